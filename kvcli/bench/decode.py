"""Greedy decoding after a prompt, timed: transformers' own passes, and steps of `Session.generate`.

Capturing CUDA graphs takes as long as tens of steps, once in a generation. It is part of the whole time, but not of the
rate, which is of steady steps: tokens that only replay graphs, over whole rounds of encoding.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvcli.cache.compressed import CompressedCache
from kvcli.methods.config import CacheConfig
from kvcli.methods.method import Method

DecodeMode = Literal["auto", "graphs", "steps", "passes"]
"""How tokens are made with a compressed cache; auto: as `Session.generate` does."""

COMPILED = ", compiled"
"""Said of how tokens were made where layers were compiled."""

_WARM_ROUNDS = 2
"""Rounds of encoding after which every graph was captured: each occurs in the first one."""

Mark = tuple[int, float]
"""Number of tokens made, and the time at which they were known."""


@dataclass(frozen=True)
class Decoded:
    """When the tokens of a generation were known.

    Attributes:
        first: time of the first token.
        ended: time of the last one.
        how: how the tokens after the first were made.
        steady: number and seconds of steady steps; None if there is no whole round of them.
        note: why graphs were asked for and not captured.
    """

    first: float
    ended: float
    how: str
    steady: tuple[int, float] | None = None
    note: str | None = None


def decode_uncompressed(model: Any, cache: Any, logits: Tensor, new_tokens: int) -> Decoded:
    """Continues greedily with one forward pass per token, as transformers does.

    Args:
        model: a causal language model, not attached.
        cache: of transformers; holds the prompt.
        logits: of the prompt's last token, [batch, 1, vocab_size].
        new_tokens: tokens chosen, the first included; 0: none is kept.
    """
    token = logits.argmax(-1)
    first = synchronized_time(logits.device)
    for _ in range(new_tokens - 1):
        token = step(model, cache, token)
    return Decoded(first, synchronized_time(logits.device), "eager")


def round_tokens(method: Method, config: CacheConfig) -> int:
    """Tokens per row between two passes that encode the same: the longer interval of keys and values."""
    return max(max(schedule.block, schedule.multiple_of) for schedule in method.schedules(config))


class StepClock:
    """Notes when tokens were known, as `on_tokens` of `Session.generate`.

    Args:
        cache: that is continued.
        interval: tokens per round of encoding.

    Attributes:
        first: time of the first token.
    """

    def __init__(self, cache: CompressedCache, interval: int) -> None:
        self._cache, self._interval = cache, interval
        self.first = 0.0
        self._step: Any = None
        self._last: Mark = (0, 0.0)
        self._stretches: list[dict[bool, list[Mark]]] = []

    def __call__(self, tokens: Tensor) -> None:
        """Notes the time of new tokens [batch, count], which are on the host."""
        mark = (self._last[0] + tokens.shape[1], time.perf_counter())
        step = self._cache.passes.step
        if not self._last[0]:
            self.first = mark[1]
            self._stretches.append({True: [], False: []})
        elif step is not self._step:
            # codes had outgrown the graphs, which were captured again after the mark before
            self._stretches.append({True: [self._last], False: [self._last]})
        self._step, self._last = step, mark
        self._stretches[-1][step is not None].append(mark)

    def steady(self, steps: bool) -> tuple[int, float] | None:
        """Number and seconds of the steady steps, or passes, in whole rounds; None if there are none."""
        spans = [steady_span(marks[steps], self._interval) for marks in self._stretches]
        tokens = sum(span[0] for span in spans)
        return (tokens, sum(span[1] for span in spans)) if tokens else None


def steady_span(marks: list[Mark], interval: int) -> Mark:
    """Number and seconds of the tokens after the first two rounds, as far as they are whole rounds; (0, 0.0): none.

    Args:
        marks: in the order of time.
        interval: tokens per round; where no mark is at its end, it ends with the next mark.
    """
    if not marks:
        return 0, 0.0
    after = [mark for mark in marks if mark[0] - marks[0][0] >= _WARM_ROUNDS * interval]
    ends = after[:1]
    for mark in after[1:]:
        if mark[0] - ends[-1][0] >= interval:
            ends.append(mark)
    return (ends[-1][0] - ends[0][0], ends[-1][1] - ends[0][1]) if ends else (0, 0.0)


def step(model: Any, cache: Any, token: Tensor) -> Tensor:
    """The most probable next token; both [batch, 1]."""
    logits: Tensor = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits.argmax(-1)


def synchronized_time(device: torch.device) -> float:
    """Seconds, read after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
