"""KL along texts that the uncompressed model generated."""

import dataclasses

import pytest
import torch
from console import refused

from kvcli.artifact.choice import MethodChoice
from kvcli.cli.output import Output
from kvcli.eval import long
from kvcli.eval.suite import Case
from kvcli.models.load import LoadedModel

PROMPTS = torch.randint(3, 259, (3, 8), generator=torch.Generator().manual_seed(0))
FP16 = Case("fp16", MethodChoice("fp16", {"residual_length": 4, "flush_block": 1}))
KIVI = Case("kivi-1", MethodChoice("kivi-1", {"residual_length": 8, "group_size": 8}))


@pytest.fixture(autouse=True)
def prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long.LongOptions, "sequences", lambda *_: PROMPTS)


def test_rows_score_the_generated_tokens_of_the_same_texts(loaded: LoadedModel) -> None:
    options = long.LongOptions(max_new_tokens=40, batch_size=2, chunk=8)
    prepared = long.prepare(options, loaded, [FP16, KIVI], Output(quiet=True))
    exact, coarse = prepared.rows
    texts = torch.tensor(prepared.protocol["tokens"])
    assert texts.shape == (3, 48)
    assert torch.equal(texts[:, :8], PROMPTS)
    assert exact.fields["num_tokens"] == coarse.fields["num_tokens"] == 3 * 40
    assert exact.fields["kl_mean"] < 1e-6 < coarse.fields["kl_mean"]
    assert [(unit.sequence, unit.start, unit.tokens) for unit in coarse.units] == [(i, 0, 40) for i in range(3)]
    assert sum(coarse.fields["quarters"]) / 4 == pytest.approx(coarse.fields["kl_mean"])
    assert len(set(coarse.fields["quarters"])) == 4


def test_a_seed_and_a_temperature_decide_the_text(loaded: LoadedModel) -> None:
    state = torch.random.get_rng_state()
    first, again, other, cold = (
        long.sampled(loaded.model, PROMPTS, 30, temperature, seed)
        for temperature, seed in ((1.0, 0), (1.0, 0), (1.0, 1), (1e-4, 0))
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    greedy = {"attention_mask": torch.ones_like(PROMPTS), "max_new_tokens": 30, "min_new_tokens": 30}
    assert torch.equal(cold, loaded.model.generate(PROMPTS, do_sample=False, pad_token_id=0, **greedy))


def test_no_token_ends_a_text_and_the_models_own_sampling_is_not_used(loaded: LoadedModel) -> None:
    """A checkpoint's generation_config may cut the distribution; the text is of the model itself."""
    model, defaults = loaded.model, loaded.model.generation_config
    ends = long.sampled(model, PROMPTS, 30, 1.0, 0)
    changed = {"eos_token_id": int(ends[0, 9]), "top_k": 1, "top_p": 0.1, "repetition_penalty": 5.0}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setattr(defaults, name, value)
        texts = long.sampled(model, PROMPTS, 30, 1.0, 0)
    assert texts.shape == ends.shape
    kept = ends[:, 8] != changed["eos_token_id"]
    assert torch.equal(texts[kept, 8], ends[kept, 8])  # of the whole distribution


def test_pairs_are_counted_in_every_text() -> None:
    texts = torch.tensor([[1, 2, 1, 2, 1], [1, 2, 3, 4, 5]])
    assert long.distinct_pairs(texts) == (2 + 4) / 8


def test_scores_after_the_prompt_are_those_of_later_tokens() -> None:
    from kvcli.eval.quality import TokenScores

    scores = TokenScores(*(torch.arange(12.0).view(2, 6) + 100 * i for i in range(4)))
    for value, whole in zip(dataclasses.astuple(scores.after(4)), dataclasses.astuple(scores), strict=True):
        assert torch.equal(value, whole[:, 4:])


@pytest.mark.parametrize("temperature", ["0", "1e-45", "inf", "nan"])
def test_temperatures_that_no_text_is_sampled_at_are_refused(temperature: str) -> None:
    """A record could not hold infinity, and logits over almost 0 are infinite."""
    assert "--temperature" in refused("eval", "long", "--method", "fp8", "--temperature", temperature)
