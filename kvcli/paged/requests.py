"""The requests of a pass, and what a model is told of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class ScheduledRequest:
    """A request in a pass, and its new tokens.

    Attributes:
        tokens: their ids.
        num_computed_tokens: earlier ones.
        first_exact: from which of these on tokens may be attended to exactly, a multiple of the page size.
        pages: of all tokens, and others after them.
        ring: 1 or above, of no other request.
    """

    tokens: Sequence[int]
    num_computed_tokens: int
    first_exact: int
    pages: Sequence[int]
    ring: int

    @property
    def positions(self) -> range:
        """Of the new tokens."""
        return range(self.num_computed_tokens, self.num_computed_tokens + len(self.tokens))

    def slots(self, page_size: int) -> list[int]:
        """Where the new tokens are in pages of so many."""
        return [self.pages[i // page_size] * page_size + i % page_size for i in self.positions]


@dataclass(frozen=True)
class PassInputs:
    """What a model is told of the requests of a pass; one after another, each has its new tokens side by side.

    Attributes:
        query_lens: new tokens of each request.
        tokens, positions, slots: of the new tokens, int64 [tokens]: ids, positions, and where they are in the pages;
            below 0: nowhere.
        seq_lens, rings, first_exact, last: int64 [requests]: all tokens, as in `ScheduledRequest`, and which of the new
            tokens is the last of each.
        block_table: pages of each, int64 [requests, most pages].
        has_codes: False if no request has earlier tokens.
    """

    query_lens: Sequence[int]
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    seq_lens: Tensor
    rings: Tensor
    first_exact: Tensor
    last: Tensor
    block_table: Tensor
    has_codes: bool = True

    @classmethod
    def of(cls, requests: Sequence[ScheduledRequest], page_size: int, device: torch.device) -> Self:
        """Those of requests with pages of so many tokens."""

        def tensor(numbers: Iterable[int]) -> Tensor:
            return torch.tensor([*numbers], device=device)

        query_lens = [len(x.tokens) for x in requests]
        used = [torch.tensor(x.pages[: -(-x.positions.stop // page_size)]) for x in requests]
        return cls(
            query_lens=query_lens,
            tokens=tensor(i for x in requests for i in x.tokens),
            positions=tensor(i for x in requests for i in x.positions),
            slots=tensor(i for x in requests for i in x.slots(page_size)),
            seq_lens=tensor(x.positions.stop for x in requests),
            rings=tensor(x.ring for x in requests),
            first_exact=tensor(x.first_exact for x in requests),
            last=tensor(i - 1 for i in accumulate(query_lens)),
            block_table=pad_sequence(used, True).to(device),
            has_codes=any(x.num_computed_tokens for x in requests),
        )
