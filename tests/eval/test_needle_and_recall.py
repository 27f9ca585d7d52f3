"""Prompts of the needle grid and of verbatim recall, and their scores."""

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
from kvcli.models.load import LoadedModel


@pytest.fixture
def chatty(loaded: LoadedModel) -> LoadedModel:
    tokenizer = byte_tokenizer(CHAT)
    return replace(loaded, tokenizer=tokenizer)


@pytest.fixture
def answered(loaded: LoadedModel, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Units of the uncompressed model if it answers every prompt with the right text, changed."""

    def units(module: Any, options: Any, change: Any) -> list[Any]:
        def fake(_: Any, new_cache: Any, pieces: Any, limit: int, *, stop: Any, done: Any, session: Any) -> Any:
            expected = next(prompt.expected for prompt in asked if prompt.pieces == pieces)
            tokens = loaded.tokenizer(change(expected))["input_ids"][:limit]
            ends = (end for end in range(1, len(tokens) + 1) if done(tokens[:end]))
            return tokens[: next(ends, limit)], new_cache()

        monkeypatch.setattr("kvcli.eval.greedy.greedy", fake)
        monkeypatch.setattr(type(options), "documents", lambda *_: texts)
        prepared = module.prepare(options, loaded, [REFERENCE], Output(quiet=True))
        asked = prepared.protocol["prompts"]
        (row,) = prepared.rows
        assert row.memory is None
        return row.units

    return units


@pytest.mark.parametrize(
    ("change", "exact", "prefix"),
    [
        (lambda value: value, 1.0, 1.0),
        (lambda value: f" `{value}`.", 1.0, 1.0),
        (lambda value: value[:-1], 0.0, 35 / 36),
        (lambda value: value[:9] + "x" + value[10:], 0.0, 9 / 36),
        (lambda value: "", 0.0, 0.0),
        (lambda value: f"It is {value}", 0.0, 0.0),
    ],
)
def test_a_needle_is_found_if_the_answer_begins_with_it(
    answered: Any, change: Any, exact: float, prefix: float
) -> None:
    units = answered(needle, NeedleOptions(contexts=[200], depths=[50], num_prompts=2), change)
    assert [(unit.exact, unit.prefix) for unit in units] == [(exact, pytest.approx(prefix))] * 2


@pytest.mark.parametrize(
    ("change", "exact", "quoted"),
    [
        (lambda text: text, 1.0, 20),
        (lambda text: f" {text} and more", 1.0, 20),
        (lambda text: text.replace(" ", "\n", 1).replace(" ", "  ", 1), 1.0, 20),
        (lambda text: " ".join([*text.split()[:5], "wrong", *text.split()[6:]]), 0.0, 5),
        (lambda text: " ".join(text.split()[::-1]), 0.0, 0),
        (lambda text: "", 0.0, 0),
        (lambda text: " ".join(text.split()[:19]), 0.0, 19),
        (lambda text: text[:-2], 0.0, 19),
        (lambda text: text + ",", 0.0, 19),
    ],
)
def test_words_are_quoted_up_to_the_first_wrong_one(answered: Any, change: Any, exact: float, quoted: int) -> None:
    units = answered(recall, RecallOptions(distances=[50], passage_words=20, num_prompts=2), change)
    assert [(unit.exact, unit.quoted, unit.words) for unit in units] == [(exact, quoted, 20)] * 2


def test_every_value_stands_once_at_its_depth(chatty: LoadedModel, texts: list[str]) -> None:
    config = NeedleOptions(contexts=[400, 900], depths=[0, 25, 100], num_prompts=2)
    prompts = needle.make_needle_prompts(chatty, texts, config, True)
    places = ({"context": c, "depth": d, "prompt": i} for c in (400, 900) for i in (0, 1) for d in (0, 25, 100))
    assert [prompt.place for prompt in prompts] == [*places]
    assert len({prompt.expected for prompt in prompts}) == 12
    for prompt in prompts:
        text, question = (chatty.tokenizer.decode(piece) for piece in prompt.pieces)
        assert text.count(prompt.expected) == 1
        assert uuid.UUID(prompt.expected).version == 4
        assert prompt.expected not in question
        name = text.split("code of the ")[1].split()[0]
        assert question.endswith(f"</s><assistant>The access code of the {name} is")
        assert len(prompt.pieces[0]) == pytest.approx(prompt.place["context"], abs=110)
        assert text.index(prompt.expected) / len(text) == pytest.approx(prompt.place["depth"] / 100, abs=0.15)
    assert prompts == needle.make_needle_prompts(chatty, texts, config, True)
    assert prompts != needle.make_needle_prompts(chatty, texts, config.model_copy(update={"seed": 1}), True)


def test_passages_come_before_other_text_and_the_answer_has_their_first_words(loaded: Any, texts: list[str]) -> None:
    def made(**changes: Any) -> list[Any]:
        config = RecallOptions(**{"distances": [50, 200], "passage_words": 20, "num_prompts": 3, **changes})
        return recall.make_recall_prompts(loaded, texts, config, False)

    def split(prompt: Any) -> list[str]:
        text = loaded.tokenizer.decode(prompt.pieces[0]).removeprefix("Passage: ")
        return text.split("\n\nOther text: ")

    prompts = made()
    assert [prompt.place["distance"] for prompt in prompts] == [50] * 3 + [200] * 3
    for prompt in prompts:
        passage, other = split(prompt)
        cue, words = passage.split()[:CUE_WORDS], passage.split()[CUE_WORDS:]
        assert len(words) == 20
        assert words == prompt.expected.split()
        assert len(other.split()) == prompt.place["distance"]
        assert loaded.tokenizer.decode(prompt.pieces[1]).endswith("Passage: " + " ".join(cue))
        documents = [set(re.findall(r"of text (\d)", part)) for part in (passage, other)]
        assert len(documents[0]) == 1
        assert not documents[0] & documents[1]
    lengths = [len(text.split()) for text in texts]
    far = sum(lengths) - max(lengths)
    assert [len(split(prompt)[1].split()) for prompt in made(distances=[far])] == [far] * 3
    with pytest.raises(CorpusError, match="fewer than the distance of"):
        made(distances=[far + 1])
    with pytest.raises(CorpusError, match=r"no document of the corpus has the \d+ words of a passage"):
        made(passage_words=1000)


def test_the_chat_template_is_used_where_there_is_one(loaded: LoadedModel, chatty: LoadedModel) -> None:
    assert uses_chat(chatty, None)
    assert not uses_chat(chatty, False)
    assert not uses_chat(loaded, None)
    with pytest.raises(UsageError, match="no chat template"):
        uses_chat(loaded, True)
    text, question = in_pieces(chatty, "A text.", "A question?", "An answer", chat=True)
    assert chatty.tokenizer.decode(text) == "<user>A text.\n\n"
    assert chatty.tokenizer.decode(question) == "A question?</s><assistant>An answer"
    for template, said in (
        ("{{ messages[0]['content'] * 2 }}", "changes the message"),
        ("{{ messages[0]['content'] | upper }}", "changes the message"),
        ("{{ raise_exception('no') }}", "fails: no"),
    ):
        chatty.tokenizer.chat_template = template
        with pytest.raises(ModelError, match=said):
            in_pieces(chatty, "A text.", "A question?", "", chat=True)


def test_a_corpus_that_is_too_short_is_refused(loaded: LoadedModel, texts: list[str]) -> None:
    with pytest.raises(CorpusError, match="fewer than the 90000 of a prompt"):
        needle.make_needle_prompts(loaded, texts, NeedleOptions(contexts=[90000]), False)
