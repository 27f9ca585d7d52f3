"""Codes made while tokens are looked at: with an exact peak where codes do not hold them, and rounded in the window."""

from typing import Any

import interpret  # noqa: F401
import pytest
import torch
from encoders import DEVICE, assert_same
from factories import make_spec
from parts import make_codec

from kvcli.cache.window import WindowLayout
from kvcli.registry import get_method, make_config

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(
    ("name", "fused"),
    [*((name, True) for name in ("kivi", "rtn", "turboquant", "oscar", "klt", "klt-tcq")), ("klt", False)],
)
def test_peaks_are_those_of_the_tokens(name: str, fused: bool) -> None:
    codec: Any = make_codec(name, 4, 2, 64)[1]
    if name == "oscar":
        for part in (codec.key, codec.value):
            part.rotation.copy_(torch.eye(64))
    for part in (codec.key, codec.value):
        part.fused = fused
        x = torch.randn(
            2,
            part.spec.num_kv_heads,
            32 if name == "kivi" else 4,
            part.spec.head_dim,
            generator=torch.Generator().manual_seed(0),
        )
        for factor, row in ((1.0, 0), (3e5, 1)):
            tokens = x.clone()
            tokens[row, -1, 3] *= factor
            tokens = tokens.to(DEVICE, torch.bfloat16)
            expected, start = part.encode(tokens, None), part.max_magnitude / 10
            peak = torch.full((), start, device=DEVICE)
            assert_same(expected, part.encode_noted(tokens, peak))
            whole = float(part.peak(tokens, expected))
            if whole > part.max_magnitude:
                assert float(peak) == pytest.approx(whole, rel=1e-3)
            else:
                assert start <= float(peak) * 1.001
                assert float(peak) <= max(start, whole) * 1.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_kernel_rounds_values_in_the_window(dtype: torch.dtype) -> None:
    """Window and codes are bit for bit what encoding, writing and decoding apart give."""
    method = get_method("kivi")
    config = make_config(method.name, {"residual_length": 16, "group_size": 16})
    value: Any = method.build(make_spec(16), config, 0).to(DEVICE).value
    value.fused = True
    layout, first, count = WindowLayout(3, 21), torch.tensor([[0], [19], [40]], dtype=torch.int32, device=DEVICE), 3
    window = torch.randn(3, 2, layout.capacity, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    before = window.clone()
    buffers = value.encode(torch.zeros(3, 2, 50, 16, device=DEVICE)).map(torch.zeros_like)
    assert value.round_in_place(window, layout.sinks, first, count, buffers)
    for row, start in enumerate(first[:, 0].tolist()):
        slots = layout.slots(torch.arange(3 + start, 3 + start + count, device=DEVICE))
        codes = value.encode(before[row : row + 1, :, slots])
        for name, x in codes.tensors().items():
            written = getattr(buffers, name)[row : row + 1]
            assert torch.equal(written[:, :, start : start + count], x)
            written[:, :, start : start + count] = 0
            assert not written.any()
        assert torch.equal(window[row, :, slots], value.decode_to(codes, None, dtype)[0])
        before[row, :, slots] = window[row, :, slots]
    assert torch.equal(window, before)
