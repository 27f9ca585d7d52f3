"""The codes of the keys, or of the values, of one layer, in tensors that grow by a part of their size.

A token costs no concatenation. This module does not know when tokens are encoded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvcli.cache.counts import Counts, Encoding
from kvcli.cache.forward import ordinary_tensors
from kvcli.methods.base import Codec, Codes

HEADROOM = 128
"""Fewest tokens by which a buffer grows after its first allocation."""


class CodeBuffer:
    """Preallocated codes of the keys, or of the values, of one layer, written at each row's own end.

    Args:
        codec: what encodes the tokens.
        like: window buffer [batch, num_kv_heads, capacity, head_dim] of the tokens.

    Attributes:
        codec: as given.
        codes: zeros where nothing was written.
        capacity: tokens that a row can hold without growing.
        tokens_per_entry: tokens that share an entry of a field, by its name.
    """

    def __init__(self, codec: Codec[Any], like: Tensor) -> None:
        self.codec = codec
        group = codec.encoded_group(like)
        tokens = codec.tokens_per_group
        self.tokens_per_entry = {name: tokens // x.shape[2] for name, x in group.tensors().items()}
        self.codes: Codes = group.map(lambda x: x.new_empty(like.shape[0], x.shape[1], 0, *x.shape[3:]))
        self.capacity = 0

    def reserve(self, num_tokens: int) -> None:
        """Makes room for this many tokens per row; grows by an eighth, at least 128 tokens, after the first."""
        if num_tokens > self.capacity:
            self._grow(num_tokens)

    @ordinary_tensors
    def _grow(self, num_tokens: int) -> None:
        capacity = grown_capacity(self.capacity, num_tokens, max(self.tokens_per_entry.values()))
        grown = {}
        for name, x in self.codes.tensors().items():
            grown[name] = x.new_zeros(*x.shape[:2], capacity // self.tokens_per_entry[name], *x.shape[3:])
            grown[name][:, :, : x.shape[2]] = x
        self.codes, self.capacity = type(self.codes)(**grown), capacity

    def write(self, tokens: Tensor, state: Any, encoding: Encoding) -> Codes:
        """Encodes tokens [rows, num_kv_heads, count, head_dim], where `reserve` made room; keeps no allocation.

        Args:
            tokens: what the codec takes.
            state: of their rows.
            encoding: which rows and tokens they are.

        Returns:
            Their codes.
        """
        if isinstance(encoding.start, Tensor):
            codes: Codes = self.codec.encode(tokens, state)
            self._scatter(encoding.start, codes)
            return codes
        target = self._view(encoding.start, encoding.count)
        if encoding.whole:
            self.codec.encode_into(tokens, state, target)
            return target
        codes = self.codec.encode(tokens, state)
        for name, x in codes.tensors().items():
            getattr(target, name)[encoding.rows] = x
        return codes

    def nbytes(self, lengths: Counts) -> int:
        """Bytes in use for rows of these lengths."""
        used = 0
        for name, x in self.codes.tensors().items():
            entry = x.shape[1] * x.shape[3:].numel() * x.element_size()
            used += sum(-(-length // self.tokens_per_entry[name]) * entry for length in lengths)
        return used

    def _view(self, start: int, count: int) -> Codes:
        """Views of the entries of tokens [start, start + count), which share no entry with earlier tokens."""
        views = {}
        for name, x in self.codes.tensors().items():
            tokens = self.tokens_per_entry[name]
            views[name] = x[:, :, start // tokens : start // tokens - (-count // tokens)]
        return type(self.codes)(**views)

    def _scatter(self, start: Tensor, codes: Codes) -> None:
        """Writes codes of all rows behind the entries of `start` [batch, 1] earlier tokens."""
        for name, x in codes.tensors().items():
            first = (start // self.tokens_per_entry[name]).long()
            entry = first + torch.arange(x.shape[2], device=x.device)
            index = entry.view(-1, 1, x.shape[2], *(1,) * (x.ndim - 3)).expand(x.shape)
            buffer: Tensor = getattr(self.codes, name)
            if x.element_size() == 1:  # indexing knows no 8-bit floats
                buffer.view(torch.uint8).scatter_(2, index, x.view(torch.uint8))
            else:
                buffer.scatter_(2, index, x)


def grown_capacity(capacity: int, num_tokens: int, unit: int) -> int:
    """Tokens that a buffer has room for once it has to hold `num_tokens`: if it grows, a multiple of `unit` and even.

    Rows of an even number of tokens are aligned so that kernels can read the scales of two tokens at once.
    """
    if num_tokens <= capacity:
        return capacity
    unit = math.lcm(unit, 2)
    headroom = max(HEADROOM, num_tokens // 8) if capacity else 0
    return -(-(num_tokens + headroom) // unit) * unit
