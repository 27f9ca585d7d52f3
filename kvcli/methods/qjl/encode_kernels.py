"""Encode kernel of QJL's keys: norms, projections and packed signs of inlier and outlier channels in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import Tiles, cdiv, norm_unit, power_of_two, row_major, shared_memory_limit
from kvcli.kernels.words import FP16_MAX
from kvcli.methods.packing import packed_size

# tuned on one H200, torch 2.11, triton 3.6
_FEW_TOKENS = {"BLOCK_T": 16, "BLOCK_R": 64, "num_warps": 4, "num_stages": 2}
_TILES = Tiles(
    hopper={"BLOCK_T": 64, "BLOCK_R": 32, "num_warps": 4, "num_stages": 1},
    smaller={"BLOCK_T": 64, "BLOCK_R": 16, "num_warps": 4, "num_stages": 1},
)


@triton.jit
def _store_signs(
    x, sketch, signs, i_t, m_t, o_d, ROWS: tl.constexpr, D: tl.constexpr, BYTES: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Packed signs of S x for x [tokens, channels], S = sketch float32 [ROWS, D], at rows i_t of uint8 [.., BYTES]."""
    o_8, o_y = tl.arange(0, 8)[None, None, :], tl.arange(0, BLOCK_R // 8)
    for start in range(0, ROWS, BLOCK_R):
        o_r = start + tl.arange(0, BLOCK_R)
        p_s = sketch + o_r[None, :] * D + o_d[:, None]
        b_s = tl.load(p_s, mask=(o_r < ROWS)[None, :] & (o_d < D)[:, None], other=0.0)
        # tf32x3 has the precision of float32
        positive = tl.dot(x, b_s, input_precision="tf32x3") > 0
        bits = tl.reshape(positive.to(tl.int32), (x.shape[0], BLOCK_R // 8, 8))
        p_b = signs + i_t[:, None] * BYTES + (start // 8 + o_y)[None, :]
        m_b = m_t[:, None] & (start // 8 + o_y < BYTES)[None, :]
        tl.store(p_b, tl.sum(bits << o_8, axis=2).to(tl.uint8), mask=m_b)


@triton.jit
def _store_norm(x, norms, per_unit, i_t, m_t):
    """Norms of x [tokens, channels] times `per_unit` as float16, at entries i_t of norms."""
    norm = tl.minimum(tl.sqrt_rn(tl.sum(x * x, axis=1)) * per_unit, FP16_MAX)
    tl.store(norms + i_t, norm.to(tl.float16), mask=m_t)


@triton.jit(do_not_specialize=["tokens"])
def _encode_kernel(
    x, outliers, sketch, outlier_sketch, signs, norms, outlier_signs, outlier_norms,
    stride_b, stride_h, stride_t, heads, tokens, per_unit,
    ROWS: tl.constexpr, OUTLIER_ROWS: tl.constexpr, D: tl.constexpr,
    BYTES: tl.constexpr, OUTLIER_BYTES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """sign(S x) and |x| of the inlier channels, then of the outlier channels, of BLOCK_T tokens of one head.

    Grid (ceil(tokens / BLOCK_T), batch * heads). x [batch, heads, tokens, D] float, strides stride_*; outliers float32
    [batch, heads, D], 1 for outlier channels, 0 for others; sketch, outlier_sketch float32 [ROWS, D] and [OUTLIER_ROWS,
    D]; written: signs uint8 [batch, heads, tokens, BYTES], norms float16 [batch, heads, tokens], times `per_unit`, and
    unless OUTLIER_ROWS is 0 the same of the outlier channels, OUTLIER_BYTES. BLOCK_D is D padded; BLOCK_R rows of a
    sketch at a time.
    """
    i_tile, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_t, o_d = i_tile * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    m_t, m_d = o_t < tokens, o_d < D
    base = x + (i_row // heads) * stride_b + (i_row % heads) * stride_h
    p_x = base + o_t[:, None] * stride_t + o_d[None, :]
    b_x = tl.load(p_x, mask=m_t[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    outlier = tl.load(outliers + i_row * D + o_d, mask=m_d, other=0.0)[None, :]
    i_t = i_row * tokens + o_t
    inliers = b_x * (1 - outlier)
    _store_norm(inliers, norms, per_unit, i_t, m_t)
    _store_signs(inliers, sketch, signs, i_t, m_t, o_d, ROWS, D, BYTES, BLOCK_R)
    if OUTLIER_ROWS:
        outlier_x = b_x * outlier
        _store_norm(outlier_x, outlier_norms, per_unit, i_t, m_t)
        _store_signs(outlier_x, outlier_sketch, outlier_signs, i_t, m_t, o_d, OUTLIER_ROWS, D, OUTLIER_BYTES, BLOCK_R)


def encode_tile(tokens: int, width: int, device: torch.device) -> dict[str, int]:
    """The tile for padded channels: half the tokens where the two parts of their float32 channels do not fit."""
    tile = dict(_FEW_TOKENS) if tokens <= 64 else _TILES.on(device)
    if 8 * (tile["BLOCK_T"] + tile["BLOCK_R"]) * width > shared_memory_limit(device):
        tile["BLOCK_T"] = max(16, tile["BLOCK_T"] // 2)
    return tile


def encode_keys(
    x: Tensor, outliers: Tensor, sketch: Tensor, outlier_sketch: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `QJLCodes` of x [batch, heads, time, head_dim].

    outliers float32 [batch, heads, head_dim], 1 for outlier channels and 0 for others; sketch float32 [m, head_dim];
    outlier_sketch float32 [m_out, head_dim], m_out may be 0.
    """
    x = row_major(x)
    batch, heads, time, width = x.shape
    signs, outlier_signs = (
        x.new_empty(*x.shape[:3], packed_size(len(rows), 1), dtype=torch.uint8) for rows in (sketch, outlier_sketch)
    )
    norm, outlier_norm = (
        x.new_empty(*x.shape[:3], min(len(rows), 1), dtype=torch.float16) for rows in (sketch, outlier_sketch)
    )
    block_d = max(16, power_of_two(width))
    tile = encode_tile(time, block_d, x.device)
    if x.numel():
        _encode_kernel[(cdiv(time, tile["BLOCK_T"]), batch * heads)](
            x, outliers.contiguous(), sketch, outlier_sketch, signs, norm, outlier_signs, outlier_norm,
            *x.stride()[:3], heads, time, 1 / norm_unit(width),
            ROWS=len(sketch), OUTLIER_ROWS=len(outlier_sketch), D=width,
            BYTES=signs.shape[-1], OUTLIER_BYTES=outlier_signs.shape[-1],
            BLOCK_D=block_d, **tile,
        )  # fmt: skip
    return signs, norm, outlier_signs, outlier_norm
