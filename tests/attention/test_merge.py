"""Attention over two sets of keys is merged into attention over their union, whatever the size of the scores."""

from __future__ import annotations

import pytest
import torch
from parts import DEVICE

from kvcli.attention import reference, window_kernels
from kvcli.cache.window import WindowLayout, WindowTokens

SHIFTS = [1.0, 300.0, -300.0]  # exp overflows in float32 beyond 88


def tensors(shift: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, with `shift` added to every score."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, time, 16, generator=generator) for heads, time in ((4, 1), (2, 24), (2, 24))
    )
    query[..., 0] = 1.0
    key[..., 0] = shift
    return query, key, value


@pytest.mark.parametrize("shift", SHIFTS)
def test_halves_are_merged_into_the_whole(shift: float) -> None:
    query, key, value = tensors(shift)
    whole = reference.partial_attention(query, key, value, None, 1.0)
    halves = [
        reference.partial_attention(query, key[:, :, s], value[:, :, s], None, 1.0)
        for s in (slice(0, 9), slice(9, None))
    ]
    for actual, expected in zip(reference.merge_state(*halves), whole, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-4)  # a log-sum-exp of 300 is rounded to 3e-5


def test_an_empty_set_changes_nothing() -> None:
    query, key, value = tensors(0.0)
    some = reference.partial_attention(query, key, value, None, 1.0)
    nothing = torch.zeros_like(some[0]), torch.full_like(some[1], float("-inf"))
    for pair in ((some, nothing), (nothing, some)):
        assert all(torch.equal(x, y) for x, y in zip(reference.merge_state(*pair), some, strict=True))
    assert torch.equal(reference.merge_state(nothing, nothing)[0], nothing[0])


@pytest.mark.kernels
@pytest.mark.parametrize("shift", SHIFTS)
def test_the_window_kernel_merges_codes(shift: float) -> None:
    query, key, value = (x.to(DEVICE) for x in tensors(shift))
    codes = reference.partial_attention(query, key[:, :, :9], value[:, :, :9], None, 1.0)
    key_window, value_window = key[:, :, 9:].contiguous(), value[:, :, 9:].contiguous()
    window = WindowTokens(WindowLayout(0, key_window.shape[2]), key_window.shape[2], 0, key_window.shape[2] - 1)
    actual = window_kernels.attend_window(query, key_window, value_window, window, 1.0, codes)
    expected = reference.partial_attention(query, key, value, None, 1.0)[0].transpose(1, 2)
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)
