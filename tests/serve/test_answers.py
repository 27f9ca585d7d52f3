"""Answers: where they end, and what a client gets of them, in pieces and as a whole."""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from spm_tokenizer import spm_tokenizer, tokens
from transformers.cli.serving import utils
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvcli.serve.answers import Answer, Form, Piece, TokenLogprob, response_parser, usage_of
from kvcli.serve.requests import Message

TOKENIZER = byte_tokenizer()
END = 2
QWEN = SimpleNamespace(config=SimpleNamespace(model_type="qwen2"))
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
FORMS = [Form("chatcmpl-1", "m", True), Form("cmpl-1", "m", False)]


def ids(text: str | bytes) -> list[int]:
    """A token of each byte."""
    if isinstance(text, str):
        return list(TOKENIZER(text)["input_ids"])
    alphabet = {bytes([i]): TOKENIZER.convert_tokens_to_ids(c) for i, c in bytes_to_unicode().items()}
    return [alphabet[bytes([byte])] for byte in text]


def answer(
    text: Any = None, *, stop: Sequence[str] = (), parsed: bool = False, start: str = "Hi", most: int = 1000
) -> tuple[Answer, list[Piece]]:
    """An answer that begins, or one that ends with a text, and its pieces."""
    pieces: list[Piece] = []
    parser = response_parser(TOKENIZER, QWEN, start, None) if parsed else None
    made = Answer(TOKENIZER, most, [END], stop, parser, pieces.append)
    if text is not None:
        made.feed([*ids(text), END])
    return made, pieces


def groups(tokens: list[int], seed: int) -> Iterator[list[int]]:
    """The tokens, some at a time."""
    numbers = random.Random(seed)
    while tokens:
        count = numbers.randint(1, 5)
        yield tokens[:count]
        tokens = tokens[count:]


def text_of(pieces: list[Piece], kind: str = "content") -> str:
    return "".join(value for name, value in pieces if name == kind)


def first_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the stop string that is whole first, character by character."""
    for end in range(1, len(text) + 1):
        if found := [x for x in stop if text[:end].endswith(x)]:
            return text[: end - max(map(len, found))]
    return text


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ([], "One two, one twofold."),
        (["nothing"], "One two, one twofold."),
        (["two"], "One "),
        (["twofold"], "One two, one "),
        (["twofold", "two,"], "One "),
        ([".", "fold."], "One two, one two"),
        (["O"], ""),
        (["wo, one twofold.", "n"], "O"),
    ],
)
def test_an_answer_ends_before_its_first_stop_string(stop: list[str], expected: str) -> None:
    made, pieces = answer(stop=stop)
    text = "One two, one twofold."
    ended = [made.feed(group) for group in groups([*ids(text), END, *ids("more")], 0)]
    assert ended[-1]
    assert made.finish_reason == "stop"
    assert text_of(pieces) == expected == first_stop(text, stop)


@pytest.mark.parametrize("sizes", [1, 3, 30])
def test_where_an_answer_ends_does_not_depend_on_its_pieces(sizes: int) -> None:
    """Stop strings of three letters, which begin and end like others."""
    for seed in range(60):
        numbers = random.Random(seed)
        text = "".join(numbers.choices("abé", k=30))
        stop = ["".join(numbers.choices("abé", k=numbers.randint(2, 6))) for _ in range(numbers.randint(1, 4))]
        made, pieces = answer(stop=stop)
        for start in range(0, len(text), sizes):  # as tokens of several characters
            if made.finish_reason is None:
                made._add(text[start : start + sizes])
        made.feed([END])
        assert text_of(pieces) == first_stop(text, stop)


def test_what_cannot_begin_a_stop_string_is_sent_at_once() -> None:
    (made, pieces), sent = answer(stop=["abc"]), []
    for token in ids("xabab"):
        made.feed([token])
        sent.append(text_of(pieces))
    assert sent == ["x", "x", "x", "xab", "xab"]


@pytest.mark.parametrize(("most", "reason", "text"), [(4, "stop", ""), (3, "length", "fou")])
def test_an_answer_has_max_tokens_at_most(most: int, reason: str, text: str) -> None:
    made, pieces = answer(most=most, stop=["four"])
    assert made.feed(ids("four?")) is True
    assert (made.finish_reason, made.num_tokens, text_of(pieces)) == (reason, most, text)


def test_an_end_token_ends_an_answer_and_is_no_part_of_it() -> None:
    made, pieces = answer(most=3)
    assert made.feed([*ids("ab"), END, *ids("c")])
    assert (made.finish_reason, made.num_tokens, text_of(pieces)) == ("stop", 3, "ab")


def test_characters_split_over_tokens_are_sent_whole() -> None:
    text = "Grüße, 世界 🙂!"
    made, pieces = answer()
    for token in ids(text):
        made.feed([token])
    assert [value for _, value in pieces] == list(text)


def test_bytes_that_are_no_text_are_replaced_as_the_tokenizer_does() -> None:
    """But for an unfinished character at the end."""
    for seed in range(20):
        tokens = random.Random(seed).choices(range(3, 259), k=60)
        made, pieces = answer(most=60)
        made.feed(tokens)
        assert text_of(pieces).rstrip("\ufffd") == TOKENIZER.decode(tokens).rstrip("\ufffd")


@pytest.mark.parametrize("parsed", [False, True])
def test_stop_strings_of_bytes_that_are_no_text_do_not_break_an_answer(parsed: bool) -> None:
    _, pieces = answer(b"a\xff\xfe!b", stop=["\ufffd\ufffd!"], parsed=parsed)
    assert text_of(pieces) == "a"


@pytest.mark.parametrize("seed", range(4))
def test_reasoning_and_tool_calls_are_found_in_an_answer(seed: int) -> None:
    text = f"<think>Should I?</think>Let me see.{CALL}\n{CALL}"
    made, pieces = answer(parsed=True)
    for group in groups([*ids(text), END], seed):
        made.feed(group)
    assert made.finish_reason == "tool_calls"
    assert text_of(pieces, "reasoning_content") == "Should I?"
    assert text_of(pieces) == "Let me see."
    calls = [value for kind, value in pieces if kind == "tool_calls"]
    assert [call["name"] for call in calls] == ["look", "look"]
    assert [json.loads(call["arguments"]) for call in calls] == [{"at": "é"}] * 2


def test_a_stop_string_ends_reasoning_and_tool_calls_too() -> None:
    for text, reasoning in (("<think>I add four.</think>Nine.", "I add "), (CALL, "")):
        made, pieces = answer(text, stop=["four", "loo"], parsed=True)
        assert (made.finish_reason, text_of(pieces, "reasoning_content")) == ("stop", reasoning)
        assert "tool_calls" not in dict(pieces)


@pytest.mark.parametrize("text", ["<", "a <think", "1 < 2 <tool", "<think>", " \n"])
def test_what_only_begins_like_a_tag_is_text(text: str) -> None:
    made, pieces = answer(text, parsed=True)
    assert made.finish_reason == "stop"
    assert text_of(pieces).strip() == text.removesuffix("<think>").strip()


@pytest.mark.parametrize("parsed", [False, True])
def test_an_end_token_that_a_parser_does_not_know_is_no_part_of_the_answer(parsed: bool) -> None:
    """Such as that of DeepSeek-R1-Distill-Qwen, a model of type qwen2."""
    made, pieces = answer("Yes.\n", parsed=parsed)
    assert (text_of(pieces).rstrip(), made.finish_reason) == ("Yes.", "stop")


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>look at it</tool_call>",
        "<tool_call>[1]</tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"at": NaN}}</tool_call>',
        '<tool_call>{"name": "look", "argum',
        "<tool_call>",
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_a_tool_call_that_is_none_is_text(call: str, size: int) -> None:
    """A model wrote it, so it is no error; nothing of it is lost, nor of what follows."""
    more = " So it is." if "</" in call else ""
    made, pieces = answer(parsed=True)
    tokens = [*ids(f"Well. {call}{more}"), END]
    for start in range(0, len(tokens), size):
        made.feed(tokens[start : start + size])
    assert made.finish_reason == "stop"
    assert [kind for kind, _ in pieces if kind != "content"] == []
    assert "".join(text_of(pieces).split()) == "".join(f"Well. {call}{more}".split())


@pytest.mark.parametrize(
    "said", ["", ', "arguments": ""', ', "arguments": null', ', "arguments": " "', ', "arguments": {}']
)
def test_a_call_without_arguments_has_an_empty_object_of_them_and_is_taken_back(said: str) -> None:
    _, pieces = answer(f'<tool_call>{{"name": "now"{said}}}</tool_call>', parsed=True)
    message = FORMS[0].whole([(pieces, "tool_calls")], {})["choices"][0]["message"]
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "now", "arguments": "{}"}]
    message = ChatCompletionMessage.model_validate(message).model_dump()  # with fields of the client's that are null
    assert Message.model_validate(message).plain()["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


def test_a_tool_call_that_is_none_leaves_those_before_it() -> None:
    made, pieces = answer(f"{CALL}<tool_call>x</tool_call>", parsed=True)
    assert made.finish_reason == "tool_calls"
    assert [kind for kind, _ in pieces] == ["tool_calls", *["content"] * (len(pieces) - 1)]


def test_a_call_does_not_hide_that_another_was_cut_off_and_has_parameters_as_of_llama_3() -> None:
    made, pieces = answer(CALL.replace("arguments", "parameters") * 2, parsed=True, most=len(ids(CALL)) + 24)
    assert made.finish_reason == "length"
    assert pieces[0] == ("tool_calls", {"index": 0, "name": "look", "arguments": '{"at": "\\u00e9"}'})


def test_transformers_without_a_parser_gives_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.utils", None)
    monkeypatch.setitem(sys.modules, "transformers.cli.serving", None)
    made, pieces = answer(CALL, parsed=True)
    assert made.parser is None
    assert (text_of(pieces), made.finish_reason) == (CALL, "stop")


def test_models_that_transformers_does_not_know_have_no_parser() -> None:
    model = SimpleNamespace(config=SimpleNamespace(model_type="x"))
    assert response_parser(TOKENIZER, model, "Hi", None) is None


def test_parsers_of_transformers_that_take_no_tools_are_called_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 5.18 to 5.22, with which every conversation failed."""
    build = utils.build_response_parser
    monkeypatch.setattr(utils, "build_response_parser", lambda one, model, x: build(one, model, input_ids=x))
    assert response_parser(TOKENIZER, QWEN, "<think>", [{"type": "function"}]) is not None


@pytest.mark.parametrize(
    ("start", "text", "reasoning"),
    [
        ("<|im_start|>assistant\n", "Yes.", ""),
        ("<|im_start|>assistant\n<think>\n", "Hm.</think>Yes.", "Hm."),
        ("<Assistant><think>\n", "Hm.</think>Yes.", "Hm."),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes.", ""),
    ],
)
def test_what_a_template_puts_before_an_answer_says_how_to_read_it_and_is_no_part_of_it(
    start: str, text: str, reasoning: str
) -> None:
    _, pieces = answer(text, parsed=True, start=start)
    assert (text_of(pieces), text_of(pieces, "reasoning_content")) == ("Yes.", reasoning)


@pytest.mark.parametrize("parsed", [False, True])
@pytest.mark.parametrize("text", ["", "Yes.", f"<think>Hm.</think>Yes.{CALL}{CALL}"])
@pytest.mark.parametrize("form", FORMS)
def test_bodies_are_those_of_the_openai_api(form: Form, text: str, parsed: bool) -> None:
    made, pieces = answer(text, parsed=parsed and form.chat)
    usage = usage_of(7, 5, [made])
    body = form.whole([(pieces, str(made.finish_reason))], usage)
    form = replace(form, include_usage=True)
    told = [*form.begin(), *(x for piece in pieces for x in form.add(piece, None, 0))]
    told += [*form.add(None, made.finish_reason, 0), *form.end(usage)]
    assert told.pop() == "data: [DONE]\n\n"
    events = [json.loads(event.removeprefix("data: ")) for event in told]
    assert [event["usage"] for event in events] == [None] * (len(events) - 1) + [usage]
    assert "usage" not in FORMS[0].chunk(None)
    if not form.chat:
        whole = Completion.model_validate(json.loads(json.dumps(body)))
        assert whole.choices[0].text == text
        for event in events[:-2]:
            assert event["choices"][0].pop("finish_reason") is None  # as OpenAI's own, which its type does not have
            event["choices"][0]["finish_reason"] = "stop"
        streamed = [Completion.model_validate(event) for event in events]
        assert "".join(event.choices[0].text for event in streamed[:-1]) == text
        assert whole.usage == streamed[-1].usage
        return
    chat = ChatCompletion.model_validate(json.loads(json.dumps(body)))
    chunks = [ChatCompletionChunk.model_validate(event) for event in events]
    message, deltas = chat.choices[0].message, [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == message.role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    whole = [(call.id, i, call.type) for i, call in enumerate(message.tool_calls or [])]
    assert [(call.id, call.index, call.type) for call in calls] == whole
    assert chat.usage == chunks[-1].usage
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert (chat.usage.total_tokens, chat.usage.prompt_tokens_details.cached_tokens) == (7 + made.num_tokens, 5)
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert (0 < thought < len("<think>Hm.</think>")) == (parsed and "<think>" in text)
    assert chunks[-2].choices[0].finish_reason == chat.choices[0].finish_reason == made.finish_reason
    assert {chunk.id for chunk in chunks} == {chat.id}
    found: Any = message.model_extra
    assert found.get("reasoning_content") == ("Hm." if parsed and "<think>" in text else None)
    assert (message.content is None) == (bool(calls) and not text_of(pieces))


def test_an_echo_tells_of_each_token_once_also_of_the_last() -> None:
    """As clients count that score texts: a token that ends the answer has an entry, too."""
    pieces, prompt = list[Piece](), ids("Hi")
    made = Answer(TOKENIZER, 9, [END], (), None, pieces.append, prompt, echo="Hi")
    for logprob in (-9.0, -1.0):  # read again
        made.add_prompt_logprobs([TokenLogprob(prompt[0], None, []), TokenLogprob(prompt[1], logprob, [(7, -0.5)])])
    assert not made.feed(ids("o"), TokenLogprob(ids("o")[0], -2.0, [(8, -0.25), (9, -3.0)]))
    assert made.feed([END], TokenLogprob(END, -4.0, [(8, -0.125)]))
    choice = Form("cmpl-1", "m", False).whole([(pieces, "stop")], {})["choices"][0]
    assert choice["text"] == "Hio"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -4.0]
    assert [x and max(x.values()) for x in choice["logprobs"]["top_logprobs"]] == [None, -0.5, -0.25, -0.125]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


@pytest.mark.parametrize(("echo", "offsets"), [("<s>é x", [0, 3, 3, 4]), ("é x", [0, 0, 0, 1]), (None, [])])
def test_where_the_text_of_each_token_begins(echo: str | None, offsets: list[int]) -> None:
    """A character of several tokens begins with the first; what the tokenizer puts before a prompt has no text."""
    tokenizer, e, pieces = spm_tokenizer(), tokens(*(f"<0x{x:02X}>" for x in "é".encode())), list[Piece]()
    prompt, text = [*tokens("<s>"), *e, *tokens("▁x")], [*tokens("▁Paris"), *e, *tokens("▁is")]
    made = Answer(tokenizer, len(text), [], (), None, pieces.append, prompt, echo=echo)
    if echo is not None:
        told = [TokenLogprob(x, -1.0 if i else None, []) for i, x in enumerate(prompt)]
        made.add_prompt_logprobs(told[:3])
        made.add_prompt_logprobs(told[3:])
    for token in text:
        made.feed([token], TokenLogprob(token, -1.0, []))
    choice = Form("cmpl-1", "m", False).whole([(pieces, "length")], {})["choices"][0]
    start = len(echo or "")
    assert choice["text"] == (echo or "") + " Parisé is"
    assert choice["logprobs"]["text_offset"] == [*offsets, *(start + x for x in (0, 6, 6, 7))]
