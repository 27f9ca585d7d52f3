"""Attention of long queries: running states, decoded blocks, new tokens apart from the older window; merged sets."""

import pytest
import torch
from parts import DEVICE, assert_same, make_codec, make_part
from torch import Tensor

from kvcli.attention import chunk_kernels, decoded, reference, window_kernels
from kvcli.cache.window import WindowLayout, WindowTokens
from kvcli.methods.layer_codec import PartialAttention

DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
"""Triton's interpreter cannot multiply bfloat16."""


def tensors(
    batch: int, heads: int, kv_heads: int, queries: int, tokens: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as slices of longer tensors, heads before or after time."""
    query = torch.randn(batch, queries, heads, head_dim, device=DEVICE).to(dtype).transpose(1, 2)
    key, value = torch.randn(2, batch, kv_heads, tokens + 5, head_dim, device=DEVICE).to(dtype)[:, :, :, 2:-3]
    return query, key, value


def some_state(query: Tensor) -> PartialAttention:
    """A state over other keys, of which the first query saw none."""
    out, lse = torch.randn(query.shape, device=DEVICE), torch.randn(query.shape[:3], device=DEVICE)
    out[:, :, 0], lse[:, :, 0] = 0, float("-inf")
    return out, lse


def library(query: Tensor, key: Tensor, value: Tensor, scaling: float, *, causal: bool) -> PartialAttention:
    """Stands in for PyTorch's fused attention, whose output has the query's dtype."""
    visible = torch.ones(query.shape[2], key.shape[2], device=DEVICE).tril().bool() if causal else None
    visible = None if visible is None else visible.expand(query.shape[0], -1, -1)
    out, lse = reference.partial_attention(query, key, value, visible, scaling)
    return out.to(query.dtype), lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "tokens", "head_dim", "causal"),
    [
        (1, 4, 1, 65, 130, 128, False),
        (3, 3, 3, 9, 64, 80, False),
        (1, 6, 2, 63, 63, 64, False),
        (2, 8, 2, 33, 1, 96, False),
        (1, 2, 1, 200, 9, 64, False),
        (3, 3, 3, 9, 9, 80, True),
        (1, 6, 2, 63, 63, 64, True),
        (1, 2, 1, 200, 200, 64, True),
    ],
)
def test_states_are_extended(
    batch: int, heads: int, kv_heads: int, queries: int, tokens: int, head_dim: int, causal: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    query, key, value = tensors(batch, heads, kv_heads, queries, tokens, head_dim, dtype)
    state, part = some_state(query), library(query.float(), key, value, 0.1, causal=causal)
    expected = reference.merge_state(state, part)
    chunk_kernels.extend(state, query, key, value, 0.1, causal=causal)
    assert_same(state, expected, dtype)
    assert_same(chunk_kernels.extend(None, query, key, value, 0.1, causal=causal), part, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [0, 40])
def test_sequences_end_at_their_length(first: int, dtype: torch.dtype) -> None:
    """Tokens beyond it are never read, even if they are not numbers."""
    torch.manual_seed(0)
    lengths = torch.tensor([140, 41, 40, 0, 105], dtype=torch.int32, device=DEVICE)
    query, key, value = tensors(5, 6, 2, 20, 100, 64, dtype)
    visible = torch.arange(first, first + 100, device=DEVICE) < lengths[:, None]
    state = some_state(query)
    part = reference.partial_attention(query, key, value, visible[:, None], 0.1)
    expected = reference.merge_state(state, part)
    for x in (key, value):
        x.masked_fill_(~visible[:, None, :, None], float("nan"))
    chunk_kernels.extend(state, query, key, value, 0.1, lengths=lengths, first=first)
    assert_same(state, expected, dtype)
    assert_same(chunk_kernels.extend(None, query, key, value, 0.1, lengths=lengths, first=first), part, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_attention_is_merged(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = tensors(2, 6, 2, 33, 50, 80, dtype)
    out, lse = reference.partial_attention(query, key, value, None, 0.1)
    state, part = some_state(query), (out.to(dtype).transpose(1, 2).contiguous().transpose(1, 2), lse)
    part[1][:, 0, :2] = float("-inf")
    part[0][:, 0, :2] = 0
    expected = reference.merge_state(state, (part[0].float(), part[1]))
    chunk_kernels.merge(state, part)
    assert_same(state, expected, torch.float32)


GROUPS = {"kivi-2": 48, "squat-2": 48, "squat-pre-2": 32, "qjl": 1, "commvq-1": 1, "fp8": 1}


@pytest.mark.parametrize(
    ("name", "ragged", "by_library"),
    [
        *((name, True, False) for name in GROUPS),
        *((name, False, by_library) for name in ("kivi-2", "qjl") for by_library in (False, True)),
    ],
)
def test_codes_in_blocks_of_whole_groups(
    name: str, ragged: bool, by_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a group does not divide the block."""
    torch.manual_seed(0)
    group = GROUPS[name]
    head_dim, settings = (96, {"group_size": 48, "residual_length": 48}) if group == 48 else (64, {})
    _, codec = make_codec(name, 4, 2, head_dim, **settings)
    assert codec.tokens_per_group == group
    part = make_part(codec, 4, 3, 96, [96, group, 0] if ragged else None)
    query = torch.randn(3, 4, 20 if ragged else 65, head_dim, device=DEVICE)
    expected = reference.attend_codes(codec, query, part, 0.125)
    monkeypatch.setattr(reference, "_BLOCK_TOKENS", 80)
    assert_same(reference.attend_codes(codec, query, part, 0.125), expected, torch.float32)
    codec.use_kernels(group != 48)
    monkeypatch.setattr(decoded, "_block_tokens", lambda codec, query: 80)
    if by_library:
        monkeypatch.setattr(decoded, "fused_sdpa", library)
    for dtype in (torch.float32, torch.bfloat16):
        assert_same(decoded.attend_dequantized(codec, query.to(dtype), part, 0.125), expected, dtype)


@pytest.mark.parametrize("by_library", [False, True])
@pytest.mark.parametrize("has_codes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_new_tokens(dtype: torch.dtype, has_codes: bool, by_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    query, key, value = tensors(2, 6, 2, 66, 66, 80, dtype)
    codes = some_state(query) if has_codes else None
    expected = library(query.float(), key.float(), value.float(), 0.1, causal=True)
    if codes is not None:
        expected = reference.merge_state(codes, expected)
    if by_library:
        monkeypatch.setattr(decoded, "fused_sdpa", library)
    assert_same(decoded.attend_prefill(query, key, value, 0.1, codes), expected, dtype)


@pytest.mark.kernels
@pytest.mark.parametrize("shift", [1.0, 300.0, -300.0])  # exp overflows in float32 beyond 88
def test_halves_are_merged_into_the_whole(shift: float) -> None:
    """By the reference, and by the kernel that attends to the window; `shift` is added to every score."""
    torch.manual_seed(0)
    query, (key, value) = torch.randn(2, 4, 1, 16, device=DEVICE), torch.randn(2, 2, 2, 24, 16, device=DEVICE)
    query[..., 0], key[..., 0] = 1.0, shift
    whole = reference.partial_attention(query, key, value, None, 1.0)
    codes, rest = (
        reference.partial_attention(query, key[:, :, s], value[:, :, s], None, 1.0)
        for s in (slice(0, 9), slice(9, None))
    )
    for actual, expected in zip(reference.merge_state(codes, rest), whole, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-4)  # a log-sum-exp of 300 is rounded to 3e-5
    window = WindowTokens(WindowLayout(0, 15), 15, 0, 14)
    actual = window_kernels.attend_window(query, key[:, :, 9:], value[:, :, 9:], window, 1.0, codes)
    assert torch.allclose(actual, whole[0].transpose(1, 2), rtol=1e-4, atol=1e-4)


def test_an_empty_set_changes_nothing() -> None:
    some = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 3)
    nothing = torch.zeros(2, 4, 3, 16), torch.full((2, 4, 3), float("-inf"))
    for first, second, expected in ((some, nothing, some), (nothing, some, some), (nothing, nothing, nothing)):
        assert all(map(torch.equal, reference.merge_state(first, second), expected))
