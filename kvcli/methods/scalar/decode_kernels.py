"""Decode kernel of the scalar format: tokens of which only the key or only the value is encoded, and long queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two
from kvcli.kernels.splits import batch_and_head
from kvcli.kernels.words import as_decoded, field_fp32

# tuned on one H200, torch 2.11, triton 3.6
_BLOCK_N = 32
_WARPS = 2


@triton.jit(do_not_specialize=["length"])
def _decode_kernel(
    packed, scale, zero, out, p_batch, p_head, p_time, c_batch, c_head, c_time, num_kv_heads, length,
    B: tl.constexpr, W: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = code * scale + zero, where TOKENS tokens times CHANNELS channels share a scale and a zero.

    Grid (ceil(length / BLOCK_N), batch * num_kv_heads); one program: BLOCK_N tokens of one kv head. packed int16
    [batch, num_kv_heads, length, W], strides p_*, B-bit codes by `pack_planes`; scale and zero float16 [batch,
    num_kv_heads, length / TOKENS, D / CHANNELS], strides c_*; out [batch, num_kv_heads, length, D] float, written,
    clamped to the range of float16 if it is that. BLOCK_W is W padded.
    """
    i_bh, i_b, i_h = batch_and_head(1, num_kv_heads)
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
        b_x = field_fp32(words, f, B) * b_c + b_z
        p_out = out + (i_bh * length + n)[:, None] * D + channel[None, :]
        tl.store(p_out, as_decoded(b_x, out), mask=m_x)


def dequantize_planes(
    packed: Tensor, scale: Tensor, zero: Tensor, n_bits: int, head_dim: int, group: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Decodes the fields of `ScalarCodes` with `group`, (tokens, channels), to [batch, kv heads, time, head_dim]."""
    words = packed.view(torch.int16)
    batch, kv_heads, length, count = words.shape
    out = torch.empty(batch, kv_heads, length, head_dim, dtype=dtype, device=words.device)
    if not out.numel():
        return out
    _decode_kernel[(cdiv(length, _BLOCK_N), batch * kv_heads)](
        words, scale, zero, out, *words.stride()[:3], *scale.stride()[:3], kv_heads, length,
        B=n_bits, W=count, D=head_dim, TOKENS=group[0], CHANNELS=group[1],
        BLOCK_W=power_of_two(count), BLOCK_N=_BLOCK_N, num_warps=_WARPS,
    )  # fmt: skip
    return out
