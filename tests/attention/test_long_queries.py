"""Attention of long queries: running states, decoded blocks, new tokens apart from the older window; merged sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factories import make_model
from parts import DEVICE, TOLERANCE, assert_same, make_codec, make_part
from torch import Tensor

import kvcli
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "tokens", "head_dim"),
    [(1, 4, 1, 65, 130, 128), (3, 3, 3, 9, 64, 80), (1, 6, 2, 63, 63, 64), (2, 8, 2, 33, 1, 96), (1, 2, 1, 200, 9, 64)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_states_are_extended(
    batch: int, heads: int, kv_heads: int, queries: int, tokens: int, head_dim: int, causal: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    query, key, value = tensors(batch, heads, kv_heads, queries, queries if causal else tokens, head_dim, dtype)
    visible = torch.ones(queries, queries, device=DEVICE).tril().bool()[None].expand(batch, -1, -1) if causal else None
    part = reference.partial_attention(query, key, value, visible, 0.1)
    state = some_state(query)
    expected = reference.merge_state(state, part)
    chunk_kernels.extend(state, query, key, value, 0.1, causal=causal)
    assert_same(state, expected, dtype)


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


@pytest.mark.parametrize("by_library", [False, True])
@pytest.mark.parametrize("name", ["kivi-2", "squat-pre-2", "qjl", "commvq-1", "fp8"])
@pytest.mark.parametrize("lengths", [None, [96, 32, 0]])
def test_codes_in_blocks(
    name: str, lengths: list[int] | None, by_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    _, codec = make_codec(name, 4, 2, 64)
    part = make_part(codec, 4, 3, 96, lengths)
    query = torch.randn(3, 4, 70, 64, device=DEVICE)
    expected = reference.attend_codes(codec, query, part, 0.125)
    codec.use_kernels(True)
    monkeypatch.setattr(decoded, "_block_tokens", lambda codec, query: 64)
    if by_library:
        monkeypatch.setattr(decoded, "fused_sdpa", library)
    assert_same(decoded.attend_decoded(codec, query, part, 0.125), expected, torch.float32)
    assert_same(decoded.attend_decoded(codec, query.bfloat16(), part, 0.125), expected, torch.bfloat16)


def library(query: Tensor, key: Tensor, value: Tensor, scaling: float, *, causal: bool) -> PartialAttention:
    """Stands in for PyTorch's fused attention, whose output has the query's dtype."""
    visible = torch.ones(query.shape[2], key.shape[2], device=DEVICE).tril().bool()[None] if causal else None
    visible = None if visible is None else visible.expand(query.shape[0], -1, -1)
    out, lse = reference.partial_attention(query, key, value, visible, scaling)
    return out.to(query.dtype), lse


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
    assert_same(decoded.attend_new(query, key, value, 0.1, codes), expected, dtype)


@pytest.mark.parametrize("method", ["kivi-2", "qjl", "fp16"])
@pytest.mark.parametrize("padded", [False, True])
def test_prompts_in_chunks(method: str, padded: bool, prompt: Any) -> None:
    """Long and short chunks, with and without padding, give the logits of the reference."""
    model = make_model("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_hidden_layers=2)
    model = model.to(DEVICE)
    first = prompt(41, 20) if padded else prompt(41, 41)
    mask, pieces = first["attention_mask"], [first]
    for count in (12, 20, 3, 9):
        mask = torch.cat((mask, torch.ones(2, count, dtype=torch.long)), dim=1)
        ids = torch.arange(2 * count).view(2, count) % 90 + 5
        pieces.append({"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids})
    if not padded:
        pieces[0] = {"input_ids": first["input_ids"]}
    group = {"residual_length": 32} if method == "kivi-2" else {"residual_length": 6, "flush_block": 1}
    outputs = []
    for impl in ("reference", "fused"):
        with kvcli.attach(model, method, impl=impl, sink_length=2, **group) as session, torch.no_grad():
            cache = session.new_cache()
            moved = ({name: x.to(DEVICE) for name, x in piece.items()} for piece in pieces)
            outputs.append([model(**piece, past_key_values=cache).logits for piece in moved])
    for ours, theirs in zip(*outputs, strict=True):
        real = ours[:, -3:] - theirs[:, -3:]
        assert real.norm() / theirs[:, -3:].norm() < 20 * TOLERANCE[torch.float32]


SHIFTS = [1.0, 300.0, -300.0]  # exp overflows in float32 beyond 88


def shifted(shift: float) -> tuple[Tensor, Tensor, Tensor]:
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
    query, key, value = shifted(shift)
    whole = reference.partial_attention(query, key, value, None, 1.0)
    halves = [
        reference.partial_attention(query, key[:, :, s], value[:, :, s], None, 1.0)
        for s in (slice(0, 9), slice(9, None))
    ]
    for actual, expected in zip(reference.merge_state(*halves), whole, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-4)  # a log-sum-exp of 300 is rounded to 3e-5


def test_an_empty_set_changes_nothing() -> None:
    query, key, value = shifted(0.0)
    some = reference.partial_attention(query, key, value, None, 1.0)
    nothing = torch.zeros_like(some[0]), torch.full_like(some[1], float("-inf"))
    for pair in ((some, nothing), (nothing, some)):
        assert all(torch.equal(x, y) for x, y in zip(reference.merge_state(*pair), some, strict=True))
    assert torch.equal(reference.merge_state(nothing, nothing)[0], nothing[0])


@pytest.mark.kernels
@pytest.mark.parametrize("shift", SHIFTS)
def test_the_window_kernel_merges_codes(shift: float) -> None:
    query, key, value = (x.to(DEVICE) for x in shifted(shift))
    codes = reference.partial_attention(query, key[:, :, :9], value[:, :, :9], None, 1.0)
    key_window, value_window = key[:, :, 9:].contiguous(), value[:, :, 9:].contiguous()
    window = WindowTokens(WindowLayout(0, key_window.shape[2]), key_window.shape[2], 0, key_window.shape[2] - 1)
    actual = window_kernels.attend_window(query, key_window, value_window, window, 1.0, codes)
    expected = reference.partial_attention(query, key, value, None, 1.0)[0].transpose(1, 2)
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)
