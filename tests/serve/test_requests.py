"""Bodies of requests: what is understood, and that everything else is refused by its name."""

import json
import random
from typing import Any

import pytest

from kvcli.serve.requests import ApiError, ChatBody, CompletionBody, parse, prompt_of

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> ChatBody:
    return parse(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatBody, "m")


def refused(data: bytes, kind: Any = ChatBody) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(data, kind, "m")
    assert 400 <= caught.value.status < 500
    assert caught.value.to_dict()["error"].keys() == {"message", "type", "param", "code"}
    return caught.value


def test_fields_mean_what_they_do_elsewhere() -> None:
    body = chat(temperature=0.5, top_p=0.9, top_k=7, repetition_penalty=1.1, max_tokens=5, stop="x", seed=3, n=1)
    sampling = body.sampling(5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.5, 0.9, 7, 1.1)
    assert (body.limit(), body.stop, body.seed) == (5, ["x"], 3)
    assert chat(max_tokens=5, max_completion_tokens=6).limit() == 6
    assert chat().sampling(9).temperature == chat(temperature=1e-40).sampling(9).temperature == 0
    assert chat(temperature=None, stop=None, n=None, logprobs=False, frequency_penalty=0.0, logit_bias={}).stop == []
    assert chat(user="u", prompt_cache_key="k", safety_identifier="s", metadata={}) != chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 9}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools.0"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 1}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"other": True}}, "stream_options.other"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [1]}, "messages.0"),
        ({"generation_config": "{}"}, "generation_config"),
        ({"adapter": "/etc"}, "adapter"),
        ({"model": 3}, "model"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    assert refused(json.dumps({"messages": MESSAGES, **fields}).encode()).param == param


def test_other_models_do_not_exist() -> None:
    assert refused(json.dumps({"messages": MESSAGES, "model": "../m"}).encode()).status == 404
    assert chat(model="m").model == "m"


def test_an_empty_stop_string_is_refused() -> None:
    assert "empty" in str(refused(json.dumps({"messages": MESSAGES, "stop": ["a", ""]}).encode()))


def test_messages_become_what_templates_take() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(
        messages=[
            {"role": "developer", "content": "d"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
            {"role": "assistant", "content": "So.", "reasoning": "r"},
        ]
    )
    assert [message.plain() for message in body.messages] == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": "So.", "reasoning": "r", "reasoning_content": "r"},
    ]


@pytest.mark.parametrize("said", [{}, {"arguments": None}, *({"arguments": x} for x in ("", " ", "null", "{}", {}))])
def test_calls_without_arguments_have_an_empty_object_of_them(said: dict[str, Any]) -> None:
    call = {"type": "function", "function": {"name": "f", **said}}
    (message,) = chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}]).messages
    assert message.plain()["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize("said", [{}, {"content": None}, {"content": ""}, {"content": []}, {"tool_calls": []}])
def test_an_assistant_may_have_said_nothing(said: dict[str, Any]) -> None:
    (message,) = chat(messages=[{"role": "assistant", **said}]).messages
    assert message.plain() == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": "user"},
        {"role": "king", "content": ""},
        {"role": ["user"], "content": ""},
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
        {"role": "user", "content": ["text"]},
        {"role": "user", "content": "a", "path": "b"},
        {"role": "user", "content": "a", "name": 3},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
        {"role": "assistant", "tool_calls": {"a": 1}},
        {"role": "assistant", "tool_calls": 3},
    ],
)
def test_messages_of_another_form_are_refused(message: dict[str, Any]) -> None:
    assert refused(json.dumps({"messages": [*MESSAGES, message]}).encode()).param == "messages.1"


def test_a_prompt_is_one_text_or_token_ids() -> None:
    def prompt(value: Any) -> Any:
        return prompt_of(parse(json.dumps({"prompt": value}).encode(), CompletionBody, "m"), 100)

    assert [prompt("a"), prompt(["a"]), prompt([1, 99]), prompt([[1, 2]])] == ["a", "a", [1, 99], [1, 2]]
    for wrong in ([], ["a", "b"], [100], [-1], [True], [1.0], [[1], [2]], [None]):
        with pytest.raises(ApiError):
            prompt(wrong)


def test_malformed_bodies_are_refused() -> None:
    """2000 bodies: bytes, JSON of other forms, half texts, deep nesting, fields of random values."""
    random.seed(0)
    valid = json.dumps({"messages": MESSAGES, "max_tokens": 3, "stop": ["a"], "temperature": 0.5}).encode()
    names = [*ChatBody.model_fields, "path", "__class__", ""]
    values: list[Any] = [None, True, -1, 2**64, 1e308, "", "x" * 99, "\ud800", [], [[]], {}, {"a": {"b": []}}, "null"]
    for i in range(2000):
        kind = i % 5
        if kind == 0:
            data = random.randbytes(random.randrange(60))
        elif kind == 1:
            data = valid[: random.randrange(len(valid))]
        elif kind == 2:
            data = json.dumps(random.choice(values[:-4])).encode()
        elif kind == 3:
            data = random.choice((b"[", b'{"messages":')) * random.randrange(1, 100_000)
        else:
            data = json.dumps({**{random.choice(names): random.choice(values) for _ in range(3)}, "no": 1}).encode()
        refused(data, random.choice((ChatBody, CompletionBody)))
