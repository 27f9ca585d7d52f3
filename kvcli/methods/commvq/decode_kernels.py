"""Decode kernels of CommVQ (arXiv 2506.18879), for long queries: keys with offset and RoPE, values of all heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, row_major
from kvcli.kernels.words import as_decoded, bit_rows
from kvcli.methods.commvq.codeword_kernels import code_words, codeword_sums, halves_of_sums
from kvcli.rope import Rotation

_KEY_TILE = {"BLOCK_T": 8, "num_warps": 2}
"""The fastest of six on one H200 (torch 2.11, triton 3.6): 32K tokens, 8 heads of 128 channels, R = 11."""
_VALUE_TILE = {"BLOCK_T": 128, "BLOCK_C": 128, "BLOCK_Y": 16, "num_warps": 8, "num_stages": 3}
"""The fastest of six on one H200 (torch 2.11, triton 3.6): 32K tokens, 8 heads of 128 channels, 1 bit."""


@triton.jit(do_not_specialize=["length"])
def _decode_keys_kernel(
    packed, norm, table, pair_scale, offset, cos, sin, out,
    p_batch, p_time, n_batch, n_head, n_time, c_batch, c_time, batch, num_kv_heads, length, norm_factor,
    R: tl.constexpr, N: tl.constexpr, CODE_BITS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, PITCH: tl.constexpr, ALIGNED: tl.constexpr, WORDS: tl.constexpr, HAS_OFFSET: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """out = R_t (norm * sum_r (u_a + i u_b) + offset), for BLOCK_T tokens of one kv head.

    Grid (ceil(length / BLOCK_T), num_kv_heads * batch): programs that run at the same time share a codebook. packed
    [batch, 1, length, PITCH bytes], int32 words if ALIGNED, else uint8, strides p_*; norm float16 [batch, 1 or
    num_kv_heads, length, 1], strides n_*; table int32 [num_kv_heads, GROUPS, R, N, g/2] of `pack_codebook`; pair_scale
    float32 [num_kv_heads, GROUPS, g]; offset float32 [num_kv_heads, D], if HAS_OFFSET; cos, sin float32 [batch or 1, 1,
    length, HALF], strides c_*, channels beyond 2 * HALF are not rotated; out [batch, num_kv_heads, length, D] float,
    written, clamped to the range of float16 if it is that. CODE_BITS per code; WORDS: 32-bit words that hold R codes;
    BLOCK_K and BLOCK_W are GROUPS and g/2 padded.
    """
    i_b = (tl.program_id(1) % batch).to(tl.int64)
    i_h = (tl.program_id(1) // batch).to(tl.int64)
    PAIRS: tl.constexpr = D // 2
    PART: tl.constexpr = PAIRS // GROUPS // 2
    o_k, o_w = tl.minimum(tl.arange(0, BLOCK_K), GROUPS - 1), tl.minimum(tl.arange(0, BLOCK_W), PART - 1)
    t = tl.arange(0, BLOCK_T)
    start = tl.program_id(0).to(tl.int64) * BLOCK_T
    count = tl.minimum(length - tl.program_id(0) * BLOCK_T, BLOCK_T)
    m_t = t < count

    bit = (i_h.to(tl.int32) * GROUPS + o_k) * (R * CODE_BITS)
    shift = (bit % 32).to(tl.uint32)[:, None]
    first = (bit // 32)[:, None]
    raws = code_words(packed + i_b * p_batch + start * p_time, t[None, :], p_time, first, count, PITCH, ALIGNED, WORDS)
    p_table = table + (i_h * GROUPS + o_k)[:, None, None] * (R * N * PART)
    real, imag = codeword_sums(raws, shift, p_table, o_w, PART, R, N, CODE_BITS, WORDS)
    real = tl.reshape(tl.permute(real, (1, 2, 0)), [BLOCK_T, BLOCK_W * BLOCK_K])
    imag = tl.reshape(tl.permute(imag, (1, 2, 0)), [BLOCK_T, BLOCK_W * BLOCK_K])

    b_norm = tl.load(norm + i_b * n_batch + i_h * n_head + (start + t) * n_time, mask=m_t, other=0.0).to(tl.float32)
    b_norm = (b_norm * norm_factor)[:, None]
    p_angle = i_b * c_batch + (start + t)[:, None] * c_time
    p_out = out + ((i_b * num_kv_heads + i_h) * length + start + t)[:, None] * D
    # word w of group k holds the group's pairs w and w + PART
    i_w, i_k = tl.arange(0, BLOCK_W * BLOCK_K) // BLOCK_K, tl.arange(0, BLOCK_W * BLOCK_K) % BLOCK_K
    m_w = (i_w < PART) & (i_k < GROUPS)
    halves = halves_of_sums(real, imag, R)
    for half in tl.static_range(2):
        b_re, b_im = halves[half]
        place = i_w + half * PART
        pair = place * GROUPS + i_k
        b_scale = tl.load(pair_scale + i_h * PAIRS + i_k * (2 * PART) + place, mask=m_w, other=0.0)[None, :]
        b_x, b_y = b_re * b_scale * b_norm, b_im * b_scale * b_norm
        # pair j of the rotated ones is channels j and j + HALF, and likewise among the rest
        first = tl.where(pair < HALF, pair, pair + HALF)
        second = first + tl.where(pair < HALF, HALF, PAIRS - HALF)
        if HAS_OFFSET:
            b_x += tl.load(offset + i_h * D + first, mask=m_w, other=0.0)[None, :]
            b_y += tl.load(offset + i_h * D + second, mask=m_w, other=0.0)[None, :]
        m_angle = m_t[:, None] & (m_w & (pair < HALF))[None, :]
        b_cos = tl.load(cos + p_angle + pair[None, :], mask=m_angle, other=1.0)
        b_sin = tl.load(sin + p_angle + pair[None, :], mask=m_angle, other=0.0)
        m_out = m_t[:, None] & m_w[None, :]
        b_first, b_second = b_x * b_cos - b_y * b_sin, b_y * b_cos + b_x * b_sin
        tl.store(p_out + first[None, :], as_decoded(b_first, out), mask=m_out)
        tl.store(p_out + second[None, :], as_decoded(b_second, out), mask=m_out)


def decode_keys(
    packed: Tensor, norm: Tensor, table: Tensor, pair_scale: Tensor, code_bits: int, norm_factor: float,
    rotation: Rotation, offset: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`KeyCodec.decode_rotated` of the fields of `CommVQKeyCodes`, [batch, num_kv_heads, time, head_dim].

    table is that of `pack_codebook` with g even and R at most `MAX_STAGES`; pair_scale float32 [num_kv_heads, groups,
    g]; a stage's code has `code_bits` bits; stored norms are multiplied by `norm_factor`; offset is None, or float32
    [1, num_kv_heads, 1, head_dim], added before RoPE.
    """
    num_kv_heads, groups, stages, size, part = table.shape
    batch, _, length, pitch = packed.shape
    head_dim = 4 * groups * part
    out = packed.new_empty(batch, num_kv_heads, length, head_dim, dtype=dtype)
    if not out.numel():
        return out
    aligned = pitch % 4 == 0
    packed = packed.view(torch.int32) if aligned else packed
    cos, sin = row_major(rotation.cos), row_major(rotation.sin)
    _decode_keys_kernel[(cdiv(length, _KEY_TILE["BLOCK_T"]), num_kv_heads * batch)](
        packed, norm, table, pair_scale, out if offset is None else offset.contiguous(),
        cos, sin, out, packed.stride(0), packed.stride(2),
        norm.stride(0), norm.stride(1) if norm.shape[1] > 1 else 0, norm.stride(2),
        cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(2),
        batch, num_kv_heads, length, norm_factor,
        R=stages, N=size, CODE_BITS=code_bits, GROUPS=groups,
        D=head_dim, HALF=cos.shape[-1], PITCH=pitch, ALIGNED=aligned,
        WORDS=cdiv(stages * code_bits, 32), HAS_OFFSET=offset is not None,
        BLOCK_K=power_of_two(groups), BLOCK_W=power_of_two(part), **_KEY_TILE,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["length"])
def _decode_values_kernel(
    packed, scale, codebook, offset, out, p_batch, p_time, s_batch, s_time, length,
    COUNT: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """out = scale * (bits C + offset), for BLOCK_T tokens and BLOCK_C channels of all kv heads.

    Grid (ceil(WIDTH / BLOCK_C), ceil(length / BLOCK_T), batch): programs that run at the same time share bits. packed
    uint8 [batch, 1, length, BYTES], strides p_*; scale float16 [batch, 1, length, 1], strides s_*; codebook, offset
    float16 [COUNT, WIDTH] and [WIDTH]; out [batch, WIDTH / D, length, D] float, written, clamped to the range of
    float16 if it is that. BLOCK_Y bytes of bits at a time.
    """
    i_b = tl.program_id(2).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_n, m_c = n < length, c < WIDTH
    p_bits = packed + i_b * p_batch + n * p_time
    b_x = bit_rows(p_bits, m_n, codebook, c, m_c, WIDTH, COUNT, BYTES, BLOCK_Y, BLOCK_T, BLOCK_C)
    b_x += tl.load(offset + c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_x = b_x * tl.load(scale + i_b * s_batch + n * s_time, mask=m_n, other=0.0).to(tl.float32)[:, None]
    head = i_b * (WIDTH // D) + c // D
    p_out = out + (head[None, :] * length + n[:, None]) * D + (c % D)[None, :]
    tl.store(p_out, as_decoded(b_x, out), mask=m_n[:, None] & m_c[None, :])


def decode_values(
    packed: Tensor, scale: Tensor, codebook: Tensor, offset: Tensor, head_dim: int, dtype: torch.dtype
) -> Tensor:
    """As `CommVQValueCodec.decode`; bits and codebook are exact in float16, products are summed in float32.

    packed and scale are fields of `CommVQValueCodes`; codebook float16 [bits, num_kv_heads * head_dim] and offset
    float16 [num_kv_heads * head_dim]; the result is [batch, num_kv_heads, time, head_dim].
    """
    count, width = codebook.shape
    batch, _, length, size = packed.shape
    out = torch.empty(batch, width // head_dim, length, head_dim, dtype=dtype, device=packed.device)
    if not out.numel():
        return out
    grid = (cdiv(width, _VALUE_TILE["BLOCK_C"]), cdiv(length, _VALUE_TILE["BLOCK_T"]), batch)
    _decode_values_kernel[grid](
        packed, scale, codebook, offset, out,
        packed.stride(0), packed.stride(2), scale.stride(0), scale.stride(2), length,
        COUNT=count, BYTES=size, WIDTH=width, D=head_dim, **_VALUE_TILE,
    )  # fmt: skip
    return out
