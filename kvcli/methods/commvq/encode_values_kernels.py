"""Triton kernels that encode CommVQ's values (arXiv 2506.18879): unit rows, encoder, coordinate descent, packing.

The descent works in code space. With the Gram matrix G = C C^T and the correlations t = (row - offset) C^T, the product
of codebook row i with the residual, the bits of i's own group taken as 0, is t_i - sum of G_ij over the bits j set in
other groups. So one product of bits and G serves a block of 64 bits; within the block, changes are added as they
happen. The 16 bits of four groups are chosen together: their scores are a product of these dot products with all
settings of a group, and what a change in one group adds to the scores of the next ones is a product, too, with a table
(`DescentTables.effects`). All of it stays in the layout of tensor cores, where each warp has its own tokens and never
waits for another. Groups choose in the order of `values.sweep`.

Products take float16 inputs and sum in float32. float16 rows and Gram matrix flip near-ties, so codes may differ from
the reference; the squared error matches it to 0.1 % (1 % if a few outlier tokens dominate).

Tuned on one H200, torch 2.11, triton 3.6. Every width and number of bits is supported; the encoder of the paper's
trainer is not (`CommVQValueCodec.encode` then uses the reference).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import Tiles, cdiv, power_of_two, row_major
from kvcli.methods.commvq.tables import BLOCK_BITS, DescentTables
from kvcli.methods.packing import packed_size

_ENCODE_TOKENS = 16384
_METRIC_TOKENS = 64
_METRIC_TILES = Tiles(hopper={"BLOCK": 64}, smaller={"BLOCK": 32})
_PRODUCT_TILES = Tiles(hopper={"BLOCK_K": 64, "num_warps": 4}, smaller={"BLOCK_K": 64, "num_warps": 8})
_UNIT_ELEMENTS = 4096
# blocks of 128 bits are 3 % faster, and Triton takes 12 s instead of 3 to compile them
_SWEEP_TILE = {"BLOCK_T": 64, "BLOCK_O": BLOCK_BITS // 2, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}


@triton.jit(do_not_specialize=["first", "tokens", "time"])
def _metric_kernel(
    x, metric_root, product, stride_b, stride_h, stride_t, first, tokens, time,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """product = x metric_root of one head, for tokens first to first + tokens - 1, counted over all rows of x.

    Grid (ceil(tokens / BLOCK_T), heads). x [batch, heads, time, WIDTH] any float, strides of all but the last axis;
    metric_root float32 [heads, WIDTH, WIDTH]; product float32 [tokens, heads * WIDTH]. BLOCK channels at a time.
    """
    i_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    i_h = tl.program_id(1).to(tl.int64)
    o_t = first + i_t
    m_t = i_t < tokens
    p_x = x + (o_t // time) * stride_b + i_h * stride_h + (o_t % time) * stride_t
    p_product = product + i_t * (tl.num_programs(1) * WIDTH) + i_h * WIDTH
    metric_root += i_h * WIDTH * WIDTH
    for column in range(0, WIDTH, BLOCK):
        o_n = column + tl.arange(0, BLOCK)
        m_n = (o_n < WIDTH)[None, :]
        total = tl.zeros((BLOCK_T, BLOCK), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            o_k = start + tl.arange(0, BLOCK)
            m_x = m_t[:, None] & (o_k < WIDTH)[None, :]
            b_x = tl.load(p_x[:, None] + o_k[None, :], mask=m_x, other=0.0).to(tl.float32)
            p_r = metric_root + o_k[:, None] * WIDTH + o_n[None, :]
            b_r = tl.load(p_r, mask=(o_k < WIDTH)[:, None] & m_n, other=0.0)
            total = tl.dot(b_x, b_r, total, input_precision="tf32x3")
        tl.store(p_product[:, None] + o_n[None, :], total, mask=m_t[:, None] & m_n)


@triton.jit(do_not_specialize=["tokens"])
def _unit_kernel(product, rows, rms, tokens, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """rows = product / rms with rms over the D channels of a token; grid (ceil(tokens / BLOCK_T),).

    product float32 [tokens, D]; rows float16 [tokens, D]; rms float32 [tokens]. All channels at once.
    """
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = tl.arange(0, BLOCK_D)
    m_t = o_t < tokens
    at, m = o_t[:, None] * D + o_d[None, :], m_t[:, None] & (o_d < D)[None, :]
    b_x = tl.load(product + at, mask=m, other=0.0)
    b_rms = tl.sqrt_rn(tl.sum(b_x * b_x, axis=1) / D)
    factor = tl.where(b_rms > 1e-12, 1 / tl.maximum(b_rms, 1e-30), 0.0)
    tl.store(rows + at, (b_x * factor[:, None]).to(tl.float16), mask=m)
    tl.store(rms + o_t, b_rms, mask=m_t)


@triton.jit(do_not_specialize=["tokens"])
def _project_kernel(
    rows, matrix, shift, out, tokens, count,
    D: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BITS: out = (rows matrix^T + shift > 0); else out = rows matrix^T - shift.

    Grid (ceil(tokens / BLOCK_T), N / BLOCK_N). rows float16 [tokens, D]; matrix float16 [count, D]; shift float32
    [count]; out [tokens, N], float16 zeros and ones (BITS) or float32, 0 in columns from `count` on. BLOCK_K channels
    at a time.
    """
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for start in range(0, D, BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        m_r, m_m = (o_t < tokens)[:, None] & (o_k < D)[None, :], (o_n < count)[None, :] & (o_k < D)[:, None]
        b_r = tl.load(rows + o_t[:, None] * D + o_k[None, :], mask=m_r, other=0.0)
        b_m = tl.load(matrix + o_n.to(tl.int64)[None, :] * D + o_k[:, None], mask=m_m, other=0.0)
        total = tl.dot(b_r, b_m, total)
    b_s = tl.load(shift + o_n, mask=o_n < count, other=0.0)[None, :]
    p_o = out + o_t[:, None] * N + o_n[None, :]
    if BITS:
        tl.store(p_o, tl.where(total + b_s > 0, 1.0, 0.0).to(tl.float16), mask=(o_t < tokens)[:, None])
    else:
        tl.store(p_o, total - b_s, mask=(o_t < tokens)[:, None])


@triton.jit
def _columns_16(x, INDEX: tl.constexpr):
    """Columns 16 INDEX to 16 INDEX + 15 of x [A, B], without data exchange between threads."""
    WIDTH: tl.constexpr = x.shape[1]
    if WIDTH > 16:
        left, right = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, WIDTH // 2)), (0, 2, 1)))
        if 32 * INDEX < WIDTH:
            x = _columns_16(left, INDEX)
        else:
            x = _columns_16(right, INDEX - WIDTH // 32)
    return x


@triton.jit
def _small_dot(x, y, total):
    """total + x y for x [16 * WARPS, K], y [K, M], as one batched product per warp.

    Forces mma.sync: wgmma would need a shared-memory fence that costs more than the product.
    """
    WARPS: tl.constexpr = x.shape[0] // 16
    many = tl.broadcast_to(tl.expand_dims(y, 0), (WARPS, y.shape[0], y.shape[1]))
    part = tl.reshape(total, (WARPS, 16, y.shape[1]))
    return tl.reshape(tl.dot(tl.reshape(x, (WARPS, 16, x.shape[1])), many, part), (x.shape[0], y.shape[1]))


@triton.jit
def _tables_of_16(gram, energies, effects, first, o_block, N: tl.constexpr):
    """Tables for bits first..first + 15: energies [1, 64], effects [16, 64], Gram rows [16, BLOCK_O] of a block."""
    o_16, o_64 = tl.arange(0, 16), tl.arange(0, 64)
    energy = tl.load(energies + 4 * first + o_64)[None, :]
    effect = tl.load(effects + 64 * (first + o_16)[:, None] + o_64[None, :])
    return energy, effect, tl.load(gram + (first + o_16)[:, None] * N + o_block[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _sweep_kernel(
    correlations, gram, unit, energies, effects, bits, tokens,
    SWEEPS: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """SWEEPS coordinate-descent sweeps over the bits of a tile of tokens, in place; grid (ceil(tokens / BLOCK_T),).

    Each group of four bits takes the setting s that minimises energy(s) - 2 <dots, s>, dots the products of its
    codebook rows with the residual, its own bits taken as 0.
    correlations float32 [tokens, N]; gram, unit, energies and effects as in `DescentTables`; bits float16 [tokens, N],
    zeros and ones. BLOCK_O bits per block, BLOCK_K bits at a time in products with gram.
    """
    o_t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    o_16, o_64, o_b, o_k = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_K)
    m_t = o_t < tokens
    to_units = 1 / tl.load(unit)
    # column 16 g + s: -2 times setting s of group g, which multiplies the dot products of 16 bits
    same_group = (o_16 // 4)[:, None] == (o_64 // 16)[None, :]
    chosen = ((o_64[None, :] >> (o_16 % 4)[:, None]) & 1) == 1
    settings = tl.where(same_group & chosen, -2.0, 0.0).to(tl.float16)
    for step in range(SWEEPS * (N // BLOCK_O)):
        outer = (step % (N // BLOCK_O)) * BLOCK_O
        o_block = outer + o_b
        # loads of this block and of the next 16 bits overlap with products
        old_bits = ()
        for i in tl.static_range(BLOCK_O // 16):
            old_bits = old_bits + (tl.load(bits + o_t * N + (outer + 16 * i + o_16)[None, :], mask=m_t, other=0.0),)
        total = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
        for start in range(0, N, BLOCK_K):
            b_s = tl.load(bits + o_t * N + (start + o_k)[None, :], mask=m_t, other=0.0)
            total = tl.dot(b_s, tl.load(gram + (start + o_k)[:, None] * N + o_block[None, :]), total)
        next_tables = _tables_of_16(gram, energies, effects, outer, o_block, N)
        dots = tl.load(correlations + o_t * N + o_block[None, :], mask=m_t, other=0.0) * to_units - total
        tl.debug_barrier()
        for i in tl.static_range(BLOCK_O // 16):
            energy, effect, gram_rows = next_tables
            if i < BLOCK_O // 16 - 1:
                next_tables = _tables_of_16(gram, energies, effects, outer + 16 * i + 16, o_block, N)
            dots_16 = tl.minimum(tl.maximum(_columns_16(dots, i), -60000.0), 60000.0)
            high = dots_16.to(tl.float16)
            low = (dots_16 - high.to(tl.float32)).to(tl.float16)
            scores = _small_dot(low, settings, tl.broadcast_to(energy, (BLOCK_T, 64)))
            scores = _small_dot(high, settings, scores)
            bits_cleared = tl.zeros((BLOCK_T, 16), tl.float16)
            for group in tl.static_range(4):
                # the index of a setting replaces the last four bits of its score
                tagged = _columns_16(scores, group).to(tl.int32, bitcast=True) & -16 | o_16[None, :]
                best = tl.min(tagged.to(tl.float32, bitcast=True), axis=1).to(tl.int32, bitcast=True)
                new = tl.where((best[:, None] & (1 << o_16 % 4)[None, :]) != 0, 1.0, 0.0).to(tl.float16)
                change = tl.where((o_16 // 4 == group)[None, :], old_bits[i] - new, 0.0)
                bits_cleared += change
                if group < 3:
                    scores = _small_dot(change, effect, scores)
            tl.store(bits + o_t * N + (outer + 16 * i + o_16)[None, :], old_bits[i] - bits_cleared, mask=m_t)
            if i < BLOCK_O // 16 - 1:
                dots = tl.dot(bits_cleared, gram_rows, dots)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["tokens"])
def _finish_kernel(
    rows, rms, codebook, offset, bits, packed, scales, tokens, count,
    D: tl.constexpr, N: tl.constexpr, BYTES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Packs the bits; scales = rms <row, decoded> / |decoded|^2, decoded = bits codebook + offset.

    Grid (ceil(tokens / BLOCK_T),). rows float16 [tokens, D]; rms float32 [tokens]; codebook float16 [count, D]; offset
    float32 [D]; bits float16 [tokens, N]; packed uint8 [tokens, BYTES]; scales float16 [tokens]. BLOCK_D channels and
    BLOCK_K bits at a time.
    """
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = (o_t < tokens)[:, None]
    product, energy = tl.zeros((BLOCK_T,), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, D, BLOCK_D):
        o_d = start + tl.arange(0, BLOCK_D)
        m_d = (o_d < D)[None, :]
        total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for k in range(0, N, BLOCK_K):
            o_k = k + tl.arange(0, BLOCK_K)
            b_s = tl.load(bits + o_t[:, None] * N + o_k[None, :], mask=m_t, other=0.0)
            p_c = codebook + o_k.to(tl.int64)[:, None] * D + o_d[None, :]
            total = tl.dot(b_s, tl.load(p_c, mask=(o_k < count)[:, None] & m_d, other=0.0), total)
        total += tl.load(offset + o_d, mask=o_d < D, other=0.0)[None, :]
        b_r = tl.load(rows + o_t[:, None] * D + o_d[None, :], mask=m_t & m_d, other=0.0).to(tl.float32)
        product += tl.sum(b_r * total, axis=1)
        energy += tl.sum(total * total, axis=1)
    scale = tl.load(rms + o_t, mask=o_t < tokens, other=0.0) * product / tl.maximum(energy, 1e-12)
    scale = tl.maximum(scale, -65504.0, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.minimum(scale, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scales + o_t, scale.to(tl.float16), mask=o_t < tokens)
    o_8 = tl.arange(0, 8)[None, None, :]
    for start in range(0, BYTES, 16):
        o_y = start + tl.arange(0, 16)
        p_s = bits + (o_t * N)[:, None, None] + (o_y * 8)[None, :, None] + o_8
        m_y = m_t & (o_y < BYTES)[None, :]
        m_s = m_y[:, :, None] & ((o_y * 8)[None, :, None] + o_8 < count)
        byte = tl.sum(tl.where(tl.load(p_s, mask=m_s, other=0.0) > 0, 1 << o_8, 0), axis=2)
        tl.store(packed + o_t[:, None] * BYTES + o_y[None, :], byte.to(tl.uint8), mask=m_y)


def encode_values(x: Tensor, encoder: Tensor, tables: DescentTables, sweeps: int) -> tuple[Tensor, Tensor]:
    """The fields of `CommVQValueCodes` of values x [batch, num_kv_heads, time, head_dim].

    The linear encoder has the weight `encoder`, float16 [N_c, D]; `sweeps` of coordinate descent follow.
    """
    batch, _, time, _ = x.shape
    width = packed_size(encoder.shape[0], 1)
    packed = torch.empty(batch, 1, time, width, dtype=torch.uint8, device=x.device)
    scale = torch.empty(batch, 1, time, 1, dtype=torch.float16, device=x.device)
    x = row_major(x)
    # equal parts: bits and correlations take 6 bytes per value bit, and a short last part underfills the GPU
    total, tile = batch * time, int(_SWEEP_TILE["BLOCK_T"])
    size = tile * max(1, cdiv(total, max(1, cdiv(total, _ENCODE_TOKENS)) * tile))
    for first in range(0, total, size):
        tokens = min(size, total - first)
        rows, rms = _unit_rows(x, tables, first, tokens)
        part = slice(first, first + tokens)
        _encode_part(encoder, tables, sweeps, rows, rms, packed.view(-1, width)[part], scale.view(-1)[part])
    return packed, scale


def _unit_rows(x: Tensor, tables: DescentTables, first: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Unit rows float16 [tokens, D] and their root mean squares float32 [tokens], from token `first` of all rows."""
    heads, time, width = x.shape[1:]
    product = torch.empty(tokens, heads * width, dtype=torch.float32, device=x.device)
    rows, rms = torch.empty_like(product, dtype=torch.float16), product.new_empty(tokens)
    block = min(_METRIC_TILES.on(x.device)["BLOCK"], max(16, power_of_two(width)))
    _metric_kernel[(cdiv(tokens, _METRIC_TOKENS), heads)](
        x, tables.metric_root, product, *x.stride()[:3], first, tokens, time,
        WIDTH=width, BLOCK_T=_METRIC_TOKENS, BLOCK=block, num_warps=4,
    )  # fmt: skip
    block_d = power_of_two(heads * width)
    block_t = max(1, _UNIT_ELEMENTS // block_d)
    _unit_kernel[(cdiv(tokens, block_t),)](
        product, rows, rms, tokens, D=heads * width, BLOCK_T=block_t, BLOCK_D=block_d, num_warps=4
    )
    return rows, rms


def _encode_part(
    encoder: Tensor, tables: DescentTables, sweeps: int, rows: Tensor, rms: Tensor, packed: Tensor, scales: Tensor
) -> None:
    """Encodes unit rows [tokens, D] into packed [tokens, bytes] and scales [tokens]."""
    (tokens, width), count, padded = rows.shape, encoder.shape[0], tables.gram.shape[0]
    bits = torch.empty(tokens, padded, dtype=torch.float16, device=rows.device)
    tile: dict[str, Any] = {"D": width, "N": padded, **_PRODUCT_TILES.on(rows.device)}
    block = 128 if tokens > 256 else 16
    grid = (cdiv(tokens, block), padded // 128)
    _project_kernel[grid](
        rows, encoder, tables.bias, bits, tokens, count, BITS=True, BLOCK_T=block, BLOCK_N=128, **tile
    )
    if sweeps:
        correlations = torch.empty(tokens, padded, dtype=torch.float32, device=rows.device)
        _project_kernel[grid](
            rows, tables.codebook, tables.shift, correlations, tokens, count,
            BITS=False, BLOCK_T=block, BLOCK_N=128, **tile,
        )  # fmt: skip
        _sweep_kernel[(cdiv(tokens, _SWEEP_TILE["BLOCK_T"]),)](
            correlations, tables.gram, tables.unit, tables.energies, tables.effects, bits, tokens,
            SWEEPS=sweeps, N=padded, **_SWEEP_TILE,
        )  # fmt: skip
    block = 64 if tokens > 256 else 16
    _finish_kernel[(cdiv(tokens, block),)](
        rows, rms, tables.codebook, tables.offset, bits, packed, scales, tokens, count,
        BYTES=packed.shape[1], BLOCK_T=block, BLOCK_D=128, **tile, num_stages=4,
    )  # fmt: skip
