"""Sampling of the next token."""

from __future__ import annotations

import pytest
import torch

from kvcli.attention.next_token import NextToken, SamplingConfig


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_sampling_has_the_distribution_of_transformers(penalty: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, ids = 3 * torch.randn(1, 20, generator=generator), torch.tensor([[3, 4, 5, 4]])
    sampling = SamplingConfig(temperature=0.8, top_k=9, top_p=0.9, repetition_penalty=penalty)
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    steps = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else [])
    steps.extend([TemperatureLogitsWarper(0.8), TopKLogitsWarper(9), TopPLogitsWarper(0.9)])
    expected = steps(ids, logits.clone()).softmax(-1)[0]
    torch.manual_seed(0)
    counts = torch.zeros(20)
    for _ in range(400):
        batch = NextToken(sampling, ids.expand(50, -1), 20)(logits.expand(50, -1))
        counts += torch.bincount(batch[:, 0], minlength=20)
    assert torch.allclose(counts / counts.sum(), expected, atol=0.015)
    assert not counts[expected == 0].any()
