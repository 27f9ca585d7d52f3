"""Loading models: the devices that weights are read onto, and what tells models apart."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from byte_tokenizer import CHAT, byte_tokenizer
from factories import load, make_model
from transformers import AutoModelForCausalLM

from kvcli.errors import ModelError, UsageError
from kvcli.models import load as models
from kvcli.models.checkpoint import load_checkpoint
from kvcli.models.fingerprint import differs, fingerprint
from kvcli.models.load import load_model
from kvcli.spec import ModelSpec


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


@pytest.mark.parametrize(
    ("end", "special", "found"),
    [("", True, []), ("<end>", False, []), ("<end>", True, [259]), ("<end>\n", True, [259])],
)
def test_every_token_that_is_said_to_end_a_text_ends_it(end: str, special: bool, found: list[int]) -> None:
    loaded = replace(load(make_model("llama", vocab_size=300, eos_token_id=7)), tokenizer=byte_tokenizer())
    assert loaded.end_tokens == [2, 7]
    loaded.model.generation_config.eos_token_id = [9, 5]
    assert loaded.end_tokens == [2, 5, 7, 9]
    loaded.tokenizer.add_tokens("<end>", special_tokens=special)
    loaded.tokenizer.chat_template = CHAT.replace("</s>", end)
    assert loaded.end_tokens == [2, 5, 7, 9, *found]
    loaded.tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert loaded.end_tokens == [2, 5, 7, 9]


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", "auto"])
def test_quantized_weights_are_read_onto_their_device(device: str, monkeypatch: Any, tmp_path: Path) -> None:
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
    index = {"cuda": "cuda:3"}.get(device, device)
    assert asked == (["auto", "auto"] if device == "auto" else [None, {"": index}])


def test_fingerprint_tells_models_apart_but_not_dtypes() -> None:
    spec = ModelSpec.from_config(make_model("llama").config)
    first = fingerprint(make_model("llama"), spec)
    for model in (make_model("llama").half(), make_model("llama").bfloat16(), make_model("llama").half().bfloat16()):
        assert differs(first, fingerprint(model, spec)) is None
    other = make_model("llama")
    other.model.layers[1].self_attn.k_proj.weight.data[0, 0] *= 1.05
    assert differs(first, fingerprint(other, spec))
