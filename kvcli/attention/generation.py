"""Before and after decoding: the prompt's pass, the tokens that stop a row, what is returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvcli.attention.decoder import Mode
from kvcli.cache.compressed import CompressedCache
from kvcli.errors import UsageError
from kvcli.progress import Advance


@dataclass(frozen=True)
class Generated:
    """What `Session.generate` made.

    Attributes:
        sequences: prompt and new tokens, int64 [batch, time]; padding after the end of a row.
        new_tokens: how many per row.
        cache: it holds all tokens but the last.
        mode: how tokens were made at the end: passes, steps or graphs.
        compiled: whether layers ran compiled.
        graph_bytes: memory that captured CUDA graphs took meanwhile.
        note: why steps were not captured or not compiled; None if there is nothing to say.
    """

    sequences: Tensor
    new_tokens: int
    cache: CompressedCache
    mode: Mode
    compiled: bool
    graph_bytes: int
    note: str | None


def prefill(
    model: Any,
    cache: CompressedCache,
    ids: Tensor,
    mask: Tensor | None,
    chunk: int | None,
    advance: Advance = lambda count: None,
) -> Tensor:
    """Reads what a cache does not hold yet of prompts.

    Args:
        model: the attached model.
        cache: holds the first tokens of the prompts, or none.
        ids: int64 [batch, time].
        mask: int64 [batch, time], 0 at padding; None: no padding.
        chunk: tokens per forward pass; None: all.
        advance: told how many tokens were read.

    Returns:
        Logits of the last token, [batch, vocab_size].

    Raises:
        UsageError: padding that is not on the left, or no token that the cache does not hold.
        CacheError: a pass over the cache broke off.
    """
    held = cache.get_seq_length()
    if held:
        cache.passes.check_at_rest()
    if held >= ids.shape[1]:
        raise UsageError(f"the prompt has {ids.shape[1]} tokens, and the cache holds {held}: nothing is left to read")
    if mask is not None and bool((mask.diff(dim=1) < 0).any() | (mask[:, -1] == 0).any()):
        raise UsageError("padding must stand on the left of a prompt")
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    for start in range(held, ids.shape[1], chunk or ids.shape[1]):
        stop = min(ids.shape[1], start + (chunk or ids.shape[1]))
        logits: Tensor = model(
            input_ids=ids[:, start:stop],
            attention_mask=None if mask is None else mask[:, :stop],
            position_ids=None if positions is None else positions[:, start:stop],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        advance(stop - start)
    return logits[:, -1]


def stop_tokens(model: Any, stops: int | Sequence[int] | None, padding: int | None) -> tuple[list[int], int]:
    """Tokens that end a row and the token after its end: those given, or those of the model's generation config."""
    config = getattr(model, "generation_config", None)
    stops = getattr(config, "eos_token_id", None) if stops is None else stops
    found = [stops] if isinstance(stops, int) else list(stops or ())
    padding = getattr(config, "pad_token_id", None) if padding is None else padding
    return found, padding if padding is not None else next(iter(found), 0)
