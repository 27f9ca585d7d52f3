"""Passes over pages as CUDA graphs: of requests that decode together, and of each that reads its prompt alone."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.graphs import Graphs
from kvcli.kernels.launch import power_of_two
from kvcli.paged.requests import PassInputs, ScheduledRequest

MOST_GRAPHS = 64
"""Graphs that are kept; each has some thousand launches."""

_LEAST_PAGES = 8
"""Pages of a request that a graph has room for at least."""


class _Inputs:
    """`PassInputs` of so many requests, new tokens and pages of each, in tensors that stay.

    Tokens after a request's own, and requests after the last, are stored nowhere.
    """

    def __init__(self, rows: int, count: int, columns: int, has_codes: bool, device: torch.device) -> None:
        sizes = [rows * count] * 3 + [rows] * 4 + [rows * columns]
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        *of_each, table = self._numbers.split(sizes)
        fields: Any = [count] * rows, *of_each, table.view(rows, columns), has_codes
        self.tensors = PassInputs(*fields)
        self._shape = rows, count, columns

    def load(self, requests: Sequence[ScheduledRequest], page_size: int) -> None:
        """Those of requests."""
        (rows, count, columns), (tokens, positions, slots, table) = self._shape, (list[int]() for _ in range(4))
        for x in requests:
            rest = count - len(x.tokens)
            tokens += [*x.tokens, *[0] * rest]
            positions += [*x.positions, *[x.positions.stop - 1] * rest]  # which the model knows
            slots += [*x.slots(page_size), *[-1] * rest]
            table += [*x.pages[:columns], *[0] * (columns - len(x.pages))]
        exact, rings = [x.first_exact for x in requests], [x.ring for x in requests]
        last = [row * count + len(x.tokens) - 1 for row, x in enumerate(requests)]
        of_rows = [([x.num_computed_tokens + count for x in requests], count), (rings, 0), (exact, 0), (last, 0)]
        fields, idle = [(tokens, 0), (positions, 0), (slots, -1), *of_rows, (table, 0)], rows - len(requests)
        numbers = (x + [other] * (len(x) // len(requests) * idle) for x, other in fields)
        self._numbers.copy_(torch.frombuffer(array("q", chain.from_iterable(numbers)), dtype=torch.int64))


class CapturedPasses:
    """Passes of requests, of which each is of as many requests, tokens and pages as are seldom others.

    Args:
        run: makes a pass; its logits [requests, vocab_size].
        page_size, num_rings: as of `PagedModel`.
        graphs: capture passes.
    """

    def __init__(self, run: Callable[[PassInputs], Tensor], page_size: int, num_rings: int, graphs: Graphs) -> None:
        self._run, self._page_size, self._most, self.graphs = run, page_size, num_rings, graphs
        self._inputs = dict[tuple[int, int, int, bool], _Inputs]()
        self._logits = dict[int, Tensor]()  # of so many requests

    def __call__(self, requests: Sequence[ScheduledRequest]) -> Tensor:
        """Logits of the last token of each request, [requests, vocab_size]."""
        decoding = [i for i, x in enumerate(requests) if len(x.tokens) == 1]
        reading = [[i] for i, x in enumerate(requests) if len(x.tokens) > 1]
        passes = [decoding, *reading] if decoding else reading
        logits = torch.cat([self._pass([requests[i] for i in some]) for some in passes])
        order = [i for some in passes for i in some]
        return logits if order == sorted(order) else logits[torch.tensor(order).argsort().to(logits.device)]

    def _pass(self, requests: Sequence[ScheduledRequest]) -> Tensor:
        pages = -(-max(x.positions.stop for x in requests) // self._page_size)
        count, has_codes = len(requests[0].tokens), any(x.num_computed_tokens for x in requests)
        if count > 1:
            key = 1, self._tokens(count), max(_LEAST_PAGES, power_of_two(pages)), has_codes
        else:
            key = min(power_of_two(len(requests)), self._most), 1, _with_room(pages), True
        if (inputs := self._inputs.get(key)) is None:
            inputs = self._inputs[key] = _Inputs(*key, self.graphs.device)
        inputs.load(requests, self._page_size)

        def run() -> None:
            logits = self._run(inputs.tensors)
            self._logits.setdefault(len(logits), torch.empty_like(logits)).copy_(logits)

        self.graphs.call(key, run)
        return self._logits[key[0]][: len(requests)].clone()

    def _tokens(self, count: int) -> int:
        """At least as many: halves of up to two pages, then powers of two of pages."""
        half = self._page_size // 2
        return -(-count // half) * half if count <= 4 * half else power_of_two(-(-count // (2 * half))) * 2 * half


def _with_room(pages: int) -> int:
    """At least as many: one of four numbers for each power of two."""
    step = max(_LEAST_PAGES, power_of_two(pages) // 8)
    return -(-pages // step) * step
