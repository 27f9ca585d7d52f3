"""How the tokens of a request are chosen, and what is told of their probabilities."""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

from kvcli.attention.generation import NextToken
from kvcli.serve.answers import TokenLogprob
from kvcli.serve.jobs import Job


class Sampler:
    """Chooses the tokens of a request from logits, with random numbers of its own.

    Args:
        device: of the logits; `vocab_size`: how many a token has.
    """

    def __init__(self, job: Job, device: torch.device, vocab_size: int) -> None:
        self._job = job
        generator = torch.Generator(device).manual_seed(secrets.randbits(63) if job.seed is None else job.seed)
        self._choose = NextToken(job.sampling, job.ids.to(device), vocab_size, generator)

    def __call__(self, logits: Tensor) -> Tensor:
        """A token int64 [1, 1] of logits [1, vocab_size]."""
        grammar = self._job.grammar
        return self._choose(logits if grammar is None else grammar.allowed(logits))

    def take(self, token: int, logits: Tensor) -> tuple[TokenLogprob | None, bool]:
        """Goes on with a token that was chosen by logits [1, vocab_size].

        Returns what the model says of it and of the most probable ones, if that is asked for, and whether nothing can
        follow it; ModelError: it is none that the grammar allows.
        """
        told, grammar = None, self._job.grammar
        if (count := self._job.num_logprobs) is not None:
            logprobs = logits[0].float().log_softmax(-1)
            values, ids = logprobs.topk(count)
            told = TokenLogprob(token, float(logprobs[token]), [*zip(ids.tolist(), values.tolist(), strict=True)])
        return told, grammar is not None and grammar.take(token)
