"""Triton kernels of CommVQ's key codec: norms, the greedy search through all stages, and packing of the codes.

The search of one stage is a matrix product in the (min, +) algebra. With dots_a = -2 <x, u_a>, dots_b = -2 <x, i u_b>
and the table |u_a + i u_b|^2 of `codebook.pair_table`, best_a = min over b of (dots_b + table_ab) is formed for every
token and a; then a = argmin of (dots_a + best_a), and b = argmin of (dots_b + table_ab) for that a. A program holds
the residual of a tile of tokens of one problem (kv head and group) in registers and runs through the stages.

Products run on tensor cores without losing digits: codebook entries are int8 and exact in float16; the residual, times
the unit of each channel, is split into two float16 numbers, which hold 22 bits. Half of each sum above, in whole
numbers of a unit small enough for 28 bits, is what is compared: an integer addition and minimum are one instruction.
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

_FAR_AWAY = tl.constexpr(2**30)
"""Entry of a table that stands for no centre."""

_LARGEST = 2.0**28


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
def _split(x):
    """x as a sum of two float16 numbers."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _halves(x):
    """The first and the second half of x along its first axis, without an exchange between threads."""
    HALF: tl.constexpr = x.shape[0] // 2
    if len(x.shape) == 2:
        first, second = tl.split(tl.permute(tl.reshape(x, (2, HALF, x.shape[1])), (1, 2, 0)))
    else:
        first, second = tl.split(tl.permute(tl.reshape(x, (2, HALF, x.shape[1], x.shape[2])), (1, 2, 3, 0)))
    return first, second


@triton.jit
def _min_plus(best, along, table):
    """min(best, min over b of along + table) for best [F, N, T], along [B, F, T] and table [B, N].

    One b after the other: a whole tile of sums and its minimum would not fit into registers.
    """
    if along.shape[0] > 1:
        along_0, along_1 = _halves(along)
        table_0, table_1 = _halves(table)
        best = _min_plus(_min_plus(best, along_0, table_0), along_1, table_1)
    else:
        along = tl.reshape(along, (along.shape[1], along.shape[2]))
        table = tl.reshape(table, (table.shape[1],))
        best = tl.minimum(best, along[:, None, :] + table[None, :, None])
    return best


@triton.jit
def _least(x, N: tl.constexpr):
    """First column of the least number in each row of x [A, B]; `tl.argmin` takes three times as many instructions."""
    columns = tl.arange(0, x.shape[1])[None, :]
    found = tl.min(tl.where(x == tl.min(x, axis=1)[:, None], columns, x.shape[1]), axis=1)
    # sums of a token with an infinite channel can overflow, and then choose an entry that there is not
    return tl.minimum(found, N - 1)


@triton.jit(do_not_specialize=["tokens", "time"])
def _search_kernel(
    x, norms, weights, units, lifts, steps, books, tables, codes,
    stride_b, stride_h, stride_t, tokens, time, heads, root,
    JOINT: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, STAGES: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
    FAR: tl.constexpr, NEAR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """All stages of a tile of FAR * NEAR tokens of one problem; grid (tiles of tokens, heads * groups).

    x [batch, heads, time, D] any float with strides, tokens = batch * time; norms float32 [batch, 1 or heads, time];
    weights, units, lifts, steps, books and tables as in `SearchTables`; codes int32 [tokens, problems * STAGES].

    The search runs over tiles [FAR, BLOCK_N, NEAR], one b after the other, with tokens last: Triton hands the last axis
    to the lanes of a warp and the one before to the warps, so that FAR tokens share each entry of the table that a
    thread reads.
    """
    BLOCK_T: tl.constexpr = FAR * NEAR
    GROUPS: tl.constexpr = D // 2 // G
    WIDTH: tl.constexpr = 2 * BLOCK_G
    i_tile, i_problem = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_head, i_group = i_problem // GROUPS, i_problem % GROUPS
    o_t = i_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    o_z, o_n = tl.arange(0, WIDTH), tl.arange(0, BLOCK_N)
    o_g, is_y = o_z % BLOCK_G, o_z // BLOCK_G
    m_t, m_g = o_t < tokens, o_g < G
    weight = tl.load(weights + i_problem * G + o_g, mask=m_g, other=0.0)[None, :]
    unit = tl.load(units + i_problem * G + o_g, mask=m_g, other=0.0)[None, :]
    lifted = unit * tl.load(lifts + i_problem)
    i_b, i_t = o_t // time, o_t % time
    p_n = norms + i_b * time + i_t if JOINT else norms + (i_b * heads + i_head) * time + i_t
    norm = tl.load(p_n, mask=m_t, other=0.0)[:, None]
    p_x = x + i_head * stride_h + (i_b * stride_b + i_t * stride_t)[:, None]
    o_x = i_group * G + o_g
    o_c = o_x + is_y * (ROTARY // 2)
    if ROTARY < D:
        # pairs beyond the rotated ones are paired among themselves
        o_c = tl.where(o_x < ROTARY // 2, o_c, o_x + tl.where(is_y == 1, D // 2, ROTARY // 2))
    b_x = tl.load(p_x + o_c[None, :], mask=m_t[:, None] & m_g[None, :], other=0.0).to(tl.float32)
    b_x = tl.where(norm > 0, tl.div_rn(b_x, tl.maximum(norm, 1e-30)), 0.0) * root * weight
    # what is left of the token, times -unit and lift: this is what is multiplied with the codebook's whole numbers
    left = -b_x * lifted
    grain = unit * lifted
    # row r of (-im, re), which is the product of (re, im) with i
    o_turned, sign = (o_z + BLOCK_G) % WIDTH, tl.where(is_y == 1, 1.0, -1.0).to(tl.float16)[:, None]
    p_step = steps + i_problem * STAGES
    p_book = books + i_problem * (STAGES * BLOCK_N * WIDTH)
    p_table = tables + i_problem * (STAGES * BLOCK_N * BLOCK_N)
    p_code = codes + o_t * (tl.num_programs(1) * STAGES) + i_problem * STAGES
    for _ in range(STAGES):
        step = tl.load(p_step)
        high, low = _split(left)
        best = tl.full((FAR, BLOCK_N, NEAR), _FAR_AWAY, tl.int32)
        for start in range(0, BLOCK_N, BLOCK_B):
            o_b = start + tl.arange(0, BLOCK_B)
            turned = tl.load(p_book + o_b[None, :] * WIDTH + o_turned[:, None]) * sign
            along = (tl.dot(high, turned, tl.dot(low, turned)) * step).to(tl.int32)
            along = tl.reshape(tl.trans(along), (BLOCK_B, FAR, NEAR))
            best = _min_plus(best, along, tl.trans(tl.load(p_table + o_n[:, None] * BLOCK_N + o_b[None, :])))
        # the codewords come of products with what selects them, which need no exchange between threads
        book = tl.load(p_book + o_n[None, :] * WIDTH + o_z[:, None])
        along = (tl.dot(high, book, tl.dot(low, book)) * step).to(tl.int32)
        first = _least(along + tl.reshape(tl.permute(best, (0, 2, 1)), (BLOCK_T, BLOCK_N)), N)
        left += tl.dot((o_n[None, :] == first[:, None]).to(tl.float16), tl.trans(book)) * grain
        turned = tl.load(p_book + o_n[None, :] * WIDTH + o_turned[:, None]) * sign
        along = (tl.dot(high, turned, tl.dot(low, turned)) * step).to(tl.int32)
        second = _least(along + tl.load(p_table + first[:, None] * BLOCK_N + o_n[None, :]), N)
        left += tl.dot((o_n[None, :] == second[:, None]).to(tl.float16), tl.trans(turned)) * grain
        tl.store(p_code, first * N + second, mask=m_t)
        p_step += 1
        p_book += BLOCK_N * WIDTH
        p_table += BLOCK_N * BLOCK_N
        p_code += 1


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
    """What the search needs; P problems (kv head and group), N and g padded to powers of two, at least 16.

    Attributes:
        weights: float32 [P, g], weight of each channel pair.
        units: float32 [P, g], weight times codebook unit.
        lifts: float32 [P], powers of two that bring units to 1 or below.
        steps: float32 [P, R], what makes whole numbers of products with a stage's codebook, over lift.
        books: float16 [P, R, N, 2g], whole numbers, real parts before imaginary ones.
        tables: int32 [P, R, N, N], half the squared norms of all centres in the whole numbers of their stage.
    """

    weights: Tensor
    units: Tensor
    lifts: Tensor
    steps: Tensor
    books: Tensor
    tables: Tensor


def search_tables(codec: CommVQKeyCodec) -> SearchTables:
    """Derives the tables from a codec's buffers."""
    size, pairs = codec.config.codebook_size, codec.config.pairs_per_group
    pad_n, pad_g = max(16, power_of_two(size)) - size, max(16, power_of_two(pairs)) - pairs
    weights = codec.pair_weight.unflatten(1, (codec.num_groups, -1)).flatten(0, 1).contiguous()
    units = weights * codec.codebook_scale.flatten(0, 1)
    lifts = torch.exp2(-units.amax(-1).clamp(1e-30, 1e30).log2().ceil())
    centred = codec.books() * codec.group_weight().unsqueeze(1)
    halves = torch.stack([pair_table(book) for book in centred.unbind(1)], dim=1) / 2
    # no stage leaves more than its shortest centre added to what was there
    width = codec.spec.kv_dim if codec.config.key_norm == "joint" else codec.spec.head_dim
    longest, words = weights.amax(-1, keepdim=True) * width**0.5, centred.norm(dim=-1).amax(-1)
    shortest = (2 * halves.amin((-2, -1))).clamp_min(0).sqrt()
    longest = longest + shortest.cumsum(-1) - shortest
    # twice the largest product, and the largest half of a squared norm: a sum of two products and a half fits 30 bits
    bound = 2 * words * torch.maximum(longest, words)
    scale = torch.exp2((_LARGEST / bound.clamp_min(1e-30)).log2().floor())
    tables = (halves * scale[:, :, None, None]).round().int()
    tables = torch.nn.functional.pad(tables, (0, pad_n, 0, pad_n), value=_FAR_AWAY.value)
    planes = codec.codebook.flatten(0, 1).unflatten(-1, (-1, 2)).transpose(-1, -2).half()
    books = torch.nn.functional.pad(planes, (0, pad_g, 0, 0, 0, pad_n)).flatten(-2).contiguous()
    return SearchTables(weights, units, lifts, scale / lifts.unsqueeze(1), books, tables)


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


def search_tile(tokens: int) -> dict[str, int]:
    """Tile, warps and stages of the search: small tiles where there are few tokens.

    From 64 tokens a tile, products run on Hopper's warp groups, a warp for 16 tokens: 8 warps on 64 tokens would hold
    them twice, and failed on an H200 (illegal memory access, Triton 3.6) though no address is out of bounds.
    """
    far, near = (1, 16) if tokens <= 512 else (2, 32)
    return {"FAR": far, "NEAR": near, "BLOCK_B": 8, "num_warps": 4, "num_stages": 1}


def _search(codec: CommVQKeyCodec, x: Tensor, norms: Tensor, tables: SearchTables) -> Tensor:
    """Codes a * N + b, int32 [batch * time, problems * stages]."""
    batch, heads, time, width = x.shape
    config, joint = codec.config, codec.config.key_norm == "joint"
    problems, pairs, size = heads * codec.num_groups, config.pairs_per_group, config.codebook_size
    codes = torch.empty(batch * time, codec.num_codes, dtype=torch.int32, device=x.device)
    tile = search_tile(batch * time)
    if x.numel():
        _search_kernel[(cdiv(batch * time, tile["FAR"] * tile["NEAR"]), problems)](
            x, norms, tables.weights, tables.units, tables.lifts, tables.steps, tables.books, tables.tables, codes,
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
