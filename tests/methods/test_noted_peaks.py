"""Codes of tokens whose largest numbers are noted: the same codes, and an exact peak where codes do not hold it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from encoders import DEVICE, assert_same
from parts import make_codec

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
