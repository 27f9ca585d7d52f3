"""Encode kernels of the scalar format: minimum, maximum, codes and packing in one pass over the tokens.

They give the bits of `scalar.codec.quantize` and `packing.pack_planes` exactly. A tile is laid out
as [tokens, fields, words], channel = field * words + word, so that packing is a sum over the fields of a word.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, row_major
from kvcli.kernels.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from kvcli.kernels.words import FP16_MAX, TINY, as_decoded
from kvcli.methods.config import ScalarBits
from kvcli.methods.packing import planes_size

_TILE = 4096
"""Elements per program, about; tuned on one H200, torch 2.11, triton 3.6."""
_PROGRAMS = 64
"""Programs of a step, at most, and half as many at least, if there are as many tokens and heads."""


@triton.jit
def affine_scale(low, high, LEVELS: tl.constexpr):
    """Scale and zero as stored (float16) of groups with minimum `low` and maximum `high`, float32 of any shape."""
    if LEVELS == 1:
        excess = tl.maximum(high - low - FP16_MAX, 0.0) * 0.5
        low, high = low + excess, high - excess
    scale = tl.minimum(tl.div_rn(high - low, tl.full(low.shape, LEVELS, tl.float32)), FP16_MAX)
    return scale.to(tl.float16), low.to(tl.float16)


@triton.jit
def affine_codes(x, scale, zero, LEVELS: tl.constexpr):
    """Codes 0 to LEVELS of float32 x, as float32, rounded half to even; scale and zero float16 broadcast against x."""
    step = scale.to(tl.float32)
    ratio = tl.div_rn(x - zero.to(tl.float32), tl.maximum(step, TINY))
    ratio = tl.where(step > 0, tl.minimum(tl.maximum(ratio, 0.0), LEVELS), 0.0)
    # float32 between 2^23 and 2^24 are the integers, so this addition rounds; clamping first changes nothing
    return (ratio + 8388608.0) - 8388608.0


@triton.jit
def clamp_to_fp16(x):
    """x as float32, clamped to the range of float16."""
    return tl.minimum(tl.maximum(x.to(tl.float32), -FP16_MAX), FP16_MAX)


@triton.jit
def _note(b_x, peak):
    """`peak` grows to the largest magnitude of b_x, if that is beyond what 1-bit codes hold."""
    largest = tl.max(tl.max(tl.max(tl.abs(b_x.to(tl.float32)), axis=2), axis=1), axis=0)
    tl.atomic_max(peak, largest, mask=largest > FP16_MAX / 2)


@triton.jit(do_not_specialize=["groups"], do_not_specialize_on_alignment=["peak"])
def _per_channel_kernel(
    x, packed, scales, zeros, peak, stride_b, stride_h, stride_t, heads, groups,
    BITS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_W: tl.constexpr, NOTE: tl.constexpr,
):  # fmt: skip
    """Codes, scales and zeros per channel of one group of G tokens of one head; grid (groups, batch * heads).

    Those of zeros, which pages encode while a group of keys is open, are zeros, without what they would be computed by.

    x [batch, heads, groups * G, D] float, strides stride_*; written: packed int16 [batch, heads, groups * G, WORDS],
    scales and zeros float16 [batch, heads, groups, D]. BITS per code; BLOCK_G and BLOCK_W are G and WORDS padded. NOTE
    as of `_per_token_kernel`.
    """
    pdl_launch_dependents()
    LEVELS: tl.constexpr = (1 << BITS) - 1
    i_group, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_t = tl.arange(0, BLOCK_G)[:, None, None]
    o_f = tl.arange(0, 16 // BITS)[None, :, None]
    o_w = tl.arange(0, BLOCK_W)[None, None, :]
    o_c = o_f * WORDS + o_w
    m_c = (o_w < WORDS) & (o_c < D)
    m_x = (o_t < G) & m_c
    base = x + (i_row // heads) * stride_b + (i_row % heads) * stride_h + i_group * G * stride_t
    p_s = (i_row * groups + i_group) * D + o_c
    p_w = packed + (i_row * groups + i_group) * G * WORDS + o_t * WORDS + o_w
    m_w = (o_t < G) & (o_w < WORDS)
    pdl_wait()
    b_x = tl.load(base + o_t.to(tl.int64) * stride_t + o_c, mask=m_x, other=0.0)
    is_some = b_x.to(tl.float32).to(tl.int32, bitcast=True) != 0
    some = tl.max(tl.max(tl.max(is_some.to(tl.int32), axis=2), axis=1), axis=0)
    if some == 0:
        zero = tl.zeros([1, 16 // BITS, BLOCK_W], tl.float16)
        tl.store(scales + p_s, zero, mask=m_c)
        tl.store(zeros + p_s, zero, mask=m_c)
        tl.store(p_w, tl.zeros([BLOCK_G, 1, BLOCK_W], tl.int16), mask=m_w)
        return
    if NOTE:
        _note(b_x, peak)
    b_x = clamp_to_fp16(b_x)
    low = tl.min(tl.where(o_t < G, b_x, float("inf")), axis=0, keep_dims=True)
    high = tl.max(tl.where(o_t < G, b_x, float("-inf")), axis=0, keep_dims=True)
    scale, zero = affine_scale(low, high, LEVELS)
    tl.store(scales + p_s, scale, mask=m_c)
    tl.store(zeros + p_s, zero, mask=m_c)
    codes = tl.where(m_x, affine_codes(b_x, scale, zero, LEVELS), 0.0).to(tl.int32)
    words = tl.sum(codes << (o_f * BITS), axis=1, keep_dims=True)
    tl.store(p_w, words.to(tl.int16), mask=m_w)


@triton.jit(
    do_not_specialize=["tokens", "length", "sinks", "ring", "p_batch", "p_head", "s_batch", "s_head"],
    do_not_specialize_on_alignment=["packed", "scales", "zeros", "peak"],
)
def _per_token_kernel(
    x, packed, scales, zeros, first, peak, x_batch, x_head, x_time, p_batch, p_head, s_batch, s_head,
    heads, length, tokens, sinks, ring,
    BITS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, IN_PLACE: tl.constexpr, NOTE: tl.constexpr,
):  # fmt: skip
    """Codes, scales and zeros of BLOCK_T tokens in groups of G channels; grid (ceil(tokens / BLOCK_T),).

    Tokens are counted over all sequences and heads: tokens = batch * heads * length. x [batch, heads, length, D] float,
    strides x_*; written: packed int16 [batch, heads, length, WORDS], strides p_*, scales and zeros float16 [batch,
    heads, length, D / G], strides s_*. BITS per code; BLOCK_W is WORDS padded.

    IN_PLACE: tokens `first` (int32 [batch]) to first + length - 1 of each row, counted after the sinks, are read from a
    ring window x [batch, heads, sinks + ring, D], where what their codes decode to replaces them; packed, scales and
    zeros hold the codes of a row's tokens from its first on. NOTE: peak, float32 [], grows to the largest magnitude of
    x, if that is beyond what 1-bit codes hold.
    """
    pdl_launch_dependents()
    LEVELS: tl.constexpr = (1 << BITS) - 1
    GROUPS: tl.constexpr = D // G
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None, None]
    i_b, i_h, o_t = o_n // length // heads, o_n // length % heads, o_n % length
    o_f = tl.arange(0, 16 // BITS)[None, :, None]
    o_w = tl.arange(0, BLOCK_W)[None, None, :]
    o_c = o_f * WORDS + o_w
    m_t = o_n < tokens
    m_c = (o_w < WORDS) & (o_c < D)
    m_x = m_t & m_c
    slot = o_t
    pdl_wait()
    if IN_PLACE:
        o_t += tl.load(first + i_b, mask=m_t, other=0)
        slot = sinks + o_t % ring
    p_x = x + i_b * x_batch + i_h * x_head + slot * x_time + o_c
    b_x = tl.load(p_x, mask=m_x, other=0.0)
    if NOTE:
        _note(b_x, peak)
    b_x = clamp_to_fp16(b_x)
    p_s = i_b * s_batch + i_h * s_head + o_t * GROUPS
    b_scale, b_zero = tl.zeros(b_x.shape, tl.float16), tl.zeros(b_x.shape, tl.float16)
    for group in tl.static_range(GROUPS):
        m_g = m_c & (o_c // G == group)
        low = tl.min(tl.min(tl.where(m_g, b_x, float("inf")), axis=2, keep_dims=True), axis=1, keep_dims=True)
        high = tl.max(tl.max(tl.where(m_g, b_x, float("-inf")), axis=2, keep_dims=True), axis=1, keep_dims=True)
        scale, zero = affine_scale(low, high, LEVELS)
        tl.store(scales + p_s + group, scale, mask=m_t)
        tl.store(zeros + p_s + group, zero, mask=m_t)
        b_scale, b_zero = tl.where(m_g, scale, b_scale), tl.where(m_g, zero, b_zero)
    numbers = tl.where(m_x, affine_codes(b_x, b_scale, b_zero, LEVELS), 0.0)
    if IN_PLACE:
        tl.store(p_x, as_decoded(numbers * b_scale.to(tl.float32) + b_zero.to(tl.float32), x), mask=m_x)
    codes = numbers.to(tl.int32)
    words = tl.sum(codes << (o_f * BITS), axis=1, keep_dims=True)
    p_w = packed + i_b * p_batch + i_h * p_head + o_t * WORDS + o_w
    tl.store(p_w, words.to(tl.int16), mask=m_t & (o_w < WORDS))


def quantize_per_channel(
    x: Tensor, n_bits: ScalarBits, group_size: int, peak: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes and packs each channel of x [batch, heads, time, channels] in groups of `group_size` tokens.

    `peak` as of `encode_per_token`.

    Returns:
        packed uint8 [batch, heads, time, planes_size(channels)], scale and zero float16
        [batch, heads, time / group_size, channels].
    """
    x = row_major(x)
    batch, heads, time, channels = x.shape
    groups, words = time // group_size, planes_size(channels, n_bits) // 2
    packed = torch.empty(batch, heads, time, words, dtype=torch.int16, device=x.device)
    scale = torch.empty(batch, heads, groups, channels, dtype=torch.float16, device=x.device)
    zero = torch.empty_like(scale)
    if x.numel():
        block = power_of_two(group_size)
        _per_channel_kernel[(groups, batch * heads)](
            x, packed, scale, zero, x if peak is None else peak, *x.stride()[:3], heads, groups, NOTE=peak is not None,
            BITS=n_bits, G=group_size, D=channels, WORDS=words, BLOCK_G=block,
            BLOCK_W=power_of_two(words), num_warps=tile_warps(block * channels), **pdl_launch_options(),
        )  # fmt: skip
    return packed.view(torch.uint8), scale, zero


def quantize_per_token(
    x: Tensor, n_bits: ScalarBits, group_size: int, peak: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes and packs each token of x [batch, heads, time, channels] in groups of `group_size` channels.

    `peak` as of `encode_per_token`.

    Returns:
        packed uint8 [batch, heads, time, planes_size(channels)], scale and zero float16
        [batch, heads, time, channels / group_size].
    """
    groups = x.shape[-1] // group_size
    packed = x.new_empty(*x.shape[:3], planes_size(x.shape[-1], n_bits), dtype=torch.uint8)
    scale = x.new_empty(*x.shape[:3], groups, dtype=torch.float16)
    out = packed, scale, torch.empty_like(scale)
    encode_per_token(x, x.shape[2], n_bits, group_size, out, peak=peak)
    return out


def encode_per_token(
    x: Tensor,
    time: int,
    n_bits: ScalarBits,
    group_size: int,
    out: tuple[Tensor, Tensor, Tensor],
    place: tuple[Tensor, int, int] | None = None,
    peak: Tensor | None = None,
) -> None:
    """Writes what `quantize_per_token` returns to `out`, views of longer tensors, or does `Codec.round_in_place`.

    x is [batch, heads, time, channels], or the window with `place` (first, sinks, ring) of `Codec.round_in_place`;
    `out` are packed, scale and zero; `peak`, float32 [], grows to the largest magnitude if that is beyond what 1-bit
    codes hold.
    """
    x = row_major(x) if place is None else x
    batch, heads, _, channels = x.shape
    width, tokens = power_of_two(channels), batch * heads * time
    if not tokens:
        return
    block = max(1, _TILE // width)
    if time == 1:  # a step; other passes share one variant
        block = min(block, power_of_two(cdiv(tokens, _PROGRAMS)))
    target = out[0].view(torch.int16)
    _per_token_kernel[(cdiv(tokens, block),)](
        x, target, out[1], out[2], x if place is None else place[0], x if peak is None else peak,
        *x.stride()[:3], *target.stride()[:2],
        *out[1].stride()[:2], heads, time, tokens, *((0, 1) if place is None else place[1:]),
        BITS=n_bits, G=group_size, D=channels, WORDS=target.shape[-1], BLOCK_T=block,
        BLOCK_W=power_of_two(target.shape[-1]), IN_PLACE=place is not None, NOTE=peak is not None,
        num_warps=tile_warps(block * width), **pdl_launch_options(),
    )  # fmt: skip


def tile_warps(elements: int) -> int:
    """Warps of a tile: about 32 elements per thread."""
    return min(16, power_of_two(max(1, elements // 1024)))
