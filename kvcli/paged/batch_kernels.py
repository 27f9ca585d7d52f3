"""Triton kernels of `kvcli.paged.batch` and `kvcli.paged.rings`, of a pass in which each request has one new token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import power_of_two

_FEW, _MANY = 16, 64
"""Requests, or rings, that are compared at a time."""


@triton.jit
def _tokens(i, seq_lens, table, slots, table_row, requests, PAGE: tl.constexpr):
    """Of requests i, int64: earlier tokens, pages of the new and of the last earlier one, -1 if there is none."""
    m = i < requests
    past = tl.maximum(tl.load(seq_lens + i, mask=m, other=0).to(tl.int64) - 1, 0)
    slot = tl.load(slots + i, mask=m, other=-1).to(tl.int64)
    p_table = table + i.to(tl.int64) * table_row + tl.maximum(past - 1, 0) // PAGE
    return past, tl.where(slot >= 0, slot // PAGE, -1), tl.load(p_table, mask=m & (past > 0), other=-1).to(tl.int64)


@triton.jit(do_not_specialize=["requests", "rings", "table_row", "residual", "group"])
def _advance_kernel(
    seq_lens, table, slots, state, passes, lost, source, rank, begins, copied, order, ring, copy_from, writer,
    num_coded, requests, rings, table_row, residual, group,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, RINGS: tl.constexpr,
):  # fmt: skip
    """`ResidualRings.advance` of requests with a new token each. Grid (1,): BLOCK requests and RINGS rings at a time.

    Args:
        seq_lens: int [requests], new tokens included; table: int32 [requests, pages], stride table_row; slots: int64
            [requests], below 0 for tokens that are not stored.
        state: int64 [4, rings], passes: int64 [], lost: bool [], as of `ResidualRings`; written.
        source, rank, begins, copied: int64 [requests], order: int64 [rings], to work in.
        ring, copy_from, writer: int64 [requests], num_coded: int32 [requests], written.
    """
    first, length, used = state + rings, state + 2 * rings, state + 3 * rings
    # what another request had in a page that is begun is gone
    for r_0 in range(0, rings, RINGS):
        r = r_0 + tl.arange(0, RINGS)
        page = tl.load(state + r, mask=r < rings, other=-2)
        gone = tl.zeros([RINGS], tl.int32)
        for i_0 in range(0, requests, BLOCK):
            i = i_0 + tl.arange(0, BLOCK)
            slot = tl.load(slots + i, mask=i < requests, other=-1).to(tl.int64)
            begun = tl.where((slot >= 0) & (slot % PAGE == 0), slot // PAGE, -1)
            gone = tl.maximum(gone, tl.max((page[None, :] == begun[:, None]).to(tl.int32), 0))
        tl.store(state + r, -1, mask=gone > 0)
    tl.debug_barrier()
    # the first ring that each request knows
    for i_0 in range(0, requests, BLOCK):
        i = i_0 + tl.arange(0, BLOCK)
        past, last, earlier = _tokens(i, seq_lens, table, slots, table_row, requests, PAGE)
        asked = (earlier >= 0) & (last >= 0)
        b_source = tl.full([BLOCK], 0, tl.int64) + rings
        for r_0 in range(0, rings, RINGS):
            r = r_0 + tl.arange(0, RINGS)
            page = tl.load(state + r, mask=r < rings, other=-2)
            tokens = tl.load(length + r, mask=r < rings, other=-2)
            known = asked[:, None] & (page[None, :] == earlier[:, None]) & (tokens[None, :] == past[:, None])
            b_source = tl.minimum(b_source, tl.min(tl.where(known, r[None, :], rings), 1).to(tl.int64))
        tl.store(source + i, b_source, mask=i < requests)
    tl.debug_barrier()
    # the first request that knows a ring has it, -2; others are counted, since they take free rings in turn
    step = tl.load(passes) + 1
    asking = tl.full([], 0, tl.int64)
    any_lost = tl.full([], 0, tl.int32)
    for i_0 in range(0, requests, BLOCK):
        i = i_0 + tl.arange(0, BLOCK)
        past, last, earlier = _tokens(i, seq_lens, table, slots, table_row, requests, PAGE)
        b_source = tl.load(source + i, mask=i < requests, other=rings)
        found, stored = b_source < rings, last >= 0
        taken = tl.zeros([BLOCK], tl.int32)
        b_writer = tl.zeros([BLOCK], tl.int32) + requests
        for j_0 in range(0, requests, BLOCK):
            j = j_0 + tl.arange(0, BLOCK)
            its_past, its_last, _ = _tokens(j, seq_lens, table, slots, table_row, requests, PAGE)
            its_source = tl.load(source + j, mask=j < requests, other=-1)
            same = (its_source[None, :] == b_source[:, None]) & (j[None, :] < i[:, None])
            taken = tl.maximum(taken, tl.max(same.to(tl.int32), 1))
            fills = (its_last[None, :] == earlier[:, None]) & (its_past[None, :] + 1 == past[:, None])
            fills = fills & ((earlier >= 0) & stored)[:, None] & (j < requests)[None, :]
            b_writer = tl.minimum(b_writer, tl.min(tl.where(fills, j[None, :], requests), 1))
        mine = found & (taken == 0)
        other = (stored & ~mine).to(tl.int64)
        b_rank = tl.where(other > 0, asking + tl.cumsum(other, 0) - 1, tl.where(mine, -2, -1))
        asking += tl.sum(other, 0)
        any_lost = tl.maximum(any_lost, tl.max((stored & ~found & (past % group > 0)).to(tl.int32), 0))
        tl.store(rank + i, b_rank, mask=i < requests)
        tl.store(writer + i, tl.where(b_writer < requests, b_writer, -1).to(tl.int64), mask=i < requests)
        tl.store(used + tl.where(mine, b_source, 0), step + tl.zeros([BLOCK], tl.int64), mask=i < requests)
    tl.debug_barrier()
    # rings in the order of their last use
    if asking > 0:
        for r_0 in range(0, rings, RINGS):
            r = r_0 + tl.arange(0, RINGS)
            mine_used = tl.load(used + r, mask=r < rings, other=0)
            before = tl.zeros([RINGS], tl.int32)
            for s_0 in range(0, rings, RINGS):
                s = s_0 + tl.arange(0, RINGS)
                its_used = tl.load(used + s, mask=s < rings, other=0)
                earlier_used = its_used[None, :] < mine_used[:, None]
                earlier_used |= (its_used[None, :] == mine_used[:, None]) & (s[None, :] < r[:, None])
                before += tl.sum((earlier_used & (s < rings)[None, :]).to(tl.int32), 1)
            tl.store(order + before, r.to(tl.int64), mask=r < rings)
    tl.debug_barrier()
    for i_0 in range(0, requests, BLOCK):
        i = i_0 + tl.arange(0, BLOCK)
        m = i < requests
        past, _, _ = _tokens(i, seq_lens, table, slots, table_row, requests, PAGE)
        b_source, b_rank = tl.load(source + i, mask=m, other=rings), tl.load(rank + i, mask=m, other=-1)
        found = b_source < rings
        free = tl.load(order + tl.minimum(b_rank, rings - 1), mask=b_rank >= 0, other=0)
        b_ring = tl.where(b_rank == -2, b_source, free)
        tl.store(ring + i, b_ring, mask=m)
        tl.store(begins + i, tl.load(first + b_source, mask=found, other=0) + tl.where(found, 0, past), mask=m)
        tl.store(copied + i, tl.where(found, b_source, b_ring), mask=m)
    tl.debug_barrier()
    for i_0 in range(0, requests, BLOCK):
        i = i_0 + tl.arange(0, BLOCK)
        m = i < requests
        past, last, _ = _tokens(i, seq_lens, table, slots, table_row, requests, PAGE)
        b_writer, b_ring = tl.load(writer + i, mask=m, other=-1), tl.load(ring + i, mask=m, other=0)
        at = tl.where(b_writer >= 0, b_writer, i)
        begin = tl.load(begins + at, mask=m, other=0)
        tl.store(copy_from + i, tl.load(copied + at, mask=m, other=0), mask=m)
        tl.store(num_coded + i, (tl.maximum(begin, past - residual) // group * group).to(tl.int32), mask=m)
        tl.store(state + b_ring, last, mask=m)
        tl.store(first + b_ring, begin, mask=m)
        tl.store(length + b_ring, past + 1, mask=m)
        tl.store(used + b_ring, step + tl.zeros([BLOCK], tl.int64), mask=m)
    tl.store(passes, step)
    if any_lost > 0:
        tl.store(lost, True)


def advance(
    seq_lens: Tensor, table: Tensor, slots: Tensor, page_size: int, state: Tensor, passes: Tensor, lost: Tensor,
    residual: int, group: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Ring, copy_from, writer and num_coded of `kvcli.paged.rings.Rings`, of requests with a new token each."""
    requests, rings = len(seq_lens), state.shape[1]
    rows = state.new_empty(7, requests + requests % 2)[:, :requests]  # aligned alike: no kernel for odd numbers
    source, rank, begins, copied, ring, copy_from, writer = rows
    order, num_coded = state.new_empty(rings), seq_lens.new_empty(requests, dtype=torch.int32)
    _advance_kernel[(1,)](
        seq_lens, table, slots, state, passes, lost, source, rank, begins, copied, order, ring, copy_from, writer,
        num_coded, requests, rings, table.stride(0), residual, group, PAGE=page_size,
        BLOCK=_FEW if requests <= _FEW else _MANY, RINGS=_MANY, num_warps=4,
    )  # fmt: skip
    return ring, copy_from, writer, num_coded


@triton.jit(do_not_specialize=["requests", "null_page"])
def _place_kernel(
    seq_lens, slots, ring, copy_from, writer, out, is_blank, group_page, is_new, token, requests, null_page,
    PAGE: tl.constexpr, GROUP: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Where the new token of a request goes. Grid (requests,).

    Args:
        seq_lens, slots: as of `_advance_kernel`; ring, copy_from, writer: int64 [requests].
        out: int64 [10, requests], written: earlier tokens, then of `Batch` dst_page, dst_offset, sinks (2), recent and
            ring_copies (4).
        is_blank: bool [requests], written.
        group_page: int64 [2, requests], page and place of `Groups`; is_new: bool [requests, GROUP]; token: int64
            [requests, GROUP]; written if GROUP > 1.
    """
    i = tl.program_id(0).to(tl.int64)
    past = tl.maximum(tl.load(seq_lens + i).to(tl.int64) - 1, 0)
    slot = tl.load(slots + i).to(tl.int64)
    b_ring, b_writer = tl.load(ring + i), tl.load(writer + i)
    stored = slot >= 0
    page = tl.where(stored, slot // PAGE, -1)
    place = tl.where(stored, slot % PAGE, PAGE - 1)
    is_sink = stored & (past < SINKS)
    tl.store(out + i, past)
    tl.store(out + requests + i, tl.where(stored, page, null_page))
    tl.store(out + 2 * requests + i, place)
    tl.store(out + 3 * requests + i, tl.where(is_sink, page, -1))
    tl.store(out + 4 * requests + i, tl.where(is_sink, past, -1))
    tl.store(is_blank + i, is_sink | (slot < 0))
    tl.store(out + 6 * requests + i, tl.load(copy_from + i))
    tl.store(out + 7 * requests + i, b_ring)
    first_of_ring = b_ring * RING
    if RING > 0:
        before = tl.where(past > 0, (past - 1) % RING, RING - 1)
        tl.store(out + 5 * requests + i, tl.where(stored, first_of_ring + past % RING, -1))
        tl.store(out + 8 * requests + i, b_writer)
        tl.store(out + 9 * requests + i, first_of_ring + before)
    else:
        tl.store(out + 5 * requests + i, -1)
        tl.store(out + 8 * requests + i, -1)
        tl.store(out + 9 * requests + i, 0)
    if GROUP > 1:
        o_g = tl.arange(0, BLOCK_G)
        m_g = o_g < GROUP
        begin = past // GROUP * GROUP
        whole = stored & (past == begin + GROUP - 1)
        # a sink, whose code nobody reads, is encoded as the next token, for the scale
        t = tl.maximum(begin + o_g, tl.minimum(begin + GROUP - 1, SINKS))
        new = t >= past
        at = tl.where(new, i, first_of_ring + t % RING)
        tl.store(is_new + i * GROUP + o_g, new & whole, mask=m_g)
        tl.store(token + i * GROUP + o_g, tl.where(whole, at, 0), mask=m_g)
        tl.store(group_page + i, tl.where(whole, page, null_page))
        tl.store(group_page + requests + i, past // GROUP % (PAGE // GROUP))


def place(
    seq_lens: Tensor, slots: Tensor, ring: Tensor, copy_from: Tensor, writer: Tensor, null_page: int, *,
    page_size: int, group: int, sinks: int, ring_length: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`out` and `group_page` as one tensor, is_blank, is_new and token of `_place_kernel`."""
    requests = len(seq_lens)
    out, token = ring.new_empty(12, requests), ring.new_empty(requests * group)
    is_blank, is_new = (ring.new_empty(count, dtype=torch.bool) for count in (requests, requests * group))
    _place_kernel[(requests,)](
        seq_lens, slots, ring, copy_from, writer, out, is_blank, out[10:], is_new, token, requests,
        null_page, PAGE=page_size, GROUP=group, SINKS=sinks, RING=ring_length, BLOCK_G=power_of_two(group), num_warps=1,
    )  # fmt: skip
    return out, is_blank, is_new, token
