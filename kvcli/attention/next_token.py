"""The next token of each row, chosen on the device without a wait: in a CUDA graph as well as outside of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen: greedily at temperature 0, else by sampling with torch's random numbers.

    Attributes:
        max_new_tokens: tokens to make at most.
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


class NextToken:
    """Chooses tokens, and keeps which ones a row has seen, if they are penalized.

    Args:
        sampling: how.
        ids: the prompt, int64 [batch, time].
        vocab_size: logits per token.
    """

    def __init__(self, sampling: SamplingConfig, ids: Tensor, vocab_size: int) -> None:
        self.sampling = sampling
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(ids.shape[0], vocab_size, dtype=torch.bool, device=ids.device)
            self._seen.scatter_(1, ids, True)
        self._warpers = []
        if sampling.temperature > 0:
            self._warpers.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k:
                self._warpers.append(TopKLogitsWarper(min(sampling.top_k, vocab_size)))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens int64 [batch, 1] from logits [batch, vocab_size]."""
        logits = logits.float()
        if self._seen is not None:
            # Keskar et al., arXiv 1909.05858: what was seen becomes less probable, whatever the sign of its logit
            penalty = self.sampling.repetition_penalty
            penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(self._seen, penalized, logits)
        for warper in self._warpers:
            logits = warper(None, logits)
        if self.sampling.temperature > 0:
            # the largest of p / e with exponential e is a sample of p, and nothing is read back as by multinomial
            weights = logits.softmax(-1)
            logits = weights / torch.empty_like(weights).exponential_()
        token = logits.argmax(-1, keepdim=True)
        if self._seen is not None:
            self._seen.scatter_(1, token, True)
        return token
