"""RULER's tasks: what prompts hold, how long they are, what is a right answer."""

import re
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from byte_tokenizer import CHAT, byte_tokenizer
from console import refused

from kvcli.cli.output import Output
from kvcli.errors import CorpusError, UsageError
from kvcli.eval import ruler
from kvcli.eval.ruler import TASKS, RulerOptions, make_ruler_prompts, share_found
from kvcli.eval.suite import REFERENCE
from kvcli.models.load import LoadedModel

NAMES = [
    f"w{'abcdefghij'[i % 10]}{'klmnopqrst'[i // 10 % 10]}{'uvwxyz'[i // 100 % 6]}y{'aeiou'[i // 600]}"
    for i in range(3000)
]
TEXTS = [" ".join(f"The {name} is here." for name in NAMES[at : at + 1000]) for at in (0, 1000, 2000)]
CORPUS = [f"Sentence {i}." for i in range(50)], NAMES


def made(task: str, size: int, seed: int = 0) -> ruler.Made:
    return TASKS[task][0](CORPUS, Random(seed), size)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("chat", [False, True])
def test_prompts_fill_their_context_and_hold_the_right_answers(loaded: LoadedModel, task: str, chat: bool) -> None:
    tokenizer = byte_tokenizer(CHAT)
    model = replace(loaded, tokenizer=tokenizer)
    context = 6000 if task == "cwe" else 1000
    options = RulerOptions(tasks=[task], contexts=[context], num_prompts=3)
    prompts = make_ruler_prompts(model, TEXTS, options, chat)
    assert prompts == make_ruler_prompts(model, TEXTS, options, chat)
    assert prompts != make_ruler_prompts(model, TEXTS, options.model_copy(update={"seed": 1}), chat)
    assert len({prompt.expected for prompt in prompts}) == 3
    for prompt in prompts:
        text, question = (tokenizer.decode(piece) for piece in prompt.pieces)
        assert all(value in text for value in prompt.expected.split(", "))
        assert question.endswith(":")
        assert ("<assistant>" in question) == chat
        tokens = sum(map(len, prompt.pieces)) + TASKS[task][1]
        assert 0.8 * context < tokens <= context
    longer = make_ruler_prompts(model, TEXTS, options.model_copy(update={"contexts": [context + 700]}), chat)
    assert len(longer[0].pieces[0]) > len(prompts[0].pieces[0]) + 500


@pytest.mark.parametrize(
    ("task", "needles", "keys", "expected", "value", "sentences"),
    [
        ("niah_single_1", 1, 1, 1, r"\d{7}", "noise"),
        ("niah_single_2", 1, 1, 1, r"\d{7}", "text"),
        ("niah_single_3", 1, 1, 1, r"[0-9a-f-]{36}", "text"),
        ("niah_multikey_1", 4, 4, 1, r"\d{7}", "text"),
        ("niah_multikey_2", 21, 21, 1, r"\d{7}", ""),
        ("niah_multikey_3", 21, 21, 1, r"[0-9a-f-]{36}", ""),
        ("niah_multivalue", 4, 1, 4, r"\d{7}", "text"),
        ("niah_multiquery", 4, 4, 4, r"\d{7}", "text"),
    ],
)
def test_needles_are_those_of_the_paper(
    task: str, needles: int, keys: int, expected: int, value: str, sentences: str
) -> None:
    text, question, answer, right = made(task, 20)
    found = re.findall(r"One of the magic (?:number|UUID)s of (\S+) is: (\S+)\.", text)
    assert (len(found), len({key for key, _ in found}), len(right)) == (needles, keys, expected)
    assert all(re.fullmatch(value, x) for _, x in found)
    asked = {key for key, _ in found if key in question}
    assert [key in answer for key in asked] == [True] * len(asked)
    assert {x for key, x in found if key in asked} == set(right)
    assert text.count(ruler._NOISE) == 20 * (sentences == "noise")
    assert re.findall(r"Sentence (\d+)\.", text) == [*map(str, range(20))] * (sentences == "text")
    texts = [(text, right[0]) for text, _, _, right in (made(task, 20, seed) for seed in range(20))]
    assert {3 * text.find(value) // len(text) for text, value in texts} == {0, 1, 2}


def test_variables_get_the_value_one_from_the_other() -> None:
    text, question, _, right = made("vt", 20)
    lines = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text)
    assert text.count(ruler._NOISE) == 20
    assert [name for name, _ in lines] == right
    assert lines[0][1] in question
    assert [source for _, source in lines[1:]] == right[:-1]
    assert len(set(right)) == 5


def test_common_words_stand_thirty_times_and_others_three_times() -> None:
    text, _, _, right = made("cwe", 25)
    numbered = re.findall(r"(\d+)\. (\w+)", text)
    assert [int(place) for place, _ in numbered] == [*range(1, 376)]
    counts = Counter(word for _, word in numbered)
    assert {word for word, count in counts.items() if count == 30} == set(right)
    assert sorted(counts.values()) == [3] * 25 + [30] * 10


@pytest.mark.parametrize("size", [1, 2, 3, 10, 100, 1000])
def test_frequent_words_are_more_frequent_than_all_others(size: int) -> None:
    text, _, _, right = made("fwe", size)
    ranked = Counter(text.removeprefix("Coded text: ").split()).most_common()
    assert [word for word, _ in ranked[:4]] == ["...", *right]
    counts = [count for _, count in ranked]
    assert counts[0] > counts[1] > counts[2] > counts[3] > counts[4]
    share = counts[0] / (80 + 4 * size)
    assert share == pytest.approx(6 / 3.14159**2, abs=0.02)


@pytest.mark.parametrize(
    ("answer", "found"), [("ab, CD and ef", 1.0), ("ab", 1 / 3), ("EF ef ef", 1 / 3), ("", 0.0), ("xabx\nxcdx", 2 / 3)]
)
def test_the_score_is_the_share_of_right_answers_in_the_reply(answer: str, found: float) -> None:
    assert share_found(answer, "ab, cd, EF") == pytest.approx(found)


@pytest.mark.parametrize("tail", [0, 5])
def test_replies_end_with_the_last_right_answer_or_the_tasks_limit(loaded: Any, monkeypatch: Any, tail: int) -> None:
    """A reply that goes on could hold all words of the text."""
    options = RulerOptions(tasks=["fwe", "niah_single_1"], contexts=[700], num_prompts=1)

    def fake(_: Any, new_cache: Any, pieces: Any, limit: int, *, stop: Any, done: Any, session: Any) -> Any:
        expected = next(prompt.expected for prompt in asked if prompt.pieces == pieces)
        tokens = loaded.tokenizer(("x" * tail * 9 if tail else "") + expected + "y" * 200)["input_ids"]
        ends = (end for end in range(1, limit + 1) if done(tokens[:end]))
        return tokens[: next(ends, limit)], new_cache()

    monkeypatch.setattr("kvcli.eval.greedy.greedy", fake)
    monkeypatch.setattr(RulerOptions, "documents", lambda *_: TEXTS)
    prepared = ruler.prepare(options, loaded, [REFERENCE], Output(quiet=True))
    asked = prepared.protocol["prompts"]
    (row,) = prepared.rows
    words, number = row.units
    assert (words.task, words.context, words.prompt) == ("fwe", 700, 0)
    assert number.found == 1
    assert number.answer.endswith(number.expected)
    if tail:
        assert len(words.answer) == 50
        assert words.found == 0
    else:
        assert (words.found, words.answer) == (1, words.expected)


def test_a_prompt_is_short_enough_where_a_larger_one_can_have_fewer_tokens() -> None:
    def make(size: int) -> ruler.Made:
        return "x" * (10 * size + 15 * (size % 3)), "", "", []

    for most in range(50, 500):
        text = ruler.longest(make, lambda made: [[0] * len(made[0])], most, "task")[0]
        assert most - 40 < len(text) <= most
    with pytest.raises(UsageError, match="20 tokens are too few for a prompt of task"):
        ruler.longest(make, lambda made: [[0] * len(made[0])], 20, "task")  # for more than an empty one


def test_a_corpus_or_context_that_is_too_small_is_refused(loaded: LoadedModel) -> None:
    def make(texts: list[str], **options: Any) -> Any:
        return make_ruler_prompts(loaded, texts, RulerOptions(num_prompts=1, **options), False)

    with pytest.raises(CorpusError, match="has 4 different words of 4 to 10 letters"):
        make(["Some words that stay."], tasks=["vt"])
    with pytest.raises(CorpusError, match="too small for 149880 tokens of cwe"):
        make(TEXTS * 3, tasks=["cwe"], contexts=[150_000])
    with pytest.raises(CorpusError, match="fewer than the 80000 of a prompt"):
        make(TEXTS, tasks=["niah_single_2"], contexts=[80_000])
    with pytest.raises(UsageError, match="2880 tokens are too few for a prompt of cwe"):
        make(TEXTS, tasks=["cwe"], contexts=[3000])


def test_a_task_that_does_not_exist_is_refused() -> None:
    line = refused("eval", "ruler", "--method", "fp8", "--tasks", "niah_multikey_4")
    assert "not 'niah_multikey_4'" in line
    assert "did you mean 'niah_multikey_" in line
