"""The tokens of a pass of an engine: which requests are one batch, and where codes and exact tokens of each are."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from kvcli.methods.pages import PageTable
from kvcli.paged.rings import AssignedRings, ResidualRings
from kvcli.rope import Rope, Rotation, TokenRotations

_MOST_SCORES = 2**28
"""Scores of a layer that are kept at a time, in float32, for as many requests of a pass."""


def most_rows(length: int, num_heads: int) -> int:
    """Requests of a part at most, where a block table has pages of so many tokens."""
    return max(1, _MOST_SCORES // (length * num_heads))


@dataclass(frozen=True)
class UniformBatch:
    """Requests of a pass that have as many new tokens, so that they are one batch.

    Attributes:
        tokens: the new tokens' places in the pass, int64 [requests, count].
        first: the first of these, if they are in a row; -1 if they are not.
        num_computed_tokens: earlier tokens, int64 [requests].
        num_coded: those of them that are read from codes, int32 [requests].
        ring_slots: rings of the requests, int64 [requests].
        pages: of all tokens.
        rotations: of the tokens of these pages.
        has_codes: whether any token may be read from codes.
    """

    tokens: Tensor
    first: int
    num_computed_tokens: Tensor
    num_coded: Tensor
    ring_slots: Tensor
    pages: PageTable
    rotations: TokenRotations
    has_codes: bool

    def of(self, x: Tensor) -> Tensor:
        """Those of all new tokens x [tokens, ...] that are of these requests, [requests, count, ...]."""
        if self.first < 0:
            return x[self.tokens]
        return x[self.first : self.first + self.tokens.numel()].unflatten(0, self.tokens.shape)

    def visible(self, sinks: int, ring: int) -> Tensor:
        """Which sinks and places of the rings are attended to, boolean [requests, sinks + ring]."""
        last = self.num_computed_tokens.unsqueeze(1) - 1
        sink, place = (torch.arange(count, device=last.device) for count in (sinks, ring))
        token = last - (last - place) % max(ring, 1)
        return torch.cat((sink <= last, token >= self.num_coded.clamp_min(sinks).unsqueeze(1)), 1)


@dataclass(frozen=True)
class Groups:
    """Groups of keys, those that are whole after a pass among them.

    Attributes:
        page, place: where their codes go, int64 [groups].
        is_new: which of their tokens are new, boolean [groups * tokens].
        token: places in the pass of those, and in the rings of others, int64 [groups * tokens].
    """

    page: Tensor
    place: Tensor
    is_new: Tensor
    token: Tensor


@dataclass(frozen=True)
class Batch:
    """The tokens of a pass.

    Attributes:
        parts: the requests.
        stored: which of the new tokens are encoded, int64 [stored]; None: all of them.
        is_blank: which of these are sinks or not stored, boolean [stored]; their codes, which nobody reads, are those
            of zeros.
        dst_page, dst_offset: where these go, int64 [stored].
        rope, positions: of these, int64 [1, stored].
        groups: None where each key is encoded alone, or no group becomes whole.
        sinks: of new tokens that are sinks, page and place, of others below 0, int64 [2, tokens].
        recent: ring slot of each new token, -1 if a later one overwrites it, int64 [1, tokens].
        ring_copies: which ring is copied to which one first, and which new token of another request then follows at
            which place of all rings, -1 if none does, int64 [4, requests].
        encodes_beside: whether tokens may be encoded while others are attended to: nobody reads codes of this pass.
    """

    parts: Sequence[UniformBatch]
    stored: Tensor | None
    is_blank: Tensor | None
    dst_page: Tensor
    dst_offset: Tensor
    rope: Rope
    positions: Tensor
    groups: Groups | None
    sinks: Tensor
    recent: Tensor
    ring_copies: Tensor
    encodes_beside: bool = False

    @cached_property
    def rotation(self) -> Rotation:
        """RoPE of the tokens that are encoded, float32."""
        return self.rope.rotation(self.positions, torch.float32)

    @classmethod
    def of(
        cls,
        query_lens: Sequence[int],
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        rope: Rope,
        *,
        page_size: int,
        group: int,
        sinks: int,
        rings: AssignedRings | ResidualRings,
        null_page: int | None = None,
        most_rows: int = sys.maxsize,
        has_codes: bool = True,
        fused: bool = False,
    ) -> Self:
        """The batch of requests of which each has its new tokens side by side, one request after another.

        Args:
            query_lens: new tokens of each request.
            seq_lens: all tokens of each request, new ones included, int [requests].
            block_table: pages of each request, int [requests, most pages].
            slot_mapping: of the new tokens, int [tokens]; below 0 for those that are not stored.
            group: tokens whose keys are encoded together.
            sinks: tokens at the beginning of each request that are exact.
            rings: of the requests; advanced.
            null_page: a page that nobody reads, for what is not stored, so that nothing waits for the GPU and the pass
                can be captured if all have as many new tokens; None: that is left out.
            most_rows: requests of a part at most.
            has_codes: False if no request has earlier tokens.
            fused: whether kernels find what is captured, where each request has one new token.
        """
        if fused and null_page is not None and {*query_lens} == {1}:
            places = null_page, page_size, group, sinks
            return cls._decoding(seq_lens, block_table, slot_mapping, rope, rings, *places, most_rows, has_codes)
        device, size, lengths, slots = block_table.device, page_size, seq_lens.long(), slot_mapping.long()
        counts, table = query_lens, block_table
        if not all(counts):
            used = torch.tensor([i for i, count in enumerate(counts) if count], device=device)
            counts, lengths, table = [x for x in counts if x], lengths[used], table[used]
        alike = defaultdict[int, list[int]](list)
        for i, count in enumerate(counts):
            alike[count].append(i)
        new, tokens = _constant(counts, device), sum(counts)
        past, stop = (lengths - new).clamp_min(0), new.cumsum(0)
        start = stop - new
        row = torch.arange(len(counts), device=device).repeat_interleave(new, output_size=tokens)
        at = torch.arange(tokens, device=device) - start[row]
        position, written, place = past[row] + at, slots >= 0, slots % size
        page = written_page = (slots // size).where(written, -1)
        last = (past - 1).clamp_min(0) // size
        earlier = table.gather(1, last.unsqueeze(1)).squeeze(1).where(past > 0, -1)
        mine = rings.advance(earlier, page[stop - 1], past, new, page.where(place == 0, -1))
        ring, is_sink = rings.length, written & (position < sinks)
        end = past.index_add(0, row, written.long())  # of what is stored
        recent = (mine.ring[row] * ring + position % max(ring, 1)).where(written & (end[row] - position <= ring), -1)
        new_sinks = torch.stack((page, position)).where(is_sink, -1)
        stored = None if null_page is not None else written.nonzero().squeeze(1)
        is_blank = is_sink | ~written if stored is None else is_sink[stored]
        if null_page is not None:
            page = page.where(written, null_page)
        dst_page, dst_offset, dst_position = (x if stored is None else x[stored] for x in (page, place, position))
        pages, begins = table.int(), [0, *accumulate(counts)]
        token, follows = (stop - 1)[mine.writer], (mine.writer >= 0) & (ring > 0)
        token = token.where(follows, -1)
        slot_place = mine.ring * ring + (past - 1) % max(ring, 1)
        rotations = TokenRotations.first(rope, pages.shape[1] * size, device)
        parts, groups = list[UniformBatch](), list[tuple[Tensor, ...]]()
        for count, same in alike.items():
            for some in (same[i : i + most_rows] for i in range(0, len(same), most_rows)):
                in_a_row = some[-1] - some[0] == len(some) - 1
                of = slice(some[0], some[-1] + 1) if in_a_row else torch.tensor(some, device=device)
                part = UniformBatch(
                    tokens=start[of].unsqueeze(1) + torch.arange(count, device=device),
                    first=begins[some[0]] if in_a_row else -1,
                    num_computed_tokens=past[of],
                    num_coded=mine.num_coded[of].int(),
                    ring_slots=mine.ring[of],
                    pages=PageTable(pages[of], size),
                    rotations=rotations,
                    has_codes=has_codes,
                )
                parts.append(part)
                if group > 1:
                    groups.append(_groups(part, written_page, group, sinks, ring, null_page))
        whole = Groups(*map(torch.cat, zip(*groups, strict=True))) if groups else None
        return cls(
            parts,
            stored,
            is_blank if stored is None or is_blank.any() else None,
            dst_page,
            dst_offset,
            rope,
            dst_position.unsqueeze(0),
            whole if whole is not None and len(whole.page) else None,
            new_sinks,
            recent.unsqueeze(0),
            torch.stack((mine.copy_from, mine.ring, token, slot_place)),
            encodes_beside=null_page is not None and max(counts) == 1 and ring >= group,
        )

    @classmethod
    def _decoding(
        cls, seq_lens: Tensor, table: Tensor, slots: Tensor, rope: Rope, rings: AssignedRings | ResidualRings,
        null_page: int, page_size: int, group: int, sinks: int, most_rows: int, has_codes: bool,
    ) -> Self:  # fmt: skip
        """That of `of` where each request has one new token, found by kernels."""
        from kvcli.paged.batch_kernels import place

        mine, pages = rings.advance_decoding(seq_lens, table, slots, page_size), table.int()
        out, is_blank, is_new, token = place(
            seq_lens, slots, mine.ring, mine.copy_from, mine.writer, null_page,
            page_size=page_size, group=group, sinks=sinks, ring_length=rings.length,
        )  # fmt: skip
        first = torch.arange(len(seq_lens), device=table.device).unsqueeze(1)
        rotations = TokenRotations.first(rope, table.shape[1] * page_size, table.device)
        num_coded = mine.num_coded.int()
        parts = [
            UniformBatch(
                tokens=first[of],
                first=of.start,
                num_computed_tokens=out[0, of],
                num_coded=num_coded[of],
                ring_slots=mine.ring[of],
                pages=PageTable(pages[of], page_size),
                rotations=rotations,
                has_codes=has_codes,
            )
            for of in (slice(i, i + most_rows) for i in range(0, len(seq_lens), most_rows))
        ]
        groups, beside = Groups(out[10], out[11], is_new, token) if group > 1 else None, rings.length >= group
        return cls(
            parts, None, is_blank, out[1], out[2], rope, out[:1], groups, out[3:5], out[5:6], out[6:10], beside
        )  # fmt: skip


def _constant(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers, int64; if all are the same, without a copy from the host."""
    if min(numbers) == max(numbers):
        return torch.full((len(numbers),), numbers[0], device=device)
    return torch.tensor(numbers, device=device)


def _groups(
    part: UniformBatch, pages: Tensor, group: int, sinks: int, ring: int, null_page: int | None
) -> tuple[Tensor, ...]:
    """Fields of the `Groups` of a part; `pages` of all new tokens, below 0 where they are not stored.

    A sink, whose code nobody reads, is encoded as the next token, for the scale.
    """
    count, past = part.tokens.shape[1], part.num_computed_tokens.unsqueeze(1)
    index = past // group + torch.arange(-(-count // group), device=past.device)
    last = (index + 1) * group - 1
    page = pages[part.tokens.gather(1, (last - past).clamp_max(count - 1))]
    whole = (last < past + count) & (page >= 0)
    place = index % (part.pages.page_size // group)
    token = (index * group).unsqueeze(2) + torch.arange(group, device=past.device)
    token = token.maximum(last.clamp_max(sinks).unsqueeze(2))
    new = part.tokens.gather(
        1, (token - part.num_computed_tokens[:, None, None]).clamp(0, count - 1).flatten(1)
    ).view_as(token)
    is_new = token >= past.unsqueeze(2)
    token = new.where(is_new, part.ring_slots[:, None, None] * ring + token % max(ring, 1))
    if null_page is None:
        page, place, is_new, token = page[whole], place[whole], is_new[whole], token[whole]
    else:  # of others zeros, which are in the ring that is nobody's
        page, is_new, token = page.where(whole, null_page), is_new & whole[..., None], token.where(whole[..., None], 0)
    return page.flatten(), place.flatten(), is_new.flatten(), token.flatten()
