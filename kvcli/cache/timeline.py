"""Which tokens a batch of sequences holds, shared by all layers of a cache.

Slots are columns of the batch as transformers sees it, padding included. Tokens are counted per sequence without
padding: token i of a row is its i-th real token, wherever padding stands. Everything kvcli stores is by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.cache.ledger import Ledger, Turn
from kvcli.errors import CacheError
from kvcli.rope import Rope, Rotation, TokenRotations


@dataclass(frozen=True)
class Step:
    """The new tokens of one forward pass.

    Attributes:
        before: tokens each row held before.
        counts: new real tokens of each row.
        real: None when no new slot is padding, else boolean [batch, query_len].
        index: [batch, query_len] token index of each new slot, -1 for padding.
        keys: what the pass does to the keys of all layers.
        values: what it does to their values.
    """

    before: tuple[int, ...]
    counts: tuple[int, ...]
    real: Tensor | None
    index: Tensor
    keys: Turn
    values: Turn

    @property
    def fresh(self) -> bool:
        """Whether no row held a token before."""
        return not any(self.before)

    def row_tokens(self, x: Tensor, row: int) -> Tensor:
        """The real tokens of one row of x [batch, heads, query_len, dim]: [heads, count, dim]."""
        return x[row] if self.real is None else x[row][:, self.real[row]]


class Timeline:
    """Lengths, padding and RoPE positions of a batch, and how many of its tokens are codes.

    Args:
        rope: the model's rotary embedding.
        keys: counts the keys.
        values: counts the values.
        num_layers: layers that take part in every forward pass.
    """

    def __init__(self, rope: Rope, keys: Ledger, values: Ledger, num_layers: int) -> None:
        self.rope, self.keys, self.values, self.num_layers = rope, keys, values, num_layers
        self.lengths: list[int] = []
        self.valid: Tensor | None = None
        self._positions: Tensor | None = None
        self._encoded: tuple[tuple[int, ...], TokenRotations] | None = None
        self._layers_to_come = 0

    @property
    def slots(self) -> int:
        """Columns seen so far, padding included."""
        return 0 if self.valid is None else self.valid.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the positions, the padding marks and the rotations kept of encoded tokens."""
        kept = self._encoded[1].nbytes if self._encoded is not None else 0
        return kept + sum(x.nbytes for x in (self.valid, self._positions) if x is not None)

    def begin(self, batch: int, query_len: int, positions: Tensor, mask: Tensor | None) -> Step:
        """Takes in the new slots of a forward pass.

        Args:
            batch: rows.
            query_len: new slots.
            positions: [batch or 1, query_len] RoPE positions.
            mask: None, or boolean [batch or 1, 1, query_len, slots + query_len].

        Raises:
            CacheError: another batch size than before, a mask that is not causal with padding, or an earlier pass
                that did not reach the last layer.
        """
        self._check_whole()
        if self.lengths and batch != len(self.lengths):
            raise CacheError(f"the cache holds {len(self.lengths)} sequences, but a batch of {batch} came in")
        device = positions.device
        before = tuple(self.lengths or [0] * batch)
        past = self.valid if self.valid is not None else torch.ones(batch, 0, dtype=torch.bool, device=device)
        real = torch.ones(batch, query_len, dtype=torch.bool, device=device)
        counts = (query_len,) * batch
        if mask is not None:
            real = mask[:, 0, -1, -query_len:].expand(batch, -1)
            counts = tuple(real.sum(1).tolist())
        valid = torch.cat((past, real), dim=1)
        if mask is not None:
            _check_mask(mask, valid, query_len)
        padded = sum(counts) < batch * query_len
        start = vector(before, device).unsqueeze(1)
        index = (start + real.cumsum(1) - 1).masked_fill(~real, -1)
        self.valid = valid
        self.lengths = [a + b for a, b in zip(before, counts, strict=True)]
        turns = self.keys.take(counts), self.values.take(counts)
        step = Step(before, counts, real if padded else None, index, *turns)
        self._layers_to_come = self.num_layers
        self._keep_positions(positions.expand(batch, -1), step)
        return step

    def rotation(self, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Rotation:
        """Rotation of tokens [start, stop) of every row; rows that are shorter get position 0 there."""
        assert self._positions is not None
        return self.rope.rotation(self._positions[:, start:stop].long(), dtype)

    def token_rotations(self, start: int, counts: tuple[int, ...], lengths: Tensor | None) -> TokenRotations:
        """Rotations of `counts` tokens of each row from token `start` on, kept until the counts change.

        Args:
            start: first token.
            counts: tokens of each row.
            lengths: the same as int32 [batch]; None when all are equal.
        """
        assert self._positions is not None
        if self._encoded is None or self._encoded[0] != (start, *counts):
            made = TokenRotations(self.rope, self._positions[:, start : start + max(counts)], lengths)
            self._encoded = ((start, *counts), made)
        return self._encoded[1]

    def layer_done(self) -> None:
        """Notes that a layer has taken part in the forward pass."""
        self._layers_to_come -= 1

    def _check_whole(self) -> None:
        """Raises when layers hold different tokens."""
        if self._layers_to_come > 0:
            raise CacheError("a forward pass over this cache did not reach the last layer; make a new cache")

    def select(self, rows: Tensor) -> None:
        """Keeps, repeats or reorders rows, [count] indices."""
        self._encoded = None
        if self.valid is None or self._positions is None:
            return
        rows = rows.to(self.valid.device)
        self.valid, self._positions = self.valid[rows], self._positions[rows]
        order = rows.tolist()
        self.lengths = [self.lengths[row] for row in order]
        for ledger in (self.keys, self.values):
            ledger.select(order)

    def tokens_in_last(self, slots: int) -> list[int]:
        """How many tokens of each row stand in the last slots."""
        assert self.valid is not None
        counts: list[int] = self.valid[:, self.valid.shape[1] - slots :].sum(1).tolist()
        return counts

    def crop(self, slots: int, removed: list[int]) -> None:
        """Removes the last slots, which hold `removed` tokens of each row.

        Raises:
            CacheError: tokens that were encoded together would have to be cut apart, or a pass that did not reach the
                last layer; nothing has changed then.
        """
        self._check_whole()
        assert self.valid is not None
        for ledger in (self.keys, self.values):
            ledger.coded_among_last(removed)
        for ledger in (self.keys, self.values):
            ledger.truncate(removed)
        self._encoded = None
        self.valid = self.valid[:, : self.valid.shape[1] - slots]
        self.lengths = [length - count for length, count in zip(self.lengths, removed, strict=True)]

    def _keep_positions(self, positions: Tensor, step: Step) -> None:
        needed = max(self.lengths)
        held = 0 if self._positions is None else self._positions.shape[1]
        if needed > held:
            grown = torch.zeros(
                positions.shape[0], max(needed, held + held // 2, 256), dtype=torch.int32, device=positions.device
            )
            if self._positions is not None:
                grown[:, :held] = self._positions
            self._positions = grown
        assert self._positions is not None
        if step.real is None and len(set(step.before)) == 1:
            self._positions[:, step.before[0] : self.lengths[0]] = positions
            return
        for row, start in enumerate(step.before):
            new = positions[row] if step.real is None else positions[row][step.real[row]]
            self._positions[row, start : start + new.shape[0]] = new


def vector(values: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """One number a row on a device, without waiting for the device where all are equal."""
    if min(values) == max(values):
        return torch.full((len(values),), values[0], device=device, dtype=dtype)
    return torch.tensor(values, device=device, dtype=dtype)


def _check_mask(mask: Tensor, valid: Tensor, query_len: int) -> None:
    """Raises unless every real query sees exactly the real keys up to itself."""
    if mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[-1] != valid.shape[1]:
        raise CacheError("the attention mask must be causal with padding; masks of another kind are not supported")
    slots = valid.shape[1]
    key_slot = torch.arange(slots, device=mask.device)
    query_slot = key_slot[slots - query_len :]
    expected = valid.unsqueeze(1) & (key_slot <= query_slot.unsqueeze(1))
    wrong = (mask[:, 0] != expected) & valid[:, slots - query_len :].unsqueeze(-1)
    if bool(wrong.any()):
        raise CacheError("the attention mask must be causal with padding; this one hides or shows other tokens")
