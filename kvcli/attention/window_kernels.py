"""Triton attention over window tokens.

One program takes the queries of one kv head (all its query heads times a block of query positions, so that a key is
read once for all of them) and walks over the tokens with an online softmax. Its epilogue merges (out, lse) of the
codes; it is the last kernel of their PDL chain.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.cache.window import WindowTokens
from kvcli.kernels.launch import Tiles, cdiv, power_of_two, row_major
from kvcli.kernels.pdl import pdl_launch_options, pdl_wait
from kvcli.kernels.splits import capped
from kvcli.methods.layer_codec import PartialAttention

MAX_QUERIES = 8
"""Above this query length, blocks of codes are decoded once for all queries (`kvcli.attention.decoded`)."""

_TILES = Tiles(hopper={"BLOCK_M": 64, "BLOCK_N": 64}, smaller={"BLOCK_M": 64, "BLOCK_N": 32})
_TILES_FP32 = Tiles(hopper={"BLOCK_M": 64, "BLOCK_N": 64}, smaller={"BLOCK_M": 16, "BLOCK_N": 32})


@triton.jit(do_not_specialize=["attended", "index", "i_batch", "i_time", "sinks", "ring", "query_len", "kv_len"])
def _attend_kernel(
    query, key, value, attended, index, codes_out, codes_lse, out,
    q_batch, q_head, q_time, k_batch, k_head, k_time, v_batch, v_head, v_time, i_batch, i_time,
    o_batch, o_head, o_time, sinks, ring, num_kv_heads, query_len, kv_len, scaling,
    GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFT_CAP: tl.constexpr, PER_ROW: tl.constexpr, HAS_CODES: tl.constexpr,
):  # fmt: skip
    """softmax(q k^T scaling) v of the query heads of one kv head, merged with (out, lse) of the codes.

    Grid (batch * num_kv_heads, ceil(GROUPS * query_len / BLOCK_M)); rows M are GROUPS query heads times query_len.
    query [batch, GROUPS * num_kv_heads, query_len, D], key and value [batch, num_kv_heads, sinks + ring, D] of the
    model's dtype, attended and index as in `WindowTokens`: numbers, or with PER_ROW int32 [batch] and
    [batch, query_len]; codes_out float32 [batch, heads, query_len, D], codes_lse float32
    [batch, heads, query_len], out strided like the query.
    SOFT_CAP: of the scores, 0 for none. kv_len: window tokens of the longest row. Sums in float32.
    Tuned on one H200 (torch 2.11, triton 3.6).
    """
    i_b = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    i_h = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_m = o_m < GROUPS * query_len
    head = i_h * GROUPS + o_m // query_len
    time = (o_m % query_len).to(tl.int64)
    m_q = m_m[:, None] & (o_d < D)[None, :]
    rows = i_b * q_batch + head * q_head + time * q_time
    # [M, D]
    b_q = tl.load(query + rows[:, None] + o_d[None, :], mask=m_q, other=0.0)
    if PER_ROW:
        attended = tl.load(attended + i_b)
        b_index = tl.load(index + i_b * i_batch + time * i_time, mask=m_m, other=0)
    else:
        b_index = index + time
    # a query sees the tokens up to its own; `attended` of them are not in the window
    b_seen = tl.where(m_m, tl.minimum(b_index - attended + 1, kv_len), 0).to(tl.int32)
    stop = tl.max(b_seen, 0)
    oldest = attended % ring
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    key += i_b * k_batch + i_h * k_head
    value += i_b * v_batch + i_h * v_head
    for start in range(0, stop, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        place = oldest + o_n - sinks
        place = tl.where(place < ring, place, place - ring)
        slot = tl.where(o_n < sinks, o_n, sinks + place).to(tl.int64)
        m_kv = (o_n < stop)[:, None] & (o_d < D)[None, :]
        # [N, D]
        b_k = tl.load(key + slot[:, None] * k_time + o_d[None, :], mask=m_kv, other=0.0)
        b_v = tl.load(value + slot[:, None] * v_time + o_d[None, :], mask=m_kv, other=0.0)
        # [M, N]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scaling
        if SOFT_CAP > 0:
            b_s = capped(b_s, SOFT_CAP)
        b_s = tl.where(o_n[None, :] < b_seen[:, None], b_s, float("-inf"))
        new_max = tl.maximum(b_max, tl.max(b_s, 1))
        safe = tl.where(new_max == float("-inf"), 0.0, new_max)
        b_p = tl.exp(b_s - safe[:, None])
        shrink = tl.exp(b_max - safe)
        b_sum = b_sum * shrink + tl.sum(b_p, 1)
        b_acc = b_acc * shrink[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
        b_max = new_max
    b_lse = tl.where(b_sum > 0, b_max + tl.log(tl.maximum(b_sum, 1e-30)), float("-inf"))
    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    flat = (i_b * num_kv_heads * GROUPS + head) * query_len + time
    if HAS_CODES:
        pdl_wait()
        b_codes_lse = tl.load(codes_lse + flat, mask=m_m, other=float("-inf"))
        b_codes_out = tl.load(codes_out + flat[:, None] * D + o_d[None, :], mask=m_q, other=0.0)
        top = tl.maximum(b_lse, b_codes_lse)
        top = tl.where(top == float("-inf"), 0.0, top)
        w_window, w_codes = tl.exp(b_lse - top), tl.exp(b_codes_lse - top)
        total = tl.where(w_window + w_codes > 0, w_window + w_codes, 1.0)
        b_out = (b_out * w_window[:, None] + b_codes_out * w_codes[:, None]) / total[:, None]
    p_out = out + i_b * o_batch + head[:, None] * o_head + time[:, None] * o_time + o_d[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_q)


def attend_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: WindowTokens,
    scaling: float,
    codes: PartialAttention | None,
    soft_cap: float | None = None,
) -> Tensor:
    """As `kvcli.attention.reference.attend_window`, in one launch."""
    batch, heads, query_len, head_dim = query.shape
    out = torch.empty(batch, query_len, heads, head_dim, dtype=query.dtype, device=query.device)
    _launch(query, key, value, window, scaling, out.transpose(1, 2), codes, soft_cap)
    return out


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: WindowTokens,
    scaling: float,
    out: Tensor,
    codes: PartialAttention | None,
    soft_cap: float | None,
) -> None:
    batch, heads, query_len, head_dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    tile = (_TILES_FP32 if query.element_size() == 4 else _TILES).on(query.device)
    tile["BLOCK_M"] = min(tile["BLOCK_M"], max(16, power_of_two(groups * query_len)))
    nothing = query
    query, key, value = row_major(query), row_major(key), row_major(value)
    index = window.index
    _attend_kernel[(batch * kv_heads, cdiv(groups * query_len, tile["BLOCK_M"]))](
        query, key, value, window.attended, index,
        nothing if codes is None else codes[0].contiguous(), nothing if codes is None else codes[1].contiguous(),
        out,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *((0, 0) if isinstance(index, int) else index.stride()), *out.stride()[:3],
        window.layout.sinks, window.layout.ring, kv_heads, query_len, window.length, scaling,
        GROUPS=groups, D=head_dim, BLOCK_D=max(16, power_of_two(head_dim)), **tile,
        SOFT_CAP=soft_cap or 0.0,
        PER_ROW=not isinstance(index, int), HAS_CODES=codes is not None, num_warps=4,
        **({} if codes is None else pdl_launch_options()),
    )  # fmt: skip
