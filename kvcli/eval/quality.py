"""KL divergence to the uncompressed model, flips and perplexity, teacher-forced through the real cache.

A sequence is fed in chunks. Attention within a chunk is in full precision; tokens before the chunk, except the sinks
and the residual window, are read from codes. Both models see the same tokens, so next-token distributions are compared
token by token.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from kvcli.attention.session import Session
from kvcli.cache.compressed import MemoryReport
from kvcli.cache.record import ContextRecord, num_coded
from kvcli.contexts import Match, StoredContext
from kvcli.contexts.reader import ContextReader
from kvcli.errors import UsageError
from kvcli.models.load import not_finite
from kvcli.registry import BASELINE, method_name
from kvcli.seam.decoder import backbone, logits_of
from kvcli.seam.versions import with_cache
from kvcli.storage.ranks import joined_ranks

BLOCK_TOKENS = 256
"""Tokens of a block; KL of tokens this far apart is uncorrelated (docs/quality.md, "How quality is measured")."""

_LOGIT_TOKENS = 256


@dataclass(frozen=True)
class TokenScores:
    """Figures of every token, float64 [num_sequences, seq_len] each."""

    kl: Tensor  # KL(uncompressed || compressed) of the next-token distribution, in nats
    flips: Tensor  # 1 where the most probable next token changed, else 0
    nll: Tensor  # loss of the compressed model in nats, NaN where there is no next token
    reference_nll: Tensor

    def blocks(self) -> list[dict[str, Any]]:
        """Means over blocks of up to `BLOCK_TOKENS` consecutive tokens of a sequence, the units of a bootstrap.

        Each has `sequence` and `start`, its first token; `tokens`, and how many of them have a next token, `predicted`;
        the means `kl` and `flips` over the former, `nll` and `reference_nll` over the latter.
        """
        blocks = []
        for sequence in range(self.kl.shape[0]):
            for start in range(0, self.kl.shape[1], BLOCK_TOKENS):
                part = {name: x[sequence, start : start + BLOCK_TOKENS] for name, x in vars(self).items()}
                predicted = int((~part["nll"].isnan()).sum())
                means = {name: float(x.nansum()) / max(1, (~x.isnan()).sum().item()) for name, x in part.items()}
                tokens = part["kl"].numel()
                blocks.append({"sequence": sequence, "start": start, "tokens": tokens, "predicted": predicted, **means})
        return blocks

    def after(self, count: int) -> Self:
        return replace(self, **{name: x[:, count:] for name, x in vars(self).items()})


@dataclass(frozen=True)
class QualityReport:
    """What a method costs in quality, token by token, and the memory of its cache after the last batch."""

    scores: TokenScores
    memory: MemoryReport

    @property
    def figures(self) -> dict[str, Any]:
        """Over all tokens: mean and 99th percentile of `kl`, the share of `flips`, and both models' perplexity."""
        scores, kl = self.scores, self.scores.kl.flatten()
        return {
            "kl_mean": float(kl.mean()),
            "kl_p99": float(kl.kthvalue(max(1, math.ceil(0.99 * kl.numel()))).values),
            "flips": float(scores.flips.mean()),
            "perplexity": float(scores.nll.nanmean().exp()),
            "reference_perplexity": float(scores.reference_nll.nanmean().exp()),
            "num_tokens": kl.numel(),
        }


def token_scores(logits: Tensor, reference: Tensor, targets: Tensor) -> TokenScores:
    """Compares next-token distributions: logits of the compressed model and of the `reference`, [batch, time, vocab].

    The targets are the next tokens, int64 [batch, time or time - 1].
    """
    ours, theirs = logits.float().log_softmax(-1), reference.float().log_softmax(-1)
    count, picked = targets.shape[1], targets.unsqueeze(-1)

    def loss(log_probs: Tensor) -> Tensor:
        nll = torch.full(log_probs.shape[:2], math.nan, dtype=torch.float64)
        nll[:, :count] = -log_probs[:, :count].gather(-1, picked).squeeze(-1).double().cpu()
        return nll

    return TokenScores(
        kl=(theirs.exp() * (theirs - ours)).sum(-1).clamp_min(0).double().cpu(),
        flips=(ours.argmax(-1) != theirs.argmax(-1)).double().cpu(),
        nll=loss(ours),
        reference_nll=loss(theirs),
    )


def state_scores(model: Any, states: Tensor, reference: Tensor, targets: Tensor) -> Iterator[TokenScores]:
    """Compares the predictions that follow from hidden states [batch, time, hidden_size], some tokens at a time."""
    for first in range(0, states.shape[1], _LOGIT_TOKENS):
        at = slice(first, first + _LOGIT_TOKENS)
        ours, theirs = (logits_of(model, x[:, at].to(model.device)) for x in (states, reference))
        yield token_scores(ours, theirs, targets[:, at])


def joined(parts: Sequence[TokenScores], dim: int) -> TokenScores:
    """Scores of more tokens (dim 1) or of more sequences (dim 0)."""
    return TokenScores(**{name: torch.cat([getattr(x, name) for x in parts], dim) for name in vars(parts[0])})


def reference_states(model: Any, batch: Tensor) -> Tensor:
    """Last hidden states of the uncompressed model, [batch, time, hidden_size], for tokens [batch, time].

    ModelError: states that are not finite; the message names the layer.
    """
    run = partial(backbone(model), input_ids=batch, use_cache=False)
    with torch.inference_mode():
        states: Tensor = run().last_hidden_state
    if not states.isfinite().all():
        raise not_finite(model, "uncompressed attention", run)
    return states


def measure(
    model: Any,
    open_session: Callable[[], Session],
    sequences: Tensor,
    states: Sequence[Tensor] | Mapping[int, Tensor],
    *,
    chunk: int,
    batch_size: int,
    advance: Callable[[int], None] = lambda tokens: None,
    warn: Callable[[str], None] = lambda line: None,
) -> QualityReport:
    """Runs sequences through a compressed cache and compares with the uncompressed model; ranks share the batches.

    Args:
        model: a causal language model, detached.
        open_session: attaches the method to it.
        sequences: token ids, int64 [num_sequences, seq_len].
        states: `reference_states` of each batch, by its index; a rank needs those of its own.
        chunk: tokens of each sequence fed at once; a batch has `batch_size` sequences.
        advance: called with the number of tokens processed.
        warn: called if no token was a code when the last ones were read, so that nothing can have been lost.

    ModelError: logits that are not finite; the message names the method and the layer.
    """

    def run(item: tuple[int, Tensor]) -> tuple[TokenScores, MemoryReport, int]:
        """Scores of a batch, the memory of its cache, and how many of its tokens were codes when the last were read."""
        index, tokens = item[0], item[1].to(model.device)
        cache, parts, coded = session.new_cache(tokens.shape[1]), [], 0
        with closing(session.chunks(cache, chunk, tokens.shape[1])) as read:
            for start in range(0, tokens.shape[1], chunk):
                part = tokens[:, start : start + chunk]
                coded = cache.memory().num_encoded if start + chunk >= tokens.shape[1] else 0
                stop, hidden = start + part.shape[1], read(part)
                targets = tokens[:, start + 1 : stop + 1]
                for scores in state_scores(model, hidden, states[index][:, start:stop], targets):
                    if not scores.kl.isfinite().all():
                        again = partial(backbone(model), tokens[:, :stop], **with_cache(session.new_cache()))
                        raise not_finite(model, f"method '{session.method.name}'", again)
                    parts.append(scores)
                advance(part.numel())
        return joined(parts, dim=1), cache.memory(), coded

    with open_session() as session, torch.inference_mode():
        *others, last = joined_ranks().each([*enumerate(sequences.split(batch_size))], run)
        name = session.method.name
        if not last[2] and name != BASELINE:
            name = method_name(name, dict(session.config))
            warn(f"warning: nothing was measured of {name}: its window holds these texts; take longer ones")
    return QualityReport(joined([scores for scores, _, _ in [*others, last]], dim=0), last[1])


def copied_tokens(record: ContextRecord, scored: int) -> int:
    """How long the part of a context is that is loaded to predict its last `scored` tokens.

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
def stored_quality(session: Session, store: ContextReader, stored: StoredContext, scored: int) -> QualityReport:
    """What a stored copy of a text loses: the model's predictions of its last tokens, with the copy and without.

    The copy of all but the last `scored` tokens is loaded, codes only: it ends where a block ends. The tokens after it
    are fed to the model, which predicts each from the copy and from those before it.

    UsageError: the context is too short; ContextError: a file of it is damaged; CacheError: it belongs to another
    model, method or artifact; ModelError: the model's numbers are not finite.
    """
    copied, model = copied_tokens(stored.record, scored), session.model
    ids = store.token_ids(stored).unsqueeze(0).to(model.device)
    reference = reference_states(model, ids)
    cache = session.load_cache(store.load(Match(stored, copied), model.device))
    states = backbone(model)(input_ids=ids[:, copied:], **with_cache(cache)).last_hidden_state
    scores = state_scores(model, states[:, -scored:], reference[:, -scored:], ids[:, -scored:][:, 1:])
    return QualityReport(joined([*scores], dim=1), cache.memory())
