"""Attention of a pass over the pages of an engine, which hold the codes of their tokens' keys and values.

New tokens of a pass are exact to each other. Of earlier ones, the first (sinks) are exact in bytes of their page, and
the last in a ring per request, those of an open group of keys among them; all others are read from codes, on a GPU by
the method's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.backend import AttentionBackend
from kvcli.attention.reference import PREFILL_THRESHOLD, merge_state, partial_attention
from kvcli.errors import UsageError
from kvcli.kernels.streams import Event, beside
from kvcli.methods.base import Codes
from kvcli.methods.layer_codec import EncodedTokens, PartialAttention
from kvcli.methods.pages import check_page_size
from kvcli.paged import reference
from kvcli.paged.batch import Batch, UniformBatch
from kvcli.paged.pages import LayerEncoder, NewCodes
from kvcli.rope import Rotation


class Page:
    """Where codes are in a layer's pages of `size` tokens: those of keys, of values, and exact sinks.

    Args:
        encoder: of the layer.
        dtype: of exact tokens.
        size: tokens of a page.
        sinks: tokens of a page that can be kept exactly.

    Attributes:
        nbytes: of a page, a multiple of 16.
        token_bytes: the same per token, rounded up.

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
        self.nbytes = self.values.stop + -(-sinks * 2 * spec.kv_dim * dtype.itemsize // 16) * 16
        self.token_bytes = -(-self.nbytes // size)
        self._views: tuple[Any, Any] = None, None

    def views(self, pages: Tensor) -> tuple[Codes, Codes, Tensor]:
        """Codes of keys, those of values, and exact sinks in pages uint8 [pages, nbytes].

        Sinks are [pages, sinks, 2, num_kv_heads, head_dim], keys after RoPE and values.
        """
        if (seen := (pages.data_ptr(), pages.shape)) == self._views[0]:
            return self._views[1]
        count, both, heads, width = self._sinks
        stop = self.values.stop + count * both * heads * width * self._dtype.itemsize
        sinks = pages[:, self.values.stop : stop].view(self._dtype).unflatten(1, self._sinks)
        self._views = seen, (self.keys.view(pages), self.values.view(pages), sinks)
        return self._views[1]


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
        query, key, value = (x[: batch.sinks.shape[1]] for x in (query, key, value))  # without padding
        full_precision: Any = reference
        if self.backend.impl == "fused":
            from kvcli.paged import kernels as full_precision
        side = pages.device if batch.encodes_beside else None
        rotation = batch.rotation if self.encoder.codec.needs_rotations else None  # of all layers, on this stream
        prepared = Event(side)

        def encode() -> None:
            stored_key, stored_value = full_precision.prepare(key, value, sinks, self.rings, batch)
            prepared.record()
            self._encode(page, pages, batch, rotation, key, stored_key, stored_value, full_precision)

        # without a side stream all is stored before any is read: a request may share pages that another one fills
        with beside(side, encode):
            new_key, new_value = (x if x.dtype == self.rings.dtype else x.to(self.rings.dtype) for x in (key, value))
            self._attend(keys, values, sinks, batch, query, new_key, new_value, output, side, prepared, full_precision)

    def _attend(
        self, keys: Codes, values: Codes, sinks: Tensor, batch: Batch, query: Tensor, key: Tensor, value: Tensor,
        output: Tensor, side: torch.device | None, prepared: Event, full_precision: Any,
    ) -> None:  # fmt: skip
        """Writes attention of all new tokens to `output`, and new tokens to the rings, which are `prepared`."""
        for part in batch.parts:
            (requests, count), (_, heads, head_dim) = part.tokens.shape, query.shape
            empty = partial(query.new_empty, dtype=torch.float32)

            def attend(exact: PartialAttention, part: UniformBatch = part, count: int = count) -> None:
                prepared.wait()
                full_precision.attend(
                    query, key, value, sinks, self.rings, part, batch.recent, exact, self.scaling, self.soft_cap,
                    new=count < PREFILL_THRESHOLD,
                )  # fmt: skip

            codes = keys, values, part, part.of(query), part.of(key), part.of(value), sinks.shape[1]
            # prompts first have the memory that `_states` needs in between
            states = self._states(*codes) if side is None else None
            exact = empty(requests, heads, count, head_dim), empty(requests, heads, count)
            with beside(side, partial(attend, exact), branch=1):
                if side is not None:
                    states = self._states(*codes)
            full_precision.merge(part, exact, states, self.sink_logits, output)

    def _encode(
        self, page: Page, pages: Tensor, batch: Batch, rotation: Rotation | None, new: Tensor, key: Tensor,
        value: Tensor, full_precision: Any,
    ) -> None:  # fmt: skip
        """Writes the codes of keys and values into their pages; `new` are all new keys."""
        if not len(key):
            return
        codes, of_tokens = list[NewCodes](), partial(NewCodes, batch.dst_page, batch.dst_offset)
        side, encoder = pages.device if batch.encodes_beside else None, self.encoder
        with beside(side, lambda: codes.append(of_tokens(page.values, encoder.encode_values(value))), branch=2):
            if page.group == 1:
                codes.append(of_tokens(page.keys, encoder.encode_keys(key, rotation)))
            elif (groups := batch.groups) is not None:
                tokens = full_precision.gather(new, self.rings.flatten(0, 1), groups.is_new, groups.token)
                codes.append(NewCodes(groups.page, groups.place, page.keys, encoder.encode_keys(tokens, rotation)))
        full_precision.put(pages, *codes)

    def _states(
        self, keys: Codes, values: Codes, part: UniformBatch, query: Tensor, key: Tensor, value: Tensor, skip: int
    ) -> PartialAttention | None:
        """Attention of new tokens to codes of earlier ones, and if they are many, to each other; None: to neither.

        Args:
            keys, values: as of `Page.views`.
            query: of the new tokens, [requests, count, num_heads, head_dim].
            key, value: the same of kv heads.
            skip: tokens at the beginning that are sinks.
        """
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        count, codes = query.shape[2], None
        if part.has_codes:
            codec = self.encoder.codec
            rotations = part.rotations if codec.needs_rotations else None
            encoded = EncodedTokens(keys, None, values, rotations, part.num_coded, part.pages, skip)
            attend = (
                self.backend.attend_codes if count <= self.backend.decode_threshold else self.backend.attend_dequantized
            )
            codes = attend(codec, query, encoded, self.scaling)
        if count < PREFILL_THRESHOLD:
            return codes
        if self.backend.attend_prefill is not None:
            return self.backend.attend_prefill(query, key, value, self.scaling, codes)
        causal = torch.ones(1, count, count, dtype=torch.bool, device=query.device).tril()
        state = partial_attention(query, key, value, causal, self.scaling, self.soft_cap)
        return state if codes is None else merge_state(state, codes)
