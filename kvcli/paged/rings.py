"""Rings of the recent tokens of requests, which an engine names by the pages of their tokens alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.errors import CacheError

RESIDUAL_LENGTH = 32
"""Recent tokens of each request that are exact by default: fewer than in a session, as an engine has many requests."""


@dataclass(frozen=True)
class Rings:
    """The rings of the requests of a pass, int64 [requests] each.

    Attributes:
        ring: which one; ring 0, which is nobody's, of a request that is not stored.
        copy_from: whose tokens are copied to it before the pass: its own, but for a request with pages of another.
        writer: which request of the pass writes the last earlier token, whose ring is copied as well; -1: none.
        num_coded: earlier tokens that are read from codes, whole groups; the others are in the ring.
    """

    ring: Tensor
    copy_from: Tensor
    writer: Tensor
    num_coded: Tensor


class AssignedRings:
    """Rings that the caller has given to the requests of a pass, none of which is a copy of another one's.

    Args:
        rings, first_exact: of each request, int64 [requests]; earlier tokens before the latter are read from codes.
        residual_length, group: as of `ResidualRings`.

    Attributes:
        length: tokens of a ring, 0 if none are exact.
    """

    def __init__(self, rings: Tensor, first_exact: Tensor, residual_length: int, group: int) -> None:
        self.length = residual_length + group - 1
        self._rings, self._first_exact, self._residual, self._group = rings, first_exact, residual_length, group

    def advance(self, earlier: Tensor, last: Tensor, past: Tensor, new: Tensor, begun: Tensor) -> Rings:
        num_coded = self._first_exact.maximum(past - self._residual) // self._group * self._group
        return Rings(self._rings, self._rings, torch.full_like(self._rings, -1), num_coded)

    def advance_decoding(self, seq_lens: Tensor, table: Tensor, slots: Tensor, page_size: int) -> Rings:
        past = (seq_lens.long() - 1).clamp_min(0)
        return self.advance(past, past, past, past, past)


class ResidualRings:
    """Which ring is whose. Token t of a request is in place t % ring of its ring.

    A request is known by the page of its last token, which no other one writes to. If that page is full, others with
    the same tokens may have it, too: in one pass they get copies of the ring, else the first that comes has it. In a
    pass of one token each, also those get copies of which another one fills that page in this very pass. An
    engine need not say when a request is finished: the ring that was not used for longest is given to a new one.

    All is on the device, so that a pass waits for nothing and can be captured as a CUDA graph.

    Args:
        rings: no fewer than requests that run at a time.
        residual_length: recent tokens of each that are exact.
        group: tokens whose keys are encoded together; those of the last group are exact until it is whole.

    Attributes:
        length: tokens of a ring, 0 if none are exact.
    """

    def __init__(self, rings: int, residual_length: int, group: int, device: torch.device) -> None:
        self.length, self._residual, self._group = residual_length + group - 1, residual_length, group
        # of each ring the page of the request's last token, -1 if nobody has it; the first token that was written
        # there, as one that begins with cached pages has none of these; the request's tokens; the pass of the last use
        self._state = torch.full((4, rings + 1), -1, dtype=torch.int64, device=device)
        self._passes = torch.zeros((), dtype=torch.int64, device=device)
        self._lost_exact_keys = torch.zeros((), dtype=torch.bool, device=device)

    @property
    def count(self) -> int:
        """How many rings there are, ring 0 among them."""
        return self._state.shape[1]

    def advance(self, earlier: Tensor, last: Tensor, past: Tensor, new: Tensor, begun: Tensor) -> Rings:
        """The rings of the requests of a pass, with their earlier tokens.

        Args:
            earlier: page of each one's last earlier token, below 0 if there is none, int64 [requests].
            last: page of its last new token, below 0 if it is not stored, int64 [requests].
            past, new: how many earlier and new tokens there are, int64 [requests].
            begun: pages that are written from their first token on, and any number below 0, int64 [any].
        """
        page, first, length, used = self._state
        stored = last >= 0
        # what another request had there is gone
        page.masked_fill_((page.unsqueeze(1) == begun).any(1), -1)
        asked = ((earlier >= 0) & stored).unsqueeze(1)
        known = (page == earlier.unsqueeze(1)) & (length == past.unsqueeze(1)) & asked
        found, source = known.any(1), known.byte().argmax(1)
        same = (source == source.unsqueeze(1)) & found & found.unsqueeze(1)
        mine = found & ~same.tril(-1).any(1)
        others = stored & ~mine
        self._passes += 1
        used[source.where(mine, 0)] = self._passes
        free = used.argsort(stable=True)[(others.cumsum(0) - 1).clamp(0, self.count - 1)]
        slot = source.where(mine, free.where(others, 0))
        is_filled = (last == earlier.unsqueeze(1)) & (past + 1 == past.unsqueeze(1)) & (new == 1) & asked
        writer = is_filled.byte().argmax(1).where(is_filled.any(1), -1)
        begin = first[source].where(found, past)
        copy_from = source.where(found, slot)
        begin, copy_from = (x[writer].where(writer >= 0, x) for x in (begin, copy_from))
        self._state[:, slot] = torch.stack((last, begin, past + new, self._passes.expand_as(last)))
        self._lost_exact_keys |= (stored & ~found & (past % self._group > 0)).any()
        num_coded = begin.maximum(past - self._residual) // self._group * self._group
        return Rings(slot, copy_from, writer, num_coded)

    def advance_decoding(self, seq_lens: Tensor, table: Tensor, slots: Tensor, page_size: int) -> Rings:
        """As `advance` in one launch, of requests with one new token each; arguments as of `Batch.of`."""
        from kvcli.paged.batch_kernels import advance

        lost, residual, group = self._lost_exact_keys, self._residual, self._group
        return Rings(*advance(seq_lens, table, slots, page_size, self._state, self._passes, lost, residual, group))

    def check(self) -> None:
        """CacheError: a request that ended in an open group was not known. It waits for the device."""
        if self._lost_exact_keys:
            raise CacheError("exact keys are lost: a request was moved to the host, or too many run at a time")
