"""Triton kernels of CommVQ's key codec: norms, the greedy search through all stages, and packing of the codes.

The search of one stage is a matrix product in the (min, +) algebra. With dots_a = -2 <x, u_a>, dots_b = -2 <x, i u_b>
and the table |u_a + i u_b|^2 of `codebook.pair_table`, best_a = min over b of (dots_b + table_ab) is formed for every
token and a; then a = argmin of (dots_a + best_a), and b = argmin of (dots_b + table_ab) for that a. A program holds
the residual of a tile of tokens of one problem (kv head and group) in registers and runs through the stages.

Products run on tensor cores without losing digits: codebook entries are int8 and exact in float16; the residual, times
the unit of each channel, is split into two float16 numbers, which hold 22 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, row_major
from kvcli.methods.commvq.codebook import pair_table
from kvcli.packing import packed_size

if TYPE_CHECKING:
    from kvcli.methods.commvq.keys import CommVQKeyCodec


@triton.jit(do_not_specialize=["time"])
def _norm_kernel(
    x, stored, norms, stride_b, stride_h, stride_t, time,
    HEADS: tl.constexpr, JOINT: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Norms over one head or all; grid (ceil(time / BLOCK_T), batch * (1 if JOINT else HEADS)).

    x [batch, HEADS, time, D] any float with strides; stored float16 and norms float32 [batch, 1 or HEADS, time]; where
    the stored norm is 0, so is the other.
    """
    i_tile, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_t, o_d = i_tile * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    mask = (o_t < time)[:, None] & (o_d < D)[None, :]
    if JOINT:
        base = x + i_row * stride_b
    else:
        base = x + (i_row // HEADS) * stride_b + (i_row % HEADS) * stride_h
    energy = tl.zeros((BLOCK_T,), tl.float32)
    for head in range(HEADS if JOINT else 1):
        b_x = tl.load(base + head * stride_h + o_t[:, None] * stride_t + o_d[None, :], mask=mask, other=0.0)
        b_x = b_x.to(tl.float32)
        energy += tl.sum(b_x * b_x, axis=1)
    norm = tl.sqrt_rn(energy)
    half = tl.minimum(norm, 65504.0).to(tl.float16)
    p_n = i_row * time + o_t
    tl.store(stored + p_n, half, mask=o_t < time)
    tl.store(norms + p_n, tl.where(half > 0, norm, 0.0), mask=o_t < time)


@triton.jit
def _halves(words):
    """Real and imaginary parts of int8 pairs in int16 words, as float16 whole numbers."""
    # 0x6400 is 1024.0, whose last bits count ones: cheaper than converting integers
    real = (((words & 255) ^ 128) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    imag = ((((words >> 8) & 255) ^ 128) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    return real, imag


@triton.jit
def _split(x):
    """x as a sum of two float16 numbers."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _four_products(x_high, x_low, y_high, y_low, real, imag):
    """(x_high + x_low) real + (y_high + y_low) imag, float32."""
    return tl.dot(x_high, real, tl.dot(y_high, imag, tl.dot(x_low, real, tl.dot(y_low, imag))))


@triton.jit(do_not_specialize=["tokens", "time"])
def _search_kernel(
    x, norms, weights, units, lifts, codebook, tables, codes,
    stride_b, stride_h, stride_t, tokens, time, heads, root,
    JOINT: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, STAGES: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
    FAR: tl.constexpr, NEAR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """All stages of a tile of FAR * NEAR tokens of one problem; grid (tiles of tokens, heads * groups).

    x [batch, heads, time, D] any float with strides, tokens = batch * time; norms float32 [batch, 1 or heads, time];
    weights and units float32 [problems, G], weight of a pair and weight times codebook unit; lifts float32 [problems],
    powers of two that bring units to 1 or below; codebook int16 [problems, STAGES, N, G], (re, im) in a word; tables
    float32 [problems, STAGES, N, N]; codes int32 [tokens, problems * STAGES].

    The search runs over tiles [BLOCK_B, FAR, BLOCK_N, NEAR] with b first and tokens last: Triton hands the last axis to
    the lanes of a warp and the one before to the warps, so that minima over b stay in a thread, and FAR tokens share
    each entry of the table that a thread reads.
    """
    BLOCK_T: tl.constexpr = FAR * NEAR
    GROUPS: tl.constexpr = D // 2 // G
    i_tile, i_problem = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_head, i_group = i_problem // GROUPS, i_problem % GROUPS
    o_t = i_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    o_g, o_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N)
    m_t, m_g, m_n = o_t < tokens, o_g < G, o_n < N
    weight = tl.load(weights + i_problem * G + o_g, mask=m_g, other=0.0)
    unit = tl.load(units + i_problem * G + o_g, mask=m_g, other=0.0)
    lift = tl.load(lifts + i_problem)
    i_b, i_t = o_t // time, o_t % time
    p_n = norms + i_b * time + i_t if JOINT else norms + (i_b * heads + i_head) * time + i_t
    norm = tl.load(p_n, mask=m_t, other=0.0)[:, None]
    p_x = x + i_head * stride_h + (i_b * stride_b + i_t * stride_t)[:, None]
    o_x, o_y = i_group * G + o_g, i_group * G + o_g + ROTARY // 2
    if ROTARY < D:
        # pairs beyond the rotated ones are paired among themselves
        beyond = o_x >= ROTARY // 2
        o_y = tl.where(beyond, o_x + D // 2, o_y)
        o_x = tl.where(beyond, o_x + ROTARY // 2, o_x)
    m_x = m_t[:, None] & m_g[None, :]
    b_x = tl.load(p_x + o_x[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_y = tl.load(p_x + o_y[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_x = tl.where(norm > 0, tl.div_rn(b_x, tl.maximum(norm, 1e-30)), 0.0) * root * weight[None, :]
    b_y = tl.where(norm > 0, tl.div_rn(b_y, tl.maximum(norm, 1e-30)), 0.0) * root * weight[None, :]
    book, table = codebook + i_problem * STAGES * N * G, tables + i_problem * STAGES * N * N
    p_code = codes + o_t * (tl.num_programs(1) * STAGES) + i_problem * STAGES
    lifted, factor = (unit * lift)[None, :], -2.0 / lift
    for _ in range(STAGES):
        x_high, x_low = _split(b_x * lifted)
        y_high, y_low = _split(b_y * lifted)
        best = tl.full((FAR, BLOCK_N, NEAR), float("inf"), tl.float32)
        for start in range(0, BLOCK_N, BLOCK_B):
            o_b = start + tl.arange(0, BLOCK_B)
            m_b = o_b < N
            p_book = book + o_b[None, :] * G + o_g[:, None]
            real, imag = _halves(tl.load(p_book, mask=m_g[:, None] & m_b[None, :], other=0))
            along = _four_products(y_high, y_low, x_high, x_low, real, -imag) * factor
            p_table = table + o_n[:, None] * N + o_b[None, :]
            part = tl.load(p_table, mask=m_n[:, None] & m_b[None, :], other=float("inf"))
            along = tl.reshape(tl.trans(along), (BLOCK_B, FAR, NEAR))
            best = tl.minimum(best, tl.min(along[:, :, None, :] + tl.trans(part)[:, None, :, None], axis=0))
        p_book = book + o_n[None, :] * G + o_g[:, None]
        real, imag = _halves(tl.load(p_book, mask=m_g[:, None] & m_n[None, :], other=0))
        along = _four_products(x_high, x_low, y_high, y_low, real, imag) * factor
        best += tl.permute(tl.reshape(along, (FAR, NEAR, BLOCK_N)), (0, 2, 1))
        # where all is NaN, as for a token with an infinite channel, argmin may be an entry that there is not
        first = tl.minimum(tl.reshape(tl.argmin(best, axis=1), (BLOCK_T,)), N - 1)
        along = _four_products(y_high, y_low, x_high, x_low, real, -imag) * factor
        along += tl.load(table + first[:, None] * N + o_n[None, :], mask=m_n[None, :], other=float("inf"))
        second = tl.minimum(tl.argmin(along, axis=1), N - 1)
        a_real, a_imag = _halves(tl.load(book + first[:, None] * G + o_g[None, :], mask=m_g[None, :], other=0))
        b_real, b_imag = _halves(tl.load(book + second[:, None] * G + o_g[None, :], mask=m_g[None, :], other=0))
        b_x -= (a_real - b_imag).to(tl.float32) * unit[None, :]
        b_y -= (a_imag + b_real).to(tl.float32) * unit[None, :]
        tl.store(p_code, first * N + second, mask=m_t)
        p_code += 1
        book += N * G
        table += N * N


@triton.jit(do_not_specialize=["tokens"])
def _pack_kernel(
    codes, packed, tokens,
    COUNT: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """Codes int32 [tokens, COUNT] of BITS bits to a stream of bytes, uint8 [tokens, BYTES]; grid (tiles of tokens,)."""
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    o_y = tl.arange(0, BLOCK_Y)[None, :]
    m_t = (o_t < tokens) & (o_y < BYTES)
    byte = tl.zeros((BLOCK_T, BLOCK_Y), tl.int32)
    for step in tl.static_range((BITS + 6) // BITS + 1):  # so many codes can reach into a byte
        i_code = 8 * o_y // BITS + step
        shift = i_code * BITS - 8 * o_y
        code = tl.load(codes + o_t * COUNT + i_code, mask=m_t & (i_code < COUNT), other=0)
        byte |= tl.where(shift < 0, code >> tl.maximum(-shift, 0), code << tl.minimum(tl.maximum(shift, 0), 8))
    tl.store(packed + o_t * BYTES + o_y, (byte & 255).to(tl.uint8), mask=m_t)


@dataclass(frozen=True)
class SearchTables:
    """What the search needs beside the codebook; `_search_kernel` lists shapes.

    Attributes:
        weights: weight of each channel pair.
        units: weight times codebook unit.
        lifts: powers of two that bring units to 1 or below.
        tables: squared norms of all centres, by stage.
    """

    weights: Tensor
    units: Tensor
    lifts: Tensor
    tables: Tensor


def search_tables(codec: CommVQKeyCodec) -> SearchTables:
    """Derives the tables from a codec's buffers."""
    weights = codec.pair_weight.unflatten(1, (codec.num_groups, -1)).flatten(0, 1).contiguous()
    units = weights * codec.codebook_scale.flatten(0, 1)
    lifts = torch.exp2(-units.amax(-1).clamp(1e-30, 1e30).log2().ceil())
    books = codec.books() * codec.group_weight().unsqueeze(1)
    tables = torch.stack([pair_table(book) for book in books.unbind(1)], dim=1)
    return SearchTables(weights, units, lifts, tables)


def encode_keys(codec: CommVQKeyCodec, x: Tensor, tables: SearchTables) -> tuple[Tensor, Tensor]:
    """Packed codes and norms, as `CommVQKeyCodes`.

    Args:
        codec: a fitted codec.
        x: [batch, num_kv_heads, time, head_dim].
        tables: of that codec.
    """
    x = row_major(x)
    stored, norms = _norms(x, codec.config.key_norm == "joint")
    codes = _search(codec, x, norms, tables)
    packed = _pack(codes, codec.config.bits_per_code)
    return packed.view(x.shape[0], 1, x.shape[2], packed.shape[-1]), stored.unsqueeze(-1)


def _norms(x: Tensor, joint: bool) -> tuple[Tensor, Tensor]:
    """Norms over all heads or each: float16 to be stored, float32 to divide by, [batch, 1 or heads, time]."""
    batch, heads, time, width = x.shape
    rows = 1 if joint else heads
    stored = torch.empty(batch, rows, time, dtype=torch.float16, device=x.device)
    norms = torch.empty(batch, rows, time, dtype=torch.float32, device=x.device)
    block = 32
    if x.numel():
        _norm_kernel[(cdiv(time, block), batch * rows)](
            x, stored, norms, *x.stride()[:3], time,
            HEADS=heads, JOINT=joint, D=width, BLOCK_T=block, BLOCK_D=power_of_two(width), num_warps=4,
        )  # fmt: skip
    return stored, norms


def search_tile(tokens: int, size: int) -> dict[str, int]:
    """Tile, warps and stages of the search: small ones where there are few tokens or a large codebook.

    From 64 tokens a tile, products run on Hopper's warp groups, a warp for 16 tokens: 8 warps on 64 tokens would hold
    them twice, and failed on an H200 (illegal memory access, Triton 3.6) though no address is out of bounds.
    """
    if tokens <= 512 or size > 64:
        return {"FAR": 1, "NEAR": 32, "BLOCK_B": 16, "num_warps": 8, "num_stages": 1}
    return {"FAR": 2, "NEAR": 32, "BLOCK_B": 16, "num_warps": 4, "num_stages": 1}


def _search(codec: CommVQKeyCodec, x: Tensor, norms: Tensor, tables: SearchTables) -> Tensor:
    """Codes a * N + b, int32 [batch * time, problems * stages]."""
    batch, heads, time, width = x.shape
    config, joint = codec.config, codec.config.key_norm == "joint"
    problems, pairs, size = heads * codec.num_groups, config.pairs_per_group, config.codebook_size
    codes = torch.empty(batch * time, codec.num_codes, dtype=torch.int32, device=x.device)
    tile = search_tile(batch * time, size)
    if x.numel():
        _search_kernel[(cdiv(batch * time, tile["FAR"] * tile["NEAR"]), problems)](
            x, norms, tables.weights, tables.units, tables.lifts,
            codec.codebook.view(torch.int16), tables.tables, codes,
            *x.stride()[:3], batch * time, time, heads, (heads * width if joint else width) ** 0.5,
            JOINT=joint, D=width, ROTARY=codec.spec.rope.rotary_dim, STAGES=config.num_residuals, N=size, G=pairs,
            BLOCK_N=max(16, size), BLOCK_G=max(16, power_of_two(pairs)), **tile,
        )  # fmt: skip
    return codes


def _pack(codes: Tensor, n_bits: int) -> Tensor:
    """`pack_bits` of codes int32 [tokens, count]: uint8 [tokens, bytes]."""
    tokens, count = codes.shape
    width = packed_size(count, n_bits)
    packed = torch.empty(tokens, width, dtype=torch.uint8, device=codes.device)
    block = 16
    if tokens:
        _pack_kernel[(cdiv(tokens, block),)](
            codes, packed, tokens, COUNT=count, BITS=n_bits, BYTES=width,
            BLOCK_T=block, BLOCK_Y=power_of_two(width), num_warps=4,
        )  # fmt: skip
    return packed
