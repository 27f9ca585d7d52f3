"""Triton kernels around the window: RoPE in single launches, and attention over window tokens.

Append: RoPE of queries, RoPE of keys into their slots of the window, a copy of values. Flush: inverse RoPE of keys that
are encoded, for codecs that work before RoPE. Attention: one program takes the queries of one kv head (all its query
heads times a block of query positions, so that a key is read once for all of them) and walks over the tokens with an
online softmax. Its epilogue merges (out, lse) of the codes; the products after it begin while it ends.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.cache.window import WindowTokens
from kvcli.kernels.launch import HOPPER_SHARED_MEMORY, cdiv, power_of_two, row_major, shared_memory_limit
from kvcli.kernels.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from kvcli.kernels.splits import capped
from kvcli.methods.layer_codec import PartialAttention
from kvcli.rope import Rotation

DECODE_THRESHOLD = 8
"""Above this query length, blocks of codes are decoded once for all queries (`kvcli.attention.decoded`)."""

_TILES = ((64, 64, 3), (64, 64, 2), (64, 32, 3), (64, 32, 2), (32, 32, 2), (16, 32, 2), (16, 16, 2))
"""BLOCK_M, BLOCK_N and stages; the first on an H100 or H200, from the third on elsewhere."""

_LOW_TILES = ((16, 64, 3), (16, 32, 3), (16, 32, 2), (16, 16, 2))
"""The same for float32, whose products are made without tensor cores, and for latents and values of more than 256
channels: sums of more rows do not fit into registers."""


@cache
def tile_for(
    rows: int, widths: tuple[int, int, int], itemsize: int, device: torch.device, copies: int = 1, tokens: int = 0
) -> dict[str, int]:
    """The first tile that fits, for query rows per kv head and padded channels of queries, keys and values.

    That of a few queries to so many exact `tokens` has all of these, up to 128.

    Triton keeps the queries in shared memory, in `copies` dtypes, `stages` tiles of keys and values for tensor cores of
    Hopper, else one less, and, but on Hopper, the weights.
    """
    limit, (of_queries, of_keys, of_values) = shared_memory_limit(device), widths
    hopper, fp32 = limit >= HOPPER_SHARED_MEMORY, itemsize == 4
    wide = of_queries > of_keys or of_values > 256
    sizes = _TILES[0 if hopper else 2 :]
    if fp32 or wide:
        sizes = _LOW_TILES[0 if hopper and (not fp32 or max(widths) <= 128) else 1 :]
    for block_m, block_n, stages in sizes:
        weights = 0 if hopper and not fp32 else block_m * block_n
        operands = copies * block_m * of_queries + (stages - (fp32 or wide)) * block_n * (of_keys + of_values)
        if (weights + operands) * itemsize + 512 <= limit:
            break
    tile = {"BLOCK_M": min(block_m, max(16, power_of_two(rows))), "BLOCK_N": block_n}
    if tokens and rows <= 16 and max(widths) <= 128 and itemsize == 2 and block_n >= 64:
        return tile | {"BLOCK_N": min(128, max(16, power_of_two(tokens))), "num_warps": 8, "num_stages": 1}
    return tile | {"num_warps": 8 if wide else 4, "num_stages": stages}


@triton.jit
def _angle(cos, sin, m):
    """Cosines and sines at pointers, float32."""
    return tl.load(cos, mask=m, other=0.0).to(tl.float32), tl.load(sin, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _rotate(x, b_cos, b_sin, out, m, HALF: tl.constexpr):
    """Rotates pairs at pointers x, x + HALF and writes them to out, out + HALF."""
    b_x = tl.load(x, mask=m, other=0.0).to(tl.float32)
    b_y = tl.load(x + HALF, mask=m, other=0.0).to(tl.float32)
    tl.store(out, (b_x * b_cos - b_y * b_sin).to(out.dtype.element_ty), mask=m)
    tl.store(out + HALF, (b_y * b_cos + b_x * b_sin).to(out.dtype.element_ty), mask=m)


@triton.jit
def _copy(x, out, m, START: tl.constexpr, STOP: tl.constexpr, BLOCK: tl.constexpr):
    """Copies channels [START, STOP) of tokens whose first channels are at pointers x and out."""
    o_c = START + tl.arange(0, BLOCK)[None, :]
    m = m & (o_c < STOP)
    tl.store(out + o_c, tl.load(x + o_c, mask=m, other=0.0).to(out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["index", "sinks", "ring", "tokens", "length"])
def _rotate_and_append_kernel(
    query, key, value, cos, sin, query_out, key_out, value_out, index,
    q_batch, q_head, q_time, k_batch, k_head, k_time, v_batch, v_head, v_time, c_batch, c_time,
    ko_batch, ko_head, ko_time, vo_batch, vo_head, vo_time, sinks, ring, tokens, length, heads, kv_heads,
    HALF: tl.constexpr, DQ: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, PER_ROW: tl.constexpr, REST_Q: tl.constexpr, REST: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Tokens of one head: rotates a query head or a key head, or copies a value head.

    Grid (ceil(batch * length / BLOCK_T), heads + 2 * kv_heads); tokens are counted over all rows, `length` of each.
    Computes in float32. Tuned on one H200 (torch 2.11, triton 3.6).

    Args:
        query: [batch, heads, length, DQ] of the model's dtype; key and value with kv_heads, D and DV.
        cos, sin: [batch or 1, 1, length, HALF] any float.
        query_out: [batch, length, heads, DQ], written.
        key_out, value_out: [batch, kv_heads, sinks + ring, D or DV], the windows, written except for padding.
        index: token index of the first new token; with PER_ROW of each, int32 [batch, length], -1 at padding.
        q_, k_, v_, c_, ko_, vo_: strides; c_batch is 0 for one row of angles.
        HALF: rotated pairs, of the first channels.
        BLOCK_D, REST_Q, REST, BLOCK_V: HALF, DQ - 2 * HALF, D - 2 * HALF, DV, padded to powers of two; rests may be 0.
    """
    pdl_launch_dependents()
    pdl_wait()
    n = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    i_h = tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)[None, :]
    row, t = (n // length)[:, None], (n % length)[:, None]
    m_t = (n < tokens)[:, None]
    m = m_t & (o_d < HALF)
    p_cos, p_sin = cos + row * c_batch + t * c_time + o_d, sin + row * c_batch + t * c_time + o_d
    if PER_ROW:
        token = tl.load(index + n, mask=n < tokens, other=-1)[:, None]
    else:
        token = index + t
    slot = tl.where(token < sinks, token, sinks + (token - sinks) % ring)
    if i_h < heads:
        p_x = query + row * q_batch + i_h * q_head + t * q_time
        p_out = query_out + ((row * length + t) * heads + i_h) * DQ
        b_cos, b_sin = _angle(p_cos, p_sin, m)
        _rotate(p_x + o_d, b_cos, b_sin, p_out + o_d, m, HALF)
        if REST_Q > 0:
            _copy(p_x, p_out, m_t, 2 * HALF, DQ, REST_Q)
    elif i_h < heads + kv_heads:
        i_h -= heads
        p_x = key + row * k_batch + i_h * k_head + t * k_time
        b_cos, b_sin = _angle(p_cos, p_sin, m)
        p_out = key_out + row * ko_batch + i_h * ko_head + slot * ko_time
        _rotate(p_x + o_d, b_cos, b_sin, p_out + o_d, m & (token >= 0), HALF)
        if REST > 0:
            _copy(p_x, p_out, m_t & (token >= 0), 2 * HALF, D, REST)
    else:
        i_h -= heads + kv_heads
        p_x = value + row * v_batch + i_h * v_head + t * v_time
        p_out = value_out + row * vo_batch + i_h * vo_head + slot * vo_time
        _copy(p_x, p_out, m_t & (token >= 0), 0, DV, BLOCK_V)


def rotate_and_append(
    rotation: Rotation,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_window: Tensor,
    value_window: Tensor,
    window: WindowTokens,
) -> Tensor:
    """As `kvcli.attention.reference.rotate_and_append` in one launch, rounded once."""
    batch, heads, length, query_dim = query.shape
    half, head_dim, value_dim = rotation.cos.shape[-1], key.shape[3], value.shape[3]
    rest_q, rest = (power_of_two(width - 2 * half) * (2 * half < width) for width in (query_dim, head_dim))
    query, key, value = row_major(query), row_major(key), row_major(value)
    # [batch, time, heads, channels], so that SDPA's output needs no copy before o_proj
    out = torch.empty(batch, length, heads, query_dim, dtype=query.dtype, device=query.device)
    index = window.index if isinstance(window.index, int) else window.index.contiguous()
    block = min(16, power_of_two(batch * length))
    _rotate_and_append_kernel[(cdiv(batch * length, block), heads + 2 * key.shape[1])](
        query, key, value, rotation.cos, rotation.sin, out, key_window, value_window, index,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        rotation.cos.stride(0) if rotation.cos.shape[0] > 1 else 0, rotation.cos.stride(2),
        *key_window.stride()[:3], *value_window.stride()[:3], window.layout.sinks, window.layout.ring,
        batch * length, length, heads, key.shape[1],
        HALF=half, DQ=query_dim, D=head_dim, DV=value_dim, BLOCK_D=power_of_two(half), BLOCK_T=block,
        PER_ROW=not isinstance(index, int), REST_Q=rest_q, REST=rest, BLOCK_V=power_of_two(value_dim),
        num_warps=4 if block > 4 else 1, **pdl_launch_options(),
    )  # fmt: skip
    return out.transpose(1, 2)


@triton.jit(do_not_specialize=["tokens", "length"])
def _unrotate_kernel(
    x, cos, sin, offset, offset_cos, offset_sin, out, x_batch, x_head, x_time, c_batch, c_time, o_batch, b_batch,
    b_time, tokens, length, heads,
    HALF: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, REST: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """Inverse RoPE of tokens of one head, if HAS_OFFSET less a rotated offset.

    Grid (ceil(batch * length / BLOCK_T), heads). Tuned on one H200 (torch 2.11, triton 3.6).

    Args:
        x: [batch, heads, length, D] of the model's dtype, the first 2 * HALF channels rotated.
        cos, sin: [batch or 1, 1, length, HALF] float32, strides c_*.
        offset: float32 [batch or 1, heads, 1, D], stride o_batch; its rotation as cos and sin, strides b_*.
        out: float32 [batch, heads, length, D], contiguous, written.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    i_h = tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)[None, :]
    row, t = (n // length)[:, None], (n % length)[:, None]
    m_t = (n < tokens)[:, None]
    m = m_t & (o_d < HALF)
    b_cos, b_sin = _angle(cos + row * c_batch + t * c_time + o_d, sin + row * c_batch + t * c_time + o_d, m)
    scale = tl.where(m, b_cos * b_cos + b_sin * b_sin, 1.0)
    p_x = x + row * x_batch + i_h * x_head + t * x_time
    p_out = out + ((row * heads + i_h) * length + t) * D
    b_x = tl.load(p_x + o_d, mask=m, other=0.0).to(tl.float32)
    b_y = tl.load(p_x + HALF + o_d, mask=m, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        p_offset = offset + row * o_batch + i_h * D + o_d
        at = row * b_batch + t * b_time + o_d
        b_off_cos, b_off_sin = _angle(offset_cos + at, offset_sin + at, m)
        b_off_x = tl.load(p_offset, mask=m, other=0.0)
        b_off_y = tl.load(p_offset + HALF, mask=m, other=0.0)
        b_x -= b_off_x * b_off_cos - b_off_y * b_off_sin
        b_y -= b_off_y * b_off_cos + b_off_x * b_off_sin
    b_cos, b_sin = tl.div_rn(b_cos, scale), tl.div_rn(b_sin, scale)
    tl.store(p_out + o_d, b_x * b_cos + b_y * b_sin, mask=m)
    tl.store(p_out + HALF + o_d, b_y * b_cos - b_x * b_sin, mask=m)
    if REST > 0:
        o_c = 2 * HALF + tl.arange(0, REST)[None, :]
        m = m_t & (o_c < D)
        b_rest = tl.load(p_x + o_c, mask=m, other=0.0).to(tl.float32)
        if HAS_OFFSET:
            b_rest -= tl.load(offset + row * o_batch + i_h * D + o_c, mask=m, other=0.0)
        tl.store(p_out + o_c, b_rest, mask=m)


def unrotate(rotation: Rotation, x: Tensor, offset: tuple[Tensor, Rotation] | None = None) -> Tensor:
    """As `kvcli.rope.unrotate` in one launch."""
    batch, heads, length, head_dim = x.shape
    half = rotation.cos.shape[-1]
    x = row_major(x)
    vector, at = (x, rotation) if offset is None else (offset[0].contiguous(), offset[1])
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    block = min(16, power_of_two(batch * length))
    _unrotate_kernel[(cdiv(batch * length, block), heads)](
        x, rotation.cos, rotation.sin, vector, at.cos, at.sin, out, *x.stride()[:3],
        rotation.cos.stride(0) if rotation.cos.shape[0] > 1 else 0, rotation.cos.stride(2),
        vector.stride(0) if vector.shape[0] > 1 else 0,
        at.cos.stride(0) if at.cos.shape[0] > 1 else 0, at.cos.stride(2),
        batch * length, length, heads, HAS_OFFSET=offset is not None,
        HALF=half, D=head_dim, BLOCK_D=power_of_two(half), BLOCK_T=block,
        REST=power_of_two(head_dim - 2 * half) * (2 * half < head_dim), num_warps=4 if block > 4 else 1,
    )  # fmt: skip
    return out


@triton.jit
def attend_tile(
    b_q, b_rest, b_k, b_v, shown, b_max, b_sum, b_acc, scaling, LATENT: tl.constexpr, SOFT_CAP: tl.constexpr
):
    """One step of the online softmax: queries [M, D] over keys [N, D] and values [N, DV], where `shown` [M or 1, N].

    If LATENT, keys end with the values, and queries with b_rest [M, DV].
    """
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if LATENT:
        b_s = tl.dot(b_rest, tl.trans(b_v), b_s, input_precision="ieee")
    b_s *= scaling
    if SOFT_CAP > 0:
        b_s = capped(b_s, SOFT_CAP)
    b_s = tl.where(shown, b_s, float("-inf"))
    new_max = tl.maximum(b_max, tl.max(b_s, 1))
    safe = tl.where(new_max == float("-inf"), 0.0, new_max)
    b_p = tl.exp(b_s - safe[:, None])
    shrink = tl.exp(b_max - safe)
    b_acc = b_acc * shrink[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
    return new_max, b_sum * shrink + tl.sum(b_p, 1), b_acc


@triton.jit
def _as_decoded(b_q, decoded):
    """Queries in the dtype of decoded tokens: bfloat16 ones in the range of float16."""
    if b_q.dtype != decoded.dtype.element_ty:
        b_q = tl.clamp(b_q.to(tl.float32), -65504.0, 65504.0).to(decoded.dtype.element_ty)
    return b_q


@triton.jit(do_not_specialize=["attended", "index", "i_batch", "i_time", "sinks", "ring", "query_len", "kv_len"])
def _attend_kernel(
    query, key, value, attended, index, codes_out, codes_lse, out,
    q_batch, q_head, q_time, k_batch, k_head, k_time, v_batch, v_head, v_time, i_batch, i_time,
    o_batch, o_head, o_time, ck_batch, ck_head, cv_batch, cv_head, sinks, ring, num_kv_heads, query_len, kv_len,
    scaling,
    GROUPS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LATENT: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFT_CAP: tl.constexpr, PER_ROW: tl.constexpr,
    HAS_CODES: tl.constexpr, DECODED: tl.constexpr,
):  # fmt: skip
    """softmax(q k^T scaling) v of the query heads of one kv head, merged with (out, lse) of the codes, if HAS_CODES.

    Grid (batch * num_kv_heads, ceil(GROUPS * query_len / BLOCK_M)); rows M are GROUPS query heads times query_len.
    query [batch, GROUPS * num_kv_heads, query_len, D], [..., D + DV] if LATENT: keys end with the values; key and
    value [batch, num_kv_heads, sinks + ring, D or DV] of the model's dtype, attended and index as in `WindowTokens`:
    numbers, or with PER_ROW int32 [batch] and [batch, query_len]; codes_out float32 [batch, heads, query_len, DV],
    codes_lse float32 [batch, heads, query_len], out [batch, heads, query_len, DV] with strides o_*. If DECODED,
    codes_out and codes_lse are decoded keys and values instead, [batch, num_kv_heads, tokens, D or DV] with strides
    c*_, of which each row attends to `attended` first. SOFT_CAP: of the scores, 0 for none. kv_len: window tokens of
    the longest row. Sums in float32. Tuned on one H200 (torch 2.11, triton 3.6).
    """
    pdl_launch_dependents()
    i_b = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    i_h = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    m_d, m_v = (o_d < D)[None, :], (o_v < DV)[None, :]
    m_m = o_m < GROUPS * query_len
    head = i_h * GROUPS + o_m // query_len
    time = (o_m % query_len).to(tl.int64)
    m_out = m_m[:, None] & m_v
    p_query = (query + i_b * q_batch + head * q_head + time * q_time)[:, None]
    # [M, D]
    b_q = tl.load(p_query + o_d[None, :], mask=m_m[:, None] & m_d, other=0.0)
    b_rest = b_q
    if LATENT:
        b_rest = tl.load(p_query + D + o_v[None, :], mask=m_out, other=0.0)
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
    b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    key += i_b * k_batch + i_h * k_head
    value += i_b * v_batch + i_h * v_head
    if DECODED:
        codes_out += i_b * ck_batch + i_h * ck_head
        codes_lse += i_b * cv_batch + i_h * cv_head
        r_q, r_v = _as_decoded(b_q, codes_out), _as_decoded(b_rest, codes_out)
        for start in range(0, attended, BLOCK_N):
            o_n = start + tl.arange(0, BLOCK_N)
            m_n, at = (o_n < attended)[:, None], o_n.to(tl.int64)[:, None]
            b_k = tl.load(codes_out + at * D + o_d[None, :], mask=m_n & m_d, other=0.0)
            b_v = tl.load(codes_lse + at * DV + o_v[None, :], mask=m_n & m_v, other=0.0)
            shown = (o_n < attended)[None, :]
            b_max, b_sum, b_acc = attend_tile(r_q, r_v, b_k, b_v, shown, b_max, b_sum, b_acc, scaling, LATENT, SOFT_CAP)
    for start in range(0, stop, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        place = oldest + o_n - sinks
        place = tl.where(place < ring, place, place - ring)
        slot = tl.where(o_n < sinks, o_n, sinks + place).to(tl.int64)[:, None]
        m_n = (o_n < stop)[:, None]
        # [N, D]
        b_k = tl.load(key + slot * k_time + o_d[None, :], mask=m_n & m_d, other=0.0)
        b_v = tl.load(value + slot * v_time + o_v[None, :], mask=m_n & m_v, other=0.0)
        shown = o_n[None, :] < b_seen[:, None]
        b_max, b_sum, b_acc = attend_tile(b_q, b_rest, b_k, b_v, shown, b_max, b_sum, b_acc, scaling, LATENT, SOFT_CAP)
    b_lse = tl.where(b_sum > 0, b_max + tl.log(tl.maximum(b_sum, 1e-30)), float("-inf"))
    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    flat = (i_b * num_kv_heads * GROUPS + head) * query_len + time
    if HAS_CODES:
        pdl_wait()
        b_codes_lse = tl.load(codes_lse + flat, mask=m_m, other=float("-inf"))
        b_codes_out = tl.load(codes_out + flat[:, None] * DV + o_v[None, :], mask=m_out, other=0.0)
        top = tl.maximum(b_lse, b_codes_lse)
        top = tl.where(top == float("-inf"), 0.0, top)
        w_window, w_codes = tl.exp(b_lse - top), tl.exp(b_codes_lse - top)
        total = tl.where(w_window + w_codes > 0, w_window + w_codes, 1.0)
        b_out = (b_out * w_window[:, None] + b_codes_out * w_codes[:, None]) / total[:, None]
    p_out = out + i_b * o_batch + head[:, None] * o_head + time[:, None] * o_time + o_v[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)


def attend_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: WindowTokens,
    scaling: float,
    codes: PartialAttention | None,
    soft_cap: float | None = None,
    decoded: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As `kvcli.attention.reference.attend_window`, in one launch.

    Instead of `codes`, (out, lse), it takes `decoded` keys and values [batch, num_kv_heads, tokens, channels].
    """
    batch, heads, query_len, query_dim = query.shape
    kv_heads, head_dim, value_dim = key.shape[1], key.shape[3], value.shape[3]
    output = torch.empty(batch, query_len, heads, value_dim, dtype=query.dtype, device=query.device)
    out = output.transpose(1, 2)
    groups, latent = heads // kv_heads, query_dim > head_dim
    block_d, block_v = (max(16, power_of_two(width)) for width in (head_dim, value_dim))
    copies = 1 if decoded is None or decoded[0].dtype == query.dtype else 2
    widths = block_d + block_v * latent, block_d, block_v
    tokens = 128 if decoded is None else 0  # whatever the window has: what is launched is known beforehand
    tile = tile_for(groups * query_len, widths, query.element_size(), query.device, copies, tokens)
    query, key, value = row_major(query), row_major(key), row_major(value)
    first, second = (query, query) if codes is None else (x.contiguous() for x in codes)
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if decoded is not None:
        first, second = (x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous() for x in decoded)
        strides = *first.stride()[:2], *second.stride()[:2]
    index = window.index
    _attend_kernel[(batch * kv_heads, cdiv(groups * query_len, tile["BLOCK_M"]))](
        query, key, value, window.attended, index, first, second, out,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *((0, 0) if isinstance(index, int) else index.stride()), *out.stride()[:3],
        *strides, window.layout.sinks, window.layout.ring, kv_heads, query_len, window.length, scaling,
        GROUPS=groups, D=head_dim, DV=value_dim, LATENT=latent, BLOCK_D=block_d, BLOCK_V=block_v, **tile,
        SOFT_CAP=soft_cap or 0.0, PER_ROW=not isinstance(index, int), HAS_CODES=codes is not None,
        DECODED=decoded is not None,
        **({} if codes is None else pdl_launch_options()),
    )  # fmt: skip
    return output
