"""Triton kernels of `kvcli.paged.reference`: a launch or two each, whatever the requests of a pass are."""

from __future__ import annotations

from itertools import chain

import triton
import triton.language as tl
from torch import Tensor

from kvcli.attention.window_kernels import attend_tile, tile_for
from kvcli.kernels.launch import cdiv, power_of_two, row_major
from kvcli.kernels.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from kvcli.methods.layer_codec import PartialAttention
from kvcli.paged.batch import Batch, UniformBatch
from kvcli.paged.pages import NewCodes

_BLOCK = 1024


@triton.jit(do_not_specialize=["table_row", "count", "new"])
def _attend_full_precision_kernel(
    query, key, value, sinks, rings, token, past, closed, slot, recent, table, out, lse,
    q_time, q_head, k_time, k_head, v_time, v_head, s_page, s_token, s_both, s_head, r_ring, r_token, r_both, r_head,
    table_row, num_kv_heads, count, new, scaling,
    GROUPS: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFT_CAP: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """softmax(q k^T scaling) v over sinks, ring and new tokens of a request.

    STORE: then writes the new tokens to their places in the rings; one program must have all rows of a kv head.

    Grid (requests * num_kv_heads, ceil(GROUPS * count / BLOCK_M)); one program: BLOCK_M of the GROUPS * count query
    rows of one kv head. Exact tokens n are the sinks, the places of the ring, and `new` new tokens, in this order.

    Args:
        query: [tokens, num_heads, D] of the model's dtype; key and value with num_kv_heads, in that of the rings.
        sinks: [pages, SINKS, 2, num_kv_heads, D]; rings: [rings, RING, 2, num_kv_heads, D].
        token: int64 [requests, count], places of new tokens in the pass.
        past, slot: int64 [requests], earlier tokens and the ring; closed: int32 [requests], those read from codes.
        recent: int64 [tokens], places in all rings, below 0 for tokens that are not stored.
        table: int32 [requests, pages], stride table_row.
        out, lse: float32 [requests, num_heads, count, D] and [requests, num_heads, count], written. q_ to r_: strides.
    """
    i_b = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    i_h = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_m, m_d = o_m < GROUPS * count, (o_d < D)[None, :]
    head, time = i_h * GROUPS + o_m // count, o_m % count
    m_q = m_m[:, None] & m_d
    token += i_b * count
    at = tl.load(token + time, mask=m_m, other=0)
    # [M, D]
    b_q = tl.load(query + (at * q_time + head * q_head)[:, None] + o_d[None, :], mask=m_q, other=0.0)
    i_past = tl.load(past + i_b).to(tl.int32)
    oldest = tl.maximum(tl.load(closed + i_b), SINKS)
    sinks += tl.maximum(tl.load(table + i_b * table_row), 0).to(tl.int64) * s_page + i_h * s_head
    stored = rings + i_h * r_head
    rings = stored + tl.load(slot + i_b) * r_ring
    key += i_h * k_head
    value += i_h * v_head
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, SINKS + RING + new, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        i_new = n - SINKS - RING
        m_new = (i_new >= 0) & (i_new < new)
        t = tl.load(token + i_new, mask=m_new, other=0)
        m_n, p_k, p_v = m_new, key + t * k_time, value + t * v_time
        shown = m_new[None, :] & (i_new[None, :] <= time[:, None])
        if SINKS > 0:
            m_sink = (n < SINKS) & (n < i_past)
            p_sink = sinks + n * s_token
            m_n, p_k, p_v = m_n | m_sink, tl.where(m_sink, p_sink, p_k), tl.where(m_sink, p_sink + s_both, p_v)
            shown |= m_sink[None, :]
        if RING > 0:
            place = n - SINKS
            behind = (i_past - 1 - place) % RING
            behind = tl.where(behind < 0, behind + RING, behind)
            m_ring = (place >= 0) & (place < RING) & (i_past - 1 - behind >= oldest)
            p_ring = rings + place * r_token
            m_n, p_k, p_v = m_n | m_ring, tl.where(m_ring, p_ring, p_k), tl.where(m_ring, p_ring + r_both, p_v)
            shown |= m_ring[None, :]
        # [N, D]
        b_k = tl.load(p_k[:, None] + o_d[None, :], mask=m_n[:, None] & m_d, other=0.0)
        b_v = tl.load(p_v[:, None] + o_d[None, :], mask=m_n[:, None] & m_d, other=0.0)
        b_max, b_sum, b_acc = attend_tile(b_q, b_q, b_k, b_v, shown, b_max, b_sum, b_acc, scaling, False, SOFT_CAP)
    b_lse = tl.where(b_sum > 0, b_max + tl.log(tl.maximum(b_sum, 1e-30)), float("-inf"))
    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    row = (i_b * num_kv_heads * GROUPS + head) * count + time
    tl.store(lse + row, b_lse, mask=m_m)
    tl.store(out + row[:, None] * D + o_d[None, :], b_out, mask=m_q)
    if STORE:
        tl.debug_barrier()  # a new token may take the place of one that was attended to
        for i in range(count):
            t = tl.load(token + i)
            place = tl.load(recent + t)
            p_stored, m_stored = stored + place * r_token + o_d, (o_d < D) & (place >= 0)
            tl.store(p_stored, tl.load(key + t * k_time + o_d, mask=m_stored), mask=m_stored)
            tl.store(p_stored + r_both, tl.load(value + t * v_time + o_d, mask=m_stored), mask=m_stored)


def attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, rings: Tensor, part: UniformBatch, recent: Tensor,
    state: PartialAttention, scaling: float, soft_cap: float | None, *, new: bool,
) -> None:  # fmt: skip
    """As that of `kvcli.paged.reference`."""
    (requests, count), (_, heads, head_dim), kv_heads = part.tokens.shape, query.shape, key.shape[1]
    query, key, value = row_major(query), row_major(key), row_major(value)
    if query.dtype != rings.dtype:
        query = query.to(rings.dtype)
    groups, table, tokens = heads // kv_heads, part.pages.table, part.tokens.contiguous()
    width, exact = max(16, power_of_two(head_dim)), sinks.shape[1] + rings.shape[1] + count
    tile = tile_for(groups * count, (width,) * 3, query.element_size(), query.device, tokens=exact)
    blocks = cdiv(groups * count, tile["BLOCK_M"])
    _attend_full_precision_kernel[(requests * kv_heads, blocks)](
        query, key, value, sinks, rings,
        tokens, part.num_computed_tokens, part.num_coded, part.ring_slots, recent, table, *state,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *sinks.stride()[:4], *rings.stride()[:4],
        table.stride(0), kv_heads, count, count if new else 0, scaling,
        GROUPS=groups, D=head_dim, SINKS=sinks.shape[1], RING=rings.shape[1],
        BLOCK_D=width, **tile, SOFT_CAP=soft_cap or 0.0, STORE=rings.shape[1] > 0 and blocks == 1,
    )  # fmt: skip
    if rings.shape[1] and blocks > 1:
        _store_kernel[(tokens.numel(), 2)](
            key, value, rings, tokens, recent, *key.stride()[:2], *value.stride()[:2], *rings.stride()[1:4],
            D=head_dim, WIDTH=kv_heads * head_dim, BLOCK=_block(kv_heads * head_dim), num_warps=4,
        )  # fmt: skip


@triton.jit
def _merge_kernel(
    exact_out, exact_lse, other_out, other_lse, sink_logits, token, out, o_time, o_head, count,
    HEADS: tl.constexpr, D: tl.constexpr, HAS_OTHERS: tl.constexpr, HAS_LOGITS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merges attention to exact tokens with that to others. Grid (requests * count, ceil(HEADS / BLOCK_H)).

    Args:
        exact_out, exact_lse, other_out, other_lse: float32 [requests, HEADS, count, D] and [requests, HEADS, count];
            the latter two, if HAS_OTHERS.
        sink_logits: [HEADS], if HAS_LOGITS.
        token: int64 [requests, count], places of new tokens in the pass.
        out: [tokens, HEADS, D], strides o_, written.
    """
    i = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, BLOCK_D)
    m_h, m = head < HEADS, (head < HEADS)[:, None] & (o_d < D)[None, :]
    row = (i // count * HEADS + head) * count + i % count
    at = row[:, None] * D + o_d[None, :]
    b_lse, b_out = tl.load(exact_lse + row, mask=m_h, other=0.0), tl.load(exact_out + at, mask=m, other=0.0)
    if HAS_OTHERS:
        b_other_lse = tl.load(other_lse + row, mask=m_h, other=0.0)
        b_other_out = tl.load(other_out + at, mask=m, other=0.0)
        top = tl.maximum(b_lse, b_other_lse)
        top = tl.where(top == float("-inf"), 0.0, top)
        w_exact, w_others = tl.exp(b_lse - top), tl.exp(b_other_lse - top)
        total = tl.where(w_exact + w_others > 0, w_exact + w_others, 1.0)
        b_out = (b_out * w_exact[:, None] + b_other_out * w_others[:, None]) / total[:, None]
        b_lse = top + tl.log(total)
    if HAS_LOGITS:
        b_logit = tl.load(sink_logits + head, mask=m_h, other=0.0).to(tl.float32)
        b_out *= tl.sigmoid(b_lse - b_logit)[:, None]
    p_out = out + tl.load(token + i) * o_time + (head * o_head)[:, None] + o_d[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m)


def merge(
    part: UniformBatch, exact: PartialAttention, others: PartialAttention | None, sink_logits: Tensor | None,
    output: Tensor,
) -> None:  # fmt: skip
    """As that of `kvcli.paged.reference`."""
    (_, heads, count, head_dim), tokens = exact[0].shape, part.tokens.contiguous()
    block_h = min(8, power_of_two(heads))
    _merge_kernel[(tokens.numel(), cdiv(heads, block_h))](
        *exact, *(exact if others is None else [x.contiguous() for x in others]),
        exact[1] if sink_logits is None else sink_logits, tokens, output, *output.stride()[:2], count,
        HEADS=heads, D=head_dim, HAS_OTHERS=others is not None, HAS_LOGITS=sink_logits is not None,
        BLOCK_H=block_h, BLOCK_D=power_of_two(head_dim), num_warps=4,
    )  # fmt: skip


def _block(width: int) -> int:
    return min(_BLOCK, power_of_two(width))


@triton.jit
def _load_token(key, value, of_values, t, head, o_d, k_time, k_head, v_time, v_head, mask):
    """Channels o_d of heads of the key of token t, or of its value."""
    if of_values:
        b_x = tl.load(value + t * v_time + head * v_head + o_d, mask=mask, other=0.0)
    else:
        b_x = tl.load(key + t * k_time + head * k_head + o_d, mask=mask, other=0.0)
    return b_x


@triton.jit
def _store_kernel(
    key, value, rings, token, recent, k_time, k_head, v_time, v_head, r_token, r_both, r_head,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a token's key or value, WIDTH numbers of all heads, to its place in the rings. Grid (tokens, 2)."""
    t, of_values = tl.load(token + tl.program_id(0)), tl.program_id(1)
    place = tl.load(recent + t)
    if place >= 0:
        rings += place * r_token + of_values * r_both
        for start in range(0, WIDTH, BLOCK):
            o = start + tl.arange(0, BLOCK)
            m, head, o_d = o < WIDTH, o // D, o % D
            b_x = _load_token(key, value, of_values, t, head, o_d, k_time, k_head, v_time, v_head, m)
            tl.store(rings + head * r_head + o_d, b_x, mask=m)


@triton.jit(do_not_specialize=["tokens", "selected", "requests"])
def _prepare_kernel(
    key, value, sinks, sink_places, rings, ring_copies, stored, is_blank, out,
    k_time, k_head, v_time, v_head, s_page, s_token, s_both, s_head, r_token, r_both, r_head,
    tokens, selected, requests, ring_size,
    D: tl.constexpr, WIDTH: tl.constexpr, HAS_STORED: tl.constexpr, HAS_BLANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a new token, WIDTH numbers of all heads: its key or value to its place in `sinks`, if it is a sink, and that
    of an encoded one to out [2, selected, WIDTH]; of a request its ring, ring_size numbers, if it is another one's,
    and the other one's new token, if that follows.

    Grid (tokens, 3): keys, values, rings.
    """
    pdl_launch_dependents()
    i, role = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if role == 2:
        if i < requests:
            source, copy = tl.load(ring_copies + i), tl.load(ring_copies + requests + i)
            if source != copy:
                for start in range(0, ring_size, BLOCK):
                    o = start + tl.arange(0, BLOCK)
                    b_x = tl.load(rings + source * ring_size + o, mask=o < ring_size)
                    tl.store(rings + copy * ring_size + o, b_x, mask=o < ring_size)
                t = tl.load(ring_copies + 2 * requests + i)
                if t >= 0:
                    tl.debug_barrier()  # its place was copied as well
                    rings += tl.load(ring_copies + 3 * requests + i) * r_token
                    for both in tl.static_range(2):
                        for start in range(0, WIDTH, BLOCK):
                            o = start + tl.arange(0, BLOCK)
                            m, head, o_d = o < WIDTH, o // D, o % D
                            b_x = _load_token(key, value, both, t, head, o_d, k_time, k_head, v_time, v_head, m)
                            p_x = rings + both * r_both + head * r_head + o_d
                            tl.store(p_x, b_x.to(rings.dtype.element_ty), mask=m)
    else:
        page = tl.load(sink_places + i)
        t, kept = i, i < selected
        if HAS_STORED:
            t = tl.load(stored + i, mask=kept, other=0)
        if HAS_BLANK:
            is_kept = tl.load(is_blank + i, mask=kept, other=1) == 0
        else:
            is_kept = kept
        for start in range(0, WIDTH, BLOCK):
            o = start + tl.arange(0, BLOCK)
            m, head, o_d = o < WIDTH, o // D, o % D
            b_x = _load_token(key, value, role, t, head, o_d, k_time, k_head, v_time, v_head, m & is_kept)
            tl.store(out + (role * selected + i) * WIDTH + o, b_x, mask=m & kept)
            if page >= 0:
                p_sink = sinks + page * s_page + tl.load(sink_places + tokens + i) * s_token + role * s_both
                b_x = _load_token(key, value, role, i, head, o_d, k_time, k_head, v_time, v_head, m)
                tl.store(p_sink + head * s_head + o_d, b_x.to(sinks.dtype.element_ty), mask=m)


def prepare(key: Tensor, value: Tensor, sinks: Tensor, rings: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """As that of `kvcli.paged.reference`."""
    (tokens, heads, head_dim), key, value = key.shape, row_major(key), row_major(value)
    stored, is_blank, copies = batch.stored, batch.is_blank, batch.ring_copies
    as_they_are = stored is None and is_blank is None
    selected = tokens if stored is None else len(stored)
    out = key.new_empty(2, 0 if as_they_are else selected, heads, head_dim)
    _prepare_kernel[(tokens, 3)](
        key, value, sinks, batch.sinks, rings, copies, key if stored is None else stored,
        key if is_blank is None else is_blank, out, *key.stride()[:2], *value.stride()[:2], *sinks.stride()[:4],
        *rings.stride()[1:4], tokens, out.shape[1], copies.shape[1], rings[0].numel(), D=head_dim,
        WIDTH=heads * head_dim, HAS_STORED=stored is not None, HAS_BLANK=is_blank is not None,
        BLOCK=_block(heads * head_dim), num_warps=4,
    )  # fmt: skip
    return (key, value) if as_they_are else (out[0], out[1])


@triton.jit(do_not_specialize=["count", "other_count"])
def _put_kernel(
    pages, rows, places, page, group, other_page, other_group, page_bytes, count, other_count,
    FIELDS: tl.constexpr, ALL_FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies the bytes of a group's field, for each of its heads, into a page. Grid (groups, ALL_FIELDS).

    rows and places: of each `Field`. page and group: int64 [count], where groups of the first FIELDS go, and others.
    """
    pdl_launch_dependents()
    i = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) >= FIELDS:
        page, group, count = other_page, other_group, other_count
    if i < count:
        pages += tl.load(page + i) * page_bytes
        at = tl.load(group + i)
        pdl_wait()
        for f in tl.static_range(ALL_FIELDS):
            if tl.program_id(1) == f:
                start, heads = tl.load(places[f]), tl.load(places[f] + 1)
                head_bytes, size = tl.load(places[f] + 2), tl.load(places[f] + 3)
                for first in range(0, heads * size, BLOCK):
                    o = first + tl.arange(0, BLOCK)
                    m, head, byte = o < heads * size, o // size, o % size
                    b_x = tl.load(rows[f] + (head * count + i) * size + byte, mask=m)
                    tl.store(pages + start + head * head_bytes + at * size + byte, b_x, mask=m)


def put(pages: Tensor, *new: NewCodes) -> None:
    """As that of `kvcli.paged.reference`."""
    fields = [[*x.layout.fields_of(x.codes, len(x.page))] for x in new]
    flat, (first, last), counts = [*chain(*fields)], (new[0], new[-1]), [len(x.page) for x in new]
    _put_kernel[(max(counts), len(flat))](
        pages, tuple(field.rows for field in flat), tuple(field.place for field in flat), first.page, first.place,
        last.page, last.place, pages.stride(0), counts[0], counts[-1], FIELDS=len(fields[0]), ALL_FIELDS=len(flat),
        BLOCK=_BLOCK, num_warps=4, **pdl_launch_options(),
    )  # fmt: skip


@triton.jit
def _gather_kernel(
    key, recent, is_new, token, out, k_time, k_head, r_token, r_head, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies a token's key, WIDTH numbers of all heads, from the pass or from a ring. Grid (tokens,)."""
    pdl_launch_dependents()
    i = tl.program_id(0).to(tl.int64)
    place = tl.load(token + i)
    new = tl.load(is_new + i)
    pdl_wait()
    for start in range(0, WIDTH, BLOCK):
        o = start + tl.arange(0, BLOCK)
        m, head, o_d = o < WIDTH, o // D, o % D
        if new:
            b_x = tl.load(key + place * k_time + head * k_head + o_d, mask=m).to(out.dtype.element_ty)
        else:
            b_x = tl.load(recent + place * r_token + head * r_head + o_d, mask=m)
        tl.store(out + i * WIDTH + o, b_x, mask=m)


def gather(key: Tensor, recent: Tensor, is_new: Tensor, token: Tensor) -> Tensor:
    """As that of `kvcli.paged.reference`."""
    (_, heads, head_dim), key = key.shape, row_major(key)
    out = recent.new_empty(len(token), heads, head_dim)
    _gather_kernel[(len(token),)](
        key, recent, is_new, token, out, *key.stride()[:2], recent.stride(0), recent.stride(2), D=head_dim,
        WIDTH=heads * head_dim, BLOCK=_block(heads * head_dim), num_warps=4, **pdl_launch_options(),
    )  # fmt: skip
    return out
