"""Triton kernels that encode CommVQ's keys (arXiv 2506.18879): norms, the greedy search of all stages, packing.

The search of one stage is a matrix product in the (min, +) algebra. With dots_a = -2 <x, u_a>, dots_b = -2 <x, i u_b>
and the table |u_a + i u_b|^2 of `codebook.pair_table`, best_a = min over b of (dots_b + table_ab) is formed for every
token and a; then a = argmin of (dots_a + best_a), and b = argmin of (dots_b + table_ab) for that a. A program holds
the residual of a tile of tokens of one problem (kv head and group) in registers and runs through the stages.

Products run on tensor cores at float32 accuracy: codebook entries are int8 and exact in float16; the residual, scaled
per channel, is split into two float16 numbers, which hold 22 bits. Half of each sum above is compared in fixed point of
28 bits, because an integer addition and minimum are one instruction.

Tuned on one H200, torch 2.11, triton 3.6. Every codebook size, group and rotary width of the reference is supported.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.constants import TINY, norm_unit
from kvcli.kernels.launch import cdiv, power_of_two, row_major, shared_memory_limit
from kvcli.methods.commvq.codebook import by_group, greedy_codes
from kvcli.methods.commvq.tables import NO_CENTRE, SearchTables
from kvcli.packing import packed_size
from kvcli.rope import to_pairs

_NO_CENTRE = tl.constexpr(NO_CENTRE)

_SMALL_TILE, _LARGE_TILE = (1, 16), (2, 32)
"""Tokens per thread and lanes of the search."""


@triton.jit(do_not_specialize=["time"])
def _norm_kernel(
    x, weights, stored, norms, stride_b, stride_h, stride_t, time, per_unit,
    HEADS: tl.constexpr, JOINT: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """L2 norms of weighted keys, over all heads (JOINT) or each.

    Grid (ceil(time / BLOCK_T), batch * (1 if JOINT else HEADS)).
    x [batch, HEADS, time, D] any float, strides of all but the last axis; weights float32 [HEADS, D] of the channels;
    stored float16 and norms float32
    [batch, 1 or HEADS, time]; stored norms are multiplied by `per_unit`, and where one is 0, so is the other.
    BLOCK_D = D as a power of two.
    """
    i_tile, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_t, o_d = i_tile * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    mask = (o_t < time)[:, None] & (o_d < D)[None, :]
    if JOINT:
        base = x + i_row * stride_b
    else:
        base = x + (i_row // HEADS) * stride_b + (i_row % HEADS) * stride_h
        weights += (i_row % HEADS) * D
    energy = tl.zeros((BLOCK_T,), tl.float32)
    for head in range(HEADS if JOINT else 1):
        b_w = tl.load(weights + head * D + o_d, mask=o_d < D, other=0.0)
        b_x = tl.load(base + head * stride_h + o_t[:, None] * stride_t + o_d[None, :], mask=mask, other=0.0)
        b_x = b_x.to(tl.float32) * b_w[None, :]
        energy += tl.sum(b_x * b_x, axis=1)
    norm = tl.sqrt_rn(energy)
    half = tl.minimum(norm * per_unit, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    p_n = i_row * time + o_t
    tl.store(stored + p_n, half, mask=o_t < time)
    tl.store(norms + p_n, tl.where(half > 0, norm, 0.0), mask=o_t < time)


@triton.jit
def _split_fp16(x):
    """x as a sum of two float16 numbers."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _halves(x):
    """The first and the second half of x along its first axis, without data exchange between threads."""
    HALF: tl.constexpr = x.shape[0] // 2
    if len(x.shape) == 2:
        first, second = tl.split(tl.permute(tl.reshape(x, (2, HALF, x.shape[1])), (1, 2, 0)))
    else:
        first, second = tl.split(tl.permute(tl.reshape(x, (2, HALF, x.shape[1], x.shape[2])), (1, 2, 3, 0)))
    return first, second


@triton.jit
def _min_plus(best, dots, table):
    """min(best, min over b of dots + table) for best [F, N, T], dots [B, F, T] and table [B, N].

    One b after the other: a whole tile of sums and its minimum would not fit into registers.
    """
    if dots.shape[0] > 1:
        dots_0, dots_1 = _halves(dots)
        table_0, table_1 = _halves(table)
        best = _min_plus(_min_plus(best, dots_0, table_0), dots_1, table_1)
    else:
        dots = tl.reshape(dots, (dots.shape[1], dots.shape[2]))
        table = tl.reshape(table, (table.shape[1],))
        best = tl.minimum(best, dots[:, None, :] + table[None, :, None])
    return best


@triton.jit
def _argmin(x, N: tl.constexpr):
    """First column of the minimum of each row of x [A, B], at most N - 1.

    `tl.argmin` takes three times as many instructions.
    """
    columns = tl.arange(0, x.shape[1])[None, :]
    index = tl.min(tl.where(x == tl.min(x, axis=1)[:, None], columns, x.shape[1]), axis=1)
    # inf inputs overflow int32; clamp so that the index stays valid
    return tl.minimum(index, N - 1)


@triton.jit(do_not_specialize=["tokens", "time"])
def _search_kernel(
    x, norms, weights, units, pow2_scales, fixed_point_scales, books, tables, codes,
    stride_b, stride_h, stride_t, tokens, time, heads, root,
    JOINT: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, STAGES: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
    TOKENS_PER_THREAD: tl.constexpr, LANES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Codes a * N + b of all stages: for each stage, argmin over (a, b) of |residual - u_a - i u_b|^2.

    Grid (ceil(tokens / BLOCK_T), heads * groups), BLOCK_T = TOKENS_PER_THREAD * LANES tokens of one problem.
    x [batch, heads, time, D] any float, strides of all but the last axis, tokens = batch * time; norms float32
    [batch, 1 or heads, time]; weights, units, pow2_scales, fixed_point_scales, books and tables as in `SearchTables`;
    codes int32 [tokens, problems * STAGES]. `root` is the norm of normalised keys.
    JOINT: one norm for all heads; ROTARY rotated channels; G pairs per group; BLOCK_N and BLOCK_G are N and G padded;
    BLOCK_B candidates b at a time.

    The search runs over tiles [TOKENS_PER_THREAD, BLOCK_N, LANES], tokens last: Triton maps the last axis to the lanes
    of a warp and the one before to warps, so TOKENS_PER_THREAD tokens share each table entry that a thread reads.
    """
    BLOCK_T: tl.constexpr = TOKENS_PER_THREAD * LANES
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
    scaled_unit = unit * tl.load(pow2_scales + i_problem)
    i_b, i_t = o_t // time, o_t % time
    p_n = norms + i_b * time + i_t if JOINT else norms + (i_b * heads + i_head) * time + i_t
    norm = tl.load(p_n, mask=m_t, other=0.0)[:, None]
    p_x = x + i_head * stride_h + (i_b * stride_b + i_t * stride_t)[:, None]
    o_x = o_g * GROUPS + i_group
    o_c = o_x + is_y * (ROTARY // 2)
    if ROTARY < D:
        # pairs beyond the rotated ones are paired among themselves
        o_c = tl.where(o_x < ROTARY // 2, o_c, o_x + tl.where(is_y == 1, D // 2, ROTARY // 2))
    b_x = tl.load(p_x + o_c[None, :], mask=m_t[:, None] & m_g[None, :], other=0.0).to(tl.float32)
    b_x = tl.where(norm > 0, tl.div_rn(b_x, tl.maximum(norm, 1e-30)), 0.0) * root * weight
    # minus the residual in the scale in which it is multiplied with the integers of the codebook
    neg_residual = -b_x * scaled_unit
    codeword_scale = unit * scaled_unit
    # row z of (-im, re) = i * (re, im)
    o_swap, sign = (o_z + BLOCK_G) % WIDTH, tl.where(is_y == 1, 1.0, -1.0).to(tl.float16)[:, None]
    p_scale = fixed_point_scales + i_problem * STAGES
    p_book = books + i_problem * (STAGES * BLOCK_N * WIDTH)
    p_table = tables + i_problem * (STAGES * BLOCK_N * BLOCK_N)
    p_code = codes + o_t * (tl.num_programs(1) * STAGES) + i_problem * STAGES
    for _ in range(STAGES):
        scale = tl.load(p_scale)
        high, low = _split_fp16(neg_residual)
        best = tl.full((TOKENS_PER_THREAD, BLOCK_N, LANES), _NO_CENTRE, tl.int32)
        for start in range(0, BLOCK_N, BLOCK_B):
            o_b = start + tl.arange(0, BLOCK_B)
            book_i = tl.load(p_book + o_b[None, :] * WIDTH + o_swap[:, None]) * sign
            dots = (tl.dot(high, book_i, tl.dot(low, book_i)) * scale).to(tl.int32)
            dots = tl.reshape(tl.trans(dots), (BLOCK_B, TOKENS_PER_THREAD, LANES))
            best = _min_plus(best, dots, tl.trans(tl.load(p_table + o_n[:, None] * BLOCK_N + o_b[None, :])))
        # codewords are gathered by one-hot products, which need no data exchange between threads
        book = tl.load(p_book + o_n[None, :] * WIDTH + o_z[:, None])
        dots = (tl.dot(high, book, tl.dot(low, book)) * scale).to(tl.int32)
        first = _argmin(dots + tl.reshape(tl.permute(best, (0, 2, 1)), (BLOCK_T, BLOCK_N)), N)
        neg_residual += tl.dot((o_n[None, :] == first[:, None]).to(tl.float16), tl.trans(book)) * codeword_scale
        book_i = tl.load(p_book + o_n[None, :] * WIDTH + o_swap[:, None]) * sign
        dots = (tl.dot(high, book_i, tl.dot(low, book_i)) * scale).to(tl.int32)
        second = _argmin(dots + tl.load(p_table + first[:, None] * BLOCK_N + o_n[None, :]), N)
        neg_residual += tl.dot((o_n[None, :] == second[:, None]).to(tl.float16), tl.trans(book_i)) * codeword_scale
        tl.store(p_code, first * N + second, mask=m_t)
        p_scale += 1
        p_book += BLOCK_N * WIDTH
        p_table += BLOCK_N * BLOCK_N
        p_code += 1


@triton.jit(do_not_specialize=["tokens"])
def _pack_kernel(
    codes, packed, tokens,
    COUNT: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """`packing.pack_bits`: codes of BITS bits as a stream of bytes; grid (ceil(tokens / BLOCK_T),).

    codes int32 [tokens, COUNT]; packed uint8 [tokens, BYTES]. BLOCK_Y = BYTES as a power of two.
    """
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    o_y = tl.arange(0, BLOCK_Y)[None, :]
    m_t = (o_t < tokens) & (o_y < BYTES)
    byte = tl.zeros((BLOCK_T, BLOCK_Y), tl.int32)
    for i in tl.static_range((BITS + 6) // BITS + 1):  # the most codes that a byte has bits of
        i_code = 8 * o_y // BITS + i
        shift = i_code * BITS - 8 * o_y
        code = tl.load(codes + o_t * COUNT + i_code, mask=m_t & (i_code < COUNT), other=0)
        byte |= tl.where(shift < 0, code >> tl.maximum(-shift, 0), code << tl.minimum(tl.maximum(shift, 0), 8))
    tl.store(packed + o_t * BYTES + o_y, (byte & 255).to(tl.uint8), mask=m_t)


def encode_keys(x: Tensor, tables: SearchTables, joint: bool, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """Packed codes and norms of keys, the fields of `CommVQKeyCodes`.

    Args:
        x: [batch, num_kv_heads, time, head_dim].
        tables: of the fitted codec.
        joint: whether one norm serves all heads of a token.
        rotary_dim: channels that RoPE rotates.

    Returns:
        uint8 [batch, 1, time, bytes] and float16 [batch, 1 or num_kv_heads, time, 1].
    """
    x = row_major(x)
    stored, norms = _norms(x, tables.channel_weights, joint)
    codes = _search(x, norms, tables, joint, rotary_dim)
    packed = _pack(codes, 2 * (tables.codebook_size - 1).bit_length())
    return packed.view(x.shape[0], 1, x.shape[2], packed.shape[-1]), stored.unsqueeze(-1)


def _norms(x: Tensor, weights: Tensor, joint: bool) -> tuple[Tensor, Tensor]:
    """Norms of weighted keys: float16 to be stored in units, float32 to divide by, [batch, 1 or heads, time]."""
    batch, heads, time, width = x.shape
    rows = 1 if joint else heads
    stored = torch.empty(batch, rows, time, dtype=torch.float16, device=x.device)
    norms = torch.empty(batch, rows, time, dtype=torch.float32, device=x.device)
    block = 32
    if x.numel():
        _norm_kernel[(cdiv(time, block), batch * rows)](
            x, weights, stored, norms, *x.stride()[:3], time, 1 / norm_unit(heads * width if joint else width),
            HEADS=heads, JOINT=joint, D=width, BLOCK_T=block, BLOCK_D=power_of_two(width), num_warps=4,
        )  # fmt: skip
    return stored, norms


def search_note(size: int, pairs: int, device: torch.device) -> str | None:
    """Why the search of codebooks of N = `size` codewords and g = `pairs` cannot run in a kernel; None if it can."""
    needed, limit = _shared_memory(size, pairs, _SMALL_TILE), shared_memory_limit(device)
    if needed <= limit:
        return None
    return (
        f"keys are encoded in PyTorch: the search of {size} codewords needs {needed} bytes of shared memory, "
        f"and the GPU has {limit} per block"
    )


def _shared_memory(size: int, pairs: int, tile: tuple[int, int]) -> int:
    """An upper bound of the search's shared memory in bytes.

    The terms are those of Triton 3.7 for compute capability 8.0 and 9.0 (N 64 to 256, g 32 and 64): it is exact at
    N = 256 and up to 18 KiB too large below.
    """
    rows, width = max(16, power_of_two(size)), max(16, power_of_two(pairs))
    per_row = 4 * tile[0] * tile[1] + 4 * width
    return rows * per_row + (0 if rows >= 256 else 18 * 1024)


def search_tile(tokens: int, small: bool = False) -> dict[str, int]:
    """Tile, warps and stages of the search: small tiles where there are few tokens, or where `small` asks for them.

    From 64 tokens per tile, products run on Hopper's warp groups, a warp for 16 tokens: 8 warps on 64 tokens would hold
    them twice, and failed on an H200 (illegal memory access, triton 3.6) though no address is out of bounds.
    """
    per_thread, lanes = _SMALL_TILE if tokens <= 512 or small else _LARGE_TILE
    return {"TOKENS_PER_THREAD": per_thread, "LANES": lanes, "BLOCK_B": 8, "num_warps": 4, "num_stages": 1}


def _search(x: Tensor, norms: Tensor, tables: SearchTables, joint: bool, rotary_dim: int) -> Tensor:
    """Codes a * N + b, int32 [batch * time, problems * stages]."""
    batch, heads, time, width = x.shape
    problems, pairs = tables.weights.shape
    stages, size = tables.books.shape[1], tables.codebook_size
    codes = torch.empty(batch * time, problems * stages, dtype=torch.int32, device=x.device)
    if search_note(size, pairs, x.device) is not None:
        return _search_in_torch(x, norms, tables, joint, rotary_dim)
    tile = search_tile(batch * time, _shared_memory(size, pairs, _LARGE_TILE) > shared_memory_limit(x.device))
    if x.numel():
        _search_kernel[(cdiv(batch * time, tile["TOKENS_PER_THREAD"] * tile["LANES"]), problems)](
            x, norms, tables.weights, tables.units, tables.pow2_scales, tables.fixed_point_scales,
            tables.books, tables.tables, codes,
            *x.stride()[:3], batch * time, time, heads, (heads * width if joint else width) ** 0.5,
            JOINT=joint, D=width, ROTARY=rotary_dim, STAGES=stages, N=size, G=pairs,
            BLOCK_N=max(16, size), BLOCK_G=max(16, power_of_two(pairs)), **tile,
        )  # fmt: skip
    return codes


def _search_in_torch(x: Tensor, norms: Tensor, tables: SearchTables, joint: bool, rotary_dim: int) -> Tensor:
    """`_search` without a kernel, for GPUs whose shared memory is too small for it."""
    heads, width = x.shape[1], x.shape[3]
    problems, pairs = tables.weights.shape
    unit = torch.where(norms.unsqueeze(-1) > 0, x.float() / norms.unsqueeze(-1).clamp_min(TINY), 0.0)
    unit = to_pairs(unit * (heads * width if joint else width) ** 0.5, rotary_dim)
    rows = by_group(unit, problems // heads, 3).permute(1, 3, 0, 2, 4, 5).flatten(0, 1).flatten(1, 2)
    residual = (rows * tables.weights[:, None, :, None]).flatten(-2)
    planes = tables.books[:, :, : tables.codebook_size].float().unflatten(-1, (2, -1))[..., :pairs]
    books = (planes * tables.units[:, None, None, None, :]).transpose(-1, -2).flatten(-2)
    return greedy_codes(residual, books).permute(1, 0, 2).flatten(1).int()


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
