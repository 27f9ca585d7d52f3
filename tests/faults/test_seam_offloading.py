"""Models that accelerate places: parts on disk, and layers that are not in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from families import make as make_family
from passes import assert_same_tokens, greedy
from transformers import AutoModelForCausalLM

import kvcli
from kvcli.artifact.artifact import Artifact
from kvcli.errors import UnsupportedModelError
from kvcli.registry import get_method
from kvcli.seam.rotary import _copied

PARTS = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", *(f"model.layers.{i}" for i in range(3)))


def placed(model: Any, folder: Path, **places: str) -> Any:
    """A model that accelerate runs on the CPU, with parts of it on disk."""
    device_map = {**dict.fromkeys(PARTS, "cpu"), **places}
    return accelerate.dispatch_model(model, device_map, "cpu", offload_dir=str(folder), force_hooks=True)


@pytest.mark.parametrize("part", [None, "lm_head", "model.embed_tokens", "model.norm"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # what caps gemma2's scores is found out by the probe alone
def test_placed_models_give_the_tokens_of_stock(family: str, part: str | None, tmp_path: Path) -> None:
    expected = greedy(make_family(family, num_hidden_layers=3))
    untied = make_family(family, num_hidden_layers=3, tie_word_embeddings=False)
    untied.lm_head.weight.data.copy_(untied.model.embed_tokens.weight)
    if family == "llama":
        expected = greedy(untied)
    model = placed(untied, tmp_path, **({} if part is None else {part: "disk"}))
    assert_same_tokens(model, expected)
    with kvcli.attach(model, "kivi-2", group_size=16, residual_length=16) as session:
        assert greedy(model, session.new_cache()).shape == (1, 42)


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "auto"])
def test_models_loaded_with_a_device_map(device_map: Any, tiny_model: Any, tmp_path: Path) -> None:
    tiny_model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map).eval()
    assert_same_tokens(model, greedy(tiny_model.to(model.device)))


def test_a_probe_copies_nothing_that_accelerate_knows(tiny_model: Any, tmp_path: Path) -> None:
    rotary = placed(tiny_model, tmp_path).model.rotary_emb
    assert _copied(rotary)._hf_hook is rotary._hf_hook
    assert _copied(rotary).inv_freq.data_ptr() != rotary.inv_freq.data_ptr()


REMEDY = "load the model without offloading, over more GPUs or with quantized weights"


@pytest.mark.parametrize("part", ["model.layers.1", "model.layers.1.mlp"])
def test_layers_on_disk_are_refused(part: str, tiny_model: Any, tmp_path: Path) -> None:
    rest = ("self_attn", "input_layernorm", "post_attention_layernorm") if part.endswith("mlp") else ()
    model = placed(tiny_model, tmp_path, **{part: "disk", **{f"model.layers.1.{x}": "cpu" for x in rest}})
    with pytest.raises(UnsupportedModelError, match=f"layer 1 is offloaded or not loaded .*{REMEDY}"):
        kvcli.attach(model, "kivi-2")


def test_a_device_map_that_needs_the_disk_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    tiny_model.save_pretrained(tmp_path, max_shard_size="50KB")
    placing = {"device_map": "auto", "max_memory": {"cpu": "120KB"}, "offload_folder": tmp_path / "disk"}
    with pytest.raises(UnsupportedModelError, match=REMEDY):
        kvcli.attach(AutoModelForCausalLM.from_pretrained(tmp_path, **placing), "kivi-2")


def test_offloaded_layers_are_refused(tiny_model: Any, tiny_artifact: Callable[[Any], Artifact]) -> None:
    """Fault: layers offloaded to `meta`. Result: refused."""
    accelerate.cpu_offload(tiny_model, execution_device=torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        kvcli.attach(tiny_model, "qjl")
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        kvcli.attach(tiny_model, "commvq", artifact=tiny_artifact(get_method("commvq")))
