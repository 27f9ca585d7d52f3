"""Keys and values beyond the range of float16, which bfloat16 and float32 models can have."""

from typing import Any

import interpret  # noqa: F401
import pytest
import torch
from factories import WINDOW, fitted_keys, make_spec
from parts import DEVICE
from test_cache_copies import attach, ids

import kvcli
from kvcli.attention.generation import SamplingConfig
from kvcli.cache import ranges
from kvcli.cache.counts import Encoding
from kvcli.errors import CacheError
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.method import METHOD
from kvcli.registry import get_method
from kvcli.seam.versions import with_cache

BEYOND = "layer 1: {} reach .*e\\+05, but codes .* up to 65504; use method fp16"
PROJECTIONS = pytest.mark.parametrize(("projection", "named"), [("k_proj", "keys"), ("v_proj", "values")])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def enlarge(model: Any, projection: str, layer: int, peak: float) -> None:
    """Scales a projection so that its outputs for the tests' tokens reach about `peak`."""
    module, seen = getattr(model.model.layers[layer].self_attn, projection), []
    with torch.no_grad():
        with module.register_forward_hook(lambda module, args, output: seen.append(float(output.abs().max()))):
            model(ids(60), use_cache=False)
        module.weight *= peak / seen[0]


@DTYPES
@pytest.mark.parametrize("method", ["kivi-2", "squat-2", "squat-pre-2", "qjl", "rtn-2", "fp8"])
@PROJECTIONS
def test_what_codes_cannot_hold_is_refused(
    tiny_model: Any, method: str, projection: str, named: str, dtype: torch.dtype
) -> None:
    """Fault: keys or values beyond what codes hold. Result: refused with layer, number and
    [limit](methods.md#range-of-the-stored-numbers).
    """
    enlarge(tiny_model, projection, 1, 4e5)
    with attach(tiny_model.to(dtype), method) as session, torch.no_grad():
        cache = session.new_cache()
        with pytest.raises(CacheError, match=BEYOND.format(named)):
            tiny_model(ids(60), **with_cache(cache))
        with pytest.raises(CacheError, match="reset"):
            tiny_model(ids(1), **with_cache(cache))


def test_numbers_of_later_tokens_are_refused_too(tiny_model: Any) -> None:
    with attach(tiny_model, "rtn-2") as session, torch.no_grad():
        cache = session.new_cache()
        tiny_model(ids(60), **with_cache(cache))
        tiny_model.model.layers[2].self_attn.v_proj.weight *= 1e7
        for _ in range(7):  # the next one is the first that leaves the window
            tiny_model(ids(1), **with_cache(cache))
        with pytest.raises(CacheError, match="layer 2: values reach"):
            tiny_model(ids(2), **with_cache(cache))


@DTYPES
@pytest.mark.parametrize("lengths", [(40, 40), (40, 31)])
@pytest.mark.parametrize("method", ["rtn-2", "kivi-2", "squat-pre-2"])
@PROJECTIONS
def test_numbers_of_steps_are_refused_too(
    tiny_model: Any, method: str, projection: str, named: str, lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    """Rows that encode together are looked at every few steps and at the end; rows apart as well."""
    mask = (torch.arange(42) >= 40 - torch.tensor(lengths)[:, None]).long()
    with attach(tiny_model.to(dtype), method) as session:
        cache, known = session.new_cache(), ids(40).expand(2, -1)
        session.generate(known, mask[:, :40], sampling=SamplingConfig(2), cache=cache, mode="steps")
        known = torch.cat((known, ids(2).expand(2, -1)), dim=1)
        enlarge(tiny_model, projection, 1, 4e5)
        with pytest.raises(CacheError, match=BEYOND.format(named)):
            session.generate(known, mask, sampling=SamplingConfig(60), cache=cache, mode="steps")
        with pytest.raises(CacheError, match="reset"):
            tiny_model(ids(1).expand(2, -1), **with_cache(cache))


@pytest.mark.kernels
def test_kernels_that_encode_in_place_note_numbers() -> None:
    method: Any = get_method("kivi")
    value = method.build(make_spec(), method.config_cls(residual_length=32, group_size=16), 0).to(DEVICE).value
    value.fused = True
    window = torch.randn(2, 2, 40, 16, dtype=torch.bfloat16).to(DEVICE)
    window[1, 0, 9, 3], window[0, 1, 30, 0] = -3e5, 4e5  # the latter is not encoded
    codes = value.encode(torch.zeros(2, 2, 64, 16, device=DEVICE)).map(torch.zeros_like)
    first = torch.tensor([[4], [4]], dtype=torch.int32, device=DEVICE)
    seen = ranges.StepRanges(2, torch.device(DEVICE))
    note = ranges.Note(seen, "layer 0: values", value)
    assert note.peak(torch.float16) is None
    assert value.round_in_place(window.clone(), 2, first, 1, codes, note.peak(window.dtype))
    seen.check()
    assert value.round_in_place(window, 2, first, 4, codes, note.peak(window.dtype))
    with pytest.raises(CacheError, match=r"layer 0: values reach 2\.99e\+05"):
        seen.check()
    seen.check()


def test_one_bit_codes_hold_half_the_range(tiny_model: Any) -> None:
    enlarge(tiny_model, "v_proj", 0, 5e4)
    with kvcli.attach(tiny_model, "rtn-2", **WINDOW) as session, torch.no_grad():
        tiny_model(ids(60), **with_cache(session.new_cache()))
    with kvcli.attach(tiny_model, "rtn-1", **WINDOW) as session, pytest.raises(CacheError, match="up to 32752"):
        tiny_model(ids(60), **with_cache(session.new_cache()))


def test_uncompressed_tokens_have_no_limit(tiny_model: Any) -> None:
    enlarge(tiny_model, "v_proj", 1, 4e5)
    expected = tiny_model(ids(60)).logits
    with attach(tiny_model, "fp16") as session, torch.no_grad():
        assert torch.allclose(tiny_model(ids(60), **with_cache(session.new_cache())).logits, expected, atol=1e-4)


def test_single_tokens_on_a_gpu_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        dtype, is_cuda = torch.bfloat16, True

    noted: list[Any] = []
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda *args, **kwargs: noted.append(args) or torch.zeros(()))
    method = get_method("fp8")
    note = ranges.Note(ranges.Ranges(), "layer 0: keys", method.build(make_spec(), method.config_cls(), 0).key)
    for start, count in ((0, 1), (128, 1), (128, 63), (128, 64)):
        note(Encoding([0], True, start, count, 0), OnGpu(), None)  # type: ignore[arg-type]
    assert len(noted) == 2


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 3e3), (torch.float32, 1e6)])
@pytest.mark.parametrize("which", ["key", "value"])
def test_commvq_refuses_what_is_far_beyond_its_calibration(dtype: torch.dtype, factor: float, which: str) -> None:
    codec, keys = fitted_keys(make_spec(), CommVQConfig(codebook_size=8, num_residuals=2, key_iterations=2))
    part: Any = codec
    if which == "key":
        part.pair_weight.mul_(30)  # as if calibrated on keys of a thirtieth
    else:
        part = METHOD.build(make_spec(), codec.config, 0).value
        part.randomize_(torch.Generator().manual_seed(0))
        part.codebook.mul_(0.001)  # as if calibrated on values of a thousandth
        part.offset.zero_()
    seen = ranges.Ranges()
    note = ranges.Note(seen, "layer 3: numbers", part)
    x = keys.unsqueeze(0).to(dtype)
    place = Encoding([0], True, 0, x.shape[2], 0)
    for tokens in (x, x * float("nan")):  # what is not a number shows in the logits
        note(place, tokens, part.encode(tokens))
        seen.check()
    large = (x.float() * factor).to(dtype)
    note(place, large, part.encode(large))
    with pytest.raises(CacheError, match="layer 3: numbers relative to those calibrated reach"):
        seen.check()
