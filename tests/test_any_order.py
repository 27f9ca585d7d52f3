"""Chunks, padding, reordering, rollbacks in any order: the cache and transformers' own, kernels and reference."""

from typing import Any

import pytest
import torch
from factories import make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import kvcli
from kvcli.errors import CacheError
from kvcli.seam.versions import with_cache

MODEL = make_model("llama", num_hidden_layers=2)

PROMPT = st.tuples(st.integers(1, 3), st.integers(1, 60), st.integers(0, 10_000))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.sampled_from([1, 1, 1, 2, 5, 17])),
        st.tuples(st.just("remove"), st.integers(1, 12)),
        st.tuples(st.just("reorder"), st.integers(0, 10_000)),
    ),
    max_size=24,
)


def outputs(cache: Any, prompt: tuple[int, int, int], steps: list[tuple[str, int]], padded: bool) -> list[torch.Tensor]:
    """Logits after the prompt and after every chunk that follows."""
    batch, length, seed = prompt
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, length, dtype=torch.long)
    if padded:
        starts = torch.randint(0, length, (batch,), generator=generator)
        mask = (torch.arange(length) >= starts.unsqueeze(1)).long()
    actual = []
    for kind, number in [("read", length), *steps]:
        if kind == "remove":
            count = min(number, mask.shape[1] - 1)
            cache.crop(-count)
            mask = mask[:, : mask.shape[1] - count]
        elif kind == "reorder":
            rows = torch.randint(0, batch, (batch,), generator=torch.Generator().manual_seed(number))
            cache.reorder_cache(rows)
            mask = mask[rows]
        else:
            if actual:
                mask = torch.cat((mask, torch.ones(batch, number, dtype=torch.long)), dim=1)
            ids = torch.randint(3, 97, (batch, number), generator=generator)
            position = (mask.cumsum(1) - 1).clamp(min=0)[:, -number:]
            with torch.no_grad():
                logits = MODEL(ids, attention_mask=mask, position_ids=position, **with_cache(cache)).logits
            actual.append(logits[:, -1])
    return actual


@settings(max_examples=200, deadline=None)
@given(
    prompt=PROMPT,
    steps=STEPS,
    padded=st.booleans(),
    sinks=st.sampled_from([0, 1, 4]),
    window=st.sampled_from([1, 4, 9, 16]),
    block=st.sampled_from([1, 3]),
)
def test_a_lossless_cache_is_transformers_own(
    prompt: Any, steps: Any, padded: bool, sinks: int, window: int, block: int
) -> None:
    expected = outputs(DynamicCache(config=MODEL.config), prompt, steps, padded)
    with kvcli.attach(MODEL, "fp16", sink_length=sinks, residual_length=window, flush_block=block) as session:
        actual = outputs(session.new_cache(), prompt, steps, padded)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_a_rollback_to_padding_alone() -> None:
    """What was left of every row is padding: the next tokens are a first prompt behind it."""
    steps = [("remove", 5), ("read", 2), ("read", 1)]
    seed = next(s for s in range(99) if int(torch.randint(0, 9, (1,), generator=torch.Generator().manual_seed(s))) > 4)
    expected = outputs(DynamicCache(config=MODEL.config), (1, 9, seed), steps, padded=True)
    with kvcli.attach(MODEL, "fp16", sink_length=1, residual_length=2) as session:
        actual = outputs(session.new_cache(), (1, 9, seed), steps, padded=True)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


@settings(max_examples=6, deadline=None)
@given(prompt=PROMPT, steps=STEPS, padded=st.booleans(), sinks=st.sampled_from([0, 4]))
@pytest.mark.parametrize("method", ["kivi-2", "qjl"])
def test_kernels_are_the_reference(method: str, prompt: Any, steps: Any, padded: bool, sinks: int) -> None:
    steps = [step for step in steps if step[0] != "remove"]  # groups cannot be cut apart
    actual = {}
    for impl in ("reference", "fused"):
        with kvcli.attach(MODEL, method, impl=impl, sink_length=sinks, residual_length=32) as session:
            actual[impl] = outputs(session.new_cache(), prompt, steps, padded)
    for ours, theirs in zip(actual["fused"], actual["reference"], strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-3


def ragged(model: Any, lengths: list[tuple[int, ...]], method: str, impl: str, **settings: Any) -> list[torch.Tensor]:
    """Logits after chunks of which each row takes the last `lengths` tokens; the rest is padding."""
    generator = torch.Generator().manual_seed(0)
    mask, actual = torch.zeros(len(lengths[0]), 0, dtype=torch.long), []
    with kvcli.attach(model, method, impl=impl, **settings) as session, torch.no_grad():
        cache = session.new_cache()
        for counts in lengths:
            width = max(counts)
            new = torch.arange(width) >= width - torch.tensor(counts).unsqueeze(1)
            mask = torch.cat((mask, new.long()), dim=1)
            ids = torch.randint(3, 97, new.shape, generator=generator)
            position = (mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
            output = model(ids, attention_mask=mask, position_ids=position, **with_cache(cache))
            actual.append(output.logits[:, -1])
    return actual


@pytest.mark.kernels
def test_sinks_of_keys_and_values_lie_apart_in_a_ragged_batch() -> None:
    """In one step of a group, keys are gathered row by row while values still lie behind a gap."""
    lengths = [(64, 96), *[(1, 1)] * 8]
    settings = {"residual_length": 32, "sink_length": 4}
    actual, expected = (ragged(MODEL, lengths, "kivi-2", impl, **settings) for impl in ("fused", "reference"))
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-4


def test_rotations_follow_a_row_that_catches_up() -> None:
    """A short row gains tokens while the longest row's codes stay: alone or in a batch, it is attended to alike."""
    lengths = [(200, 40), (1, 1), (1, 100), (1, 1), (1, 1)]
    together = ragged(MODEL, lengths, "squat-pre", "reference", residual_length=32)
    generator = torch.Generator().manual_seed(0)
    chunks = [torch.randint(3, 97, (2, max(counts)), generator=generator)[1:, -counts[1] :] for counts in lengths]
    with kvcli.attach(MODEL, "squat-pre", impl="reference", residual_length=32) as session, torch.no_grad():
        cache = session.new_cache()
        for ids, actual in zip(chunks, together, strict=True):
            assert torch.allclose(actual[1], MODEL(ids, **with_cache(cache)).logits[0, -1], atol=1e-4)


def test_a_cache_whose_layers_differ_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pass that ended between two layers, nothing may go on as if it had not."""
    import kvcli.attention.session as session_module

    ids, attend = torch.randint(3, 97, (1, 30)), session_module.attend_layer
    with kvcli.attach(MODEL, "fp16", residual_length=8) as session, torch.no_grad():
        cache = session.new_cache()
        MODEL(ids, **with_cache(cache))

        def fails_in_the_last_layer(call: Any, backend: Any) -> torch.Tensor:
            if call.key.layer is cache.layers[-1]:
                raise RuntimeError("out of memory")
            return attend(call, backend)

        monkeypatch.setattr(session_module, "attend_layer", fails_in_the_last_layer)
        with pytest.raises(RuntimeError, match="out of memory"):
            MODEL(ids[:, :1], **with_cache(cache))
        monkeypatch.undo()
        for use in (lambda: MODEL(ids[:, :1], **with_cache(cache)), lambda: cache.crop(-1)):
            with pytest.raises(CacheError, match="did not reach the last layer"):
                use()
        cache.reset()
        assert MODEL(ids, **with_cache(cache)).logits.isfinite().all()
