"""A document that is asked in Python, with a store and without."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import pipeline

import kvcli
from kvcli.cache.blocks import encode
from kvcli.contexts import ContextStore
from kvcli.errors import CacheError, UsageError
from kvcli.seam.versions import CACHE_ARGUMENT, with_cache

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3
SAMPLING = kvcli.SamplingConfig(12)


@pytest.fixture
def made(loaded: Any) -> Iterator[Callable[..., kvcli.Document]]:
    with kvcli.attach(loaded, "rtn-2", residual_length=8, group_size=8) as session:
        yield lambda text=TEXT, **options: kvcli.Document(loaded, session, text, prefill_chunk=64, **options)


def test_questions_do_not_change_each_others_answers(made: Any, tmp_path: Path) -> None:
    """Whether the document was read by this object, by another one, or is in the store."""
    questions = ("Which times?", "Which age?", "Which times?")
    document = made()
    answers = [document.ask(question, SAMPLING) for question in questions]
    assert answers[0].text == answers[2].text == made().ask(questions[2], SAMPLING).text
    assert [answer.reused_tokens for answer in answers] == [document.ids.shape[1]] * 3
    for reused in (0, document.ids.shape[1]):
        stored = made(store=tmp_path)
        assert [stored.ask(question, SAMPLING).text for question in questions] == [x.text for x in answers]
        assert stored.reused_tokens == reused


def test_of_a_longer_document_so_much_is_used_that_the_last_tokens_are_exact(made: Any, tmp_path: Path) -> None:
    """As many as the window holds: elsewhere a question follows tokens that are codes."""
    store = ContextStore(tmp_path, block_tokens=16)
    made(store=store).read()
    for length in range(128, 144):
        document = made(TEXT[:length], store=store)
        document.read()
        store.remove(document.name)
        assert 100 < document.reused_tokens <= document.ids.shape[1] - 8


@pytest.fixture
def new_bytes() -> Iterator[Callable[[], int]]:
    """Counts the bytes of tensors that were made since the test began."""

    def count() -> int:
        tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())

    gc.collect()
    gc.freeze()
    yield count
    gc.unfreeze()


def test_a_document_is_in_memory_once(made: Any, loaded: Any, tmp_path: Path, new_bytes: Any, monkeypatch: Any) -> None:
    """While it is stored, while the first question is asked, and for the next one, which loads it."""
    seen: list[int] = []
    document = made(store=ContextStore(tmp_path, block_tokens=32))

    def note(*call: Any) -> Any:
        seen.append(new_bytes())
        return encode(*call) if len(call) == 1 else None

    monkeypatch.setattr("kvcli.cache.context.encode", note)
    monkeypatch.setattr("kvcli.contexts.store.encode", note)
    document.read()
    stored = len(seen)
    hook = loaded.model.model.register_forward_pre_hook(note)
    size = document.ask("Which times?", SAMPLING).memory.allocated_bytes
    document.ask("Which age?", SAMPLING)
    hook.remove()
    assert stored > 20
    assert max(seen) < 1.2 * size


def test_space_around_a_document_is_no_part_of_it(made: Any) -> None:
    """Templates strip messages."""
    assert torch.equal(made(f"\n {TEXT}\n\n").ids, made().ids)
    with pytest.raises(UsageError, match="document is empty"):
        made(" \n")


def test_a_document_that_begins_with_words_of_the_template_is_found_in_it(made: Any, loaded: Any) -> None:
    assert loaded.tokenizer.decode(made("user").prompt("user", 1)[0]) == "<user>user\n\nuser</s><assistant>"


def test_reading_goes_on_where_it_broke_off(made: Any, loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a store, in the same object."""
    monkeypatch.setattr("kvcli.text.document._READING_PER_KEEPING", 0)
    document, passes = made(), []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        passes.append(kwargs["input_ids"].shape[1])
        if len(passes) == 3:
            raise KeyboardInterrupt

    hook = loaded.model.model.register_forward_pre_hook(note, with_kwargs=True)
    with pytest.raises(KeyboardInterrupt):
        document.read()
    assert document.kept_tokens == 128
    answer = document.ask("Which times?", SAMPLING)
    hook.remove()
    assert passes[:3] == [64] * 3
    assert sum(passes[3:5]) == document.ids.shape[1] - 128
    assert answer.text == made().ask("Which times?", SAMPLING).text


def test_a_pipeline_takes_a_new_cache_for_each_call(loaded: Any) -> None:
    pipe = pipeline("text-generation", model=loaded.model, tokenizer=loaded.tokenizer)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    with kvcli.attach(loaded, "rtn-2", residual_length=8, group_size=8) as session:
        with pytest.raises(CacheError, match=rf"{CACHE_ARGUMENT}=session.new_cache\(\) to it, a new one to each call"):
            pipe(TEXT, **options)
        ids = torch.tensor([loaded.tokenizer(TEXT)["input_ids"]])
        expected = session.generate(ids, max_new_tokens=8).sequences[0, ids.shape[1] :]
        texts = [loaded.tokenizer.decode(expected, skip_special_tokens=True)]
        assert pipe(TEXT, **with_cache(session.new_cache()), **options)[0]["generated_text"] == texts[0]
        both = pipe([TEXT, TEXT[:60]], batch_size=2, **with_cache(session.new_cache()), **options)
        alone = pipe(TEXT[:60], **with_cache(session.new_cache()), **options)
        assert [x[0]["generated_text"] for x in both] == [texts[0], alone[0]["generated_text"]]
