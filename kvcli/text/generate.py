"""Reading prompts into a compressed cache, and generating text with it, streamed and measured."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.generation import Generated, Mode, SamplingConfig, prefill
from kvcli.attention.session import Session
from kvcli.cache.compressed import CompressedCache, MemoryReport
from kvcli.models.checkpoint import quiet_transformers
from kvcli.models.load import LoadedModel, layers_watched, not_finite
from kvcli.progress import Progress, no_progress
from kvcli.registry import BASELINE
from kvcli.seam.decoder import backbone, decoder_layers
from kvcli.seam.versions import with_cache
from kvcli.text.detokenizer import Detokenizer


@torch.inference_mode()
def compress(
    session: Session,
    ids: Tensor,
    *,
    prefill_chunk: int | None = None,
    past_key_values: CompressedCache | None = None,
    progress: Progress = no_progress,
    after_chunk: Callable[[CompressedCache], None] = lambda cache: None,
) -> CompressedCache:
    """Reads a prompt into a cache and generates nothing.

    Later chunks attend to the codes of earlier ones, so the size of the chunks is part of the result: the same chunks
    give the same cache.

    Args:
        ids: int64 [1, time].
        prefill_chunk: tokens per forward pass; None: all.
        past_key_values: a cache that holds the first tokens of `ids`, fewer than all; default: a new one.
        progress: counts a chunk's tokens layer by layer, so that it moves within chunks.
        after_chunk: called with the cache after each forward pass.

    UsageError: a cache that holds all of `ids`; ModelError: the model's values are not finite.
    """
    cache = session.new_cache() if past_key_values is None else past_key_values
    unread, layers = ids.shape[1] - cache.get_seq_length(), len(decoder_layers(session.model))
    label = "read" if session.method.name == BASELINE else "read and compressed"

    def count(layer_idx: int, output: Tensor) -> None:
        """Each layer counts for its share of the pass's tokens."""
        advance(output.shape[1] * (layer_idx + 1) // layers - output.shape[1] * layer_idx // layers)

    with quiet_transformers(), progress(label, unread, "tokens") as advance, layers_watched(session.model, count):
        logits = prefill(session.model, cache, ids, None, prefill_chunk, lambda count: after_chunk(cache))
    if not bool(logits.isfinite().all()):
        again = partial(backbone(session.model), input_ids=ids, **with_cache(session.new_cache()))
        raise not_finite(session.model, f"method '{session.method.name}'", again)
    return cache


@dataclass(frozen=True)
class Generation:
    """Generated text with its timing and memory."""

    text: str
    prompt_tokens: int
    new_tokens: int
    ttft_s: float  # seconds until the first token was chosen, prefill and encoding included
    tokens_per_s: float  # rate after the first token; 0 when there was one token only
    memory: MemoryReport  # of the cache at the end
    reused_tokens: int = 0  # prompt tokens that the cache had before
    graph_bytes: int = 0  # memory that captured CUDA graphs took while tokens were made
    note: str | None = None  # why steps were not captured; None if there is nothing to say

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values."""
        return {**asdict(self), "memory": self.memory.to_dict()}


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
    prefill_chunk: int | None = None,
) -> tuple[Generation, Generated]:
    """Continues a prompt, also beyond the context that the model was trained on.

    Returns text and measurements, and what `Session.generate` returned. ModelError: logits that are not finite.

    Args:
        loaded: the model, attached by the session.
        ids: prompt, int64 [1, time].
        write: called with pieces of text as they are finished.
        cache: whose tokens are the first of the prompt; default: a new one.
        mode, prefill_chunk: see `Session.generate`.
    """
    detokenizer = Detokenizer(loaded.tokenizer, ids[0].tolist())
    pieces, times = list[str](), list[float]()

    def show(text: str) -> None:
        pieces.append(text)
        write(text)

    def take(tokens: Tensor) -> None:
        """Tokens [1, count] that were made together."""
        times.extend([time.perf_counter()] * tokens.shape[1])
        show(detokenizer.add(tokens[0].tolist()))

    torch.manual_seed(seed)
    reused = 0 if cache is None else cache.get_seq_length()
    started = time.perf_counter()
    with quiet_transformers():
        generated = session.generate(
            ids,
            sampling=sampling,
            cache=cache,
            eos_token_id=loaded.end_tokens,
            prefill_chunk=prefill_chunk,
            mode=mode,
            on_tokens=take,
        )
        show(detokenizer.end())
    spread = times[-1] - times[0]
    generation = Generation(
        text="".join(pieces),
        prompt_tokens=ids.shape[1],
        reused_tokens=reused,
        new_tokens=generated.new_tokens,
        ttft_s=times[0] - started,
        tokens_per_s=(len(times) - 1) / spread if spread > 0 else 0.0,
        memory=generated.cache.memory(),
        graph_bytes=generated.graph_bytes,
        note=generated.note,
    )
    return generation, generated
