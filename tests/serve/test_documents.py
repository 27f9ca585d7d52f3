"""Documents of a library in a request: side by side, in its order, with what is wrong told."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import openai
import pytest
import torch
from served import Served, serving, serving_together, until

from kvcli.attention.generation import SamplingConfig
from kvcli.errors import ContextError
from kvcli.text.document import BLANK_LINE, Document
from kvcli.text.library import Library

TEXTS = {"whale": "Call me Ishmael. I thought I would see the sea.", "times": "It was the best of times."}
FIELDS: dict[str, Any] = {"library": "books", "documents": ["times", "whale"], "repair": 1}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, method="fp16") as made:
        library = Library(made.loaded, made.session, tmp_path, "books", prefill_chunk=64)
        for name, text in TEXTS.items():
            library.add(library.document(name, text))
        yield made


def test_a_request_asks_about_documents(served: Served) -> None:
    """All read again is the answer to their texts in one message."""
    answer = served.chat("Who?", 12, extra_body=FIELDS)
    text = "<user>" + "".join(TEXTS[name] + BLANK_LINE for name in FIELDS["documents"]) + "Who?</s><assistant>"
    ids = torch.tensor([served.loaded.tokenizer(text, add_special_tokens=False)["input_ids"]])
    assert answer.usage.prompt_tokens == ids.shape[1]
    made = served.session.generate(ids, sampling=SamplingConfig(12)).sequences[0, ids.shape[1] :]
    assert answer.choices[0].message.content == served.loaded.tokenizer.decode(made).rstrip("\ufffd")
    again = served.chat("Who?", 12, extra_body=FIELDS)
    assert again.choices[0].message.content == answer.choices[0].message.content
    fast = served.chat("Who?", 12, extra_body=FIELDS | {"repair": 0})
    assert fast.usage.prompt_tokens_details.cached_tokens == ids.shape[1] - len("Who?</s><assistant>") + 3


def test_contexts_of_ask_are_found_by_name_and_those_of_serve_by_their_tokens(tmp_path: Path, monkeypatch: Any) -> None:
    """Of a method whose documents stand beside no others; an answer depends on what the request names."""
    text, question = TEXTS["whale"] * 3, "Who?"
    with serving(tmp_path) as served:
        document = Document(served.loaded, served.session, text, store=tmp_path, prefill_chunk=64)
        document.read()
        before = served.chat(text + BLANK_LINE + question, 12)
        assert before.usage.prompt_tokens_details.cached_tokens == 0
        answer = served.chat(question, 12, extra_body={"documents": [document.name]})
        assert answer.choices[0].message.content == document.ask(question, SamplingConfig(12)).text.rstrip("\ufffd")
        assert answer.usage.prompt_tokens == before.usage.prompt_tokens
        assert answer.usage.prompt_tokens_details.cached_tokens == document.ids.shape[1]
        until(lambda: len(served.engine.contexts.store.names()) == 2)  # type: ignore[union-attr]
        (other,) = {*served.engine.contexts.store.names()} - {document.name}  # type: ignore[union-attr]
        for name in (other, "none"):
            with pytest.raises(openai.BadRequestError, match=f"{tmp_path}, the store of this server, has no document"):
                served.chat(question, extra_body={"documents": [name]})
        monkeypatch.setattr(served.session, "compose", Mock(side_effect=ContextError("of others")))
        with pytest.raises(openai.BadRequestError, match="of others"):
            served.chat(question, extra_body={"documents": [document.name]})
        assert served.engine.prefixes.hot  # type: ignore[attr-defined]
        served.engine.contexts.store.remove(document.name)  # type: ignore[union-attr]
        again = Document(served.loaded, served.session, text, store=tmp_path, prefill_chunk=64)
        again.read()
        assert again.reused_tokens > 100
    with serving(tmp_path, method="fp16") as served, pytest.raises(openai.BadRequestError, match="with method 'rtn'"):
        served.chat(question, extra_body={"documents": [again.name]})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"documents": ["sea"]}, "has no document 'sea' of library 'books'"),
        ({"library": "others"}, "{store}, the store of this server, has no document 'times' of library 'others'"),
        ({"library": None}, "documents are named with their library"),
        ({"documents": []}, "documents are named with their library"),
        ({"repair": 2}, "repair: "),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "one message, of the user, and no tools"),
    ],
)
def test_slips_are_told(fields: dict[str, Any], match: str, served: Served, tmp_path: Path) -> None:
    with pytest.raises(openai.BadRequestError, match=match.format(store=tmp_path)):
        served.chat("Who?", extra_body=FIELDS | fields)


def test_servers_that_cannot_are_told() -> None:
    for server in (serving_together("fp16"), serving(None, method="fp16"), serving(None, method="rtn-2")):
        with server as made, pytest.raises(openai.BadRequestError) as caught:
            made.chat("Who?", extra_body=FIELDS)
        assert any(x in str(caught.value) for x in ("--max-batch 1", "has no store of contexts", "cannot stand side"))
