"""Kernels and codecs on keys and values from the smallest to the largest float16."""

from importlib import import_module
from typing import Any

import encoders
import pytest
import torch
from parts import DEVICE, FIRST_POSITION, Rotary, assert_same, make_codec, make_part
from torch import Tensor

from kvcli.attention.reference import attend_codes as reference_attend
from kvcli.methods.layer_codec import EncodedTokens
from kvcli.methods.scalar.codec import dequantize, quantize
from kvcli.rope import Rope, TokenRotations

FP16_MAX = 65504.0


def tokens(magnitude: float, length: int = 32, head_dim: int = 64) -> Tensor:
    """Random tokens; the channels differ in size, and the largest reaches the magnitude with both signs."""
    x = torch.randn(1, 2, length, head_dim, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) / 3
    x = x * torch.linspace(0.1, 1, head_dim)
    x[0, 0, 3, -1], x[0, 0, 4, -1], x[0, 1, 5, 5] = 1, -1, 1
    return (x * magnitude).to(DEVICE)


def attend_both(name: str, keys: Tensor, values: Tensor, query: Tensor) -> tuple[Any, Any]:
    """Attention of the kernels over codes, and in float32 over the decoded tokens."""
    method, codec = make_codec(name, 4, 2, keys.shape[3])
    state = codec.key.new_state(1, keys.device)
    if state is not None:
        codec.key.observe(state, query.float(), keys, torch.ones(1, device=DEVICE))
        codec.key.finalize_state(state, [0])
    positions = torch.arange(FIRST_POSITION, FIRST_POSITION + keys.shape[2], device=DEVICE)[None]
    rotations = TokenRotations(Rope(Rotary(keys.shape[3])), positions) if codec.key.space == "pre_rope" else None
    part = EncodedTokens(codec.key.encode(keys, state), state, codec.value.encode(values, None), rotations, None)
    assert method.attend_kernels is not None
    fused = import_module(method.attend_kernels).fused_attend(codec, query, part, 0.125)
    return fused, reference_attend(codec, query.float(), part, 0.125)


def final_state(part: Any) -> Any:
    """What a codec keeps of a sequence that it has seen nothing of, or nothing."""
    state = part.new_state(1, torch.device(DEVICE))
    if state is not None:
        part.finalize_state(state, [0])
    return state


def query_for(magnitude: float, dtype: torch.dtype) -> Tensor:
    """Queries with which keys of this magnitude score about 1."""
    query = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(1))
    return (query * min(16.0, 4 / magnitude)).to(DEVICE, dtype)


CASES = [
    # method, dtype, magnitudes; in the kernels, bfloat16 takes the way of float16
    ("kivi-1", torch.float16, (97.0, FP16_MAX)),
    ("kivi-4", torch.float16, (1e-6, FP16_MAX)),
    ("kivi-2", torch.float32, (1e-6, FP16_MAX)),
    ("squat-2", torch.bfloat16, (350.0,)),
    ("squat-pre-1", torch.float16, (FP16_MAX,)),
    ("squat-pre-2", torch.float16, (1e-6, 40.0, 97.0, 350.0, FP16_MAX)),
    ("squat-pre-2", torch.bfloat16, (97.0, FP16_MAX)),
    ("squat-pre-2", torch.float32, (1e-6, FP16_MAX)),
    ("squat-pre-4", torch.float16, (485.0, FP16_MAX)),
    ("squat-pre-8", torch.float16, (FP16_MAX,)),
    ("qjl", torch.float16, (1e-6, FP16_MAX)),
    ("rtn-4", torch.float16, (1e-6, FP16_MAX)),
    ("rtn-8", torch.bfloat16, (FP16_MAX,)),
    ("fp8", torch.float16, (1e-6, FP16_MAX)),
    ("turboquant-3", torch.float16, (1e-6, FP16_MAX)),
    ("turboquant-4", torch.float32, (1e-6, FP16_MAX)),
]


@pytest.mark.parametrize(("name", "dtype", "magnitudes"), CASES)
def test_keys_of_any_magnitude(name: str, dtype: torch.dtype, magnitudes: tuple[float, ...]) -> None:
    for magnitude in magnitudes:
        keys, query = tokens(magnitude), query_for(magnitude, dtype)
        assert_same(*attend_both(name, keys, tokens(1.0), query), dtype)


@pytest.mark.parametrize("name", ["turboquant-3", "turboquant-4"])
def test_rotated_tokens_may_be_larger(name: str) -> None:
    """Than any of their channels."""
    large = 6e4 * tokens(1.0).sign()
    assert_same(*attend_both(name, tokens(1.0), large, query_for(1.0, torch.float16)), torch.float16)
    assert_same(*attend_both(name, large, tokens(1.0), query_for(6e4, torch.float16)), torch.float16)


@pytest.mark.parametrize("magnitude", [1e-6, FP16_MAX])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_of_any_magnitude(dtype: torch.dtype, magnitude: float) -> None:
    decoded = dtype == torch.float16 and magnitude < 1  # which float16 does not hold as precisely
    for name in ("kivi-1", "kivi-8", *(() if decoded else ("rtn-4", "fp8", "turboquant-4"))):
        assert_same(*attend_both(name, tokens(1.0), tokens(magnitude), query_for(1.0, dtype)), dtype)


@pytest.mark.parametrize("magnitude", [1e-6, FP16_MAX])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_commvq_keys_and_values_of_any_magnitude(dtype: torch.dtype, magnitude: float) -> None:
    torch.manual_seed(0)
    method, codec = make_codec("commvq-1", 4, 2, 64)
    part = make_part(codec, 4, 1, 33, None)
    assert method.attend_kernels is not None
    fused_attend = import_module(method.attend_kernels).fused_attend
    large_keys = query_for(magnitude, torch.float32 if magnitude > 1 else dtype)
    for codes, factor, query in (
        (part.value_codes.scale, magnitude, query_for(20.0, dtype)),
        (part.key_codes.norm, magnitude / 20, large_keys),
    ):
        codes.mul_(factor)
        expected = reference_attend(codec, query.float(), part, 0.125)
        assert_same(fused_attend(codec, query, part, 0.125), expected, query.dtype)


@pytest.mark.parametrize("name", ["kivi-1", "kivi-2", "kivi-8", "rtn-4", "fp8", "qjl", "turboquant-4", "squat-2"])
def test_decoded_tokens_stay_in_the_range_of_float16(name: str) -> None:
    """A group from 0 to 65504 decodes to 65520 at 2 bits, which float16 rounds to infinity."""
    _, codec = make_codec(name, 4, 2, 64)
    x = tokens(FP16_MAX, 32)
    x[:, :, :, 7] = x[:, :, :, 7].abs()
    x[0, 0, 3:5, 7] = torch.tensor([0.0, FP16_MAX])
    for part in (codec.key, codec.value):
        state = final_state(part)
        for fused in (False, True):
            part.fused = fused
            codes = part.encode(x, state)
            assert part.decode_to(codes, state, torch.float16).isfinite().all()


def test_encode_kernels_at_the_edge_of_float16() -> None:
    for name, dtype in (("kivi-1", torch.float16), ("kivi-2", torch.bfloat16), ("squat-1", torch.float32)):
        _, codec = make_codec(name, 4, 2, 64)
        for magnitude in (1e-6, FP16_MAX):
            x = tokens(magnitude, 32).to(dtype)
            for part in (codec.key, codec.value):
                encoders.assert_same(*encoders.both(part, x, final_state(part)))


def test_one_bit_splits_an_excess_of_the_range() -> None:
    """A scale is 65504 at most: -6e4 and 6e4 decoded as -6e4 and 5504."""
    for ends in ((-6e4, 6e4), (-6e4, 1e3), (-65504.0, 65504.0)):
        codes, scale, zero = quantize(torch.tensor([ends]), 1)
        low, high = dequantize(codes, scale, zero)[0].tolist()
        excess = max(0.0, ends[1] - ends[0] - FP16_MAX) / 2
        assert low == pytest.approx(ends[0] + excess, abs=32)
        assert high == pytest.approx(ends[1] - excess, abs=32)


@pytest.mark.parametrize("name", ["commvq-1", "qjl", "turboquant-4"])
def test_norms_of_float16_tokens_are_not_cut(name: str) -> None:
    """The norm of many large channels is beyond float16; it was cut, and the token shrank."""
    settings = {"num_residuals": 2, "codebook_size": 8} if name == "commvq-1" else {}
    _, codec = make_codec(name, 4, 2, 64, **settings)
    key = codec.key
    key.randomize_(torch.Generator(DEVICE).manual_seed(0))
    state = final_state(key)
    x = torch.randn(1, 2, 3, 64, generator=torch.Generator().manual_seed(0)).sign().to(DEVICE)
    expected = key.decode(key.encode(x, state), state)
    for fused in (False, True):
        key.fused = fused
        decoded = key.decode(key.encode(x * 6e4, state), state)
        assert torch.allclose(decoded / 6e4, expected, rtol=2e-3, atol=1e-4)


def test_fp8_keeps_small_tokens() -> None:
    """A scale of 1e-6 / 448 is 0 in float16."""
    _, codec = make_codec("fp8", 4, 2, 64)
    for magnitude, tolerance in ((1e-6, 0.1), (1e-4, 0.04), (6e4, 0.04)):
        x = tokens(magnitude)
        error = codec.key.decode(codec.key.encode(x, None), None) - x
        assert error.norm() < tolerance * x.norm()
