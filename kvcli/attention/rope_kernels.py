"""RoPE in single launches.

Append: RoPE of queries, RoPE of keys into their slots of the window, a copy of values. Flush: inverse RoPE of
keys that are encoded, for codecs that work before RoPE.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.attention import reference
from kvcli.cache.window import WindowTokens
from kvcli.kernels.launch import cdiv, power_of_two, row_major
from kvcli.rope import Rotation


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


@triton.jit(do_not_specialize=["index", "sinks", "ring", "tokens", "length"])
def _rotate_and_append_kernel(
    query, key, value, cos, sin, query_out, key_out, value_out, index,
    q_batch, q_head, q_time, k_batch, k_head, k_time, v_batch, v_head, v_time, c_batch, c_time,
    ko_batch, ko_head, ko_time, vo_batch, vo_head, vo_time, sinks, ring, tokens, length, heads, kv_heads,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """Tokens of one head: rotates a query head or a key head, or copies a value head.

    Grid (ceil(batch * length / BLOCK_T), heads + 2 * kv_heads); tokens are counted over all rows, `length` of each.
    Computes in float32. Tuned on one H200 (torch 2.11, triton 3.6).

    Args:
        query: [batch, heads, length, 2 * HALF] of the model's dtype; key and value with kv_heads.
        cos, sin: [batch or 1, 1, length, HALF] any float.
        query_out: [batch, length, heads, 2 * HALF], written.
        key_out, value_out: [batch, kv_heads, sinks + ring, 2 * HALF], the windows, written except for padding.
        index: token index of the first new token; with PER_ROW of each, int32 [batch, length], -1 at padding.
        q_, k_, v_, c_, ko_, vo_: strides; c_batch is 0 for one row of angles.
        HALF: rotated pairs, half of head_dim; BLOCK_D: HALF padded to a power of two.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    i_h = tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)[None, :]
    row, t = (n // length)[:, None], (n % length)[:, None]
    m = (n < tokens)[:, None] & (o_d < HALF)
    p_cos, p_sin = cos + row * c_batch + t * c_time + o_d, sin + row * c_batch + t * c_time + o_d
    if PER_ROW:
        token = tl.load(index + n, mask=n < tokens, other=-1)[:, None]
    else:
        token = index + t
    slot = tl.where(token < sinks, token, sinks + (token - sinks) % ring)
    if i_h < heads:
        p_x = query + row * q_batch + i_h * q_head + t * q_time + o_d
        p_out = query_out + ((row * length + t) * heads + i_h) * (2 * HALF) + o_d
        b_cos, b_sin = _angle(p_cos, p_sin, m)
        _rotate(p_x, b_cos, b_sin, p_out, m, HALF)
    elif i_h < heads + kv_heads:
        i_h -= heads
        p_x = key + row * k_batch + i_h * k_head + t * k_time + o_d
        b_cos, b_sin = _angle(p_cos, p_sin, m)
        p_out = key_out + row * ko_batch + i_h * ko_head + slot * ko_time + o_d
        _rotate(p_x, b_cos, b_sin, p_out, m & (token >= 0), HALF)
    else:
        i_h -= heads + kv_heads
        p_x = value + row * v_batch + i_h * v_head + t * v_time + o_d
        p_out = value_out + row * vo_batch + i_h * vo_head + slot * vo_time + o_d
        m &= token >= 0
        tl.store(p_out, tl.load(p_x, mask=m, other=0.0).to(value_out.dtype.element_ty), mask=m)
        tl.store(p_out + HALF, tl.load(p_x + HALF, mask=m, other=0.0).to(value_out.dtype.element_ty), mask=m)


def rotate_and_append(
    rotation: Rotation,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_window: Tensor,
    value_window: Tensor,
    window: WindowTokens,
) -> Tensor:
    """As `kvcli.attention.reference.rotate_and_append` in one launch, rounded once; partial RoPE falls back."""
    batch, heads, length, head_dim = query.shape
    half = rotation.cos.shape[-1]
    if 2 * half != head_dim:
        return reference.rotate_and_append(rotation, query, key, value, key_window, value_window, window)
    query, key, value = row_major(query), row_major(key), row_major(value)
    # [batch, time, heads, head_dim], so that SDPA's output needs no copy before o_proj
    out = torch.empty(batch, length, heads, head_dim, dtype=query.dtype, device=query.device)
    index = window.index if isinstance(window.index, int) else window.index.contiguous()
    block = min(16, power_of_two(batch * length))
    _rotate_and_append_kernel[(cdiv(batch * length, block), heads + 2 * key.shape[1])](
        query, key, value, rotation.cos, rotation.sin, out, key_window, value_window, index,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        rotation.cos.stride(0) if rotation.cos.shape[0] > 1 else 0, rotation.cos.stride(2),
        *key_window.stride()[:3], *value_window.stride()[:3], window.layout.sinks, window.layout.ring,
        batch * length, length, heads, key.shape[1],
        HALF=half, BLOCK_D=power_of_two(half), BLOCK_T=block, PER_ROW=not isinstance(index, int),
        num_warps=4 if block > 4 else 1,
    )  # fmt: skip
    return out.transpose(1, 2)


@triton.jit(do_not_specialize=["tokens", "length"])
def _unrotate_kernel(
    x, cos, sin, out, x_batch, x_head, x_time, c_batch, c_time, tokens, length, heads,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Inverse RoPE of tokens of one head.

    Grid (ceil(batch * length / BLOCK_T), heads). Tuned on one H200 (torch 2.11, triton 3.6).

    Args:
        x: [batch, heads, length, 2 * HALF] of the model's dtype, rotated.
        cos, sin: [batch or 1, 1, length, HALF] float32.
        out: float32 [batch, heads, length, 2 * HALF], contiguous, written.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    i_h = tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)[None, :]
    row, t = (n // length)[:, None], (n % length)[:, None]
    m = (n < tokens)[:, None] & (o_d < HALF)
    b_cos, b_sin = _angle(cos + row * c_batch + t * c_time + o_d, sin + row * c_batch + t * c_time + o_d, m)
    scale = tl.where(m, b_cos * b_cos + b_sin * b_sin, 1.0)
    p_x = x + row * x_batch + i_h * x_head + t * x_time + o_d
    p_out = out + ((row * heads + i_h) * length + t) * (2 * HALF) + o_d
    _rotate(p_x, tl.div_rn(b_cos, scale), -tl.div_rn(b_sin, scale), p_out, m, HALF)


def unrotate(rotation: Rotation, x: Tensor) -> Tensor:
    """As `kvcli.attention.reference.unrotate` in one launch; falls back to it for partial RoPE."""
    batch, heads, length, head_dim = x.shape
    half = rotation.cos.shape[-1]
    if 2 * half != head_dim:
        return reference.unrotate(rotation, x)
    x = row_major(x)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    block = min(16, power_of_two(batch * length))
    _unrotate_kernel[(cdiv(batch * length, block), heads)](
        x, rotation.cos, rotation.sin, out, *x.stride()[:3],
        rotation.cos.stride(0) if rotation.cos.shape[0] > 1 else 0, rotation.cos.stride(2),
        batch * length, length, heads,
        HALF=half, BLOCK_D=power_of_two(half), BLOCK_T=block, num_warps=4 if block > 4 else 1,
    )  # fmt: skip
    return out
