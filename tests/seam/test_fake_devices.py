"""Models that accelerate spreads over two pretended devices, with their rotary module on either."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from factories import WINDOW, load, make_model
from fake_devices import pretended_devices
from families import make
from passes import ids, padded
from torch import Tensor

import kvcli
from kvcli.attention.generation import SamplingConfig
from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig
from kvcli.calibrate.recording import Recording
from kvcli.errors import ModelError
from kvcli.models.fingerprint import differs
from kvcli.rope import NoRope
from kvcli.seam import identity
from kvcli.seam.probe import probe
from kvcli.seam.versions import with_cache

GROUPS = {"group_size": 16, "residual_length": 16}


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # a wrapped tensor cannot be of another class of tensors, too
    monkeypatch.setattr(identity, "_MAX_PLAIN_TOKENS", 10**6)
    with pretended_devices():
        yield


def spread(model: Any, rotary: str, last: str = "cpu:1", main: str = "cpu:0") -> Any:
    """Embeddings and the first layer on `cpu:0`, the other, norm and output on `last`; inputs go to `main`."""
    decoder = model.model
    places = {f"model.layers.{i}": last for i in range(len(decoder.layers))}
    places |= {f"model.{name}": last for name, _ in decoder.named_children() if name != "layers"}
    places |= {"model.layers.0": "cpu:0", "model.embed_tokens": "cpu:0", "model.rotary_emb": rotary, "lm_head": last}
    return dispatch_model(model, places, main_device=main)


def llama() -> Any:
    return make_model("llama", num_hidden_layers=2)


def test_devices_do_not_compute_with_each_other() -> None:
    x, y = (torch.ones(2, 3, device=device) for device in ("cpu:0", "cpu:1"))
    for other in (y, torch.ones(2, 3)):
        with pytest.raises(RuntimeError, match="same device"):
            x + other
        with pytest.raises(RuntimeError, match="same device"):
            torch.equal(x, other)
    assert str((x + y.to("cpu:0") + torch.tensor(1.0)).device) == "cpu:0"
    view = x[0]
    assert view.add_(1) is view
    assert x.tolist() == [[2, 2, 2], [1, 1, 1]]
    assert x.to("cpu:0") is x
    assert type(y.cpu()) is Tensor
    assert str(torch.tensor([1, 2], device="cpu:1").device) == "cpu:1"


@pytest.mark.parametrize("rotary", ["cpu:0", "cpu:1"])
def test_the_probe_finds_the_same(rotary: str) -> None:
    model, whole = spread(llama(), rotary), llama()
    assert {str(x.device) for x in model.model.layers.parameters()} == {"cpu:0", "cpu:1"}
    assert str(model.model.rotary_emb.inv_freq.device) == rotary
    found, expected = probe(model), probe(whole)
    assert found.spec == expected.spec
    assert not isinstance(found.rope, NoRope)
    assert all(layer.rotated for layer in found.layers)
    assert found.notes == expected.notes
    assert found.rope.frequencies() == expected.rope.frequencies()


def made(model: Any, device: str, name: str, settings: dict[str, int]) -> list[Tensor]:
    """Tokens of transformers' generate, and of ours with the prompt in pieces."""
    inputs = padded(40, 23, device=device)
    with kvcli.attach(model, name, impl="reference", **settings) as session:
        cache = session.new_cache()
        stock = model.generate(**inputs, **with_cache(cache), max_new_tokens=3, do_sample=False)
        assert cache.memory().num_encoded
        ours = session.generate(**inputs, mode="passes", prefill_chunk=16, sampling=SamplingConfig(3)).sequences
    return [stock.cpu(), ours.cpu()]


@pytest.mark.parametrize(("name", "settings"), [("fp16", WINDOW), ("kivi-2", GROUPS), ("squat-pre-2", GROUPS)])
def test_methods_make_the_tokens_of_one_device(name: str, settings: dict[str, int]) -> None:
    expected = made(llama(), "cpu", name, settings)
    for rotary, main in (("cpu:0", "cpu:0"), ("cpu:1", "cpu:0"), ("cpu:0", "cpu:1")):
        tokens = made(spread(llama(), rotary, main=main), "cpu:0", name, settings)
        assert all(map(torch.equal, tokens, expected)), (rotary, main)


@pytest.mark.parametrize("rotary", ["cpu:0", "cpu:1"])
def test_a_recording_is_that_of_one_device(rotary: str, tmp_path: Path) -> None:
    whole, split = load(llama()), load(spread(llama(), rotary))
    assert differs(split.fingerprint, whole.fingerprint) is None
    for name, x in (("whole", whole), ("split", split)):
        collect(x, ids(4, 64), CollectConfig(4, 64, 2, 2, fisher_sequences=2), tmp_path / name, {})
    recordings = [Recording(tmp_path / name) for name in ("split", "whole")]
    for layer_idx in range(2):
        ours, theirs = (x.load(layer_idx) for x in recordings)
        assert all(torch.equal(getattr(ours, kind), getattr(theirs, kind)) for kind in ("q", "k", "v"))
        fisher, expected = (vars(x.fisher[layer_idx]) for x in recordings)
        assert all(torch.allclose(fisher[name], x, rtol=1e-3) for name, x in expected.items())


def test_a_cache_is_restored_to_the_device_of_the_layers() -> None:
    model, inputs = spread(llama(), "cpu:1", last="cpu:0"), padded(40, 23, device="cpu:0")
    with kvcli.attach(model, "kivi-2", impl="reference", **GROUPS) as session, torch.no_grad():
        cache, again = session.new_cache(), session.new_cache()
        model(**inputs, **with_cache(cache))
        again.restore(cache.snapshot())
        assert {str(layer.store.keys.device) for layer in again.compressed} == {"cpu:0"}
        token = torch.full((2, 1), 5, device="cpu:0")
        mask = torch.cat((inputs["attention_mask"], torch.ones_like(token)), dim=1)
        logits = [model(input_ids=token, attention_mask=mask, **with_cache(x)).logits.cpu() for x in (cache, again)]
    assert torch.equal(*logits)


def test_layers_that_rotate_themselves_need_the_rotation_beside_them() -> None:
    model, said = spread(make("gemma3_text"), "cpu:1", last="cpu:0"), "rotates by itself is on another device"
    with kvcli.attach(model, "fp16", impl="reference", **WINDOW) as session, pytest.raises(ModelError, match=said):
        model(**padded(20, device="cpu:0"), **with_cache(session.new_cache()))
