"""What engines answer, and what sessions of the same codes answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache

import kvcli
from kvcli.seam.versions import with_cache

NEW_TOKENS = 12
WITHOUT_WINDOW = {"sink_length": 0, "residual_length": 0, "flush_block": 1}


@dataclass(frozen=True)
class Answer:
    """The continuation of a prompt, and the log-probability of each of its tokens, if it is known."""

    tokens: list[int]
    logprobs: Tensor | None

    def part(self, start: int, stop: int) -> Self:
        return type(self)(self.tokens[start:stop], None if self.logprobs is None else self.logprobs[start:stop])


def prompts_of(model: Any, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def check(
    model: Any,
    session: Any,
    prompt: Sequence[int],
    answer: Answer,
    *,
    chunk: int = 512,
    chunks: Sequence[int] = (),
    atol: float = 1e-4,
) -> None:
    """Checks an answer against a session that reads the prompt in chunks and encodes every token at once."""
    sequence = torch.tensor([[*prompt, *answer.tokens]])
    cuts = [*(chunks or range(0, len(prompt), chunk)), *range(len(prompt), sequence.shape[1])]
    cache, rows = session.new_cache(), []
    with torch.no_grad():
        for start, stop in pairwise(cuts):
            rows.append(model(sequence[:, start:stop], **with_cache(cache)).logits[0, -1].float())
    expected = torch.stack(rows[-len(answer.tokens) :]).log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    if answer.logprobs is not None:
        torch.testing.assert_close(answer.logprobs, chosen, rtol=0, atol=atol)
    torch.testing.assert_close(expected.amax(-1), chosen, rtol=0, atol=atol)


def check_each(model: Any, session: Any, prompts: Sequence[Any], answers: Sequence[Answer], **options: Any) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        check(model, session, prompt, answer, **options)


def session_of(model: Any, name: str, artifact: Any = None, **settings: Any) -> Any:
    return kvcli.attach(model, name, artifact=artifact, **{**WITHOUT_WINDOW, **settings})


class PagedCache(DynamicCache):
    """Earlier tokens as their codes, but for sinks, recent tokens and those of an open group, which are exact as new
    ones are; a request that begins with `first` cached tokens has no recent ones among these. Layers without codecs
    have what the model's `config` gives them.
    """

    def __init__(self, codecs: Any, sinks: int = 0, residual: int = 0, first: int = 0, config: Any = None) -> None:
        super().__init__(config=config)
        self.codecs, self.sinks, self.residual, self.first = codecs, sinks, residual, first

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if isinstance(self.codecs, dict) and layer_idx not in self.codecs:
            return super().update(keys, values, layer_idx, *rest, **options)
        past, codec = self.get_seq_length(layer_idx), self.codecs[layer_idx]
        keys, values = (x.clone() for x in super().update(keys, values, layer_idx, *rest, **options))
        group = codec.tokens_per_group
        closed = max(self.first if past >= self.first else 0, past - self.residual) // group * group
        start = min(self.sinks, closed)
        for x, side in ((keys, codec.key), (values, codec.value)):
            if closed > start:
                coded = x[:, :, :closed].clone()
                coded[:, :, :start] = coded[:, :, start : start + 1]  # sinks do not widen the scale of their group
                x[:, :, start:closed] = side.decode(side.encode(coded, None), None)[:, :, start:]
        return keys, values


def pages_of(
    model: Any, *method: str, sinks: int = 0, residual: int = 0, first: int = 0, **settings: Any
) -> SimpleNamespace:
    """What makes caches that have codes as an engine has them, in layers of full attention."""
    with kvcli.attach(model, *method, **settings) as session:
        codecs = {session.spec.in_model(layer_idx): codec for layer_idx, codec in enumerate(session.codecs)}
    return SimpleNamespace(new_cache=lambda *_: PagedCache(codecs, sinks, residual, first, model.config))
