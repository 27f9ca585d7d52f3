"""Prompts of the needle grid and of verbatim recall, and their scores."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from typing import Any

import pytest
from byte_tokenizer import CHAT, byte_tokenizer

from kvcli.cli.output import Output
from kvcli.errors import CorpusError, ModelError, UsageError
from kvcli.eval import needle, recall
from kvcli.eval.greedy import in_pieces, uses_chat
from kvcli.eval.needle import NeedleOptions
from kvcli.eval.recall import CUE_WORDS, RecallOptions
from kvcli.eval.suite import REFERENCE
from kvcli.models import LoadedModel

VALUE = str(uuid.UUID(int=2**127 + 12345))


@pytest.fixture
def chatty(loaded: LoadedModel) -> LoadedModel:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    return replace(loaded, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (VALUE, (1.0, 1.0)),
        (f" `{VALUE}`.", (1.0, 1.0)),
        (VALUE[:-1], (0.0, 35 / 36)),
        (VALUE[:9] + "x" + VALUE[10:], (0.0, 9 / 36)),
        ("", (0.0, 0.0)),
        (f"It is {VALUE}", (0.0, 0.0)),
    ],
)
def test_a_needle_is_found_if_the_answer_begins_with_it(answer: str, expected: tuple[float, float]) -> None:
    assert needle.score(answer, VALUE) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "words"),
    [("a b c d", 4), (" a b\nc  d and more", 4), ("a b x d", 2), ("", 0), ("b a", 0), ("a b c", 3), ("a b c d,", 3)],
)
def test_words_are_quoted_up_to_the_first_wrong_one(answer: str, words: int) -> None:
    assert recall.quoted_words(answer, "a b c d") == words


def test_every_value_stands_once_at_its_depth(chatty: LoadedModel, texts: list[str]) -> None:
    config = NeedleOptions(contexts=[400, 900], depths=[0, 25, 100], num_prompts=2)
    prompts = needle.make_needle_prompts(chatty, texts, config, True)
    assert [prompt.place for prompt in prompts[:4]] == [
        {"context": 400, "depth": 0, "prompt": 0},
        {"context": 400, "depth": 25, "prompt": 0},
        {"context": 400, "depth": 100, "prompt": 0},
        {"context": 400, "depth": 0, "prompt": 1},
    ]
    assert len(prompts) == 12
    assert len({prompt.expected for prompt in prompts}) == 12
    for prompt in prompts:
        text, question = (chatty.tokenizer.decode(piece) for piece in prompt.pieces)
        assert text.count(prompt.expected) == 1
        assert uuid.UUID(prompt.expected).version == 4
        assert prompt.expected not in question
        assert question.endswith(
            "</s><assistant>The access code of the " + text.split("code of the ")[1].split()[0] + " is"
        )
        length = len(prompt.pieces[0])
        assert length == pytest.approx(prompt.place["context"], abs=110)
        depth = text.index(prompt.expected) / len(text)
        assert depth == pytest.approx(prompt.place["depth"] / 100, abs=0.15)
    assert prompts == needle.make_needle_prompts(chatty, texts, config, True)
    assert prompts != needle.make_needle_prompts(chatty, texts, config.model_copy(update={"seed": 1}), True)


def test_passages_come_before_other_text_and_the_answer_has_their_first_words(
    loaded: LoadedModel, texts: list[str]
) -> None:
    config = RecallOptions(distances=[50, 200], passage_words=20, num_prompts=3)
    prompts = recall.make_recall_prompts(loaded, texts, config, False)
    assert [prompt.place["distance"] for prompt in prompts] == [50] * 3 + [200] * 3
    for prompt in prompts:
        text, question = (loaded.tokenizer.decode(piece) for piece in prompt.pieces)
        passage, other = text.removeprefix("Passage: ").split("\n\nOther text: ")
        assert len(passage.split()) == CUE_WORDS + 20
        assert len(other.split()) == prompt.place["distance"]
        assert passage.split()[CUE_WORDS:] == prompt.expected.split()
        assert question.endswith("Passage: " + " ".join(passage.split()[:CUE_WORDS]))
        documents = [set(re.findall(r"of text (\d)", part)) for part in (passage, other)]
        assert len(documents[0]) == 1
        assert not documents[0] & documents[1]
    total = sum(len(text.split()) for text in texts)
    far = total - max(len(text.split()) for text in texts)
    for prompt in recall.make_recall_prompts(loaded, texts, config.model_copy(update={"distances": [far]}), False):
        other = loaded.tokenizer.decode(prompt.pieces[0]).split("\n\nOther text: ")[1]
        assert len(other.split()) == far
    with pytest.raises(CorpusError, match="fewer than the distance of"):
        recall.make_recall_prompts(loaded, texts, config.model_copy(update={"distances": [far + 1]}), False)
    with pytest.raises(CorpusError, match=r"no document of the corpus has the \d+ words of a passage"):
        recall.make_recall_prompts(loaded, texts, config.model_copy(update={"passage_words": total}), False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: f" {text}.", (1.0, 1.0)),
        (lambda text: text[:6] + "z" + text[7:], (0.0, 6 / 36)),
        (lambda text: "no", (0.0, 0.0)),
    ],
)
def test_needle_answers_are_scored_in_whole(
    chatty: LoadedModel, texts: list[str], monkeypatch: pytest.MonkeyPatch, change: Any, expected: tuple[float, float]
) -> None:
    options = NeedleOptions(contexts=[200], depths=[50], num_prompts=2)
    units = answered(needle, options, chatty, texts, monkeypatch, change)
    assert [(unit.exact, unit.prefix) for unit in units] == [pytest.approx(expected)] * 2


@pytest.mark.parametrize(
    ("change", "exact", "quoted"),
    [
        (lambda text: f" {text} and more", 1.0, 20),
        (lambda text: text, 1.0, 20),
        (lambda text: " ".join([*text.split()[:5], "wrong", *text.split()[6:]]), 0.0, 5),
        (lambda text: text[:-2], 0.0, 19),
    ],
)
def test_recall_answers_are_scored_in_whole(
    loaded: LoadedModel, texts: list[str], monkeypatch: pytest.MonkeyPatch, change: Any, exact: float, quoted: int
) -> None:
    options = RecallOptions(distances=[50], passage_words=20, num_prompts=2)
    units = answered(recall, options, loaded, texts, monkeypatch, change)
    assert [(unit.exact, unit.quoted, unit.words) for unit in units] == [(exact, quoted, 20)] * 2


def answered(
    module: Any, options: Any, loaded: LoadedModel, texts: list[str], monkeypatch: pytest.MonkeyPatch, change: Any
) -> Any:
    """Units of the uncompressed model if it answers every prompt with the right text, changed."""

    def fake(_: Any, new_cache: Any, pieces: Any, limit: int, *, stop: Any, done: Any) -> Any:
        expected = next(prompt.expected for prompt in asked if prompt.pieces == pieces)
        tokens: list[int] = []
        for token in loaded.tokenizer(change(expected))["input_ids"][:limit]:
            tokens.append(token)
            if done(tokens):
                break
        return tokens, new_cache()

    monkeypatch.setattr("kvcli.eval.greedy.greedy", fake)
    monkeypatch.setattr(type(options), "documents", lambda self: texts)
    prepared = module.prepare(options, loaded, [REFERENCE], Output(quiet=True))
    asked = prepared.protocol["prompts"]
    (row,) = prepared.rows
    assert row.memory is None
    return row.units


def test_the_chat_template_is_used_where_there_is_one(loaded: LoadedModel, chatty: LoadedModel) -> None:
    assert uses_chat(chatty, None)
    assert not uses_chat(chatty, False)
    assert not uses_chat(loaded, None)
    with pytest.raises(UsageError, match="no chat template"):
        uses_chat(loaded, True)
    text, question = in_pieces(chatty, "A text.", "A question?", "An answer", chat=True)
    assert chatty.tokenizer.decode(text) == "<user>A text.\n\n"
    assert chatty.tokenizer.decode(question) == "A question?</s><assistant>An answer"
    chatty.tokenizer.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(ModelError, match="changes the message"):
        in_pieces(chatty, "A text.", "A question?", "", chat=True)
    chatty.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ModelError, match="fails: no"):
        in_pieces(chatty, "A text.", "A question?", "", chat=True)


def test_a_corpus_that_is_too_short_is_refused(loaded: LoadedModel, texts: list[str]) -> None:
    with pytest.raises(CorpusError, match="fewer than the 90000 of a prompt"):
        needle.make_needle_prompts(loaded, texts, NeedleOptions(contexts=[90000]), False)
