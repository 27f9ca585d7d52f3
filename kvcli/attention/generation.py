"""Around decoding: how tokens are chosen, the prompt's pass, the tokens that stop a row, what is returned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from kvcli.cache.compressed import CompressedCache
from kvcli.errors import UsageError, suggestion
from kvcli.models.load import end_tokens
from kvcli.progress import Advance
from kvcli.seam.versions import CACHE_ARGUMENT, with_cache

Mode = Literal["passes", "steps", "graphs"]
"""How tokens are made: ordinary passes, passes whose counts are on the device, or CUDA graphs of those."""


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen: greedily at temperature 0, else by sampling with torch's random numbers.

    Attributes:
        temperature: logits are divided by it; 0: the most probable token.
        top_p: sample from the most probable tokens that have this mass together.
        top_k: sample from so many tokens; 0: from all.
        repetition_penalty: factor by which tokens that occurred lose (arXiv 1909.05858); 1: none.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Raises UsageError for numbers by which nothing can be chosen."""
        for name in ("temperature", "top_p", "top_k", "repetition_penalty"):
            if not isinstance(getattr(self, name), Real):
                raise UsageError(f"{name} is a number, not {getattr(self, name)!r}")
        for name, fits, what in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0, and at most 1"),
            ("top_k", self.top_k >= 0, "0, for all tokens, or more"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "more than 0"),
        ):
            if not fits:
                raise UsageError(f"{name} is {what}, not {getattr(self, name)}")


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingConfig` as keywords, and `do_sample`, as `generate` of transformers takes them."""

    max_new_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    repetition_penalty: float | None
    do_sample: bool | None


def sampling_of(sampling: SamplingConfig | None, keywords: Mapping[str, Any]) -> SamplingConfig:
    """How tokens are chosen: as `sampling` says, or `SamplingKeywords`, of which None is as good as absent.

    `do_sample=False` is greedy whatever the temperature, `do_sample=True` samples at temperature 1 without one.

    Raises:
        UsageError: both, other keywords, or `do_sample=True` at temperature 0.
    """
    known = SamplingKeywords.__annotations__
    for name in sorted(keywords.keys() - known):
        hint = suggestion(name, known) or f"; the model's own generate may, with {CACHE_ARGUMENT}=session.new_cache()"
        raise UsageError(f"session.generate does not take '{name}'{hint}")
    values = {name: x for name, x in keywords.items() if x is not None}
    if sampling is not None and values:
        raise UsageError(f"{next(iter(values))} is part of sampling; give one of the two")
    sampled = values.pop("do_sample", None)
    config = sampling or SamplingConfig(**{**({"temperature": 1.0} if sampled else {}), **values})
    if sampled and config.temperature <= 0:
        raise UsageError("do_sample=True needs a temperature above 0")
    return replace(config, temperature=0.0) if sampled is False else config


class NextToken:
    """Chooses tokens, and keeps which ones a row has seen, those of prompts int64 [batch, time] first.

    `generator` makes the random numbers, on the device of the logits; None: torch's default one. The `mask` of prompts
    is 0 at padding, which no row has seen; None: no padding.
    """

    def __init__(
        self,
        sampling: SamplingConfig,
        ids: Tensor,
        vocab_size: int,
        generator: torch.Generator | None = None,
        mask: Tensor | None = None,
    ) -> None:
        self.sampling, self._generator = sampling, generator
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            real = torch.ones_like(ids) if mask is None else mask.to(ids)
            self._seen = real.new_zeros(ids.shape[0], vocab_size).scatter_add_(1, ids, real) > 0

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens int64 [batch, 1] from logits [batch, vocab_size]."""
        scores, sampling = self.penalized(logits), self.sampling
        if sampling.temperature > 0:
            drawn = self.draw(torch.empty_like(scores))
            scores = warped(scores / sampling.temperature, sampling.top_k, sampling.top_p) / drawn
        token = scores.argmax(-1, keepdim=True)
        self.note(token)
        return token

    def penalized(self, logits: Tensor) -> Tensor:
        """Logits, float32, less of what was seen."""
        logits = logits.float()
        if self._seen is None:
            return logits
        # Keskar et al., arXiv 1909.05858: what was seen becomes less probable, whatever the sign of its logit
        penalty = self.sampling.repetition_penalty
        return torch.where(self._seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)

    def draw(self, out: Tensor) -> Tensor:
        """Exponential e: p / e is largest at a sample of p, so that nothing is read back as by multinomial."""
        return out.exponential_(generator=self._generator)

    def note(self, token: Tensor) -> None:
        """Tokens int64 [batch, 1] are seen from now on."""
        if self._seen is not None:
            self._seen.scatter_(1, token, True)


def warped(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """Probabilities of the most probable tokens, 0 of others, by scores [batch, vocab_size]."""
    if top_k:
        scores = TopKLogitsWarper(min(top_k, scores.shape[-1]))(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)


@dataclass(frozen=True)
class Generated:
    """What `Session.generate` made.

    Attributes:
        sequences: prompt and new tokens, int64 [batch, time]; padding after the end of a row.
        cache: it holds all tokens but the last.
        mode: how tokens were made at the end: passes, steps or graphs.
        graph_bytes: memory that captured CUDA graphs took meanwhile.
        note: why steps were not captured; None if there is nothing to say.
    """

    sequences: Tensor
    new_tokens: int
    cache: CompressedCache
    mode: Mode
    graph_bytes: int
    note: str | None


def checked_mask(model: Any, ids: Any, mask: Any, chunk: int | None) -> Tensor | None:
    """The mask of prompts as int64, once these can be read as `Session.generate` says; else UsageError."""
    for name, x in (("input_ids", ids), ("attention_mask", mask)):
        if not isinstance(x, Tensor) and (x is not None or name == "input_ids"):
            hint = "; unpack what a tokenizer returns: session.generate(**inputs)" if hasattr(x, "keys") else ""
            raise UsageError(f"{name} is a tensor [batch, time], not a {type(x).__name__}{hint}")
    if ids.dim() != 2 or not len(ids) or (mask is not None and mask.shape != ids.shape):
        shapes = " and ".join(str(list(x.shape)) for x in (ids, mask) if x is not None)
        raise UsageError(f"input_ids and attention_mask are [batch, time] with one row or more, not {shapes}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"input_ids are int64, not {str(ids.dtype).removeprefix('torch.')}")
    known = getattr(model.get_input_embeddings(), "num_embeddings", None)  # on a GPU, others would end the process
    if known is not None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < known:
        raise UsageError(f"input_ids are {ids.min()} to {ids.max()}, but the model has {known} embeddings, from 0")
    if chunk is not None and chunk < 1:
        raise UsageError(f"prefill_chunk is 1 or more, not {chunk}")
    if mask is None:
        return None
    mask = (mask != 0).long()
    if not mask.any(1).all():
        raise UsageError(f"row {int(mask.any(1).int().argmin())} has no token: its attention_mask is 0 everywhere")
    if bool((mask.diff(dim=1) < 0).any()):
        raise UsageError("padding must stand on the left of a prompt")
    return mask


def prefill(
    model: Any,
    cache: CompressedCache,
    ids: Tensor,
    mask: Tensor | None,
    chunk: int | None,
    advance: Advance = lambda count: None,
    *,
    all_logits: bool = False,
) -> Tensor:
    """Reads what a cache does not hold yet of prompts, and returns logits of the last token, [batch, vocab_size].

    Args:
        cache: holds the first tokens of the prompts, or none; emptied, and all is read, where its model rotates the
            whole of the prompts differently (`Rope.switch`).
        ids: int64 [batch, time].
        mask: int64 [batch, time], 0 at padding; None: no padding.
        chunk: tokens per forward pass; None: all.
        all_logits: return those of all tokens that are read, [batch, time, vocab_size].

    Raises:
        UsageError: nothing left to read.
        CacheError: a pass over the cache broke off.
    """
    length = ids.shape[1] if mask is None else int(mask.sum(1).max())
    if cache.sequences.rope.changes(length):
        cache.reset()
    cache.sequences.begin(length)
    if cache.sequences.one_pass(length):
        chunk = None
    length, first = ids.shape[1], cache.get_seq_length()
    if first:
        cache.passes.check_at_rest()
    if first >= length:
        raise UsageError(f"the prompt has {length} tokens, and the cache holds {first}: nothing is left to read")
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    kept: list[Tensor] = []
    for start in range(first, length, chunk or length):
        stop = min(length, start + (chunk or length))
        logits: Tensor = model(
            input_ids=ids[:, start:stop],
            attention_mask=None if mask is None else mask[:, :stop],
            position_ids=None if positions is None else positions[:, start:stop],
            logits_to_keep=0 if all_logits else 1,
            **with_cache(cache),
        ).logits
        kept = [*kept, logits] if all_logits else [logits[:, -1]]
        advance(stop - start)
    return kept[0] if len(kept) == 1 else torch.cat(kept, dim=1)


def stop_tokens(model: Any, stops: Any, padding: int | None) -> tuple[list[int], int]:
    """Tokens that end a row and the token after its end: these, or those of the model's configs."""
    several = isinstance(stops, Iterable) and not isinstance(stops, Tensor)
    ends = end_tokens(model) if stops is None else torch.as_tensor([*stops] if several else stops).flatten().tolist()
    padding = getattr(model.generation_config, "pad_token_id", None) if padding is None else padding
    return ends, padding if padding is not None else next(iter(ends), 0)
