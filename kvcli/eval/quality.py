"""KL divergence to the uncompressed model, flips and perplexity, teacher-forced through the real cache.

A sequence is fed in chunks. Attention within a chunk is in full precision; tokens before the chunk, except the sinks
and the residual window, are read from codes. Both models see the same tokens, so next-token distributions are compared
token by token.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.session import Session
from kvcli.cache.memory import MemoryReport
from kvcli.models import not_finite

_LOGIT_TOKENS = 256


@dataclass(frozen=True)
class QualityReport:
    """What a method costs in quality, over all predicted tokens.

    Attributes:
        kl_mean: mean KL(uncompressed || compressed), nats per token.
        kl_p99: its 99th percentile.
        flips: share of tokens whose most probable successor changed.
        perplexity: of the compressed model.
        reference_perplexity: of the uncompressed model.
        num_tokens: tokens compared.
        memory: what the cache took after the last batch.
    """

    kl_mean: float
    kl_p99: float
    flips: float
    perplexity: float
    reference_perplexity: float
    num_tokens: int
    memory: MemoryReport

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values."""
        return {**asdict(self), "memory": self.memory.to_dict()}


@dataclass
class _Tally:
    """Per-token figures of one method, gathered chunk by chunk."""

    kl: list[Tensor] = field(default_factory=list)
    flips: int = 0
    nll: float = 0.0
    reference_nll: float = 0.0
    predicted: int = 0

    def add(self, logits: Tensor, reference: Tensor, targets: Tensor) -> None:
        """Adds logits [batch, time, vocab] of both models; targets [batch, time or time - 1] are the next tokens."""
        ours, theirs = logits.float().log_softmax(-1), reference.float().log_softmax(-1)
        self.kl.append((theirs.exp() * (theirs - ours)).sum(-1).clamp_min(0).flatten().cpu())
        self.flips += int((ours.argmax(-1) != theirs.argmax(-1)).sum())
        count = targets.shape[1]
        picked = targets.unsqueeze(-1)
        self.nll -= float(ours[:, :count].gather(-1, picked).sum())
        self.reference_nll -= float(theirs[:, :count].gather(-1, picked).sum())
        self.predicted += targets.numel()

    def report(self, memory: MemoryReport) -> QualityReport:
        kl = torch.cat(self.kl)
        return QualityReport(
            kl_mean=float(kl.mean()),
            kl_p99=float(kl.kthvalue(max(1, math.ceil(0.99 * kl.numel()))).values),
            flips=self.flips / kl.numel(),
            perplexity=_exp(self.nll / self.predicted),
            reference_perplexity=_exp(self.reference_nll / self.predicted),
            num_tokens=kl.numel(),
            memory=memory,
        )


def _exp(nll: float) -> float:
    """e to a loss; infinity where that is more than a float holds."""
    return math.exp(nll) if nll < math.log(sys.float_info.max) else math.inf


def reference_states(model: Any, batch: Tensor) -> Tensor:
    """Last hidden states of the uncompressed model, [batch, time, hidden_size], for tokens [batch, time].

    Raises:
        ModelError: states that are not finite; the message names the layer.
    """
    run = partial(model.base_model, input_ids=batch, use_cache=False)
    with torch.inference_mode():
        states: Tensor = run().last_hidden_state
    if not states.isfinite().all():
        raise not_finite(model, "uncompressed attention", run)
    return states


def measure(
    model: Any,
    open_session: Callable[[], Session],
    sequences: Tensor,
    states: list[Tensor],
    *,
    chunk: int,
    batch_size: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> QualityReport:
    """Runs sequences through a compressed cache and compares with the uncompressed model.

    Args:
        model: a transformers causal language model, detached.
        open_session: attaches the method to the model.
        sequences: [num_sequences, seq_len] token ids.
        states: `reference_states` of each batch.
        chunk: tokens fed at once.
        batch_size: sequences fed at once.
        advance: called with the number of tokens processed.

    Returns:
        The figures over all tokens, and the memory of the cache after the last batch.

    Raises:
        ModelError: logits that are not finite; the message names the method and the layer.
    """
    tally = _Tally()
    head = model.get_output_embeddings()
    with open_session() as session, torch.inference_mode():
        for batch, reference in zip(sequences.split(batch_size), states, strict=True):
            tokens = batch.to(model.device)
            cache = session.new_cache()
            for start in range(0, tokens.shape[1], chunk):
                part = tokens[:, start : start + chunk]
                hidden = model.base_model(input_ids=part, past_key_values=cache, use_cache=True).last_hidden_state
                for first in range(0, part.shape[1], _LOGIT_TOKENS):
                    at, stop = start + first, min(start + first + _LOGIT_TOKENS, start + part.shape[1])
                    ours = head(hidden[:, first : stop - start])
                    theirs = head(reference[:, at:stop].to(model.device))
                    tally.add(ours, theirs, tokens[:, at + 1 : stop + 1])
                    if not tally.kl[-1].isfinite().all():
                        again = partial(model.base_model, tokens[:, :stop], past_key_values=session.new_cache())
                        raise not_finite(model, f"method '{session.method.name}'", again)
                advance(part.numel())
        return tally.report(cache.memory())
