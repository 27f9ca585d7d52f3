"""Generating text with a compressed cache, streamed and measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from kvcli.attention.decoder import Mode
from kvcli.attention.next_token import SamplingConfig
from kvcli.attention.session import Session
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.memory import MemoryReport
from kvcli.checkpoint import quiet_transformers
from kvcli.errors import ModelError, UsageError
from kvcli.models import LoadedModel


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
        graph_bytes: memory that captured CUDA graphs took while tokens were made.
        note: why steps were not captured although they could be; None if there is nothing to say.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    ttft_s: float
    tokens_per_s: float
    memory: MemoryReport
    graph_bytes: int = 0
    note: str | None = None

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

    def put_all(self, tokens: Tensor) -> None:
        """Takes tokens [count] one by one, as the base class wants them."""
        for token in tokens:
            self.put(token.unsqueeze(0))

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)
        self.write(text)


def prompt_ids(loaded: LoadedModel, prompt: str, chat: bool, say: Callable[[str], None] = lambda line: None) -> Tensor:
    """Token ids [1, time] of a prompt; with `chat`, of a conversation whose only message it is.

    An empty prompt becomes the beginning-of-text token.

    Args:
        loaded: the model, with its tokenizer.
        prompt: the text.
        chat: whether to put it into the tokenizer's chat template.
        say: called with a line if the prompt is empty.

    Raises:
        UsageError: an empty prompt, where the tokenizer has no beginning-of-text token.
        ModelError: a chat template that fails, or token ids that the model has no embedding for.
    """
    tokenizer: Any = loaded.tokenizer
    if chat:
        ids = tokenizer(_in_chat(loaded, prompt), add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not prompt:
        say("the prompt is empty: the model starts from its first token alone")
    if not ids:
        ids = [tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id]
    if ids[0] is None:
        raise UsageError("the prompt is empty, and the tokenizer has no beginning-of-text token to start from")
    if max(ids) >= loaded.spec.vocab_size:
        raise ModelError(
            f"the tokenizer makes token {max(ids)}, but {loaded.name} has {loaded.spec.vocab_size} embeddings; "
            "use the tokenizer and the weights of one model"
        )
    return torch.tensor([ids], device=loaded.model.device)


def _in_chat(loaded: LoadedModel, prompt: str) -> str:
    message = [{"role": "user", "content": prompt}]
    try:
        text: Any = loaded.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program of the model's author, run by jinja in its sandbox
        raise ModelError(f"the chat template of {loaded.name} fails: {' '.join(str(error).split())}") from error
    return str(text)


def generate_text(
    loaded: LoadedModel,
    session: Session,
    ids: Tensor,
    sampling: SamplingConfig,
    *,
    seed: int = 0,
    write: Callable[[str], None] = lambda text: None,
    cache: CompressedCache | None = None,
    mode: Mode | None = None,
) -> Generation:
    """Continues a prompt, also beyond the context that the model was trained on.

    Args:
        loaded: the model, attached by the session.
        session: made by `kvcli.attach`.
        ids: prompt, int64 [1, time].
        sampling: how tokens are chosen.
        seed: of the random numbers.
        write: given pieces of text as they are finished.
        cache: a cache to continue on; default a new one.
        mode: how tokens are made, see `Session.generate`.

    Raises:
        ModelError: logits that are not finite.
    """
    stream = _Stream(loaded.tokenizer, write)
    torch.manual_seed(seed)
    started = time.perf_counter()
    with quiet_transformers():
        stream.put(ids[0].cpu())
        made = session.generate(
            ids, sampling=sampling, past_key_values=cache, mode=mode, on_tokens=lambda new: stream.put_all(new[0])
        )
        stream.end()
    times = stream.times
    spread = times[-1] - times[0]
    return Generation(
        text="".join(stream.pieces),
        prompt_tokens=ids.shape[1],
        new_tokens=made.new_tokens,
        ttft_s=times[0] - started,
        tokens_per_s=(len(times) - 1) / spread if spread > 0 else 0.0,
        memory=made.cache.memory(),
        graph_bytes=made.graph_bytes,
        note=made.note,
    )
