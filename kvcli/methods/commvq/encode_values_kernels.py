"""Triton kernels of CommVQ's value codec: unit rows, encoder, coordinate descent on the bits, scale and packing.

The descent works in code space. With the Gram matrix G = C C^T and the correlations t = (row - offset) C^T, the product
of codebook row i with the residual that is left without the bits of i's own group is t_i - sum of G_ij over the bits j
that are set in other groups. So one product of bits and G serves a block of 128 bits; within the block, changes are
added as they happen. The 16 bits of four groups are chosen in one go: their scores are a product of what is left and
the settings, and what a change of one group does to the scores of the next ones is a product, too, with a table
(`effects`). All of it stays in the layout of tensor cores, where a warp has tokens of its own and waits for no other.
Groups choose in the order of `values.sweep`.

Products take float16 numbers and sum in float32. Rows and G in float16 turn near ties the other way, and what follows
from them; the error is the reference's within 1e-3 of itself, either way, within 1e-2 where few tokens make most of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, row_major
from kvcli.methods.commvq.values import SWEEP_BITS, CommVQValueCodec
from kvcli.packing import packed_size

_BLOCK_BITS = 128
_ENCODE_TOKENS = 16384
_SWEEP_TILE = {"BLOCK_T": 64, "BLOCK_O": _BLOCK_BITS, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
"""Of the descent."""


@triton.jit(do_not_specialize=["tokens", "time"])
def _rows_kernel(
    x, inverse, rows, sizes, stride_b, stride_h, stride_t, tokens, time,
    WIDTH: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Unit rows over all heads, in units of the channels' scale; grid (tiles of tokens,).

    x [batch, heads, time, WIDTH] any float with strides, tokens = batch * time; inverse float32 [D], 1 / channel scale;
    rows float16 [tokens, D]; sizes float32 [tokens], root mean squares before division.
    """
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_t < tokens)[:, None] & (o_d < D)[None, :]
    p_x = x + ((o_t // time) * stride_b + (o_t % time) * stride_t)[:, None]
    p_x += ((o_d // WIDTH).to(tl.int64) * stride_h + o_d % WIDTH)[None, :]
    b_x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    b_x *= tl.load(inverse + o_d, mask=o_d < D, other=0.0)[None, :]
    size = tl.sqrt_rn(tl.sum(b_x * b_x, axis=1) / D)
    b_x = tl.where(size[:, None] > 1e-12, b_x / tl.maximum(size, 1e-30)[:, None], 0.0)
    tl.store(rows + o_t[:, None] * D + o_d[None, :], b_x.to(tl.float16), mask=mask)
    tl.store(sizes + o_t, size, mask=o_t < tokens)


@triton.jit(do_not_specialize=["tokens"])
def _project_kernel(
    rows, matrix, inverse, shift, found, tokens, count,
    D: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows times a matrix; grid (tiles of tokens, N / BLOCK_N).

    rows float16 [tokens, D], matrix float16 [count, D], shift float32 [count]. BITS: found float16 [tokens, N] is 1
    where the product plus the shift is positive. Else found float32 [tokens, N] is the product with the matrix times
    inverse [D], minus the shift. Columns from count on are 0.
    """
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for start in range(0, D, BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        m_r, m_m = (o_t < tokens)[:, None] & (o_k < D)[None, :], (o_n < count)[None, :] & (o_k < D)[:, None]
        b_r = tl.load(rows + o_t[:, None] * D + o_k[None, :], mask=m_r, other=0.0)
        b_m = tl.load(matrix + o_n.to(tl.int64)[None, :] * D + o_k[:, None], mask=m_m, other=0.0)
        if not BITS:
            b_m = (b_m * tl.load(inverse + o_k, mask=o_k < D, other=0.0)[:, None]).to(tl.float16)
        total = tl.dot(b_r, b_m, total)
    b_s = tl.load(shift + o_n, mask=o_n < count, other=0.0)[None, :]
    p_f = found + o_t[:, None] * N + o_n[None, :]
    if BITS:
        tl.store(p_f, tl.where(total + b_s > 0, 1.0, 0.0).to(tl.float16), mask=(o_t < tokens)[:, None])
    else:
        tl.store(p_f, total - b_s, mask=(o_t < tokens)[:, None])


@triton.jit
def _sixteen(x, INDEX: tl.constexpr):
    """Columns 16 INDEX to 16 INDEX + 15 of x [A, B], without an exchange between threads."""
    WIDTH: tl.constexpr = x.shape[1]
    if WIDTH > 16:
        left, right = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, WIDTH // 2)), (0, 2, 1)))
        if 32 * INDEX < WIDTH:
            x = _sixteen(left, INDEX)
        else:
            x = _sixteen(right, INDEX - WIDTH // 32)
    return x


@triton.jit
def _small_dot(x, y, total):
    """total + x y, tile by tile of 16 rows with a warp's own instructions.

    A warp group's would have to wait until what is in shared memory is visible to them, which takes longer than these
    products do.
    """
    WARPS: tl.constexpr = x.shape[0] // 16
    many = tl.broadcast_to(tl.expand_dims(y, 0), (WARPS, y.shape[0], y.shape[1]))
    part = tl.reshape(total, (WARPS, 16, y.shape[1]))
    return tl.reshape(tl.dot(tl.reshape(x, (WARPS, 16, x.shape[1])), many, part), (x.shape[0], y.shape[1]))


@triton.jit
def _tables_of_sixteen(gram, energies, effects, first, o_block, N: tl.constexpr):
    """What the choice of 16 bits needs: energies [1, 64], effects [16, 64], and their products with a block's rows."""
    o_16, o_64 = tl.arange(0, 16), tl.arange(0, 64)
    energy = tl.load(energies + 4 * first + o_64)[None, :]
    effect = tl.load(effects + 64 * (first + o_16)[:, None] + o_64[None, :])
    return energy, effect, tl.load(gram + (first + o_16)[:, None] * N + o_block[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _sweep_kernel(
    correlations, gram, unit, energies, effects, bits, tokens,
    SWEEPS: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """All sweeps over the bits of a tile of tokens, in place; grid (tiles of tokens,).

    correlations float32 [tokens, N]; gram, unit, energies and effects as in `DescentTables`; bits float16 [tokens, N],
    zeros and ones.
    """
    o_t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    o_16, o_64, o_b, o_k = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_K)
    m_t = o_t < tokens
    to_units = 1 / tl.load(unit)
    # column 16 g + s: setting s of group g, as the factor of what is left for each of 16 bits
    own = (o_16 // 4)[:, None] == (o_64 // 16)[None, :]
    chosen = ((o_64[None, :] >> (o_16 % 4)[:, None]) & 1) == 1
    settings = tl.where(own & chosen, -2.0, 0.0).to(tl.float16)
    for step in range(SWEEPS * (N // BLOCK_O)):
        outer = (step % (N // BLOCK_O)) * BLOCK_O
        o_block = outer + o_b
        # all that is read here and for the next sixteen bits comes while something else is computed
        olds = ()
        for i in tl.static_range(BLOCK_O // 16):
            olds = olds + (tl.load(bits + o_t * N + (outer + 16 * i + o_16)[None, :], mask=m_t, other=0.0),)
        total = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
        for start in range(0, N, BLOCK_K):
            b_s = tl.load(bits + o_t * N + (start + o_k)[None, :], mask=m_t, other=0.0)
            total = tl.dot(b_s, tl.load(gram + (start + o_k)[:, None] * N + o_block[None, :]), total)
        following = _tables_of_sixteen(gram, energies, effects, outer, o_block, N)
        left = tl.load(correlations + o_t * N + o_block[None, :], mask=m_t, other=0.0) * to_units - total
        tl.debug_barrier()
        for i in tl.static_range(BLOCK_O // 16):
            energy, effect, products = following
            if i < BLOCK_O // 16 - 1:
                following = _tables_of_sixteen(gram, energies, effects, outer + 16 * i + 16, o_block, N)
            mine = tl.minimum(tl.maximum(_sixteen(left, i), -60000.0), 60000.0)
            high = mine.to(tl.float16)
            low = (mine - high.to(tl.float32)).to(tl.float16)
            scores = _small_dot(low, settings, tl.broadcast_to(energy, (BLOCK_T, 64)))
            scores = _small_dot(high, settings, scores)
            fallen = tl.zeros((BLOCK_T, 16), tl.float16)
            for group in tl.static_range(4):
                # the number of a setting takes the place of the last bits of its score
                named = _sixteen(scores, group).to(tl.int32, bitcast=True) & -16 | o_16[None, :]
                best = tl.min(named.to(tl.float32, bitcast=True), axis=1).to(tl.int32, bitcast=True)
                new = tl.where((best[:, None] & (1 << o_16 % 4)[None, :]) != 0, 1.0, 0.0).to(tl.float16)
                change = tl.where((o_16 // 4 == group)[None, :], olds[i] - new, 0.0)
                fallen += change
                if group < 3:
                    scores = _small_dot(change, effect, scores)
            tl.store(bits + o_t * N + (outer + 16 * i + o_16)[None, :], olds[i] - fallen, mask=m_t)
            if i < BLOCK_O // 16 - 1:
                left = tl.dot(fallen, products, left)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["tokens"])
def _finish_kernel(
    rows, sizes, codebook, inverse, offset, bits, packed, scales, tokens, count,
    D: tl.constexpr, N: tl.constexpr, BYTES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Packs the bits and finds the factor of least squares; grid (tiles of tokens,).

    rows float16 [tokens, D], sizes float32 [tokens], codebook float16 [count, D], inverse float32 [D], offset float32
    [D] in units of the channels' scale, bits float16 [tokens, N]; packed uint8 [tokens, BYTES], scales float16
    [tokens].
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
        total *= tl.load(inverse + o_d, mask=o_d < D, other=0.0)[None, :]
        total += tl.load(offset + o_d, mask=o_d < D, other=0.0)[None, :]
        b_r = tl.load(rows + o_t[:, None] * D + o_d[None, :], mask=m_t & m_d, other=0.0).to(tl.float32)
        product += tl.sum(b_r * total, axis=1)
        energy += tl.sum(total * total, axis=1)
    scale = tl.load(sizes + o_t, mask=o_t < tokens, other=0.0) * product / tl.maximum(energy, 1e-12)
    scale = tl.minimum(tl.maximum(scale, -65504.0), 65504.0)
    tl.store(scales + o_t, scale.to(tl.float16), mask=o_t < tokens)
    o_8 = tl.arange(0, 8)[None, None, :]
    for start in range(0, BYTES, 16):
        o_y = start + tl.arange(0, 16)
        p_s = bits + (o_t * N)[:, None, None] + (o_y * 8)[None, :, None] + o_8
        m_y = m_t & (o_y < BYTES)[None, :]
        m_s = m_y[:, :, None] & ((o_y * 8)[None, :, None] + o_8 < count)
        byte = tl.sum(tl.where(tl.load(p_s, mask=m_s, other=0.0) > 0, 1 << o_8, 0), axis=2)
        tl.store(packed + o_t[:, None] * BYTES + o_y[None, :], byte.to(tl.uint8), mask=m_y)


@dataclass(frozen=True)
class DescentTables:
    """What the descent needs beside the codebook; N is the number of bits, rounded up to whole blocks.

    Attributes:
        inverse: float32 [D], 1 / channel scale.
        offset: float32 [D], in units of the channel scale.
        bias: float32 [N_c], the encoder's.
        shift: float32 [N_c], products of codebook rows and offset.
        gram: float16 [N, N], products of codebook rows in units of `unit`, 0 within a group.
        unit: float32 [1], a power of two; the largest squared norm of a row is 32 to 64 of them.
        energies: float32 [N / 4, 16], squared norm of each setting of a group, in units of `unit`.
        effects: float16 [N, 64], what is added to the scores of the 16 settings of the four groups around a bit when
            the bit falls from 1 to 0, in units of `unit`.
    """

    inverse: Tensor
    offset: Tensor
    bias: Tensor
    shift: Tensor
    gram: Tensor
    unit: Tensor
    energies: Tensor
    effects: Tensor


def descent_tables(codec: CommVQValueCodec) -> DescentTables:
    """Derives the tables from a codec's buffers."""
    inverse = 1 / codec.channel_scale
    rows, offset = codec.codebook.float() * inverse, codec.offset.float() * inverse
    count = rows.shape[0]
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -count % _BLOCK_BITS))
    gram = padded @ padded.T
    group = torch.arange(SWEEP_BITS, device=rows.device)
    settings = ((torch.arange(2**SWEEP_BITS, device=rows.device) >> group.unsqueeze(1)) & 1).float()
    energies = (settings.T @ padded.unflatten(0, (-1, SWEEP_BITS))).square().sum(-1)
    groups = torch.arange(gram.shape[0], device=rows.device) // SWEEP_BITS
    unit = torch.exp2((gram.diagonal().amax() / 64).clamp(1e-30, 1e30).log2().ceil()).view(1)
    gram = (torch.where(groups.unsqueeze(0) == groups.unsqueeze(1), 0.0, gram) / unit).half()
    near = gram.float().unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).diagonal(dim1=0, dim2=2).movedim(2, 0)
    effects = -2 * (near.unflatten(2, (-1, SWEEP_BITS)) @ settings).flatten(2).flatten(0, 1)
    bias = codec.get_buffer(codec.encoder_weights[0][1]).float()
    return DescentTables(inverse, offset, bias, rows @ offset, gram, unit, energies / unit, effects.half())


def encode_values(codec: CommVQValueCodec, x: Tensor, tables: DescentTables) -> tuple[Tensor, Tensor]:
    """Packed bits and scales, as `CommVQValueCodes`, of a codec with the linear encoder.

    Args:
        codec: a fitted codec.
        x: [batch, num_kv_heads, time, head_dim].
        tables: of that codec.
    """
    batch, _, time, _ = x.shape
    width = packed_size(codec.config.value_code_bits, 1)
    packed = torch.empty(batch, 1, time, width, dtype=torch.uint8, device=x.device)
    scale = torch.empty(batch, 1, time, 1, dtype=torch.float16, device=x.device)
    rows, sizes = _unit_rows(x, tables)
    flat = rows, sizes, packed.view(-1, width), scale.view(-1)
    # in equal parts, because the descent keeps six bytes a bit, and a few tokens take as long as thousands
    parts, tile = max(1, cdiv(batch * time, _ENCODE_TOKENS)), int(_SWEEP_TILE["BLOCK_T"])
    size = tile * max(1, cdiv(batch * time, parts * tile))
    for part in zip(*(tensor.split(size) for tensor in flat), strict=True):
        _encode_part(codec, tables, *part)
    return packed, scale


def _unit_rows(x: Tensor, tables: DescentTables) -> tuple[Tensor, Tensor]:
    """Unit rows float16 [batch * time, D] and their sizes float32 [batch * time]."""
    x = row_major(x)
    batch, heads, time, width = x.shape
    tokens, channels = batch * time, heads * width
    rows = torch.empty(tokens, channels, dtype=torch.float16, device=x.device)
    sizes = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block_d = power_of_two(channels)
    block_t = max(1, 4096 // block_d)
    if tokens:
        _rows_kernel[(cdiv(tokens, block_t),)](
            x, tables.inverse, rows, sizes, *x.stride()[:3], tokens, time,
            WIDTH=width, D=channels, BLOCK_T=block_t, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
    return rows, sizes


def _encode_part(
    codec: CommVQValueCodec, tables: DescentTables, rows: Tensor, sizes: Tensor, packed: Tensor, scales: Tensor
) -> None:
    """Encodes unit rows [tokens, D] into packed [tokens, bytes] and scales [tokens]."""
    if not rows.shape[0]:
        return
    (tokens, width), count, padded = rows.shape, codec.config.value_code_bits, tables.gram.shape[0]
    bits = torch.empty(tokens, padded, dtype=torch.float16, device=rows.device)
    tile: dict[str, Any] = {"D": width, "N": padded, "BLOCK_K": 64, "num_warps": 4}
    block = 128 if tokens > 256 else 16
    grid = (cdiv(tokens, block), padded // 128)
    weight = codec.get_buffer(codec.encoder_weights[0][0])
    _project_kernel[grid](
        rows, weight, tables.inverse, tables.bias, bits, tokens, count, BITS=True, BLOCK_T=block, BLOCK_N=128, **tile
    )
    if codec.config.value_sweeps:
        found = torch.empty(tokens, padded, dtype=torch.float32, device=rows.device)
        _project_kernel[grid](
            rows, codec.codebook, tables.inverse, tables.shift, found, tokens, count,
            BITS=False, BLOCK_T=block, BLOCK_N=128, **tile,
        )  # fmt: skip
        _sweep_kernel[(cdiv(tokens, _SWEEP_TILE["BLOCK_T"]),)](
            found, tables.gram, tables.unit, tables.energies, tables.effects, bits, tokens,
            SWEEPS=codec.config.value_sweeps, N=padded, **_SWEEP_TILE,
        )  # fmt: skip
    block = 64 if tokens > 256 else 16
    _finish_kernel[(cdiv(tokens, block),)](
        rows, sizes, codec.codebook, tables.inverse, tables.offset, bits, packed, scales, tokens, count,
        BYTES=packed.shape[1], BLOCK_T=block, BLOCK_D=128, **tile, num_stages=4,
    )  # fmt: skip
