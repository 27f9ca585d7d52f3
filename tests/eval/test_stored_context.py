"""What a stored copy of a text loses, against the same computed by hand."""

from typing import Any

import pytest
import torch
from contexts_made import Maker, maker, store, tokens  # noqa: F401

from kvcli.contexts import ContextStore
from kvcli.errors import UsageError
from kvcli.eval.quality import copied_tokens, stored_quality
from kvcli.seam.versions import with_cache


def test_a_copy_in_full_precision_loses_nothing(maker: Any, store: ContextStore) -> None:  # noqa: F811
    made: Maker = maker("fp16", residual_length=6, flush_block=1)
    store.put(made.context(tokens(90)), name="a")
    stored = store.get("a")
    found = stored_quality(made.session, store, stored, 20).figures
    assert (found["num_tokens"], found["flips"]) == (20, 0)
    assert found["kl_mean"] < 1e-6
    assert found["perplexity"] == pytest.approx(found["reference_perplexity"], rel=1e-3)


@pytest.mark.parametrize("method", ["kivi", "commvq"])
def test_kl_is_that_of_the_cropped_cache_going_on(maker: Any, store: ContextStore, method: str) -> None:  # noqa: F811
    made: Maker = maker(method)
    ids = tokens(90)
    cache = made.read(ids)
    record = store.put(made.context(ids, cache), name="a").record
    assert copied_tokens(record, 20) == 66
    found = stored_quality(made.session, store, store.get("a"), 20).figures
    cache.crop(66 - 90)
    with torch.no_grad():
        ours = made.loaded.model(ids[None, 66:], **with_cache(cache)).logits[0, -20:].log_softmax(-1)
        theirs = made.loaded.model(ids[None], use_cache=False).logits[0, -20:].log_softmax(-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    assert found["kl_mean"] == pytest.approx(float(kl.mean()), rel=1e-3)
    assert found["kl_mean"] > 1e-5
    nll = -ours[:-1].gather(-1, ids[-19:, None])
    assert found["perplexity"] == pytest.approx(float(nll.mean().exp()), rel=1e-3)
    assert found["flips"] == pytest.approx(float((ours.argmax(-1) != theirs.argmax(-1)).float().mean()))


def test_what_is_too_short_or_has_a_later_state_is_refused(maker: Any, store: ContextStore) -> None:  # noqa: F811
    made: Maker = maker("rtn", residual_length=6, flush_block=1)
    record = store.put(made.context(tokens(60)), name="a").record
    assert [copied_tokens(record, scored) for scored in (1, 9, 10, 42)] == [50, 50, 50, 18]
    for scored in (43, 60, 500):
        with pytest.raises(UsageError, match="no block of 16 codes"):
            copied_tokens(record, scored)
    made = maker("qjl")
    ids = tokens(60)
    record = store.put(made.context(ids, made.read(ids, chunk=60)), name="b").record
    with pytest.raises(UsageError, match="no block of 16 codes"):
        copied_tokens(record, 10)
