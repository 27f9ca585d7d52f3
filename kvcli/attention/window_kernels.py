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
from kvcli.kernels.launch import cdiv, power_of_two, row_major
from kvcli.kernels.pdl import pdl_launch_options, pdl_wait
from kvcli.methods.encoded import PartialAttention

MAX_QUERIES = 8
"""Above this query length, blocks of codes are decoded once for all queries (`kvcli.attention.decoded`)."""


@triton.jit
def _tokens(buffer, decoded, time, decoded_time, n, o_d, sinks, gap, extra, mask, DECODED: tl.constexpr):
    """Tokens n [N] of a head as [N, D]: sinks, `extra` decoded ones, then the window behind a gap."""
    slot = tl.where(n < sinks, n, n - extra + gap).to(tl.int64)
    p_x = buffer + slot[:, None] * time + o_d[None, :]
    if DECODED:
        between = (n >= sinks) & (n < sinks + extra)
        p_decoded = decoded + (n - sinks).to(tl.int64)[:, None] * decoded_time + o_d[None, :]
        p_x = tl.where(between[:, None], p_decoded, p_x)
    return tl.load(p_x, mask=mask, other=0.0)


@triton.jit(
    do_not_specialize=["query_len", "kv_len", "k_sinks", "k_gap", "k_extra", "v_sinks", "v_gap", "v_extra", "vis_batch"]
)
def _attend_kernel(
    query, key, key_decoded, value, value_decoded, visible, codes_out, codes_lse, out,
    q_batch, q_head, q_time, k_batch, k_head, k_time, kd_batch, kd_head, kd_time, k_sinks, k_gap, k_extra,
    v_batch, v_head, v_time, vd_batch, vd_head, vd_time, v_sinks, v_gap, v_extra, vis_batch, vis_time,
    o_batch, o_head, o_time, num_kv_heads, query_len, kv_len, scaling,
    GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    K_DECODED: tl.constexpr, V_DECODED: tl.constexpr, HAS_VISIBLE: tl.constexpr, HAS_CODES: tl.constexpr,
):  # fmt: skip
    """softmax(q k^T scaling) v of the query heads of one kv head, merged with (out, lse) of the codes.

    Grid (batch * num_kv_heads, ceil(GROUPS * query_len / BLOCK_M)); rows M are GROUPS query heads times query_len.
    query [batch, GROUPS * num_kv_heads, query_len, D], key and value [batch, num_kv_heads, slots, D] of the model's
    dtype (sinks, gap, residual window; `*_extra` decoded tokens of `*_decoded` between), visible uint8
    [batch, 1 or query_len, kv_len], codes_out float32 [batch, heads, query_len, D], codes_lse float32
    [batch, heads, query_len], out strided like the query. Sums in float32. Tuned on one H200 (torch 2.11, triton
    3.6).
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
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    key += i_b * k_batch + i_h * k_head
    key_decoded += i_b * kd_batch + i_h * kd_head
    value += i_b * v_batch + i_h * v_head
    value_decoded += i_b * vd_batch + i_h * vd_head
    for start in range(0, kv_len, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n < kv_len
        m_kv = m_n[:, None] & (o_d < D)[None, :]
        # [N, D]
        b_k = _tokens(key, key_decoded, k_time, kd_time, o_n, o_d, k_sinks, k_gap, k_extra, m_kv, K_DECODED)
        b_v = _tokens(value, value_decoded, v_time, vd_time, o_n, o_d, v_sinks, v_gap, v_extra, m_kv, V_DECODED)
        shown = m_m[:, None] & m_n[None, :]
        if HAS_VISIBLE:
            p_visible = visible + i_b * vis_batch + time[:, None] * vis_time + o_n[None, :]
            shown = shown & (tl.load(p_visible, mask=shown, other=0) != 0)
        # [M, N]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scaling
        b_s = tl.where(shown, b_s, float("-inf"))
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
    key: WindowTokens,
    value: WindowTokens,
    visible: Tensor | None,
    scaling: float,
    codes: PartialAttention | None,
) -> Tensor:
    """As `kvcli.attention.reference.attend_window`, in one launch."""
    batch, heads, query_len, head_dim = query.shape
    out = torch.empty(batch, query_len, heads, head_dim, dtype=query.dtype, device=query.device)
    _launch(query, key, value, visible, scaling, out.transpose(1, 2), codes)
    return out


def _launch(
    query: Tensor,
    key: WindowTokens,
    value: WindowTokens,
    visible: Tensor | None,
    scaling: float,
    out: Tensor,
    codes: PartialAttention | None,
) -> None:
    batch, heads, query_len, head_dim = query.shape
    kv_heads = key.buffer.shape[1]
    groups = heads // kv_heads
    block_m = min(64, max(16, power_of_two(groups * query_len)))
    vis_stride = (0, 0)
    if visible is not None:
        visible = visible.contiguous().view(torch.uint8)
        vis_stride = (visible.stride(0), visible.stride(1) if visible.shape[1] > 1 else 0)
    nothing = query
    query, k, v = row_major(query), row_major(key.buffer), row_major(value.buffer)
    k_decoded, v_decoded = (
        buffer if x.decoded is None else row_major(x.decoded) for x, buffer in ((key, k), (value, v))
    )
    _attend_kernel[(batch * kv_heads, cdiv(groups * query_len, block_m))](
        query, k, k_decoded, v, v_decoded, nothing if visible is None else visible,
        nothing if codes is None else codes[0].contiguous(), nothing if codes is None else codes[1].contiguous(),
        out,
        *query.stride()[:3], *k.stride()[:3], *k_decoded.stride()[:3], key.sinks, key.gap, key.num_decoded,
        *v.stride()[:3], *v_decoded.stride()[:3], value.sinks, value.gap, value.num_decoded, *vis_stride,
        *out.stride()[:3], kv_heads, query_len, key.length, scaling,
        GROUPS=groups, D=head_dim, BLOCK_D=max(16, power_of_two(head_dim)), BLOCK_M=block_m, BLOCK_N=64,
        K_DECODED=key.decoded is not None, V_DECODED=value.decoded is not None, HAS_VISIBLE=visible is not None,
        HAS_CODES=codes is not None, num_warps=4,
        **({} if codes is None else pdl_launch_options()),
    )  # fmt: skip
