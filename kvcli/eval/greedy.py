"""Greedy generation over any cache, one sequence at a time, and prompts that are read in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcli.errors import ModelError
from kvcli.eval.case import NewCache
from kvcli.models import LoadedModel, not_finite
from kvcli.seam.decoder import backbone, logits_of


def read(model: Any, cache: Any, ids: Sequence[int], chunk: int | None = None) -> Tensor:
    """Reads tokens into a cache.

    Args:
        model: a causal language model, attached if the cache is compressed.
        cache: what it holds so far stays; the tokens are added.
        ids: token ids, at least one.
        chunk: tokens per forward pass; default all. Attention within a pass is in full precision.

    Returns:
        Last hidden states of the tokens, [1, time, hidden_size].
    """
    tokens = torch.tensor([list(ids)], device=model.device)
    states = [
        backbone(model)(input_ids=part, past_key_values=cache, use_cache=True).last_hidden_state
        for part in tokens.split(chunk or len(ids), dim=1)
    ]
    return torch.cat(states, dim=1)


def greedy(
    loaded: LoadedModel,
    new_cache: NewCache,
    pieces: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    chunk: int | None = None,
    stop: Iterable[int] = (),
    done: Callable[[list[int]], bool] = lambda tokens: False,
) -> tuple[list[int], Any]:
    """Continues a prompt with the most probable token, again and again.

    The prompt is read piece by piece: a later piece attends to what the cache has made of the earlier ones.

    Args:
        loaded: the model, attached if the caches are compressed.
        new_cache: makes an empty cache.
        pieces: token ids of the prompt, none of the pieces empty.
        max_new_tokens: tokens at most.
        chunk: tokens of a piece per forward pass; default all.
        stop: tokens that end the text; they are not returned.
        done: given the tokens so far after each one; True ends the text.

    Returns:
        The new tokens, and the cache.

    Raises:
        ModelError: logits that are not finite.
    """
    model: Any = loaded.model
    cache, stop = new_cache(), set(stop)
    tokens: list[int] = []
    with torch.inference_mode():
        for piece in pieces[:-1]:
            read(model, cache, piece, chunk)
        following: Sequence[int] = pieces[-1]
        while True:
            logits = logits_of(model, read(model, cache, following, chunk)[:, -1:])[:, -1]
            if not logits.isfinite().all():
                raise not_finite_logits(model, new_cache, [*(x for piece in pieces for x in piece), *tokens])
            token = int(logits.argmax(-1))
            if token in stop:
                break
            tokens.append(token)
            if len(tokens) >= max_new_tokens or done(tokens):
                break
            following = [token]
    return tokens, cache


def end_tokens(loaded: LoadedModel) -> set[int]:
    """The tokens that end a text of the model."""
    tokenizer: Any = loaded.tokenizer
    configured = getattr(loaded.model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return {int(token) for token in [*listed, tokenizer.eos_token_id] if token is not None}


def not_finite_logits(model: Any, new_cache: NewCache, ids: Sequence[int]) -> ModelError:
    """The error for logits that are not finite after some tokens; it names the layer where that begins."""
    return not_finite(model, "the cache of this row", partial(read, model, new_cache(), ids))
