"""Triton attention of many queries: it extends (out, lse) over some keys by more of them.

A running (out, lse) goes in and comes out, so blocks of decoded tokens and a prompt's own new tokens follow each other
without a merge. What PyTorch's fused attention computes (`kvcli.attention.decoded.fused_sdpa`) is merged in one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, most_splits, power_of_two, row_major, shared_memory_limit, tokens_per_split
from kvcli.kernels.pdl import pdl_launch_dependents
from kvcli.kernels.splits import LOG2E, batch_and_head, capped, merge_splits
from kvcli.methods.layer_codec import PartialAttention

_MERGE_ROWS = 16

_SPLIT_TOKENS = 64
"""What tokens of a split are a multiple of, where programs share the keys."""


@triton.jit
def _load_rows(p_x, m_n, o_d, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows at pointers [N, 1], channels o_d [1, D]: 0 beyond D, and where m_n is False if MASKED."""
    if MASKED:
        x = tl.load(p_x + o_d, mask=m_n[:, None] & (o_d < D), other=0.0)
    elif D == BLOCK_D:
        x = tl.load(p_x + o_d)
    else:
        x = tl.load(p_x + o_d, mask=o_d < D, other=0.0)
    return x


@triton.jit
def _attend_tile(
    b_q, b_rest, b_max, b_sum, b_acc, key, value, k_time, v_time, n, count, last, scaling,
    D: tl.constexpr, DV: tl.constexpr, LATENT: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    SOFT_CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over tokens n [N]; if MASKED, those before `count` and up to each row's `last`."""
    o_d, o_v = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_V)[None, :]
    m_n = n < count
    at = n.to(tl.int64)[:, None]
    b_k = _load_rows(key + at * k_time, m_n, o_d, D, BLOCK_D, MASKED)
    # [M, N]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if LATENT:
        b_v = _load_rows(value + at * v_time, m_n, o_v, DV, BLOCK_V, MASKED)
        b_s = tl.dot(b_rest, tl.trans(b_v), b_s, input_precision="ieee")
    b_s *= scaling
    if SOFT_CAP > 0:
        b_s = capped(b_s, SOFT_CAP)
    if MASKED:
        b_s = tl.where(m_n[None, :] & (n[None, :] <= last[:, None]), b_s, float("-inf"))
    new_max = tl.maximum(b_max, tl.max(b_s, 1))
    safe = tl.where(new_max == float("-inf"), 0.0, new_max)
    b_p = tl.exp2(b_s - safe[:, None])
    shrink = tl.exp2(b_max - safe)
    if not LATENT:
        b_v = _load_rows(value + at * v_time, m_n, o_v, DV, BLOCK_V, MASKED)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * shrink[:, None], input_precision="ieee")
    return new_max, b_sum * shrink + tl.sum(b_p, 1), b_acc


@triton.jit(do_not_specialize=["query_len", "kv_len", "first", "per_split"])
def _extend_kernel(
    query, key, value, lengths, state_out, state_lse, out, lse,
    q_batch, q_head, q_time, k_batch, k_head, k_time, v_batch, v_head, v_time, num_kv_heads, query_len, kv_len, first,
    per_split, scaling, GROUPS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LATENT: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_STATE: tl.constexpr, SPLIT: tl.constexpr,
    SOFT_CAP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(out, lse) over keys seen before, if HAS_STATE, becomes (out, lse) over these and `kv_len` more.

    Grid (ceil(GROUPS * query_len / BLOCK_M), batch * num_kv_heads, splits); row m is query m // GROUPS of head
    m % GROUPS of the kv head's group, so that the rows of a tile are neighbours in time. A program has `per_split` of
    the tokens, or fewer. The first split goes on from the state.

    Args:
        query: [batch, num_kv_heads * GROUPS, query_len, D] of any float dtype, strides q_*; [..., D + DV] if LATENT.
        key, value: [batch, num_kv_heads, kv_len, D or DV] of the same dtype, strides k_* and v_*.
        lengths: int32 [batch], tokens of each sequence, of which these are numbers `first` and up; if HAS_LENGTHS.
        state_out: float32 [batch, num_kv_heads * GROUPS, query_len, DV], contiguous, read if HAS_STATE.
        state_lse: float32 [batch, num_kv_heads * GROUPS, query_len], natural log, -inf where nothing was seen; too.
        out: float32 [batch, num_kv_heads * GROUPS, splits, query_len, DV], contiguous, written; of one split the state.
        lse: float32 [batch, num_kv_heads * GROUPS, splits, query_len], likewise; in units of log 2 if SPLIT.
        scaling: factor of the scores times log2(e).

    Constexprs: LATENT: keys end with the values; CAUSAL: query i sees keys up to i; SPLIT: whether splits are merged
    later; SOFT_CAP: of the scores times log2(e), 0 for none; BLOCK_D and BLOCK_V, D and DV padded.
    """
    if SPLIT:
        pdl_launch_dependents()
    _, i_b, i_h = batch_and_head(1, num_kv_heads)
    i_s = tl.program_id(2)
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d, o_v = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_V)[None, :]
    m_m = o_m < GROUPS * query_len
    time = o_m // GROUPS
    head = i_h * GROUPS + o_m % GROUPS
    p_query = query + i_b * q_batch + head * q_head + time.to(tl.int64) * q_time
    b_q = _load_rows(p_query[:, None], m_m, o_d, D, BLOCK_D, True)
    b_rest = b_q
    if LATENT:
        b_rest = _load_rows(p_query[:, None] + D, m_m, o_v, DV, BLOCK_V, True)
    i_bh = i_b * num_kv_heads * GROUPS + head
    m_out = m_m[:, None] & (o_v < DV)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if HAS_STATE:
        row, m_state = i_bh * query_len + time, m_m & (i_s == 0)
        b_max = tl.load(state_lse + row, mask=m_state, other=float("-inf")) * 1.4426950408889634
        b_acc = tl.load(state_out + row[:, None] * DV + o_v, mask=m_out & (i_s == 0), other=0.0)
    # a normalised state is one key of weight 1
    b_sum = tl.where(b_max == float("-inf"), 0.0, 1.0)
    key += i_b * k_batch + i_h * k_head
    value += i_b * v_batch + i_h * v_head
    count = kv_len
    if HAS_LENGTHS:
        count = tl.maximum(tl.minimum(count, tl.load(lengths + i_b) - first), 0)
        # a sequence that is shorter is divided into as many splits, smaller ones
        per_split = tl.minimum(per_split, tl.cdiv(tl.cdiv(count, BLOCK_N), tl.num_programs(2)) * BLOCK_N)
    begin = i_s * per_split
    count = tl.minimum(count, begin + per_split)
    last = time
    whole = count
    if CAUSAL:
        # keys that all rows of the tile see, and those that any of them sees
        whole = tl.minimum(count, tl.program_id(0) * BLOCK_M // GROUPS + 1)
        count = tl.minimum(count, (tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // GROUPS + 1)
    else:
        last = tl.full([BLOCK_M], 2147483647, tl.int32)
    whole = begin + tl.maximum(whole - begin, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, whole, BLOCK_N):
        b_max, b_sum, b_acc = _attend_tile(
            b_q, b_rest, b_max, b_sum, b_acc, key, value, k_time, v_time, start + o_n, count, last, scaling,
            D, DV, LATENT, BLOCK_D, BLOCK_V, SOFT_CAP, False,
        )  # fmt: skip
    for start in range(whole, count, BLOCK_N):
        b_max, b_sum, b_acc = _attend_tile(
            b_q, b_rest, b_max, b_sum, b_acc, key, value, k_time, v_time, start + o_n, count, last, scaling,
            D, DV, LATENT, BLOCK_D, BLOCK_V, SOFT_CAP, True,
        )  # fmt: skip
    safe_sum = tl.where(b_sum > 0, b_sum, 1.0)
    b_lse = tl.where(b_sum > 0, b_max + tl.log2(safe_sum), float("-inf"))
    b_lse *= 1.0 if SPLIT else 0.6931471805599453
    row = (i_bh * tl.num_programs(2) + i_s) * query_len + time
    tl.store(lse + row, b_lse, mask=m_m)
    tl.store(out + row[:, None] * DV + o_v, b_acc / safe_sum[:, None], mask=m_out)


@triton.jit(do_not_specialize=["rows", "heads", "query_len"])
def _merge_kernel(
    part_out, part_lse, out, lse, p_batch, p_head, p_time, heads, query_len, rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """(out, lse) merged with (part_out, part_lse) of other keys, in place; grid (ceil(rows / BLOCK_R),).

    Args:
        part_out: [batch, heads, query_len, D] of any float dtype, strides p_*.
        part_lse: float32 [batch, heads, query_len], contiguous, natural log.
        out, lse: float32, the same shapes, contiguous, read and written.
        rows: batch * heads * query_len.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_r = row < rows
    m_x = m_r[:, None] & (o_d < D)
    time, head, batch = row % query_len, row // query_len % heads, row // query_len // heads
    p_part = part_out + (batch * p_batch + head * p_head + time * p_time)[:, None] + o_d
    b_lse = tl.load(lse + row, mask=m_r, other=float("-inf"))
    b_part_lse = tl.load(part_lse + row, mask=m_r, other=float("-inf"))
    top = tl.maximum(b_lse, b_part_lse)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weight, part_weight = tl.exp(b_lse - safe), tl.exp(b_part_lse - safe)
    total = weight + part_weight
    divisor = tl.where(total > 0, total, 1.0)
    p_out = out + row[:, None] * D + o_d
    b_out = tl.load(p_out, mask=m_x, other=0.0) * weight[:, None]
    b_out += tl.load(p_part, mask=m_x, other=0.0).to(tl.float32) * part_weight[:, None]
    tl.store(p_out, b_out / divisor[:, None], mask=m_x)
    tl.store(lse + row, tl.where(total > 0, safe + tl.log(divisor), float("-inf")), mask=m_r)


def extend(
    state: PartialAttention | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    causal: bool = False,
    lengths: Tensor | None = None,
    first: int = 0,
    soft_cap: float | None = None,
) -> PartialAttention:
    """Adds keys to a state, in place, and returns it.

    Where programs of all queries are few, others share the keys with them, and another launch merges their parts.

    Args:
        state: (out, lse) over other keys, contiguous; see `PartialAttention`. None: there are none, a new one is made.
        query: [batch, num_heads, query_len, head_dim].
        key, value: [batch, num_kv_heads, kv_len, head_dim or value_dim], rotated like the query and of its dtype; keys
            that are narrower than the query end with the values (`kvcli.seam.latent`).
        causal: whether query i sees keys 0 to i only.
        lengths: tokens of each sequence, int32 [batch]; None when all keys are visible.
        first: which token of a sequence the first key is, for `lengths`.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap).
    """
    (batch, heads, query_len, _), (_, kv_heads, kv_len, head_dim) = query.shape, key.shape
    groups, value_dim, latent = heads // kv_heads, value.shape[3], query.shape[3] > head_dim
    query, key, value = row_major(query), row_major(key), row_major(value)
    block_d, block_v = (max(16, power_of_two(width)) for width in (head_dim, value_dim))
    tile, has_state = _tile(groups * query_len, (block_d, block_v), latent, query), state is not None
    programs, device = cdiv(groups * query_len, tile["BLOCK_M"]), query.device
    if state is None:
        state = _empty(batch, heads, query_len, value_dim, device=device)
    # whether tokens are split does not depend on how many there are: what steps launch is known beforehand
    per_sm, per_split, splits, parts = 1 if latent or tile["BLOCK_M"] == 128 else 2, kv_len, 1, state
    if split := not causal and most_splits(programs * batch * kv_heads, per_sm) > 1:
        per_split = tokens_per_split(kv_len, programs * batch * kv_heads, _SPLIT_TOKENS, per_sm)
        splits = max(1, cdiv(kv_len, per_split))
        parts = _empty(batch * heads, splits, query_len, value_dim, device=device)
    _extend_kernel[(programs, batch * kv_heads, splits)](
        query, key, value, query if lengths is None else lengths, *state, *parts,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], kv_heads, query_len, kv_len, first, per_split,
        scaling * LOG2E, GROUPS=groups, D=head_dim, DV=value_dim, LATENT=latent, CAUSAL=causal,
        HAS_LENGTHS=lengths is not None, HAS_STATE=has_state, SPLIT=split, SOFT_CAP=(soft_cap or 0.0) * LOG2E,
        BLOCK_D=block_d, BLOCK_V=block_v, **tile,
    )  # fmt: skip
    if split:
        merge_splits(*parts, *state)
    return state


def _empty(*shape: int, device: torch.device) -> PartialAttention:
    """(out, lse) of a shape, not written yet."""
    return torch.empty(shape, device=device), torch.empty(shape[:-1], device=device)


def _tile(rows: int, widths: tuple[int, int], latent: bool, query: Tensor) -> dict[str, int]:
    """Tile sizes for query rows per kv head and padded channels of keys and values; not tuned yet."""
    width, fp32 = max(widths), query.element_size() == 4
    if latent or width > 256:
        # sums of more rows do not fit in registers; warps share them by channels where there are more tokens than rows
        tile = {"BLOCK_M": 16 if fp32 else min(32, max(16, power_of_two(rows))), "BLOCK_N": 32 if fp32 else 64}
        tile |= {"num_warps": 8, "num_stages": 2 if fp32 else 3}
    elif fp32 or rows <= 64:
        # float32 products are made without tensor cores, and larger tiles of them do not fit in registers
        tile = {"BLOCK_M": 16 if fp32 else max(16, power_of_two(rows)), "BLOCK_N": 32 if width > 128 else 64}
        return tile | {"num_warps": 4, "num_stages": 2}
    else:
        tile = {"BLOCK_M": 128, "BLOCK_N": 128 if width <= 128 else 64, "num_warps": 8, "num_stages": 2}
    few = tile["BLOCK_M"] < 64  # rows, whose weights are exchanged, and of whose operands there is a buffer less
    operands = tile["BLOCK_M"] * (widths[0] + widths[1] * latent + few * tile["BLOCK_N"])
    operands += (tile["num_stages"] - few) * tile["BLOCK_N"] * sum(widths)
    if operands * query.element_size() > shared_memory_limit(query.device):
        tile.update(BLOCK_N=tile["BLOCK_N"] // 2, num_stages=tile["num_stages"] - 1)
    return tile


def merge(state: PartialAttention, part: PartialAttention) -> None:
    """Adds attention over other keys to a contiguous state, in place; its out has any float dtype and any strides."""
    (out, lse), (part_out, part_lse) = state, (row_major(part[0]), part[1].contiguous())
    _, heads, query_len, value_dim = out.shape
    _merge_kernel[(cdiv(lse.numel(), _MERGE_ROWS),)](
        part_out, part_lse, out, lse, *part_out.stride()[:3], heads, query_len, lse.numel(),
        D=value_dim, BLOCK_D=power_of_two(value_dim), BLOCK_R=_MERGE_ROWS, num_warps=4,
    )  # fmt: skip
