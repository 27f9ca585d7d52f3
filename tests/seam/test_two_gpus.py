"""A model whose layers are on two GPUs, as `device_map="auto"` puts them there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from factories import WINDOW, make_model
from passes import ids, padded
from transformers import AutoModelForCausalLM, DynamicCache

import kvcli
from kvcli.attention.generation import SamplingConfig
from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig
from kvcli.calibrate.recording import Recording
from kvcli.errors import CacheError
from kvcli.models.fingerprint import differs
from kvcli.models.load import load_model
from kvcli.registry import METHODS, get_method
from kvcli.seam.versions import with_cache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

SETTINGS = {"fp16": WINDOW, "kivi-2": {"group_size": 16, "residual_length": 16}}
REFERENCE = [(name, "reference") for name in METHODS if not get_method(name).needs_artifact]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk whose layers accelerate can tell apart in size."""
    made = tmp_path_factory.mktemp("model")
    make_model("llama", vocab_size=259, num_hidden_layers=4).save_pretrained(made, max_shard_size="100KB")
    byte_tokenizer().save_pretrained(made)
    return made


@pytest.mark.parametrize(("name", "impl"), [*REFERENCE, ("fp16", "auto"), ("kivi-2", "auto")])
def test_two_gpus_make_the_tokens_of_one(name: str, impl: str, folder: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().cuda()
    room = {0: 450_000, 1: 2**30}  # of 626 kB of weights; accelerate leaves room for one layer of 123 kB
    split = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="auto", max_memory=room).eval()
    assert {x.device.index for x in split.model.layers.parameters()} == {0, 1}
    inputs, made = padded(40, 23, device="cuda"), []

    def stock(model: Any, cache: Any) -> torch.Tensor:
        usual = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        return model.generate(**inputs, **with_cache(cache), **usual).cpu()

    for model in (whole, split):
        with kvcli.attach(model, name, impl=impl, **SETTINGS.get(name, {})) as session:
            cache = session.new_cache()
            theirs = stock(model, cache)
            ours = session.generate(**inputs, mode="passes", sampling=SamplingConfig(30)).sequences
            made.append((theirs, ours.cpu()))
            assert cache.memory().num_encoded or name not in SETTINGS
    assert all(map(torch.equal, *made))
    assert {layer.store.keys.device.index for layer in cache.compressed} == {0, 1}
    with pytest.raises(CacheError, match=r"several devices \(cuda:0, cuda:1\)"):
        cache.snapshot()
    if name == "fp16":
        assert torch.equal(theirs, stock(split, DynamicCache(config=split.config)))


def test_a_model_on_the_second_gpu_is_captured_there(folder: Path) -> None:
    """Where the current device is the first."""
    model, made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to("cuda:1"), []
    with kvcli.attach(model, "kivi-2", **SETTINGS["kivi-2"]) as session:
        for mode in ("passes", "graphs"):
            generated = session.generate(ids(1, 40).to("cuda:1"), mode=mode, sampling=SamplingConfig(30))
            assert generated.mode == mode
            made.append(generated.sequences.cpu())
    assert torch.equal(*made)


def test_a_model_is_spread_over_all_gpus(folder: Path, tmp_path: Path) -> None:
    loaded, whole = load_model(str(folder), device="auto"), load_model(str(folder), device="cuda:0")
    assert len({x.device for x in loaded.model.parameters()}) > 1
    assert differs(loaded.fingerprint, whole.fingerprint) is None
    for name, x in (("spread", loaded), ("whole", whole)):
        collect(x, ids(4, 64), CollectConfig(4, 64, 2, 2, fisher_sequences=1), tmp_path / name, {})
    for layer_idx in range(4):
        ours, theirs = (Recording(tmp_path / name).load(layer_idx).k.float() for name in ("spread", "whole"))
        assert torch.allclose(ours, theirs, atol=1e-2 * float(theirs.abs().max()))
