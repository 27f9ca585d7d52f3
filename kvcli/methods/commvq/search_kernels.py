"""Triton kernel of CommVQ's greedy key search (arXiv 2506.18879), all residual stages of a tile of tokens.

The search of one stage looks for the codewords (a, b) that minimise |r - u_a - i u_b|^2, r the residual. Halved and
without |r|^2, that is (|u_a|^2 / 2 - <r, u_a>) + (|u_b|^2 / 2 - <r, i u_b>) + <u_a, i u_b>: a cost of each and a table.
So a is found by a matrix product in the (min, +) algebra, best_a = min over b of (cost_b + table_ab), as argmin of
cost_a + best_a; then b as the codeword nearest to what a leaves. A program holds the residual of a tile of tokens of
one problem (kv head and group) in registers and runs through the stages.

Products run on tensor cores at float32 accuracy: codebook entries are int8 and exact in float16; the residual, scaled
per channel, is split into two float16 numbers, which hold 22 bits. The (min, +) product adds numbers of 15 bits, two
tokens in a word: Hopper does it with one instruction. Their unit is 1/32767 of the range of the table; a cost_b that
exceeds the least one by more than this range cannot win. So the cost of a is within two units of the least one.

Tuned on one H200, torch 2.11, triton 3.6. Every codebook size, group and rotary width of the reference is supported.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import TINY, Tiles, cdiv, power_of_two, shared_memory_limit
from kvcli.kernels.words import low_halves, min_sum_of_halves
from kvcli.methods.commvq.codebook import by_group, greedy_codes
from kvcli.methods.commvq.tables import TERM_MAX, SearchTables
from kvcli.rope import to_pairs

_TERM_MAX = tl.constexpr(TERM_MAX)

_FEW_TOKENS = 512
"""Tokens up to which a program of the search takes `_SMALL_TILE` of them."""

_SMALL_TILE = 16
_LARGE_TILES = Tiles(hopper={"BLOCK_T": 64}, smaller={"BLOCK_T": 32})

_CODEWORDS = 32
"""Codewords b at a time in the (min, +) product."""


@triton.jit
def _split_fp16(x):
    """x as a sum of two float16 numbers, that of more weight first."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _halves(x):
    """The first and the second half of x [A, B] along its first axis, without data exchange between threads."""
    return tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))


@triton.jit
def _pairs_of_rows(x):
    """Rows t and t + 8 of each 16 rows of x [A, B], which a thread holds both: two tensors [A / 2, B]."""
    QUADS: tl.constexpr = x.shape[0] // 16
    first, second = tl.split(tl.permute(tl.reshape(x, (QUADS, 2, 8, x.shape[1])), (0, 2, 3, 1)))
    return tl.reshape(first, (x.shape[0] // 2, x.shape[1])), tl.reshape(second, (x.shape[0] // 2, x.shape[1]))


@triton.jit
def _joined_rows(first, second):
    """The inverse of `_pairs_of_rows`."""
    EIGHTS: tl.constexpr = first.shape[0] // 8
    x = tl.reshape(tl.join(first, second), (EIGHTS, 8, first.shape[1], 2))
    return tl.reshape(tl.permute(x, (0, 3, 1, 2)), (2 * first.shape[0], first.shape[1]))


@triton.jit
def _rounded_pairs(x):
    """float32 x [A, B] in 0 to 65535, rounded, as int32 [A / 2, B]: row t in the low half of a word, t + 8 in the high.

    In the sum with 1.5 * 2^23, the integer is the lowest bits.
    """
    first, second = _pairs_of_rows((x + 12582912.0).to(tl.int32, bitcast=True))
    return low_halves(first, second)


@triton.jit
def _floats_of_pairs(words):
    """The inverse of `_rounded_pairs`: int32 [A, B] to float32 [2 A, B]."""
    low, high = (words & 0xFFFF) | 0x4B000000, ((words >> 16) & 0xFFFF) | 0x4B000000  # 2^23 plus a half of a word
    return _joined_rows(low, high).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _min_plus(best, words, tables, INDEX: tl.constexpr):
    """min(best, min over b of words + table) of both halves of words: best [N, W], words [B, W].

    `tables` holds the table [B, N] in parts of equal height, those of these words from part INDEX on. One b after the
    other: a whole tile of sums and its minimum would not fit into registers.
    """
    if words.shape[0] > tables[INDEX].shape[1]:
        words_0, words_1 = _halves(words)
        best = _min_plus(best, words_0, tables, INDEX)
        best = _min_plus(best, words_1, tables, INDEX + words_0.shape[0] // tables[INDEX].shape[1])
    else:
        best = _min_plus_rows(best, words, tl.trans(tables[INDEX]))
    return best


@triton.jit
def _min_plus_rows(best, words, table):
    """`_min_plus` with one part of the table."""
    if words.shape[0] > 1:
        words_0, words_1 = _halves(words)
        table_0, table_1 = _halves(table)
        best = _min_plus_rows(_min_plus_rows(best, words_0, table_0), words_1, table_1)
    else:
        row, column = tl.reshape(words, (words.shape[1],)), tl.reshape(table, (table.shape[1],))
        best = min_sum_of_halves(best, row[None, :], column[:, None])
    return best


@triton.jit
def _times_i(x):
    """i x for x [A, B], real parts in the first half of a row and imaginary ones in the second."""
    re, im = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(-im, re), (0, 2, 1)), (x.shape[0], x.shape[1]))


@triton.jit
def _argmin(x, N: tl.constexpr):
    """Column of the minimum of each row of float32 x [A, B], at most N - 1; numbers that differ by B / 2^23 are equal.

    The column replaces the last bits of a number: `tl.argmin` takes five times as many instructions.
    """
    B: tl.constexpr = x.shape[1]
    tagged = (x.to(tl.int32, bitcast=True) & -B) | tl.arange(0, B)[None, :]
    index = tl.min(tagged.to(tl.float32, bitcast=True), axis=1).to(tl.int32, bitcast=True) & (B - 1)
    return tl.minimum(index, N - 1)


@triton.jit
def _costs(x, book, terms):
    """<x, u> + term for x [A, 2g], a sum of two float16 tensors, codewords u, float16 [2g, N], and their terms [N]."""
    return tl.dot(x[0], book, tl.dot(x[1], book)) + terms[None, :]


@triton.jit(do_not_specialize=["tokens", "time"])
def _search_kernel(
    x, norms, weights, units, pow2_scales, books, terms, tables, steps, codes,
    stride_b, stride_h, stride_t, tokens, time, heads, root,
    JOINT: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, STAGES: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Codes a * N + b of all stages: for each stage, argmin over (a, b) of |residual - u_a - i u_b|^2.

    Grid (ceil(tokens / BLOCK_T), heads * groups).
    x [batch, heads, time, D] any float, strides of all but the last axis, tokens = batch * time; norms float32
    [batch, 1 or heads, time]; weights, units, pow2_scales, books, terms, tables and steps as in `SearchTables`;
    codes int32 [tokens, problems * STAGES]. `root` is the norm of normalised keys. JOINT: one norm for all heads;
    ROTARY rotated channels; G pairs per group, BLOCK_G padded, BLOCK_N N; BLOCK_C products, BLOCK_B rows at a time.

    The (min, +) product runs over tiles [BLOCK_N, BLOCK_T / 2], words of two tokens last: Triton maps the last axis to
    the lanes of a warp, so each entry of the table is read by a whole warp.
    """
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
    o_d = o_x + is_y * (ROTARY // 2)
    if ROTARY < D:
        # pairs beyond the rotated ones are paired among themselves
        o_d = tl.where(o_x < ROTARY // 2, o_d, o_x + tl.where(is_y == 1, D // 2, ROTARY // 2))
    b_x = tl.load(p_x + o_d[None, :], mask=m_t[:, None] & m_g[None, :], other=0.0).to(tl.float32)
    b_x = tl.where(norm > 0, tl.div_rn(b_x, tl.maximum(norm, 1e-30)), 0.0) * root * weight
    # minus the residual in the scale in which it is multiplied with the integers of the codebook
    neg_residual = -b_x * scaled_unit
    codeword_scale = unit * scaled_unit
    p_book = books + i_problem * (STAGES * BLOCK_N * WIDTH) + o_z[:, None]
    p_term = terms + i_problem * (STAGES * 3 * BLOCK_N)
    p_table = tables + i_problem * (STAGES * BLOCK_N * BLOCK_N) + o_n[:, None] * BLOCK_N
    p_step = steps + i_problem * STAGES
    p_code = codes + o_t * (tl.num_programs(1) * STAGES) + i_problem * STAGES
    for _ in range(STAGES):
        book, step = tl.load(p_book + o_n[None, :] * WIDTH), tl.load(p_step)
        minus_r = _split_fp16(neg_residual)
        turned_r = _times_i(-minus_r[0]), _times_i(-minus_r[1])  # -<r, i u> = <i r, u>
        least = tl.min(_costs(turned_r, book, tl.load(p_term + BLOCK_N + o_n)), axis=1)
        best = tl.full((BLOCK_N, BLOCK_T // 2), -1, tl.int32)
        for start in range(0, BLOCK_N, BLOCK_C):
            parts = ()
            for part in tl.static_range(BLOCK_C // BLOCK_B):
                parts = parts + (tl.load(p_table + (start + part * BLOCK_B + tl.arange(0, BLOCK_B))[None, :]),)
            o_c = start + tl.arange(0, BLOCK_C)
            costs = _costs(turned_r, tl.load(p_book + o_c[None, :] * WIDTH), tl.load(p_term + BLOCK_N + o_c))
            words = _rounded_pairs(tl.minimum((costs - least[:, None]) * (1 / step), _TERM_MAX))
            best = _min_plus(best, tl.trans(words), parts, 0)
        costs = _costs(minus_r, book, tl.load(p_term + o_n))
        first = _argmin(costs + _floats_of_pairs(tl.trans(best)) * step, N)
        # codewords are gathered by one-hot products, which need no data exchange between threads
        neg_residual += tl.dot((o_n[None, :] == first[:, None]).to(tl.float16), tl.trans(book)) * codeword_scale
        minus_r = _split_fp16(neg_residual)
        turned_r = _times_i(-minus_r[0]), _times_i(-minus_r[1])
        second = _argmin(_costs(turned_r, book, tl.load(p_term + 2 * BLOCK_N + o_n)), N)
        codeword = tl.dot((o_n[None, :] == second[:, None]).to(tl.float16), tl.trans(book))
        neg_residual += _times_i(codeword) * codeword_scale
        tl.store(p_code, first * N + second, mask=m_t)
        p_book += BLOCK_N * WIDTH
        p_term += 3 * BLOCK_N
        p_table += BLOCK_N * BLOCK_N
        p_step += 1
        p_code += 1


def search_note(size: int, pairs: int, device: torch.device) -> str | None:
    """Why the search of codebooks of N = `size` codewords and g = `pairs` cannot run in a kernel; None if it can."""
    needed, limit = _shared_memory(size, pairs, _SMALL_TILE), shared_memory_limit(device)
    if needed <= limit:
        return None
    need = f"the search of {size} codewords needs {needed} bytes of shared memory"
    return f"keys are encoded in PyTorch: {need}, and the GPU has {limit} per block"


def _shared_memory(size: int, pairs: int, tile: int) -> int:
    """An upper bound of the search's shared memory in bytes.

    With Triton 3.7, it is exact to 512 bytes for tiles of 16 and 32 tokens, N from 64 and g from 32, on compute
    capability 8.0; larger tiles on 9.0 need less.
    """
    rows, width = max(16, power_of_two(size)), max(16, power_of_two(pairs))
    return 8 * width * (rows + 2 * tile) + 512


def search_tile(tokens: int, size: int, pairs: int, device: torch.device) -> dict[str, int]:
    """Tile, warps and stages of the search: small tiles where there are few tokens or large ones do not fit.

    From 64 tokens per tile, products run on Hopper's warp groups, a warp for 16 tokens: 8 warps on 64 tokens would hold
    them twice, and failed on an H200 (illegal memory access, triton 3.6) though no address is out of bounds.
    """
    large = _LARGE_TILES.on(device)["BLOCK_T"]
    fits = _shared_memory(size, pairs, large) <= shared_memory_limit(device)
    block_n = max(16, power_of_two(size))
    return {
        "BLOCK_T": large if fits and tokens > _FEW_TOKENS else _SMALL_TILE, "BLOCK_N": block_n, "BLOCK_B": 8,
        "BLOCK_C": min(_CODEWORDS, block_n), "BLOCK_G": max(16, power_of_two(pairs)), "num_warps": 4, "num_stages": 1,
    }  # fmt: skip


def search(x: Tensor, norms: Tensor, tables: SearchTables, joint: bool, rotary_dim: int) -> Tensor:
    """Codes a * N + b of keys x [batch, num_kv_heads, time, head_dim], int32 [batch * time, problems * stages].

    norms float32 [batch, 1 or num_kv_heads, time], by which keys are divided; 0 makes a key 0. If `joint`, one norm
    serves all heads of a token. RoPE rotates `rotary_dim` channels.
    """
    batch, heads, time, width = x.shape
    problems, pairs = tables.weights.shape
    stages, size = tables.books.shape[1], tables.codebook_size
    codes = torch.empty(batch * time, problems * stages, dtype=torch.int32, device=x.device)
    if search_note(size, pairs, x.device) is not None:
        return _search_in_torch(x, norms, tables, joint, rotary_dim)
    if x.numel():
        tile = search_tile(batch * time, size, pairs, x.device)
        _search_kernel[(cdiv(batch * time, tile["BLOCK_T"]), problems)](
            x, norms, tables.weights, tables.units, tables.pow2_scales,
            tables.books, tables.terms, tables.tables, tables.steps, codes,
            *x.stride()[:3], batch * time, time, heads, (heads * width if joint else width) ** 0.5,
            JOINT=joint, D=width, ROTARY=rotary_dim, STAGES=stages, N=size, G=pairs, **tile,
        )  # fmt: skip
    return codes


def _search_in_torch(x: Tensor, norms: Tensor, tables: SearchTables, joint: bool, rotary_dim: int) -> Tensor:
    """`search` without a kernel, for GPUs whose shared memory is too small for it."""
    heads, width = x.shape[1], x.shape[3]
    problems, pairs = tables.weights.shape
    unit = torch.where(norms.unsqueeze(-1) > 0, x.float() / norms.unsqueeze(-1).clamp_min(TINY), 0.0)
    unit = to_pairs(unit * (heads * width if joint else width) ** 0.5, rotary_dim)
    rows = by_group(unit, problems // heads, 3).permute(1, 3, 0, 2, 4, 5).flatten(0, 1).flatten(1, 2)
    residual = (rows * tables.weights[:, None, :, None]).flatten(-2)
    planes = tables.books[:, :, : tables.codebook_size].float().unflatten(-1, (2, -1))[..., :pairs]
    books = (planes * tables.units[:, None, None, None, :]).transpose(-1, -2).flatten(-2)
    return greedy_codes(residual, books).permute(1, 0, 2).flatten(1).int()
