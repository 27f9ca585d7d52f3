"""Dequantization of scalar codes in Triton, for the tokens whose keys and values are not codes at the same time.

One program takes a tile of tokens of one kv head, masks the fields of its words and writes scale * code + zero.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two

_BLOCK_N = 32


@triton.jit(do_not_specialize=["length"])
def _decode_kernel(
    packed,
    scale,
    zero,
    out,
    p_batch,
    p_head,
    p_time,
    c_batch,
    c_head,
    c_time,
    num_kv_heads,
    length,
    B: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """TOKENS tokens, or CHANNELS channels of one token, share a scale."""
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // num_kv_heads
    i_h = i_bh % num_kv_heads
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_w = tl.arange(0, BLOCK_W)
    m_n = n < length
    p_packed = packed + i_b * p_batch + i_h * p_head + n[:, None] * p_time + o_w[None, :]
    words = tl.load(p_packed, mask=m_n[:, None] & (o_w < W)[None, :], other=0).to(tl.int32)
    at = i_b * c_batch + i_h * c_head + (n // TOKENS) * c_time
    for f in tl.static_range(16 // B):
        channel = f * W + o_w
        m_x = m_n[:, None] & ((o_w < W) & (channel < D))[None, :]
        o_c = at[:, None] + (channel // CHANNELS)[None, :]
        b_c = tl.load(scale + o_c, mask=m_x, other=0.0).to(tl.float32)
        b_z = tl.load(zero + o_c, mask=m_x, other=0.0).to(tl.float32)
        b_x = ((words >> (B * f)) & ((1 << B) - 1)).to(tl.float32) * b_c + b_z
        p_out = out + (i_bh * length + n)[:, None] * D + channel[None, :]
        tl.store(p_out, b_x.to(out.dtype.element_ty), mask=m_x)


def dequantize_planes(codes: Any, n_bits: int, head_dim: int, tokens: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Decodes scalar codes packed by `pack_planes`.

    Args:
        codes: packed uint8 [batch, num_kv_heads, time, words * 2]; scale and zero float16 [batch, num_kv_heads,
            time / tokens, head_dim / channels].
        n_bits: bits a code.
        head_dim: channels of a head.
        tokens: consecutive tokens that share a scale.
        channels: consecutive channels that share a scale.
        dtype: of the result.

    Returns:
        [batch, num_kv_heads, time, head_dim].
    """
    words = codes.packed.view(torch.int16)
    batch, kv_heads, length, count = words.shape
    out = torch.empty(batch, kv_heads, length, head_dim, dtype=dtype, device=words.device)
    if not out.numel():
        return out
    _decode_kernel[(cdiv(length, _BLOCK_N), batch * kv_heads)](
        words,
        codes.scale,
        codes.zero,
        out,
        *words.stride()[:3],
        *codes.scale.stride()[:3],
        kv_heads,
        length,
        B=n_bits,
        W=count,
        D=head_dim,
        TOKENS=tokens,
        CHANNELS=channels,
        BLOCK_W=power_of_two(count),
        BLOCK_N=_BLOCK_N,
        num_warps=2,
    )
    return out
