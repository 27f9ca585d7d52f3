"""Reading a prompt into a compressed cache, chunk by chunk."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcli.attention.generation import prefill
from kvcli.attention.session import Session
from kvcli.cache.compressed import CompressedCache
from kvcli.checkpoint import quiet_transformers
from kvcli.models import not_finite
from kvcli.progress import Progress, no_progress
from kvcli.seam.decoder import backbone


@torch.inference_mode()
def compress(
    session: Session,
    ids: Tensor,
    *,
    prefill_chunk: int | None = None,
    past_key_values: CompressedCache | None = None,
    progress: Progress = no_progress,
) -> CompressedCache:
    """Reads a prompt into a cache and generates nothing.

    Later chunks attend to the codes of earlier ones, so the size of the chunks is part of the result: the same chunks
    give the same cache.

    Args:
        session: made by `kvcli.attach`.
        ids: int64 [1, time].
        prefill_chunk: tokens per forward pass; None: all.
        past_key_values: a cache that holds the first tokens of `ids`, fewer than all; default: a new one.
        progress: shows the tokens read.

    Returns:
        The cache, which holds all tokens.

    Raises:
        UsageError: a cache that holds all of `ids`.
        ModelError: the model's values are not finite.
    """
    cache = session.new_cache() if past_key_values is None else past_key_values
    left = ids.shape[1] - cache.get_seq_length()
    with quiet_transformers(), progress("read and compressed", left, "tokens") as advance:
        logits = prefill(session.model, cache, ids, None, prefill_chunk, advance)
    if not bool(logits.isfinite().all()):
        again = partial(backbone(session.model), input_ids=ids, past_key_values=session.new_cache(), use_cache=True)
        raise not_finite(session.model, f"method '{session.method.name}'", again)
    return cache
