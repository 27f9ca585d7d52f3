"""Triton kernels of `paged_reference`: one launch each, whatever the requests of a pass are."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvcli.attention.window_kernels import attend_tile, tile_for
from kvcli.kernels.launch import cdiv, power_of_two, row_major
from kvcli.kernels.pdl import pdl_launch_options, pdl_wait
from kvcli.methods.base import Codes
from kvcli.methods.layer_codec import PartialAttention
from kvcli.paged.batch import UniformBatch
from kvcli.paged.pages import PageFields

_BLOCK = 1024


@triton.jit(do_not_specialize=["table_row", "count", "new"])
def _attend_full_precision_kernel(
    query, key, value, sinks, rings, token, past, closed, slot, table, other_out, other_lse, sink_logits, out,
    q_time, q_head, k_time, k_head, v_time, v_head, s_page, s_token, s_both, s_head, r_ring, r_token, r_both, r_head,
    o_time, o_head, table_row, num_kv_heads, count, new, scaling,
    GROUPS: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_OTHERS: tl.constexpr,
    HAS_LOGITS: tl.constexpr,
):  # fmt: skip
    """softmax(q k^T scaling) v over sinks, ring and new tokens of a request, merged with (out, lse) of others.

    Grid (requests * num_kv_heads, ceil(GROUPS * count / BLOCK_M)); one program: BLOCK_M of the GROUPS * count query
    rows of one kv head. Exact tokens n are the sinks, the places of the ring, and `new` new tokens, in this order.

    Args:
        query: [tokens, num_heads, D] of the model's dtype; key and value with num_kv_heads, in that of the rings.
        sinks: [pages, SINKS, 2, num_kv_heads, D]; rings: [rings, RING, 2, num_kv_heads, D].
        token: int64 [requests, count], places of new tokens in the pass.
        past, slot: int64 [requests], earlier tokens and the ring; closed: int32 [requests], those read from codes.
        table: int32 [requests, pages], stride table_row.
        other_out, other_lse: float32 [requests, num_heads, count, D] and [requests, num_heads, count], if HAS_OTHERS.
        sink_logits: [num_heads], if HAS_LOGITS.
        out: [tokens, num_heads, D], written. q_, k_, v_, s_, r_, o_: strides.
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
    rings += tl.load(slot + i_b) * r_ring + i_h * r_head
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
    if HAS_OTHERS:
        pdl_wait()
        row = (i_b * num_kv_heads * GROUPS + head) * count + time
        b_other_lse = tl.load(other_lse + row, mask=m_m, other=float("-inf"))
        b_other_out = tl.load(other_out + row[:, None] * D + o_d[None, :], mask=m_q, other=0.0)
        top = tl.maximum(b_lse, b_other_lse)
        top = tl.where(top == float("-inf"), 0.0, top)
        w_exact, w_others = tl.exp(b_lse - top), tl.exp(b_other_lse - top)
        total = tl.where(w_exact + w_others > 0, w_exact + w_others, 1.0)
        b_out = (b_out * w_exact[:, None] + b_other_out * w_others[:, None]) / total[:, None]
        b_lse = top + tl.log(total)
    if HAS_LOGITS:
        b_logit = tl.load(sink_logits + head, mask=m_m, other=0.0).to(tl.float32)
        b_out *= tl.sigmoid(b_lse - b_logit)[:, None]
    p_out = out + (at * o_time + head * o_head)[:, None] + o_d[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_q)


def attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, rings: Tensor, part: UniformBatch,
    others: PartialAttention | None, scaling: float, soft_cap: float | None, sink_logits: Tensor | None,
    output: Tensor, *, new: bool,
) -> None:  # fmt: skip
    """As that of `paged_reference`."""
    (requests, count), (_, heads, head_dim), kv_heads = part.tokens.shape, query.shape, key.shape[1]
    query, key, value = row_major(query), row_major(key), row_major(value)
    if query.dtype != rings.dtype:
        query = query.to(rings.dtype)
    groups, table = heads // kv_heads, part.pages.table
    out, lse = (query, query) if others is None else (x.contiguous() for x in others)
    tile = tile_for(groups * count, (max(16, power_of_two(head_dim)),) * 3, query.element_size(), query.device)
    _attend_full_precision_kernel[(requests * kv_heads, cdiv(groups * count, tile["BLOCK_M"]))](
        query, key, value, sinks, rings,
        part.tokens.contiguous(), part.num_computed_tokens, part.num_coded, part.ring_slots, table, out, lse,
        query if sink_logits is None else sink_logits, output,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *sinks.stride()[:4], *rings.stride()[:4],
        *output.stride()[:2], table.stride(0), kv_heads, count, count if new else 0, scaling,
        GROUPS=groups, D=head_dim, SINKS=sinks.shape[1], RING=rings.shape[1],
        BLOCK_D=max(16, power_of_two(head_dim)), **tile, SOFT_CAP=soft_cap or 0.0, HAS_OTHERS=others is not None,
        HAS_LOGITS=sink_logits is not None, **({} if others is None else pdl_launch_options()),
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _select_kernel(
    key, value, stored, is_blank, out, k_time, k_head, v_time, v_head, count, D: tl.constexpr, WIDTH: tl.constexpr,
    HAS_STORED: tl.constexpr, HAS_BLANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies a token's key or value, WIDTH numbers of all heads, to out [2, count, WIDTH]. Grid (count, 2)."""
    i, both = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, kept = i, True
    if HAS_STORED:
        t = tl.load(stored + i)
    if HAS_BLANK:
        kept = tl.load(is_blank + i) == 0
    for start in range(0, WIDTH, BLOCK):
        o = start + tl.arange(0, BLOCK)
        m, head, o_d = o < WIDTH, o // D, o % D
        if both == 0:
            b_x = tl.load(key + t * k_time + head * k_head + o_d, mask=m & kept, other=0.0)
        else:
            b_x = tl.load(value + t * v_time + head * v_head + o_d, mask=m & kept, other=0.0)
        tl.store(out + (both * count + i) * WIDTH + o, b_x, mask=m)


def select(key: Tensor, value: Tensor, stored: Tensor | None, is_blank: Tensor | None) -> tuple[Tensor, Tensor]:
    """As that of `paged_reference`."""
    if stored is None and is_blank is None:
        return key, value
    (tokens, heads, head_dim), key, value = key.shape, row_major(key), row_major(value)
    out = key.new_empty(2, tokens if stored is None else len(stored), heads, head_dim)
    if out.numel():
        _select_kernel[(out.shape[1], 2)](
            key, value, key if stored is None else stored, key if is_blank is None else is_blank, out,
            *key.stride()[:2], *value.stride()[:2], out.shape[1], D=head_dim, WIDTH=heads * head_dim,
            HAS_STORED=stored is not None, HAS_BLANK=is_blank is not None,
            BLOCK=min(_BLOCK, power_of_two(heads * head_dim)), num_warps=4,
        )  # fmt: skip
    return out[0], out[1]


@triton.jit(do_not_specialize=["count"])
def _put_kernel(pages, rows, places, page, group, page_bytes, count, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Copies the bytes of a group's field, for each of its heads, into a page. Grid (count, FIELDS).

    rows and places: of each `Field`. page and group: int64 [count], where it goes.
    """
    i = tl.program_id(0).to(tl.int64)
    pages += tl.load(page + i) * page_bytes
    at = tl.load(group + i)
    for f in tl.static_range(FIELDS):
        if tl.program_id(1) == f:
            start, heads = tl.load(places[f]), tl.load(places[f] + 1)
            head_bytes, size = tl.load(places[f] + 2), tl.load(places[f] + 3)
            for first in range(0, heads * size, BLOCK):
                o = first + tl.arange(0, BLOCK)
                m, head, byte = o < heads * size, o // size, o % size
                b_x = tl.load(rows[f] + (head * count + i) * size + byte, mask=m)
                tl.store(pages + start + head * head_bytes + at * size + byte, b_x, mask=m)


def put(pages: Tensor, page: Tensor, place: Tensor, *codes: tuple[PageFields, Codes]) -> None:
    """As that of `paged_reference`."""
    fields = [field for layout, new in codes for field in layout.fields_of(new, len(page))]
    _put_kernel[(len(page), len(fields))](
        pages, tuple(field.rows for field in fields), tuple(field.place for field in fields), page, place,
        pages.stride(0), len(page), FIELDS=len(fields), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _store_full_precision_kernel(
    key, value, stored, places, k_time, k_head, v_time, v_head, s_page, s_token, s_both, s_head, tokens,
    D: tl.constexpr, WIDTH: tl.constexpr, AXES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a token's key or value, WIDTH numbers of all heads, to its place. Grid (tokens, 2); keys, then values."""
    t, both = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + t)
    if place >= 0:
        if AXES == 2:
            stored += place * s_page
            place = tl.load(places + tokens + t)
        stored += place * s_token + both * s_both
        for start in range(0, WIDTH, BLOCK):
            o = start + tl.arange(0, BLOCK)
            m, head, o_d = o < WIDTH, o // D, o % D
            if both == 0:
                b_x = tl.load(key + t * k_time + head * k_head + o_d, mask=m)
            else:
                b_x = tl.load(value + t * v_time + head * v_head + o_d, mask=m)
            tl.store(stored + head * s_head + o_d, b_x, mask=m)


def store(key: Tensor, value: Tensor, stored: Tensor, places: Tensor) -> None:
    """As that of `paged_reference`."""
    (_, heads, head_dim), (axes, tokens), strides = key.shape, places.shape, stored.stride()
    key, value = row_major(key), row_major(value)
    _store_full_precision_kernel[(tokens, 2)](
        key, value, stored, places, *key.stride()[:2], *value.stride()[:2], strides[0] if axes == 2 else 0,
        *strides[axes - 1 : axes + 2], tokens, D=head_dim, WIDTH=heads * head_dim, AXES=axes,
        BLOCK=min(_BLOCK, power_of_two(heads * head_dim)), num_warps=4,
    )  # fmt: skip


@triton.jit
def _gather_kernel(
    key, recent, is_new, token, out, k_time, k_head, r_token, r_head, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies a token's key, WIDTH numbers of all heads, from the pass or from a ring. Grid (tokens,)."""
    i = tl.program_id(0).to(tl.int64)
    place = tl.load(token + i)
    new = tl.load(is_new + i)
    for start in range(0, WIDTH, BLOCK):
        o = start + tl.arange(0, BLOCK)
        m, head, o_d = o < WIDTH, o // D, o % D
        if new:
            b_x = tl.load(key + place * k_time + head * k_head + o_d, mask=m).to(out.dtype.element_ty)
        else:
            b_x = tl.load(recent + place * r_token + head * r_head + o_d, mask=m)
        tl.store(out + i * WIDTH + o, b_x, mask=m)


def gather(key: Tensor, recent: Tensor, is_new: Tensor, token: Tensor) -> Tensor:
    """As that of `paged_reference`."""
    (_, heads, head_dim), key = key.shape, row_major(key)
    out = recent.new_empty(len(token), heads, head_dim)
    _gather_kernel[(len(token),)](
        key, recent, is_new, token, out, *key.stride()[:2], recent.stride(0), recent.stride(2), D=head_dim,
        WIDTH=heads * head_dim, BLOCK=min(_BLOCK, power_of_two(heads * head_dim)), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _copy_rings_kernel(rings, places, width, requests, BLOCK: tl.constexpr):
    """Copies the ring of a request, `width` numbers, if it is another one's. Grid (requests,)."""
    source = tl.load(places + tl.program_id(0))
    copy = tl.load(places + requests + tl.program_id(0))
    if source != copy:
        for start in range(0, width, BLOCK):
            o = start + tl.arange(0, BLOCK)
            tl.store(rings + copy * width + o, tl.load(rings + source * width + o, mask=o < width), mask=o < width)


def copy_rings(rings: Tensor, places: Tensor) -> None:
    """As that of `paged_reference`."""
    _copy_rings_kernel[(places.shape[1],)](rings, places, rings[0].numel(), places.shape[1], BLOCK=_BLOCK, num_warps=4)
