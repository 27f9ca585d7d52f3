"""Attention of a pass over the pages of an engine, which hold the codes of their tokens' keys and values.

New tokens of a pass are exact to each other. Of earlier ones, the first (sinks) are exact in bytes of their page, and
the last in a ring per request, those of an open group of keys among them; all others are read from codes, on a GPU by
the method's kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from kvcli.attention.backend import AttentionBackend
from kvcli.attention.reference import merge_state, partial_attention
from kvcli.errors import UsageError
from kvcli.integrations.pages import LayerEncoder
from kvcli.integrations.windows import Windows
from kvcli.methods.base import Codes
from kvcli.methods.layer_codec import EncodedTokens
from kvcli.methods.pages import PageTable, check_page_size
from kvcli.rope import Rope, Rotation, TokenRotations

_MANY = 64
"""New tokens of a request from which on these are attended to apart from its other exact tokens."""


class Page:
    """Where codes are in a layer's pages of `size` tokens: those of keys, of values, and exact sinks.

    Args:
        encoder: of the layer.
        dtype: of exact tokens.
        size: tokens of a page.
        sinks: tokens of a page that can be kept exactly.

    Attributes:
        nbytes: of a page, a multiple of 16.

    Raises:
        UsageError: a size that is no power of two or below 16, groups that do not divide a page, or more sinks.
    """

    def __init__(self, encoder: LayerEncoder, dtype: torch.dtype, size: int, sinks: int) -> None:
        spec, self.size, self.group = encoder.codec.key.spec, size, encoder.codec.key.tokens_per_group
        check_page_size(size)
        if size % self.group:
            raise UsageError(f"pages of {size} tokens are no multiple of {self.group} tokens, whose keys have a scale")
        if size < sinks:
            raise UsageError(f"pages of {size} tokens do not hold {sinks} sinks; choose larger ones")
        self.keys, self.values = encoder.fields(size)
        self._dtype, self._sinks = dtype, (sinks, 2, spec.num_kv_heads, spec.head_dim)
        self._codes = self.keys.nbytes + self.values.nbytes
        self.nbytes = self._codes + -(-sinks * 2 * spec.kv_dim * dtype.itemsize // 16) * 16
        self._views: tuple[Any, Any] = None, None

    def views(self, pages: Tensor) -> tuple[Codes, Codes, Tensor]:
        """Codes of keys, those of values, and exact sinks in pages uint8 [pages, nbytes].

        Sinks are [pages, sinks, 2, num_kv_heads, head_dim], keys after RoPE and values.
        """
        if (seen := (pages.data_ptr(), pages.shape)) == self._views[0]:
            return self._views[1]
        count, both, heads, width = self._sinks
        stop = self._codes + count * both * heads * width * self._dtype.itemsize
        sinks = pages[:, self._codes : stop].view(self._dtype).unflatten(1, self._sinks)
        self._views = seen, (self.keys.view(pages), self.values.view(pages[:, self.keys.nbytes :]), sinks)
        return self._views[1]


@dataclass(frozen=True)
class Part:
    """Requests of a pass that have as many new tokens, so that they are one batch.

    Attributes:
        tokens: the new tokens' places in the pass, int64 [requests, count].
        first: the first of these, if they are in a row; -1 if they are not.
        closed: earlier tokens that are read from codes, int32 [requests].
        first_pages: of the requests, int64 [requests].
        rings: of the requests, int64 [requests].
        visible: which sinks, places of the rings and, of few new tokens, which of these are attended to, boolean
            [requests, count, sinks + ring + count] or [requests, 1, sinks + ring].
        empty: which sinks and places of the rings are not, boolean [requests, sinks + ring, 1, 1, 1].
        pages: of all tokens.
        rotations: of the tokens of these pages.
        has_codes: whether any token is read from codes.
    """

    tokens: Tensor
    first: int
    closed: Tensor
    first_pages: Tensor
    rings: Tensor
    visible: Tensor
    empty: Tensor
    pages: PageTable
    rotations: TokenRotations
    has_codes: bool

    def of(self, x: Tensor) -> Tensor:
        """Those of all new tokens x [tokens, ...] that are of these requests, [requests, count, ...]."""
        requests, count = self.tokens.shape
        if self.first < 0:
            return x[self.tokens]
        return x[self.first : self.first + requests * count].unflatten(0, (requests, count))


@dataclass(frozen=True)
class Groups:
    """The groups of keys that are whole after a pass.

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
        stored: which of the new tokens are encoded, int64 [stored]: none where an engine runs for its own sake.
        hidden: which of these are sinks, boolean [stored]; their codes, which nobody reads, are those of zeros.
        page, place: where these go, int64 [stored].
        rotation: RoPE of these, float32.
        groups: None where each key is encoded alone, or no group becomes whole.
        sinks: which of the new tokens are sinks, their pages, and their places, int64 [3, new sinks].
        recent: which of the new tokens go into rings, and their places in all rings, int64 [2, recent].
        copies: rings that are copied first, from the first to the second.
    """

    parts: Sequence[Part]
    stored: Tensor
    hidden: Tensor | None
    page: Tensor
    place: Tensor
    rotation: Rotation
    groups: Groups | None
    sinks: Tensor
    recent: Tensor
    copies: Sequence[tuple[int, int]]

    @classmethod
    def of(
        cls,
        starts: Sequence[int],
        lengths: Sequence[int],
        table: Tensor,
        slots: Tensor,
        rope: Rope,
        *,
        page_size: int,
        group: int,
        sinks: int,
        windows: Windows,
    ) -> Self:
        """The batch of requests of which each has its new tokens side by side.

        Args:
            starts: where the new tokens of each request begin in the pass, and where the last ones end.
            lengths: all tokens of each request, new ones included.
            table: pages of each request, int [requests, most pages].
            slots: of the new tokens, int [tokens]; below 0 for those that are not stored.
            group: tokens whose keys are encoded together.
            sinks: tokens at the beginning of each request that are exact.
            windows: of the requests; advanced.
        """
        ring, slots = windows.ring, slots.cpu()
        pages, size = (slots // page_size).tolist(), page_size
        requests = [
            _Request(row, start, stop - start, lengths[row] - (stop - start), pages[start] >= 0)
            for row, (start, stop) in enumerate(pairwise(starts))
            if stop > start
        ]
        device, stored = table.device, [x for x in requests if x.is_stored]
        for x in requests:
            x.closed = x.past // group * group
        if ring and stored:
            rows, last = ([x.row for x in stored], [max(x.past - 1, 0) // size for x in stored])
            before = table[torch.tensor(rows, device=device), torch.tensor(last, device=device)].tolist()
            known = [
                (page if x.past else None, list(dict.fromkeys(pages[x.start : x.start + x.count])), x.past, x.count)
                for x, page in zip(stored, before, strict=True)
            ]
            for x, window in zip(stored, windows.advance(known), strict=True):
                x.ring, x.closed = window.slot, windows.closed(window)
        copies, windows.copies = windows.copies, []
        positions = torch.cat([torch.arange(x.past, x.past + x.count) for x in requests])
        encoded = (slots >= 0).nonzero().squeeze(1)
        hidden = positions[encoded] < sinks
        alike = defaultdict[int, list[_Request]](list)
        for x in requests:
            alike[x.count].append(x)
        rotation = rope.rotation(positions[encoded].to(device).unsqueeze(0), torch.float32)
        new_sinks = [
            (x.start + t - x.past, pages[x.start + t - x.past], t)
            for x in stored
            for t in range(x.past, min(sinks, x.past + x.count))
        ]
        recent = [
            (x.start + i, x.ring * ring + (x.past + i) % ring)
            for x in stored
            for i in range(max(0, x.count - ring), x.count)
        ]
        return cls(
            [_part(same, table, rope, size, sinks, ring) for same in alike.values()],
            encoded.to(device),
            hidden.to(device) if hidden.any() else None,
            (slots[encoded] // size).to(device),
            (slots[encoded] % size).to(device),
            rotation,
            _groups(stored, pages, size, group, sinks, ring, device) if group > 1 else None,
            torch.tensor(new_sinks, dtype=torch.int64, device=device).view(-1, 3).T,
            torch.tensor(recent, dtype=torch.int64, device=device).view(-1, 2).T,
            copies,
        )


@dataclass
class _Request:
    """The new tokens [start, start + count) of a pass, after `past` others, of which `closed` are read from codes."""

    row: int
    start: int
    count: int
    past: int
    is_stored: bool
    closed: int = 0
    ring: int = 0


def _part(requests: Sequence[_Request], table: Tensor, rope: Rope, page_size: int, sinks: int, ring: int) -> Part:
    count, device = requests[0].count, table.device
    pages = max(-(-(x.past + count) // page_size) for x in requests)
    numbers = torch.tensor([(x.row, x.start, x.past, x.closed, x.ring) for x in requests], device=device)
    row, start, past, closed, rings = numbers.T
    last = past.unsqueeze(1) - 1
    token = last - (last - torch.arange(ring, device=device)) % max(ring, 1)  # of each place of a ring
    in_ring = token >= closed.clamp_min(sinks).unsqueeze(1)
    exact = torch.cat((torch.arange(sinks, device=device) <= last, in_ring), 1)
    visible = exact.unsqueeze(1)
    if count < _MANY:
        causal = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        visible = torch.cat((visible.expand(-1, count, -1), causal.expand(len(row), -1, -1)), 2)
    blocks = table[row, :pages].int().contiguous()
    return Part(
        tokens=start.unsqueeze(1) + torch.arange(count, device=device),
        first=requests[0].start if all(y.start - x.start == count for x, y in pairwise(requests)) else -1,
        closed=closed.int(),
        first_pages=blocks[:, 0].long(),
        rings=rings,
        visible=visible,
        empty=~exact[:, :, None, None, None],
        pages=PageTable(blocks, page_size),
        rotations=TokenRotations(rope, torch.arange(pages * page_size, device=device).unsqueeze(0)),
        has_codes=any(x.closed > sinks for x in requests),
    )


def _groups(
    requests: Sequence[_Request],
    pages: Sequence[int],
    page_size: int,
    group: int,
    sinks: int,
    ring: int,
    device: torch.device,
) -> Groups | None:
    """The groups that become whole. A sink, whose code nobody reads, is encoded as the next token, for the scale."""
    where, is_new, tokens = [], [], []
    for x in requests:
        first, stop = x.past // group, (x.past + x.count) // group
        where += [
            (pages[x.start + (index + 1) * group - 1 - x.past], index % (page_size // group))
            for index in range(first, stop)
        ]
        token = torch.arange(first * group, stop * group)
        token = token.maximum((token // group * group + group - 1).clamp_max(sinks))
        is_new.append(token >= x.past)
        tokens.append(torch.where(is_new[-1], x.start + token - x.past, x.ring * ring + token % max(ring, 1)))
    if not where:
        return None
    page, place = torch.tensor(where, device=device).T
    return Groups(page, place, torch.cat(is_new).to(device), torch.cat(tokens).to(device))


@dataclass(frozen=True)
class PagedAttention:
    """Attention of one layer: encodes the new tokens of a pass, and attends to them and to earlier ones.

    Attributes:
        backend: with the soft cap.
        scaling: of scores.
        rings: exact recent tokens, keys after RoPE and values, [rings, tokens, 2, num_kv_heads, head_dim]; written.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap).
        sink_logits: [num_heads], which take their share of every softmax and add nothing.
    """

    encoder: LayerEncoder
    backend: AttentionBackend
    scaling: float
    rings: Tensor
    soft_cap: float | None = None
    sink_logits: Tensor | None = None

    def __call__(
        self, page: Page, pages: Tensor, batch: Batch, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> None:
        """Writes the attention of the new tokens to `output`.

        Args:
            page: how the layer's pages are laid out.
            pages: uint8 [pages, bytes], written.
            query: after RoPE, [tokens, num_heads, head_dim], padding at the end.
            key, value: the same of kv heads, [tokens, num_kv_heads, head_dim].
            output: [tokens, num_heads, head_dim], written but for padding.
        """
        keys, values, sinks = page.views(pages)
        for source, copy in batch.copies:
            self.rings[copy] = self.rings[source]
        # all is stored before any is read: a request may share pages that another one fills in this pass
        if len(batch.stored):
            place = batch.page, batch.place
            coded = key[batch.stored], value[batch.stored]
            if (hidden := batch.hidden) is not None:
                coded = coded[0].masked_fill(hidden[:, None, None], 0), coded[1].masked_fill(hidden[:, None, None], 0)
            page.values.put(values, *place, self.encoder.encode_values(coded[1]))
            if page.group == 1:
                page.keys.put(keys, *place, self.encoder.encode_keys(coded[0], batch.rotation))
        rings = self.rings.flatten(0, 1)
        if (groups := batch.groups) is not None:
            old, new = (torch.where(x, groups.token, 0) for x in (~groups.is_new, groups.is_new))
            tokens = torch.where(groups.is_new[:, None, None], key[new], rings[old, 0])
            page.keys.put(keys, groups.page, groups.place, self.encoder.encode_keys(tokens, batch.rotation))
        both = torch.stack((key, value), 1)
        if batch.sinks.numel():
            new_sinks, sink_pages, places = batch.sinks
            sinks[sink_pages, places] = both[new_sinks].to(sinks.dtype)
        for part in batch.parts:
            exact = torch.cat((sinks[part.first_pages], self.rings[part.rings]), 1)
            exact.masked_fill_(part.empty, 0)  # what is not written yet may be NaN
            out = self._attend(keys, values, exact, part, part.of(query).transpose(1, 2), part.of(both)).transpose(1, 2)
            if part.first < 0:
                output[part.tokens] = out.to(output.dtype)
            else:
                part.of(output).copy_(out)
        if batch.recent.numel():
            recent, places = batch.recent
            rings[places] = both[recent].to(rings.dtype)

    def _attend(self, keys: Codes, values: Codes, exact: Tensor, part: Part, query: Tensor, new: Tensor) -> Tensor:
        """Attention of new tokens to themselves and to earlier ones.

        Args:
            keys, values: as of `Page.views`.
            exact: sinks and rings of the requests, [requests, sinks + ring, 2, num_kv_heads, head_dim].
            query: of the new tokens, [requests, num_heads, count, head_dim].
            new: their keys and values, [requests, count, 2, num_kv_heads, head_dim].

        Returns:
            float32 [requests, num_heads, count, head_dim].
        """
        count = query.shape[2]
        if count < _MANY:
            key, value = torch.cat((exact, new.to(exact.dtype)), 1).permute(2, 0, 3, 1, 4)
            state = partial_attention(query, key, value, part.visible, self.scaling, self.soft_cap)
        else:
            key, value = new.permute(2, 0, 3, 1, 4)
            if self.backend.attend_new is not None:
                state = self.backend.attend_new(query, key, value, self.scaling, None)
            else:
                causal = torch.ones(1, count, count, dtype=torch.bool, device=query.device).tril()
                state = partial_attention(query, key, value, causal, self.scaling, self.soft_cap)
            if exact.shape[1]:
                key, value = exact.permute(2, 0, 3, 1, 4)
                old = partial_attention(query, key, value, part.visible, self.scaling, self.soft_cap)
                state = merge_state(state, old)
        if part.has_codes:
            codec = self.encoder.codec
            rotations, skip = part.rotations if codec.needs_rotations else None, exact.shape[1] - self.rings.shape[1]
            encoded = EncodedTokens(keys, None, values, rotations, part.closed, part.pages, skip)
            attend = self.backend.attend_codes if count <= self.backend.max_queries else self.backend.attend_decoded
            state = merge_state(state, attend(codec, query, encoded, self.scaling))
        out, lse = state
        if self.sink_logits is not None:
            out = out * torch.sigmoid(lse - self.sink_logits.float()[:, None]).unsqueeze(-1)
        return out
