"""A library: documents that were read once and are asked side by side."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcli
from kvcli.contexts import ContextStore
from kvcli.contexts.reader import documents_of
from kvcli.errors import UsageError
from kvcli.text.document import BLANK_LINE
from kvcli.text.library import Library

TEXTS = {
    "times": "It was the best of times, it was the worst of times, it was the age of wisdom.",
    "whale": "Call me Ishmael. Some years ago, having little money, I thought I would see the sea.",
    "money": "It is a truth universally acknowledged, that a single man must be in want of a wife.",
}
SAMPLING = kvcli.SamplingConfig(12)


@pytest.fixture
def made(loaded: Any, tmp_path: Path) -> Iterator[Callable[..., Library]]:
    with kvcli.attach(loaded, "fp16", residual_length=8, sink_length=2) as session:
        yield lambda name="books", store=tmp_path: Library(loaded, session, store, name, prefill_chunk=32)


@pytest.fixture
def library(made: Callable[..., Library]) -> Library:
    library = made()
    for name, text in TEXTS.items():
        library.add(library.document(name, text))
    return library


@torch.no_grad()
def test_documents_are_asked_in_any_order(library: Library) -> None:
    """All read again is what reading them in that order gives."""
    for names in (["whale", "times"], ["times", "money", "whale"]):
        composed = library.compose(names, repair=1)
        answer = library.ask("Who?", composed, SAMPLING)
        text = "<user>" + "".join(TEXTS[name] + BLANK_LINE for name in names) + "Who?</s><assistant>"
        ids = torch.tensor([library.loaded.tokenizer(text, add_special_tokens=False)["input_ids"]])
        made = library.session.generate(ids, sampling=SAMPLING)
        assert answer.text == library.loaded.tokenizer.decode(made.sequences[0, ids.shape[1] :])
        assert answer.reused_tokens == composed.input_ids.shape[1]


def test_one_document_is_its_own_context(library: Library, loaded: Any, tmp_path: Path) -> None:
    document = library.document("whale", TEXTS["whale"])
    answer = document.ask("Who?", SAMPLING)
    assert document.reused_tokens == document.ids.shape[1]
    assert library.ask("Who?", library.compose(["whale"]), SAMPLING).text == answer.text
    asked = kvcli.Document(loaded, library.session, TEXTS["whale"], store=tmp_path, prefill_chunk=32)
    asked.read()
    other = Library(loaded, library.session, tmp_path, "others", prefill_chunk=32)
    again = other.document("whale", TEXTS["whale"])
    other.add(again)
    assert again.reused_tokens == again.ids.shape[1]
    assert sorted(other.documents()) == ["whale"]


def test_names_and_texts_of_every_kind(made: Callable[..., Library]) -> None:
    """Names that make the same file name are different documents; texts and questions may have no words."""
    library = made("L" * 99)
    assert library.best("Who?", 2) == []
    assert library.that_fit([], "Who?", 3) == 0
    texts = {
        "my paper": "! ?",
        "my-paper": "other words",
        "\u65e5\u672c": "\u4f60 \u597d",
        "n" * 200: "alpha",
        "n" * 201: "beta",
    }
    for name, text in texts.items():
        library.add(library.document(name, text))
    assert library.documents().keys() == texts.keys()
    assert {name: library.text(x) for name, x in library.documents().items()} == texts
    assert library.best("?", 2) == library.best("nothing of these", 2) == sorted(texts)[:2]
    assert library.best("alpha", 1) == ["n" * 200]


def test_what_another_kept_is_put_under_a_documents_own_notes(library: Library, made: Callable[..., Library]) -> None:
    stored = library.documents()["whale"]
    context = library.store.load(library.store.whole(stored.name))
    library.store.put(replace(context, notes={}), name=stored.name, overwrite=True)
    assert "whale" not in library.documents()
    library.add(library.document("whale", TEXTS["whale"]))
    assert library.documents()["whale"].name == stored.name


def test_documents_are_chosen_by_their_words(library: Library) -> None:
    assert library.best("Which wisdom was in which age?", 1) == ["times"]
    assert library.best("What did Ishmael see?", 3)[0] == "whale"
    assert len(library.best("???", 2)) == 2  # nothing in common with any


def test_what_fits_is_known_before_anything_is_loaded(library: Library) -> None:
    names = [*TEXTS]
    tokens = library.compose(names, repair=0).input_ids.shape[1] + library.question("Who?").shape[1]
    library.loaded = replace(library.loaded, spec=replace(library.loaded.spec, max_position_embeddings=tokens + 12))
    assert library.that_fit(names, "Who?", 12) == 3
    assert library.that_fit(names, "Who?", 13) == 2
    assert library.that_fit(names, "Who?", 1000) == 0


def test_a_document_is_replaced_by_another_of_its_name_and_shared_by_libraries(library: Library, made: Any) -> None:
    store = library.store
    before, size = store.names(), store.sizes()[0]
    other = made("others")
    other.add(other.document("whale", TEXTS["whale"]))
    assert store.sizes()[0] == size  # equal blocks are there once
    library.add(library.document("whale", "Call me Queequeg."))
    assert len(store.names()) == len(before) + 1
    assert library.text(library.documents()["whale"]) == "Call me Queequeg."
    assert other.text(other.documents()["whale"]) == TEXTS["whale"]


def test_what_was_not_read_to_its_end_is_no_document(made: Any, loaded: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A kill loses at most the rest of one document, which the same call goes on with."""
    monkeypatch.setattr("kvcli.text.document._READING_PER_KEEPING", 0)
    library = made()
    library.add(library.document("times", TEXTS["times"]))
    passes = 0

    def stop(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise KeyboardInterrupt

    hook = loaded.model.model.layers[1].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        library.add(library.document("whale", TEXTS["whale"]))
    hook.remove()
    assert [*documents_of(ContextStore(tmp_path), "books")] == ["times"]
    document = library.document("whale", TEXTS["whale"])
    library.add(document)
    assert [*library.documents()] == ["times", "whale"]
    assert document.reused_tokens >= 32


def test_a_stored_document_has_no_window(library: Library) -> None:
    record = library.documents()["whale"].record
    assert record.counts.attended[0] == record.num_tokens - record.counts.sinks


def test_what_cannot_be_composed_is_refused(library: Library, loaded: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'books' has no document 'sea'; it has money, times, whale"):
        library.compose(["whale", "sea"])
    library.session.detach()
    with kvcli.attach(loaded, "rtn-2", group_size=8) as session, pytest.raises(UsageError, match="keys after RoPE"):
        Library(loaded, session, tmp_path, "books")


def test_a_store_of_others_is_no_surprise(library: Library, made: Callable[..., Library], tmp_path: Path) -> None:
    """Notes are of whoever wrote them."""
    copied = tmp_path / "copy"
    shutil.copytree(library.store.folder, copied, ignore=lambda *_: ["copy"])
    context = library.store.load(library.store.whole(library.documents()["whale"].name))
    for start in ("x", True, None, -5, 10**9):
        changed = replace(context, notes={**context.notes, "start": start})
        made(store=copied).store.put(changed, name=library.documents()["whale"].name, overwrite=True)
        with nullcontext() if type(start) is not int else pytest.raises(UsageError, match="no document 'whale'"):
            assert made(store=copied).compose(["times", "whale"], repair=0).input_ids.shape[1] > 100
