"""Generating text with a compressed cache, streamed and measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from kvcli.attention.session import Session
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.memory import MemoryReport
from kvcli.models import LoadedModel


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen: greedily at temperature 0, else by sampling."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0

    def to_generate(self) -> dict[str, Any]:
        """Arguments of transformers' `generate`."""
        chosen: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": self.temperature > 0,
            "repetition_penalty": self.repetition_penalty,
        }
        if self.temperature > 0:
            chosen.update(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)
        return chosen


@dataclass(frozen=True)
class Generation:
    """Generated text with its timing and memory.

    Attributes:
        text: the continuation.
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens generated.
        ttft_s: seconds until the first token was chosen, prefill and encoding included.
        tokens_per_s: rate after the first token; 0 when there was one token only.
        memory: of the cache at the end.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    ttft_s: float
    tokens_per_s: float
    memory: MemoryReport

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values."""
        return {**asdict(self), "memory": self.memory.to_dict()}


class _Stream(TextStreamer):
    """Hands finished pieces of text on, and notes when tokens come."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.pieces: list[str] = []
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        if not (self.skip_prompt and self.next_tokens_are_prompt):
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)
        self.write(text)


def prompt_ids(loaded: LoadedModel, prompt: str, chat: bool) -> Tensor:
    """Token ids [1, time] of a prompt; with `chat`, of a conversation whose only message it is.

    An empty prompt becomes the beginning-of-text token.
    """
    tokenizer: Any = loaded.tokenizer
    if chat:
        message = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        ids = [tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id]
    return torch.tensor([ids], device=loaded.model.device)


def generate_text(
    loaded: LoadedModel,
    session: Session,
    ids: Tensor,
    sampling: SamplingConfig,
    *,
    write: Callable[[str], None] = lambda text: None,
    cache: CompressedCache | None = None,
) -> Generation:
    """Continues a prompt with transformers' own `generate`.

    Args:
        loaded: the model, attached by the session.
        session: made by `kvcli.attach`.
        ids: prompt, int64 [1, time].
        sampling: how tokens are chosen.
        write: given pieces of text as they are finished.
        cache: a cache to continue on; default a new one.
    """
    cache = cache or session.new_cache()
    stream = _Stream(loaded.tokenizer, write)
    model: Any = loaded.model
    torch.manual_seed(sampling.seed)
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            streamer=stream,
            pad_token_id=loaded.tokenizer.pad_token_id,
            **sampling.to_generate(),
        )
    times = stream.times
    spread = times[-1] - times[0]
    return Generation(
        text="".join(stream.pieces),
        prompt_tokens=ids.shape[1],
        new_tokens=output.shape[1] - ids.shape[1],
        ttft_s=times[0] - started,
        tokens_per_s=(len(times) - 1) / spread if spread > 0 else 0.0,
        memory=cache.memory(),
    )
