"""How the tokens of a request are chosen, and what is told of their probabilities."""

import secrets
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.attention.generation import NextToken, warped
from kvcli.errors import ModelError
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
        self.next_token = NextToken(job.sampling, job.ids.to(device), vocab_size, generator)

    def scores(self, logits: Tensor) -> Tensor:
        """Logits [1, vocab_size], float32, of what may follow."""
        grammar = self._job.grammar
        return self.next_token.penalized(logits if grammar is None else grammar.allowed(logits))

    def take(self, token: int, logits: Tensor) -> tuple[TokenLogprob | None, bool]:
        """Goes on with a token that was chosen by logits [1, vocab_size].

        Returns what the model says of it and of the most probable ones, if that is asked for, and whether nothing can
        follow it; ApiError: as of `Grammar.take`.
        """
        told, grammar = None, self._job.grammar
        if (count := self._job.num_logprobs) is not None:
            (told,) = _logprobs_of(torch.tensor([token], device=logits.device), logits, count)
        return told, grammar is not None and grammar.take(token)


def add_prompt_logprobs(job: Job, first: int, logits: Tensor) -> None:
    """Adds what logits [tokens, vocab_size] of the tokens from place `first` on of a prompt say of those that follow.

    ModelError: logits that are not finite.
    """
    if not logits.isfinite().all():
        raise ModelError("the model computed logits that are not finite")
    begins = [TokenLogprob(int(job.ids[0, 0]), None, [])] if first == 0 else []
    tokens = job.ids[0, first + 1 : first + 1 + len(logits)].to(logits.device)
    job.answer.add_prompt_logprobs([*begins, *_logprobs_of(tokens, logits[: len(tokens)], job.num_logprobs or 0)])


def _logprobs_of(tokens: Tensor, logits: Tensor, count: int) -> list[TokenLogprob]:
    """Of tokens, int64 [tokens], and of the `count` most probable ones, by logits [tokens, vocab_size]."""
    found = list[TokenLogprob]()
    for some, rows in zip(tokens.split(64), logits.split(64), strict=True):
        logprobs = rows.float().log_softmax(-1)
        values, ids = logprobs.topk(count)
        own = logprobs.gather(1, some.unsqueeze(1)).squeeze(1)
        columns = (x.tolist() for x in (some, own, ids, values))
        found += [TokenLogprob(x, y, [*zip(*top, strict=True)]) for x, y, *top in zip(*columns, strict=True)]
    return found


def choose(samplers: Sequence[Sampler], scores: Tensor) -> Tensor:
    """A token of each sampler, int64 [samplers, 1], by its scores [samplers, vocab_size]."""
    scores = scores.clone()
    alike = defaultdict[tuple[int, float], list[int]](list)
    for row, sampler in enumerate(samplers):
        if (sampling := sampler.next_token.sampling).temperature > 0:
            alike[sampling.top_k, sampling.top_p].append(row)
    for warpers, rows in alike.items():
        temperatures = scores.new_tensor([[samplers[row].next_token.sampling.temperature] for row in rows])
        where = torch.tensor(rows, device=scores.device)
        probabilities = warped(scores[where] / temperatures, *warpers)
        for row, out in zip(rows, drawn := torch.empty_like(probabilities), strict=True):
            samplers[row].next_token.draw(out)
        scores[where] = probabilities / drawn
    tokens = scores.argmax(-1, keepdim=True)
    for sampler, token in zip(samplers, tokens.split(1), strict=True):
        sampler.next_token.note(token)
    return tokens
