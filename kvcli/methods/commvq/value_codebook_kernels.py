"""Triton kernel of (P S) C, CommVQ's value codebook after the splits are merged (arXiv 2506.18879, Eq. 22)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv
from kvcli.methods.commvq.values import CommVQValueCodec


@triton.jit
def _codebook_kernel(
    sums, codebook, offset, out, num_kv_heads, rows, width,
    W: tl.constexpr, CHANNELS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, FP32_DOT: tl.constexpr,
):  # fmt: skip
    """out = bits C + mass * offset, each row in the channels of its kv head, for sums of bits and then of all weights.

    Grid (batch * num_kv_heads, ceil(D / BLOCK_D), ceil(rows / BLOCK_M)); `rows` per kv head.
    sums float32 [batch * num_kv_heads, rows, CHANNELS]; codebook float16 [16 W, width]; offset float16 [width]; out
    float32 [batch * num_kv_heads, rows, D]. BLOCK_K bits at a time; FP32_DOT: products in float32, else tf32.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_h = i_bh % num_kv_heads
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    m_m = o_m < rows
    m_d = o_d < D
    row = i_bh * rows + o_m
    BITS: tl.constexpr = CHANNELS - 16
    PLACES: tl.constexpr = BITS // 16
    b_out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, BITS, BLOCK_K):
        k = start + o_k
        place = k % PLACES
        word = place // 16 * 16 + place % 8 * 2 + place // 8 % 2
        m_k = (k < BITS) & (word < W)
        b_y = tl.load(sums + row[:, None] * CHANNELS + k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
        p_book = codebook + (word * 16 + k // PLACES)[:, None] * width + (i_h * D + o_d)[None, :]
        b_c = tl.load(p_book, mask=m_k[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        b_out = tl.dot(b_y, b_c, b_out, input_precision="ieee" if FP32_DOT else "tf32")
    b_mass = tl.load(sums + row * CHANNELS + BITS, mask=m_m, other=0.0)
    b_offset = tl.load(offset + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_out += b_mass[:, None] * b_offset[None, :]
    tl.store(out + row[:, None] * D + o_d[None, :], b_out, mask=m_m[:, None] & m_d[None, :])


def apply_codebook(value: CommVQValueCodec, sums: Tensor, shape: torch.Size, fp32_dot: bool) -> Tensor:
    """Bit sums times the codebook of each row's head.

    Args:
        value: the codec.
        sums: of `value_kernels.bit_sums`.
        shape: of the query, [batch, num_heads, query_len, head_dim].
        fp32_dot: float32 products instead of tf32.

    Returns:
        float32 of that shape.
    """
    batch, kv_heads, head_dim = shape[0], value.spec.num_kv_heads, shape[3]
    rows = sums.shape[2] // kv_heads
    out = torch.empty(shape, device=sums.device)
    block_d = 16 if batch * kv_heads < 64 else 64
    _codebook_kernel[(batch * kv_heads, cdiv(head_dim, block_d), cdiv(rows, 16))](
        sums, value.codebook, value.offset, out, kv_heads, rows, value.codebook.shape[1],
        W=value.codebook.shape[0] // 16, CHANNELS=sums.shape[-1], D=head_dim, BLOCK_D=block_d, BLOCK_M=16, BLOCK_K=128,
        FP32_DOT=fp32_dot, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
