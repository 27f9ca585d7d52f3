"""The quantization error of a block of channels, by which SQuat moves the channels after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import power_of_two, row_major
from kvcli.methods.config import ScalarBits
from kvcli.methods.scalar.encode_kernels import affine_codes, affine_scale, clamp_to_fp16, tile_warps


@triton.jit(do_not_specialize=["groups"])
def _error_kernel(
    x, error, stride_b, stride_h, stride_t, heads, groups,
    BITS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """decode(encode(x)) - x of one group of tokens of one head, quantized per channel; grid (groups, batch * heads).

    Args:
        x: [batch, heads, groups * G, D] float, strides stride_*.
        error: float32 [batch, heads, groups * G, D], written.

    Constexprs: BITS per code; G tokens per group; BLOCK_G and BLOCK_D, G and D padded. Tuned on one H200, torch 2.11,
    triton 3.6.
    """
    LEVELS: tl.constexpr = (1 << BITS) - 1
    i_group, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_t, o_c = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_D)[None, :]
    m_x = (o_t < G) & (o_c < D)
    base = x + (i_row // heads) * stride_b + (i_row % heads) * stride_h + i_group * G * stride_t
    b_x = clamp_to_fp16(tl.load(base + o_t.to(tl.int64) * stride_t + o_c, mask=m_x, other=0.0))
    low = tl.min(tl.where(o_t < G, b_x, float("inf")), axis=0, keep_dims=True)
    high = tl.max(tl.where(o_t < G, b_x, float("-inf")), axis=0, keep_dims=True)
    scale, zero = affine_scale(low, high, LEVELS)
    # a code times a float16 scale is exact in float32: contraction to a fused multiply-add changes nothing
    decoded = affine_codes(b_x, scale, zero, LEVELS) * scale.to(tl.float32) + zero.to(tl.float32)
    tl.store(error + (i_row * groups + i_group) * G * D + o_t * D + o_c, decoded - b_x, mask=m_x)


def per_channel_error(x: Tensor, n_bits: ScalarBits, group_size: int) -> Tensor:
    """decode(encode(x)) - x for what `quantize_per_channel` would store.

    Args:
        x: [batch, heads, time, channels], time a multiple of group_size.
        n_bits: bits per code.
        group_size: tokens per group.

    Returns:
        float32 [batch, heads, time, channels].
    """
    x = row_major(x)
    batch, heads, time, channels = x.shape
    error = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        block, width = power_of_two(group_size), power_of_two(channels)
        _error_kernel[(time // group_size, batch * heads)](
            x, error, *x.stride()[:3], heads, time // group_size, BITS=n_bits, G=group_size, D=channels,
            BLOCK_G=block, BLOCK_D=width, num_warps=tile_warps(block * width),
        )  # fmt: skip
    return error
