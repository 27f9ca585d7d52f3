"""`kvcli.new_cache`: a model is attached while one of its caches lives, and no longer."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from factories import make_model
from transformers import pipeline

import kvcli
from kvcli.errors import CacheError, UsageError
from kvcli.seam.versions import with_cache

SETTINGS = {"group_size": 8, "residual_length": 8}
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def ids(prompt: Callable[..., dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return prompt(40)


def test_it_generates_as_a_session_and_the_model_is_as_before(tiny_model: Any, ids: dict[str, torch.Tensor]) -> None:
    stock, implementation = tiny_model.generate(**ids, **GREEDY), tiny_model.config._attn_implementation
    with kvcli.attach(tiny_model, "kivi-1", **SETTINGS) as session:
        expected = tiny_model.generate(**ids, **GREEDY, **with_cache(session.new_cache()))
    gc.disable()  # nothing but the last reference has to go
    try:
        made = tiny_model.generate(**ids, **GREEDY, **with_cache(kvcli.new_cache(tiny_model, "kivi-1", **SETTINGS)))
        assert torch.equal(made, expected)
        assert tiny_model.config._attn_implementation == implementation
        assert torch.equal(tiny_model.generate(**ids, **GREEDY), stock)
    finally:
        gc.enable()


def test_caches_of_one_choice_share_a_session_and_the_last_one_ends_it(
    tiny_model: Any, ids: dict[str, torch.Tensor]
) -> None:
    first, second = (kvcli.new_cache(tiny_model, "kivi-2", **SETTINGS) for _ in range(2))
    assert first._codecs is second._codecs
    tiny_model(**ids, **with_cache(first))
    assert (first.get_seq_length(), second.get_seq_length()) == (40, 0)
    with pytest.raises(UsageError, match="the model has caches of 'kivi-2'; delete them before making others"):
        kvcli.new_cache(tiny_model, "rtn-4")
    del first
    gc.collect()
    tiny_model(**ids, **with_cache(second))
    with pytest.raises(CacheError, match="while a model is attached"):
        tiny_model(**ids)
    del second
    gc.collect()
    tiny_model(**ids)
    assert kvcli.new_cache(tiny_model, "rtn-4").get_seq_length() == 0


def test_a_pipeline_takes_it() -> None:
    model = make_model("llama", vocab_size=260)
    make = pipeline("text-generation", model=model, tokenizer=byte_tokenizer())
    text = "the water cycle is " * 3
    with kvcli.attach(model, "kivi-2", **SETTINGS) as session:
        expected = make(text, **GREEDY, **with_cache(session.new_cache()))
    assert make(text, **GREEDY, **with_cache(kvcli.new_cache(model, "kivi-2", **SETTINGS))) == expected
    make(text, **GREEDY)
