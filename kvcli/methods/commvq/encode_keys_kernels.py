"""Triton kernels that encode CommVQ's keys (arXiv 2506.18879): norms and packing around the search for codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, norm_unit, power_of_two, row_major
from kvcli.methods.commvq.search_kernels import search
from kvcli.methods.commvq.tables import SearchTables
from kvcli.methods.packing import packed_size


@triton.jit(do_not_specialize=["time"])
def _norm_kernel(
    x, weights, stored, norms, stride_b, stride_h, stride_t, time, per_unit,
    HEADS: tl.constexpr, JOINT: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """L2 norms of weighted keys, over all heads (JOINT) or each.

    Grid (ceil(time / BLOCK_T), batch * (1 if JOINT else HEADS)).
    x [batch, HEADS, time, D] any float, strides of all but the last axis; weights float32 [HEADS, D] of the channels;
    stored float16 and norms float32 [batch, 1 or HEADS, time]; stored norms are multiplied by `per_unit`, and where one
    is 0, so is the other. BLOCK_D = D as a power of two.
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
    """The fields of `CommVQKeyCodes` of keys x [batch, num_kv_heads, time, head_dim].

    If `joint`, one norm serves all heads of a token. RoPE rotates `rotary_dim` channels.
    """
    x = row_major(x)
    stored, norms = _norms(x, tables.channel_weights, joint)
    codes = search(x, norms, tables, joint, rotary_dim)
    n_bits = 2 * (tables.codebook_size - 1).bit_length()
    tokens, count = codes.shape
    width, block = packed_size(count, n_bits), 16
    packed = torch.empty(x.shape[0], 1, x.shape[2], width, dtype=torch.uint8, device=x.device)
    if tokens:
        _pack_kernel[(cdiv(tokens, block),)](
            codes, packed, tokens, COUNT=count, BITS=n_bits, BYTES=width,
            BLOCK_T=block, BLOCK_Y=power_of_two(width), num_warps=4,
        )  # fmt: skip
    return packed, stored.unsqueeze(-1)


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
