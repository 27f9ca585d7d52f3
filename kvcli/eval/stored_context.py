"""What a stored copy of a text loses: the model's predictions over its last tokens, with the copy and without.

The copy of all but the last tokens is loaded, codes only: it ends where a block ends. The tokens after it are fed to
the model, which predicts each from the copy and from those before it. The uncompressed model reads the whole text.
"""

from __future__ import annotations

import torch

from kvcli.attention.session import Session
from kvcli.cache.parts import num_coded
from kvcli.cache.record import ContextRecord
from kvcli.contexts import ContextStore, Match, StoredContext
from kvcli.errors import UsageError
from kvcli.eval.quality import QualityReport, joined, reference_states, token_scores
from kvcli.seam.decoder import backbone, logits_of

SCORED_TOKENS = 256
"""Last tokens of a context whose predictions are compared, by default."""

_LOGIT_TOKENS = 256


def copied_tokens(record: ContextRecord, scored: int = SCORED_TOKENS) -> int:
    """How long the part of a context is that is loaded to predict its last `scored` tokens.

    Raises:
        UsageError: no block of codes is left before those tokens.
    """
    sinks, size = record.counts.sinks, record.part_tokens
    blocks = min(num_coded(record.counts, size), max(0, record.num_tokens - scored - sinks) // size)
    length = sinks + blocks * size
    if not blocks or length < record.counts.observed[0]:
        raise UsageError(
            f"of {record.num_tokens} tokens, no block of {size} codes that can be loaded by itself comes before the "
            f"last {scored}; score fewer, or a longer context"
        )
    return length


@torch.inference_mode()
def stored_quality(
    session: Session, store: ContextStore, stored: StoredContext, scored: int = SCORED_TOKENS
) -> QualityReport:
    """Compares the predictions of a context's last tokens.

    Args:
        session: of the model, method and artifact that the context is bound to.
        store: that has the context.
        stored: the context.
        scored: how many last tokens.

    Returns:
        The figures over these tokens; `memory` is of the cache after the last of them.

    Raises:
        UsageError: the context is too short.
        ContextError: a file of it is damaged.
        CacheError: it belongs to another model, method or artifact.
        ModelError: the model's numbers are not finite.
    """
    copied, model = copied_tokens(stored.record, scored), session.model
    ids = store.token_ids(stored).unsqueeze(0).to(model.device)
    reference = reference_states(model, ids)
    cache = session.load_cache(store.load(Match(stored, copied), model.device))
    states = backbone(model)(input_ids=ids[:, copied:], past_key_values=cache, use_cache=True).last_hidden_state
    targets = ids[:, -scored:]
    parts = []
    for first in range(0, scored, _LOGIT_TOKENS):
        ours, theirs = (logits_of(model, x[:, -scored:][:, first : first + _LOGIT_TOKENS]) for x in (states, reference))
        parts.append(token_scores(ours, theirs, targets[:, first + 1 : first + 1 + ours.shape[1]]))
    return joined(parts, dim=1).report(cache.memory())
