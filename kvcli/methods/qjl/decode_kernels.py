"""Decode kernel of QJL's keys, for long queries: the signs times the sketches, on tensor cores."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import Tiles, cdiv, power_of_two, shared_memory_limit
from kvcli.kernels.splits import batch_and_head
from kvcli.kernels.words import as_decoded, bit_rows

_TILES = Tiles(
    hopper={"BLOCK_T": 64, "BLOCK_Y": 16, "num_warps": 4, "num_stages": 2},
    smaller={"BLOCK_T": 64, "BLOCK_Y": 16, "num_warps": 8, "num_stages": 2},
)
"""The fastest of five on one H200 (torch 2.11, triton 3.6): 32K tokens, 8 heads of 128 channels."""
_TILE_FP32 = {**_TILES.hopper, "BLOCK_T": 16}


@triton.jit
def _estimate(
    signs, norm, sketch, total, i_b, i_h, n, m_n, o_d, m_d, p_batch, p_head, p_time, n_batch, n_head, n_time, factor,
    M: tl.constexpr, BYTES: tl.constexpr, D: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """factor * |k| * S^T sign(S k) of tokens n: float32 [BLOCK_T, BLOCK_D]; `total` is the sum of the sketch's rows."""
    p_signs = signs + i_b * p_batch + i_h * p_head + n * p_time
    b_x = bit_rows(p_signs, m_n, sketch, o_d, m_d, D, M, BYTES, BLOCK_Y, BLOCK_T, BLOCK_D)
    b_x = 2.0 * b_x - tl.load(total + o_d, mask=m_d, other=0.0)[None, :]
    b_n = tl.load(norm + i_b * n_batch + i_h * n_head + n * n_time, mask=m_n, other=0.0).to(tl.float32)
    return b_x * (b_n * factor)[:, None]


@triton.jit(do_not_specialize=["length"])
def _decode_kernel(
    signs, norm, sketch, total, outlier_signs, outlier_norm, outlier_sketch, outlier_total, channels, out,
    p_batch, p_head, p_time, n_batch, n_head, n_time, po_batch, po_head, po_time, no_batch, no_head, no_time,
    num_kv_heads, length, factor, outlier_factor,
    M: tl.constexpr, M_OUT: tl.constexpr, BYTES: tl.constexpr, BYTES_OUT: tl.constexpr, D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """The k_hat with <q, k_hat> = score(q, k) (QJL Definition 2): inliers from one sketch, outliers from another.

    Grid (ceil(length / BLOCK_T), batch * num_kv_heads). signs, outlier_signs uint8 [batch, num_kv_heads, length, BYTES]
    and [.., BYTES_OUT], strides p_* and po_*; norm, outlier_norm float16 [batch, num_kv_heads, length, 1], strides n_*
    and no_*; sketch, outlier_sketch [M, D] and [M_OUT, D], float16, or float32 for float32 products; total,
    outlier_total float32 [D], sums of their rows; channels float32 [batch, num_kv_heads, D], 1 for outlier channels, 0
    for others, read if M_OUT; out [batch, num_kv_heads, length, D] float, written, clamped to the range of float16 if
    it is that. factor, outlier_factor: `norm_factor` / m; BLOCK_D is D padded; BLOCK_Y bytes of signs at a time.
    """
    i_bh, i_b, i_h = batch_and_head(1, num_kv_heads)
    n = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = tl.arange(0, BLOCK_D)
    m_n, m_d = n < length, o_d < D
    b_x = _estimate(
        signs, norm, sketch, total, i_b, i_h, n, m_n, o_d, m_d, p_batch, p_head, p_time, n_batch, n_head, n_time,
        factor, M, BYTES, D, BLOCK_Y, BLOCK_T, BLOCK_D,
    )  # fmt: skip
    if M_OUT > 0:
        b_outlier = _estimate(
            outlier_signs, outlier_norm, outlier_sketch, outlier_total, i_b, i_h, n, m_n, o_d, m_d,
            po_batch, po_head, po_time, no_batch, no_head, no_time,
            outlier_factor, M_OUT, BYTES_OUT, D, BLOCK_Y, BLOCK_T, BLOCK_D,
        )  # fmt: skip
        b_channel = tl.load(channels + i_bh * D + o_d, mask=m_d, other=0.0)
        b_x = tl.where(b_channel[None, :] > 0, b_outlier, b_x)
    p_out = out + (i_bh * length + n)[:, None] * D + o_d[None, :]
    tl.store(p_out, as_decoded(b_x, out), mask=m_n[:, None] & m_d[None, :])


def decode_keys(
    fields: Iterable[Tensor], sketches: tuple[Tensor, Tensor], channels: Tensor, norm_factor: float, dtype: torch.dtype
) -> Tensor:
    """As `QJLKey.decode`, with float16 products unless the result is float32.

    `fields` are those of `QJLCodes`; `sketches` of inlier and outlier channels, [m, head_dim] each; channels float32
    [batch, num_kv_heads, head_dim], 1 for outlier channels of a sequence, 0 for others.
    """
    signs, norm, outlier_signs, outlier_norm = fields
    batch, kv_heads, length, width = signs.shape
    head_dim = sketches[0].shape[1]
    out = torch.empty(batch, kv_heads, length, head_dim, dtype=dtype, device=signs.device)
    if not out.numel():
        return out
    block_d = max(16, power_of_two(head_dim))
    sketch, outlier_sketch = (x.to(torch.float32 if dtype == torch.float32 else torch.float16) for x in sketches)
    tile = dict(_TILE_FP32) if dtype == torch.float32 else _TILES.on(out.device)
    if 8 * tile["BLOCK_Y"] * block_d * sketch.element_size() > shared_memory_limit(out.device):
        tile["num_stages"] = 1  # else the eight products of a tile of signs load their rows of the sketch ahead
    outliers = len(outlier_sketch)
    outlier_norm = outlier_norm if outliers else norm
    _decode_kernel[(cdiv(length, tile["BLOCK_T"]), batch * kv_heads)](
        signs, norm, sketch, sketch.float().sum(0),
        outlier_signs, outlier_norm, outlier_sketch, outlier_sketch.float().sum(0),
        channels.contiguous(), out,
        *signs.stride()[:3], *norm.stride()[:3], *outlier_signs.stride()[:3],
        *outlier_norm.stride()[:3], kv_heads, length,
        norm_factor / len(sketch), norm_factor / max(1, outliers),
        M=len(sketch), M_OUT=outliers, BYTES=width, BYTES_OUT=outlier_signs.shape[-1], D=head_dim,
        BLOCK_D=block_d, **tile,
    )  # fmt: skip
    return out
