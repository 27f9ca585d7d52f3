"""What every package is put through, in its own environment, which has no kvcli: passes of 64 tokens, then `generate`.

`python -m research.rivals.protocol ADAPTER FOLDER OUT [SETTING ...]` appends a record to OUT per setting and way.
"""

from __future__ import annotations

import datetime
import importlib
import json
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from research.rivals.reach import reachable_bytes

TOKENS, PASS, NEW = 1024, 64, 64
PROMPT = TOKENS // 2
"""Tokens that are read, tokens of a pass, greedy tokens of `generate`, and those before them."""

LIMIT_S = 240
"""Seconds that one way of one setting may take."""

Model = Any
"""A causal language model of transformers."""


@dataclass(frozen=True)
class Job:
    """A model and the tokens that it reads.

    Attributes:
        folder: has `model`, a folder of transformers; `model.gguf`; and `tokens.json`.
    """

    folder: Path

    @cached_property
    def tokens(self) -> list[int]:
        """The text, longer than what the passes read."""
        return json.loads((self.folder / "tokens.json").read_text())

    @property
    def ids(self) -> Tensor:
        """[1, TOKENS]."""
        return torch.tensor([self.tokens[:TOKENS]])

    def model(self, dtype: torch.dtype = torch.float32) -> Model:
        """The model, loaded anew: packages may change it."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder / "model").to(dtype).eval()

    @cached_property
    def stock(self) -> tuple[Tensor, list[int]]:
        """Logits of the second half and greedy tokens with transformers' own cache, in float32."""
        from transformers import DynamicCache

        stock = CacheSetting("", "", lambda model: DynamicCache())
        return stock.read(self.model(), self.ids)[0], stock.continued(self.model(), self.ids)[0]

    @cached_property
    def stock_nll(self) -> float:
        """Nats per token of the text with transformers' own cache, which is the same wherever the model is."""
        targets = torch.tensor(self.tokens[PROMPT + 1 : TOKENS])
        return float(torch.nn.functional.cross_entropy(self.stock[0][:-1].double(), targets))


@dataclass(frozen=True)
class CacheSetting:
    """A cache that a model of transformers is handed.

    Attributes:
        claim: what the documentation says of it.
        cache: an empty cache for a model.
        compress: for packages that compress what has been read: a model and transformers' cache after the prompt to
            the cache that is used from then on.
        first: tokens of the first pass.
        rest: tokens of the other passes.
        tokens: tokens that are read, where the rest is short.
        after: what the documentation calls between passes.
    """

    name: str
    claim: str
    cache: Callable[[Model], Any]
    compress: Callable[[Model, Any], Any] | None = None
    first: int = PASS
    rest: int = PASS
    tokens: int = TOKENS
    after: Callable[[Model, Any], Any] | None = None
    ways: tuple[str, ...] = ("passes", "generate")

    def passes(self, job: Job) -> dict[str, Any]:
        """Losses and seconds of a float32 model, and the bits that are held beside one of 16 bits."""
        model, started = job.model(), time.perf_counter()
        ids = job.ids[:, : self.tokens]
        logits, held = self.read(model, ids)
        seconds = time.perf_counter() - started
        for dtype in (torch.bfloat16, torch.float16):
            with suppress(RuntimeError, TypeError, ValueError):  # packages that do without one of them
                held = self.read(job.model(dtype), ids)[1]
                break
        else:
            dtype = torch.float32
        added = (held[1] - held[0]) / (self.tokens - PROMPT)
        bits = {"bits": held[1] / self.tokens, "bits_added": added, "bits_beside": name(dtype), "tokens": self.tokens}
        return {**losses(logits, job.stock[0][: len(logits)]), "stock_nll": job.stock_nll, "seconds": seconds, **bits}

    def generate(self, job: Job) -> dict[str, Any]:
        """Greedy tokens that are stock's, and the bits that are held after them beside a float32 model."""
        model, started = job.model(), time.perf_counter()
        tokens, bits = self.continued(model, job.ids)
        seconds = time.perf_counter() - started
        same = agreement(tokens, job.stock[1])
        return {"same_tokens": same, "seconds": seconds, "bits": bits, "bits_beside": name(model.dtype)}

    def read(self, model: Model, ids: Tensor) -> tuple[Tensor, tuple[float, float]]:
        """Logits of the second half, and bits of one channel of all tokens after each half."""
        cache, logits, held = self.cache(model), [], []
        for start, part in parts(ids, self.first, self.rest):
            if start == PROMPT:
                cache = self.compress(model, cache) if self.compress else cache
                held.append(bits_held(cache, model))
            with torch.no_grad():
                found = model(part, past_key_values=cache, use_cache=True).logits[0]
            logits += [found] if start >= PROMPT else []
            if self.after:
                self.after(model, cache)
        return torch.cat(logits), (held[0], bits_held(cache, model))

    def continued(self, model: Model, ids: Tensor) -> tuple[list[int], float]:
        """Greedy tokens after the prompt, and the bits per value that are held then."""
        cache, prompt = self.cache(model), ids[:, :PROMPT]
        with torch.no_grad():
            if self.compress:
                model(prompt[:, :-1], past_key_values=cache, use_cache=True)
                cache = self.compress(model, cache)
            options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
            made = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, use_cache=True, **options
            )
        return made[0, PROMPT:].tolist(), bits_held(cache, model) / (PROMPT + NEW - 1)


def parts(ids: Tensor, first: int, rest: int) -> Iterator[tuple[int, Tensor]]:
    """Passes, each with the place where it begins: the end of the first one, and multiples of `rest` after it."""
    ends = [first, *(end for end in range(rest, ids.shape[1] + 1, rest) if end > first)]
    for start, end in zip([0, *ends], ends, strict=False):
        yield start, ids[:, start:end]


def in_steps(setting: CacheSetting) -> CacheSetting:
    """The prompt in one pass, then single tokens, for caches whose masks are not made for later passes of several."""
    return replace(setting, name=f"{setting.name}; steps", first=PROMPT, rest=1, tokens=PROMPT + NEW, ways=("passes",))


def bits_held(cache: Any, model: Model) -> float:
    """Bits that are reachable from a cache, but not from its model, for each channel of keys and values of a token."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return 8 * reachable_bytes(cache, [*model.parameters(), *model.buffers()]) / values


def losses(logits: Tensor, reference: Tensor) -> dict[str, float]:
    """Mean KL divergence of the reference from what was found, in nats per token, and the share of changed argmaxes."""
    total = 0.0
    for found, expected in zip(logits.split(PASS), reference.split(PASS), strict=True):
        log_q, log_p = (x.double().log_softmax(-1) for x in (found, expected))
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return {"kl": total / len(logits), "flips": float((logits.argmax(-1) != reference.argmax(-1)).double().mean())}


def name(dtype: torch.dtype) -> str:
    """As records have it."""
    return str(dtype).removeprefix("torch.")


def agreement(tokens: list[int], stock: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((at for at, pair in enumerate(zip(tokens, stock, strict=True)) if pair[0] != pair[1]), len(stock))


def error_line(error: BaseException) -> str:
    """What failed, in one line without paths."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"\S*/[\w.+-]+(?:/[\w.+-]+)+", "PATH", text)[:200]


def attempt(setting: Any, way: str, job: Job, limit_s: int = LIMIT_S) -> dict[str, Any]:
    """One way of one setting: its figures, or the error."""
    try:
        with time_limit(limit_s):
            found = getattr(setting, way)(job)
    except Exception as error:  # whatever a package raises is a finding
        found = {"error": error_line(error)}
    return {"setting": setting.name, "claim": setting.claim, "way": way, **found}


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """TimeoutError in a block that takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"no result within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def versions() -> dict[str, str]:
    """Of what every package runs on."""
    found = {"python": platform.python_version(), "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    for name in ("torch", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def measure(adapter: str, job: Job, write: Callable[[Mapping[str, Any]], None], names: Sequence[str] = ()) -> None:
    """Writes a record per setting, or named setting, and way; one record where the adapter cannot be imported."""
    try:
        settings = importlib.import_module(f"research.rivals.adapters.{adapter}").SETTINGS
    except Exception as error:
        write({**versions(), "setting": "", "claim": "", "way": "import", "error": error_line(error)})
        return
    for setting in (x for x in settings if not names or x.name in names):
        for way in setting.ways:
            write({**versions(), **attempt(setting, way, job)})


def main(adapter: str, folder: str, out: str, *names: str) -> None:
    """Measures one adapter; each record is on disk before the next measurement begins."""
    torch.manual_seed(0)

    def write(record: Mapping[str, Any]) -> None:
        with Path(out).open("a") as file:
            file.write(json.dumps(record) + "\n")

    measure(adapter, Job(Path(folder)), write, names)


if __name__ == "__main__":
    main(*sys.argv[1:])
