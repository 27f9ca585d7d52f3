"""GGUF files that are damaged, incomplete or contradict the config given for them."""

import re
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from factories import make_model
from test_models_loading import refusal
from transformers import CONFIG_MAPPING

from kvcli.errors import ModelError
from kvcli.models import load
from kvcli.models.load import find_config, load_model


def write(
    path: Path,
    model: Any,
    *,
    without: Collection[str] = (),
    tensor: str = "",
    said: Any = None,
    tensors_of_part: int = 0,
) -> Path:
    """A tiny Llama as a GGUF file."""
    writer, config = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors_of_part), model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"<{i}>" for i in range(94))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if (theirs := names.get_name(name, (".weight",))) not in without:
            writer.add_tensor(theirs, weight.numpy())
    if tensor:
        writer.add_tensor(tensor, np.ones(8, dtype=np.float32))
    for name, value in (said or {}).items():
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](f"llama.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_intact_file_loads_and_missing_tensors_are_named_and_not_replaced(tmp_path: Path) -> None:
    model: Any = make_model("llama")
    loaded: Any = load_model(str(write(tmp_path / "tiny.gguf", model)), device="cpu").model
    assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)
    path = write(tmp_path / "tiny.gguf", make_model("llama"), without={"blk.1.attn_output.weight"})
    assert "weights are missing: model.layers.1.self_attn.o_proj.weight;" in refusal(path)


def test_a_file_in_parts_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    """transformers gives what is not in the part random weights."""
    model = make_model("llama")
    whole = load_model(str(write(tmp_path / "tiny.gguf", model)), device="cpu").model.state_dict()
    write(tmp_path / "tiny.gguf", model, tensors_of_part=12)
    first, second, third = sorted(tmp_path.glob("*-of-*"))
    assert first.name == "tiny-00001-of-00003.gguf"
    loaded = load_model(str(first), device="cpu").model.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in whole.items())
    assert find_config(str(first)).tie_word_embeddings is False
    others = f"one of 3 parts: name the first, {first.name}, with all others beside it, or merge them"
    assert others in refusal(second)
    assert "have 12 of 30 tensors" in refusal(first.rename(tmp_path / "other.gguf"))
    (tmp_path / "other.gguf").rename(first)
    intact = third.read_bytes()
    third.write_bytes(second.read_bytes())
    assert "and the parts beside it have 24 of 30 tensors" in refusal(first)
    third.write_bytes(intact[:-1000])
    assert "not a readable GGUF file" in refusal(first)
    third.unlink()
    assert others in refusal(first)
    with pytest.raises(ModelError, match="one of 3 parts"):
        find_config(str(first))


@pytest.mark.parametrize(
    ("told", "lost"),
    [
        ({"tensor": "rope_freqs.weight"}, "keeps its RoPE scaling in a rope_freqs tensor"),
        ({"tensor": "rope_factors_long.weight"}, "keeps its RoPE scaling in a rope_factors_long tensor"),
        ({"said": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}}, "has RoPE scaling by 4"),
        ({"said": {"rope.scale_linear": 2.5}}, "has RoPE scaling by 2.5"),
        ({"said": {"attention.sliding_window": 64}}, "has windows of 64 tokens"),
        ({"said": {"rope.scaling.type": "none", "rope.scaling.factor": 4.0, "attention.sliding_window": 999}}, None),
    ],
)
def test_what_transformers_drops_of_a_file_needs_the_config(told: Any, lost: str | None, tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "base")
    path = write(tmp_path / "tiny.gguf", model, **told)
    if lost is None:
        assert load_model(str(path), device="cpu").spec.num_layers == 3
    else:
        assert re.fullmatch(f"tiny.gguf {lost}, which would be dropped .* --base-config", refusal(path))
    assert load_model(str(path), device="cpu", base_config=str(tmp_path / "base")).spec.num_layers == 3


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_scale_of_scores_that_no_file_says_needs_the_config(family: str) -> None:
    """Of heads of 256 channels, as all but those of 27B have, it is that of the configs' own default."""
    config, file = CONFIG_MAPPING[family](), SimpleNamespace(fields={})
    assert load._lost(file, [], config) is None
    config.head_dim = 128
    assert "heads of 128 channels are scaled (query_pre_attn_scalar)" in str(load._lost(file, [], config))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 2}, "tiny.gguf has 3 layers, but {base} has 2"),
        ({"num_hidden_layers": 4}, "tiny.gguf has 3 layers, but {base} has 4"),
        ({"intermediate_size": 80}, "down_proj.weight [64, 96] instead of [64, 80]"),
        (None, "there is no such folder"),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path: Path, changes: dict[str, int] | None, said: str) -> None:
    base = tmp_path / "base"
    if changes is not None:
        make_model("llama", **changes).save_pretrained(base)
    path = write(tmp_path / "tiny.gguf", make_model("llama"))
    assert said.format(base=base) in refusal(path, base_config=str(base))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_named_with_the_remedy(tmp_path: Path, share: float) -> None:
    path = write(tmp_path / "tiny.gguf", make_model("llama"))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert f"{path} is not a readable GGUF file" in (message := refusal(path))
    assert message.endswith("copy or download it again")
