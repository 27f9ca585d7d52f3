"""Greedy generation over caches, and where two generations part."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvcli
from kvcli.artifact.choice import MethodChoice
from kvcli.attention.session import Session
from kvcli.attention.steps import Chunks
from kvcli.cli.output import Output
from kvcli.errors import ModelError
from kvcli.eval import drift
from kvcli.eval.greedy import greedy
from kvcli.eval.suite import Case
from kvcli.models.load import LoadedModel

PROMPT = [5, 9, 40, 7, 12, 33, 90, 14] * 6


def generate(loaded: LoadedModel, pieces: list[list[int]], count: int, **changes: Any) -> list[int]:
    return greedy(loaded, DynamicCache, pieces, count, **changes)[0]


def test_greedy_is_what_transformers_generates(loaded: LoadedModel) -> None:
    ids = torch.tensor([PROMPT])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = loaded.model.generate(input_ids=ids, **options)[0, len(PROMPT) :].tolist()
    assert generate(loaded, [PROMPT], 12) == expected
    assert generate(loaded, [PROMPT[:20], PROMPT[20:]], 12, chunk=7) == expected
    assert generate(loaded, [PROMPT], 12, stop=[expected[4]]) == expected[: expected.index(expected[4])]
    assert generate(loaded, [PROMPT], 12, done=lambda tokens: len(tokens) == 3) == expected[:3]


def test_a_question_in_a_pass_of_its_own_reads_codes(loaded: LoadedModel) -> None:
    settings = {"group_size": 8, "residual_length": 8, "sink_length": 0}
    with kvcli.attach(loaded, "kivi-1", **settings) as session:
        tokens, cache = greedy(loaded, session.new_cache, [PROMPT, [50, 51]], 1)
        together, _ = greedy(loaded, session.new_cache, [[*PROMPT, 50, 51]], 1)
    assert cache.memory().num_encoded >= len(PROMPT) - 8
    assert together == generate(loaded, [[*PROMPT, 50, 51]], 1)  # a single pass is in full precision
    assert len(tokens) == 1


def test_new_tokens_are_read_in_the_sessions_steps(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def chunks(self: Session, *arguments: Any) -> Chunks:
        made.append(chunks_of(self, *arguments, "steps"))
        return made[-1]

    chunks_of = Session.chunks
    monkeypatch.setattr(Session, "chunks", chunks)
    with kvcli.attach(loaded, "kivi-2", group_size=8, residual_length=8, sink_length=2) as session:
        expected, passes = greedy(loaded, session.new_cache, [PROMPT, [50, 51]], 24)
        tokens, steps = greedy(loaded, session.new_cache, [PROMPT, [50, 51]], 24, session=session)
        assert tokens == expected
        assert [x.mode for x in made] == ["steps"]
        assert steps.get_seq_length() == passes.get_seq_length() == len(PROMPT) + 2 + 23
        assert steps.memory().true_bits == passes.memory().true_bits
        done = {"done": lambda tokens: len(tokens) == 3}
        assert greedy(loaded, session.new_cache, [PROMPT], 24, session=session, **done)[1].get_seq_length() == 50


def test_the_fp16_cache_never_drifts(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = torch.randint(3, 259, (4, 60), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(drift.DriftOptions, "sequences", lambda *_: prompts)
    cases = [
        Case("fp16", MethodChoice("fp16", {"residual_length": 4, "flush_block": 1})),
        Case("kivi-1", MethodChoice("kivi-1", {"residual_length": 8, "group_size": 8})),
    ]
    prepared = drift.prepare(drift.DriftOptions(max_new_tokens=16), loaded, cases, Output(quiet=True))
    exact, coarse = prepared.rows
    assert [(unit.first_divergence, unit.agreed, unit.equal) for unit in exact.units] == [(None, 16, 1.0)] * 4
    assert exact.memory.num_encoded > 0
    assert any(unit.first_divergence is not None for unit in coarse.units)
    assert prepared.protocol == {"tokens": prompts.tolist(), "max_new_tokens": 16}


@pytest.mark.parametrize(
    ("tokens", "expected"), [([1, 2, 3, 4], (None, 4, 1.0)), ([9, 2, 3, 4], (0, 0, 0.75)), ([1, 2, 9, 9], (2, 2, 0.5))]
)
def test_drift_is_counted_from_the_first_new_token(tokens: list[int], expected: tuple[Any, ...]) -> None:
    assert drift.compare(tokens, [1, 2, 3, 4]) == expected


def test_logits_that_are_not_finite_are_refused(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    head: Any = loaded.model.get_output_embeddings()
    monkeypatch.setattr(head, "forward", lambda x: torch.full((*x.shape[:-1], 260), torch.nan))
    with pytest.raises(ModelError, match="not finite"):
        generate(loaded, [PROMPT], 2)
