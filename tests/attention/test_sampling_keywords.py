"""`session.generate` takes sampling as transformers' `generate` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factories import make_model

import kvcli
from kvcli.attention.generation import SamplingConfig
from kvcli.errors import UsageError

MODEL = make_model("llama")
IDS = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(0))

KEYWORDS: dict[str, tuple[dict[str, Any], SamplingConfig]] = {
    "greedy": ({"max_new_tokens": 5}, SamplingConfig(5)),
    "a temperature": ({"temperature": 0.7, "top_k": 4}, SamplingConfig(temperature=0.7, top_k=4)),
    "do_sample": ({"do_sample": True, "top_p": 0.9}, SamplingConfig(temperature=1.0, top_p=0.9)),
    "not sampled": ({"do_sample": False, "temperature": 0.7}, SamplingConfig()),
    "None": ({"temperature": None, "top_p": None, "repetition_penalty": 1.2}, SamplingConfig(repetition_penalty=1.2)),
}


@pytest.mark.parametrize("case", KEYWORDS)
def test_generate_takes_the_keywords_of_transformers(case: str) -> None:
    keywords, sampling = KEYWORDS[case]
    made = []
    with kvcli.attach(MODEL, "rtn", group_size=4) as session:
        for options in ({"sampling": sampling}, keywords):
            torch.manual_seed(0)
            made.append(session.generate(IDS, eos_token_id=[], **options).sequences)
    assert torch.equal(*made)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"max_new_token": 3}, "did you mean 'max_new_tokens'"),
        ({"num_beams": 2}, "does not take 'num_beams'; the model's own generate may"),
        ({"sampling": SamplingConfig(), "top_k": 3}, "top_k is part of sampling"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample=True needs a temperature above 0"),
    ],
)
def test_keywords_that_generate_does_not_take(keywords: dict[str, Any], said: str) -> None:
    with kvcli.attach(MODEL, "rtn", group_size=4) as session, pytest.raises(UsageError, match=said):
        session.generate(IDS, **keywords)
