"""Attention of a pass over the pages of an engine, which hold the codes of their tokens' keys and values.

New tokens of a pass are exact to each other; all earlier ones are read from codes, on a GPU by the method's kernels.
There are no sinks and no residual window. Where keys are encoded in groups, those of the last group are exact until it
is whole, in bytes of its page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from kvcli.attention.backend import AttentionBackend
from kvcli.attention.reference import merge_state, partial_attention
from kvcli.errors import UsageError
from kvcli.integrations.pages import LayerEncoder
from kvcli.methods.base import Codes
from kvcli.methods.layer_codec import EncodedTokens
from kvcli.methods.pages import PageTable, check_page_size
from kvcli.rope import Rope, Rotation, TokenRotations


class Page:
    """Where codes are in a layer's pages of `size` tokens: those of keys, of values, and exact keys of an open group.

    Args:
        encoder: of the layer.
        dtype: of exact keys.
        size: tokens of a page.

    Attributes:
        nbytes: of a page, a multiple of 16.

    Raises:
        UsageError: a size that is no power of two or below 16, or groups that do not divide a page.
    """

    def __init__(self, encoder: LayerEncoder, dtype: torch.dtype, size: int) -> None:
        codec = encoder.codec
        self.size, self.group = size, codec.key.tokens_per_group
        check_page_size(size)
        if size % self.group:
            raise UsageError(f"pages of {size} tokens are no multiple of {self.group} tokens, whose keys have a scale")
        self.groups = size // self.group
        self.keys, self.values = encoder.fields(size)
        self._exact = self.group if self.group > 1 else 0, codec.key.spec.kv_dim * dtype.itemsize
        self.nbytes = self.keys.nbytes + self.values.nbytes + -(-self._exact[0] * self._exact[1] // 16) * 16

    def views(self, pages: Tensor) -> tuple[Codes, Codes, Tensor]:
        """Codes of keys and of values, and exact keys, uint8 [pages, tokens, bytes], in pages uint8 [pages, nbytes]."""
        start, (count, width) = self.keys.nbytes + self.values.nbytes, self._exact
        exact = pages[:, start : start + count * width].unflatten(1, (count, width))
        return self.keys.view(pages), self.values.view(pages[:, self.keys.nbytes :]), exact


@dataclass(frozen=True)
class Part:
    """Requests of a pass that have as many new tokens and as many keys in an open group, so that they are one batch.

    Attributes:
        tokens: the new tokens' places in the pass, int64 [requests, count].
        past: earlier tokens, int32 [requests].
        open_keys: how many of these have exact keys.
        pages: of all tokens.
        rotations: of the tokens of these pages.
        is_stored: whether the new tokens have slots.
        has_codes: whether there are earlier tokens in whole groups.
    """

    tokens: Tensor
    past: Tensor
    open_keys: int
    pages: PageTable
    rotations: TokenRotations
    is_stored: bool
    has_codes: bool

    def at(self, first: Tensor, count: int, per_page: int) -> tuple[Tensor, Tensor]:
        """Where tokens, or groups, `first` [requests] to first + count - 1 are, of which a page has `per_page`.

        Returns:
            Pages, and places in these, int64 [requests * count].
        """
        index = first.long().unsqueeze(1) + torch.arange(count, device=first.device)
        return self.pages.table.gather(1, index // per_page).flatten().long(), (index % per_page).flatten()


@dataclass(frozen=True)
class Batch:
    """The tokens of a pass.

    Attributes:
        stored: which of the new tokens have a slot, int64 [stored]: none where an engine runs for its own sake.
        slots: of these, int64 [stored]; slot s is token s % page_size of page s // page_size.
        rotation: RoPE of these, float32.
    """

    parts: Sequence[Part]
    stored: Tensor
    slots: Tensor
    rotation: Rotation

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
    ) -> Self:
        """The batch of requests of which each has its new tokens side by side.

        Args:
            starts: where the new tokens of each request begin in the pass, and where the last ones end.
            lengths: all tokens of each request, new ones included.
            table: pages of each request, int [requests, most pages].
            slots: of the new tokens, int [tokens]; below 0 for those that are not stored.
            group: tokens whose keys are encoded together.
        """
        device, stored = slots.device, (slots >= 0).nonzero().squeeze(1)
        having_slots, alike = set(stored.tolist()), defaultdict[tuple[int, int, bool], list[int]](list)
        positions = []
        for row, (start, stop) in enumerate(pairwise(starts)):
            past = lengths[row] - (stop - start)
            positions.append(torch.arange(past, lengths[row], device=device))
            if stop > start:
                alike[stop - start, past % group, start in having_slots].append(row)
        parts = []
        for (count, open_keys, is_stored), rows in alike.items():
            pages = max(-(-lengths[row] // page_size) for row in rows)
            tokens = torch.tensor([starts[row] for row in rows], device=device).unsqueeze(1)
            parts.append(
                Part(
                    tokens=tokens + torch.arange(count, device=device),
                    past=torch.tensor([lengths[row] - count for row in rows], dtype=torch.int32, device=device),
                    open_keys=open_keys,
                    pages=PageTable(table[rows, :pages].int().contiguous(), page_size),
                    rotations=TokenRotations(rope, torch.arange(pages * page_size, device=device).unsqueeze(0)),
                    is_stored=is_stored,
                    has_codes=any(lengths[row] - count > open_keys for row in rows),
                )
            )
        rotation = rope.rotation(torch.cat(positions)[stored].unsqueeze(0), torch.float32)
        return cls(parts, stored, slots[stored].long(), rotation)


@dataclass(frozen=True)
class PagedAttention:
    """Attention of one layer: encodes the new tokens of a pass, and attends to them and to earlier ones.

    Attributes:
        backend: with the soft cap.
        scaling: of scores.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap).
    """

    encoder: LayerEncoder
    backend: AttentionBackend
    scaling: float
    soft_cap: float | None = None

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
        keys, values, exact = page.views(pages)
        # all is stored before any is read: a request may share pages that another one fills in this pass
        open_keys = [self._open_keys(page, exact, part, key) for part in batch.parts]
        if len(batch.stored):
            place = batch.slots // page.size, batch.slots % page.size
            page.values.put(values, *place, self.encoder.encode_values(value[batch.stored]))
            if page.group == 1:
                page.keys.put(keys, *place, self.encoder.encode_keys(key[batch.stored], batch.rotation))
        for part, kept in zip(batch.parts, open_keys, strict=True):
            if page.group > 1 and part.is_stored:
                tokens = torch.cat((kept, key[part.tokens].transpose(1, 2)), 2)
                self._store_groups(page, tokens, keys, exact, part, batch.rotation)
        for part, kept in zip(batch.parts, open_keys, strict=True):
            new = [x[part.tokens].transpose(1, 2) for x in (query, key, value)]
            out = self._attend(page, keys, values, kept, part, *new)
            output[part.tokens] = out.transpose(1, 2).to(output.dtype)

    def _attend(
        self,
        page: Page,
        keys: Codes,
        values: Codes,
        open_keys: Tensor,
        part: Part,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Attention of new tokens to themselves and to the codes of earlier ones.

        Args:
            keys, values: as of `Page.views`.
            open_keys: of the last earlier tokens, whose group is open, [requests, num_kv_heads, tokens, head_dim].
            query, key, value: of the new tokens, [requests, heads, count, head_dim].

        Returns:
            float32 [requests, num_heads, count, head_dim].
        """
        codec, (requests, _, last, _) = self.encoder.codec, open_keys.shape
        closed = part.past - last
        if last:
            codes = page.values.take(values, *part.at(closed, last, page.size))
            decoded = codec.value.decode(codes, None)[0].unflatten(1, (requests, last)).transpose(0, 1)
            key, value = torch.cat((open_keys, key), 2), torch.cat((decoded, value.float()), 2)
        shape = 1, query.shape[2], key.shape[2]
        causal = torch.ones(shape, dtype=torch.bool, device=query.device).tril(last)
        state = partial_attention(query, key, value, causal, self.scaling, self.soft_cap)
        if part.has_codes:
            rotations = part.rotations if codec.needs_rotations else None
            encoded = EncodedTokens(keys, None, values, rotations, closed, part.pages)
            few = query.shape[2] <= self.backend.max_queries
            attend_codes = self.backend.attend_codes if few else self.backend.attend_decoded
            state = merge_state(state, attend_codes(codec, query, encoded, self.scaling))
        return state[0]

    def _store_groups(
        self, page: Page, tokens: Tensor, keys: Codes, exact: Tensor, part: Part, rotation: Rotation
    ) -> None:
        """Encodes whole groups of keys `tokens`, from the first of the group that was open; keeps the rest exactly."""
        first, (whole, rest) = part.past // page.group, divmod(tokens.shape[2], page.group)
        if whole:
            groups = tokens[:, :, : whole * page.group].transpose(1, 2).flatten(0, 1)
            page.keys.put(keys, *part.at(first, whole, page.groups), self.encoder.encode_keys(groups, rotation))
        if rest:
            block, _ = part.at(first + whole, 1, page.groups)
            kept = tokens[:, :, -rest:].transpose(1, 2).flatten(2).contiguous()
            exact[block, :rest] = kept.view(torch.uint8)

    def _open_keys(self, page: Page, exact: Tensor, part: Part, like: Tensor) -> Tensor:
        """The exact keys of open groups, [requests, num_kv_heads, tokens, head_dim]; `like` [tokens, ...]."""
        if not part.open_keys:
            return like.new_empty(len(part.past), like.shape[1], 0, like.shape[2])
        block, _ = part.at(part.past // page.size, 1, 1)
        kept = exact[block, : part.open_keys].clone().view(like.dtype)
        return kept.unflatten(2, like.shape[1:]).transpose(1, 2)
