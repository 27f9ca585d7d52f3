"""Triton kernel of the part of the scores that a constant pre-RoPE key contributes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, has_hopper_shared_memory, power_of_two, row_major
from kvcli.rope import TokenRotations

_TILE = 64
_PROGRAMS = 528
"""Programs in all, at most: four per multiprocessor of an H100."""


@triton.jit(do_not_specialize=["length"])
def _offset_scores_kernel(
    query, offset, tile_cos, tile_sin, offset_cos, offset_sin, lengths, scores,
    q_batch, q_head, q_time, o_batch, t_batch, s_batch, s_head, s_row, num_kv_heads, query_len, length, scaling,
    HEADS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """scores[m, t] = scaling * <q_m, R_t b>: Re(z e^{i (t - tile) theta}) summed, with z = conj(q) b e^{i tile theta}.

    Grid (programs, batch, num_kv_heads * ceil(rows / BLOCK_M)), rows = HEADS * query_len per kv head. One program:
    BLOCK_M query rows of one kv head and each `programs`-th tile; the small table stays in registers.

    Args:
        query: [batch, num_kv_heads * HEADS, query_len, D] any float, rotated, strides q_*.
        offset: float32 [batch or 1, num_kv_heads, D], b, stride o_batch.
        tile_cos, tile_sin: float32 [batch or 1, tiles, ROTARY / 2], rotation of each tile's first position.
        offset_cos, offset_sin: float32 [TILE, ROTARY / 2], rotation by 0 to TILE - 1 positions.
        lengths: int32 [batch], tokens of each sequence, if HAS_LENGTHS.
        scores: float32 [batch, num_kv_heads, rows, >= length], strides s_*; written up to a sequence's end.

    Constexprs: BLOCK_P, ROTARY / 2 padded; BLOCK_REST, D - ROTARY padded, 0 if there is none.
    """
    i_b = tl.program_id(1).to(tl.int64)
    i_h = (tl.program_id(2) % num_kv_heads).to(tl.int64)
    o_m = tl.program_id(2) // num_kv_heads * BLOCK_M + tl.arange(0, BLOCK_M)
    o_p = tl.arange(0, BLOCK_P)
    t = tl.arange(0, TILE)
    PAIRS: tl.constexpr = ROTARY // 2
    m_m, m_p = o_m < HEADS * query_len, o_p < PAIRS
    m_q = m_p[:, None] & m_m[None, :]
    head = i_h * HEADS + o_m // query_len
    p_query = (query + i_b * q_batch + head * q_head + (o_m % query_len).to(tl.int64) * q_time)[None, :]
    # [P, M]
    b_x = tl.load(p_query + o_p[:, None], mask=m_q, other=0.0).to(tl.float32)
    b_y = tl.load(p_query + PAIRS + o_p[:, None], mask=m_q, other=0.0).to(tl.float32)
    offset += i_b * o_batch
    b_re = tl.load(offset + i_h * D + o_p, mask=m_p, other=0.0)
    b_im = tl.load(offset + i_h * D + PAIRS + o_p, mask=m_p, other=0.0)
    p_token = t[:, None] * PAIRS + o_p[None, :]
    b_oc = tl.load(offset_cos + p_token, mask=m_p[None, :], other=0.0)
    b_os = -tl.load(offset_sin + p_token, mask=m_p[None, :], other=0.0)
    if BLOCK_REST > 0:
        # channels that RoPE leaves alone: the same for all tokens
        o_r = ROTARY + tl.arange(0, BLOCK_REST)
        b_q = tl.load(p_query + o_r[:, None], mask=(o_r < D)[:, None] & m_m[None, :], other=0.0).to(tl.float32)
        b_rest = tl.sum(b_q * tl.load(offset + i_h * D + o_r, mask=o_r < D, other=0.0)[:, None], axis=0)
    p_scores = scores + i_b * s_batch + i_h * s_head + o_m.to(tl.int64)[None, :] * s_row
    if HAS_LENGTHS:
        length = tl.load(lengths + i_b)
    for i_t in range(tl.program_id(0), tl.cdiv(length, TILE), tl.num_programs(0)):
        p_tile = i_b * t_batch + i_t * PAIRS + o_p
        b_tc = tl.load(tile_cos + p_tile, mask=m_p, other=0.0)
        b_ts = tl.load(tile_sin + p_tile, mask=m_p, other=0.0)
        k_re = (b_re * b_tc - b_im * b_ts)[:, None]
        k_im = (b_re * b_ts + b_im * b_tc)[:, None]
        b_s = tl.dot(b_oc, b_x * k_re + b_y * k_im, input_precision="tf32x3")
        b_s = tl.dot(b_os, b_x * k_im - b_y * k_re, b_s, input_precision="tf32x3")
        if BLOCK_REST > 0:
            b_s += b_rest[None, :]
        token = i_t * TILE + t
        tl.store(p_scores + token[:, None], b_s * scaling, mask=(token < length)[:, None] & m_m[None, :])


def offset_scores(
    query: Tensor, offset: Tensor, rotations: TokenRotations, scores: Tensor, scaling: float,
    lengths: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes scaling * <q, R(m) b> for every query row and token of `rotations`.

    Args:
        query: rotated, [batch, num_heads, query_len, head_dim].
        offset: b, float32 [1 or batch, num_kv_heads, 1, head_dim].
        scores: float32 [batch, num_kv_heads, rows, >= length], rows = query heads per kv head * query_len.
        lengths: tokens of each sequence, int32 [batch], after which scores have any value; None: all.

    Raises:
        CacheError: positions that are not consecutive.
    """
    batch, heads, query_len, head_dim = query.shape
    kv_heads, rows, length = offset.shape[1], scores.shape[2], rotations.positions.shape[1]
    tile = _TILE if head_dim <= 128 or has_hopper_shared_memory(query.device) else _TILE // 2
    tiles, offsets = rotations.tiles(tile), rotations.offsets(tile)
    rotary_dim, query = 2 * tiles.cos.shape[-1], row_major(query)
    rest = head_dim - rotary_dim
    o_batch = kv_heads * head_dim if len(offset) > 1 else 0
    block_m = 8 if rows <= 8 else 16
    blocks = kv_heads * cdiv(rows, block_m)
    programs = min(cdiv(length, tile), max(1, _PROGRAMS // (batch * blocks)))
    _offset_scores_kernel[(programs, batch, blocks)](
        query, offset.contiguous(), tiles.cos, tiles.sin, offsets.cos, offsets.sin,
        scores if lengths is None else lengths, scores,
        *query.stride()[:3], o_batch, tiles.cos.stride(0) if tiles.cos.shape[0] > 1 else 0,
        *scores.stride()[:3],
        kv_heads, query_len, length, scaling,
        HEADS=heads // kv_heads, D=head_dim, ROTARY=rotary_dim, TILE=tile, BLOCK_M=block_m,
        BLOCK_P=max(16, power_of_two(rotary_dim // 2)), BLOCK_REST=power_of_two(rest) if rest else 0,
        HAS_LENGTHS=lengths is not None, num_warps=4,
    )  # fmt: skip
