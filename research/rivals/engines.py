"""Programs that have a cache of their own, put through the same passes and compared with themselves at 16 bits."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from research.rivals.protocol import NEW, PASS, TOKENS, Job, agreement, losses


class Engine(Protocol):
    """A model that reads on from what it has read."""

    def read(self, tokens: list[int]) -> Any:
        """Logits of these tokens, as an array [tokens, vocab]."""

    def held(self) -> int | None:
        """Bytes of the cache, as the program says it; None where it does not."""


@dataclass(frozen=True)
class EngineSetting:
    """A setting of a program.

    Attributes:
        make: opens the model with this setting.
        stock: opens it with an uncompressed cache; the same function for all settings, so that it is read once.
        tokens: tokens that are read, where 1024 take too long.
        beside: dtype of the model that the cache is held beside.
    """

    name: str
    claim: str
    make: Callable[[Job], Engine]
    stock: Callable[[Job], Engine]
    tokens: int = TOKENS
    beside: str = "float16"
    ways: tuple[str, ...] = ("passes", "generate")

    def passes(self, job: Job) -> dict[str, Any]:
        """Losses, seconds, and bits that the program says it holds: of all tokens, and of those of the second half."""
        engine, started = self.make(job), time.perf_counter()
        logits, half = read_all(engine, job.tokens[: self.tokens])
        seconds = time.perf_counter() - started
        found = losses(logits, stock_logits(self.stock, job, self.tokens))
        bits = self.bits_told(engine, job, self.tokens)
        if bits and half != engine.held():  # else tokens of the second half were allocated with the first
            bits["bits_added"] = 2 * bits["bits"] - 8 * half / values_per_token(job) / (self.tokens // 2)
        return {**found, "seconds": seconds, **bits, "tokens": self.tokens}

    def generate(self, job: Job) -> dict[str, Any]:
        """Greedy tokens that are those of its uncompressed cache, and bits after them."""
        engine, started = self.make(job), time.perf_counter()
        prompt = job.tokens[: self.tokens // 2]
        tokens = continued(engine, prompt)
        seconds = time.perf_counter() - started
        same = agreement(tokens, stock_tokens(self.stock, job, len(prompt)))
        told = self.bits_told(engine, job, len(prompt) + NEW - 1)
        return {"same_tokens": same, "seconds": seconds, **told, "tokens": self.tokens}

    def bits_told(self, engine: Engine, job: Job, tokens: int) -> dict[str, Any]:
        """Bits per value after so many tokens, where the program tells them."""
        if (held := engine.held()) is None:
            return {}
        return {"bits": 8 * held / values_per_token(job) / tokens, "bits_beside": self.beside}


def read_all(engine: Engine, tokens: list[int]) -> tuple[Tensor, int | None]:
    """Logits of the second half, read in passes, and the bytes that are held after the first."""
    logits, half = [], None
    for start in range(0, len(tokens), PASS):
        if start == len(tokens) // 2:
            half = engine.held()
        found = torch.as_tensor(engine.read(tokens[start : start + PASS]))
        logits += [found.float()] if start >= len(tokens) // 2 else []
    return torch.cat(logits), half


def continued(engine: Engine, prompt: list[int]) -> list[int]:
    """Greedy tokens after a prompt, which is read in passes."""
    for start in range(0, len(prompt), PASS):
        logits = engine.read(prompt[start : start + PASS])
    made = [int(torch.as_tensor(logits)[-1].argmax())]
    while len(made) < NEW:
        made.append(int(torch.as_tensor(engine.read(made[-1:]))[-1].argmax()))
    return made


@functools.cache
def stock_logits(stock: Callable[[Job], Engine], job: Job, tokens: int) -> Tensor:
    """Of the uncompressed cache."""
    return read_all(stock(job), job.tokens[:tokens])[0]


@functools.cache
def stock_tokens(stock: Callable[[Job], Engine], job: Job, prompt: int) -> list[int]:
    """Of the uncompressed cache."""
    return continued(stock(job), job.tokens[:prompt])


def values_per_token(job: Job) -> int:
    """Channels of keys and values of all layers."""
    config = json.loads((job.folder / "model" / "config.json").read_text())
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
