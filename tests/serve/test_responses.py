"""`/v1/responses`: what the stock client gets, beside chat."""

import json
from typing import Any

import openai
import pytest
from served import Served

from kvcli.serve.requests import ApiError, parse
from kvcli.serve.responses import ResponseForm, ResponsesBody

TEXT = "It was the best of times, it was the worst of times."


def respond(served: Served, said: Any, **fields: Any) -> Any:
    with served.client() as client:
        return client.responses.create(model="tiny", input=said, **fields)


def test_answers_are_those_of_chat(served: Served) -> None:
    asked: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": TEXT}]
    with served.client() as client:
        chat = client.chat.completions.create(model="tiny", messages=asked, max_tokens=24)
    inputs: list[Any] = [TEXT, [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]]
    for said in inputs:
        made = respond(served, said, instructions="Be short.", max_output_tokens=24)
        assert made.output_text == chat.choices[0].message.content
        assert (made.usage.input_tokens, made.usage.output_tokens) == (chat.usage.prompt_tokens, 24)
        assert made.usage.output_tokens_details.reasoning_tokens == 0
        assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (made.instructions, made.text.format.type, made.error) == ("Be short.", "text", None)


def test_events_add_up_to_the_response(served: Served) -> None:
    whole = respond(served, TEXT, max_output_tokens=24)
    with served.client() as client:
        events = [*client.responses.create(model="tiny", input=TEXT, max_output_tokens=24, stream=True)]
        with client.responses.stream(model="tiny", input=TEXT, max_output_tokens=24) as stream:
            last = [*stream][-1]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert {*kinds[4:-4]} == {"output_text.delta"}
    assert [item.status for item in whole.output] == [events[-2].item.status] == ["incomplete"]
    assert len(kinds) > 10
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text == last.response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_a_schema_is_kept(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    made = respond(served, TEXT, text=text, max_output_tokens=100)
    assert isinstance(json.loads(made.output_text)["a"], bool)
    assert made.status == "completed"
    assert made.text.format.schema_ == schema


def body(**fields: Any) -> ResponsesBody:
    return parse(json.dumps({"input": TEXT, **fields}).encode(), ResponsesBody, "tiny")


def test_a_conversation_with_calls_is_that_of_chat() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "x"}', "id": "fc_1"}
    items: list[Any] = [
        {"role": "user", "content": "Where?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "there"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "here"}]},
        {"role": "assistant", "content": "There."},
        {"role": "assistant", "content": "And here."},
    ]
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
    chat = body(input=items, tools=[tool], temperature=0.5, max_output_tokens=7).chat("tiny")
    reasoning, function = {"reasoning_content": "Hm.", "reasoning": "Hm."}, {"name": "look", "arguments": {"at": "x"}}
    calls = [{"id": x, "type": "function", "function": function} for x in ("c1", "c2")]
    assert [message.plain() for message in chat.messages] == [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "I look.", **reasoning, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "there"},
        {"role": "tool", "tool_call_id": "c2", "content": "here"},
        {"role": "assistant", "content": "There."},
        {"role": "assistant", "content": "And here."},
    ]
    assert chat.tools == [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    assert (chat.temperature, chat.limit()) == (0.5, 7)


def test_reasoning_calls_and_text_are_items() -> None:
    """Whole, and as the events of the stock client."""
    pieces = [("reasoning_content", "Let "), ("reasoning_content", "me."), ("content", "I "), ("content", "look.")]
    calls = [{"index": i, "name": "look", "arguments": f'{{"at": {i}}}'} for i in range(2)]
    every: list[Any] = [*pieces, *(("tool_calls", call) for call in calls), ("content", "Done.")]
    usage = {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12, "prompt_tokens_details": {}}
    usage["completion_tokens_details"] = {"reasoning_tokens": 2}
    made = ResponseForm(body(), "tiny", "1").whole([(every, "tool_calls")], usage)
    kinds = [(item["type"], item["status"]) for item in made["output"]]
    assert kinds == [(x, "completed") for x in ("reasoning", "message", "function_call", "function_call", "message")]
    assert made["output"][0]["content"] == [{"type": "reasoning_text", "text": "Let me."}]
    assert [x["content"][0]["text"] for x in made["output"] if x["type"] == "message"] == ["I look.", "Done."]
    assert [(x["arguments"], x["call_id"]) for x in made["output"][2:4]] == [
        ('{"at": 0}', "call_1_0"),
        ('{"at": 1}', "call_1_1"),
    ]
    form = ResponseForm(body(), "tiny", "1")
    told = [*form.begin()]
    for piece in every:
        told += form.add(piece, None, 0)
    told += [*form.add(None, "tool_calls", 0), *form.end(usage)]
    events = [json.loads(x.split("data: ")[1]) for x in told]
    assert all(x.startswith(f"event: {e['type']}\ndata: ") for x, e in zip(told, events, strict=True))
    assert events[-1]["response"]["output"] == made["output"]
    assert events[-1]["type"] == "response.completed"
    opened = [e["output_index"] for e in events if e["type"] == "response.output_item.added"]
    closed = [e["output_index"] for e in events if e["type"] == "response.output_item.done"]
    assert opened == closed == [*range(5)]
    assert [e["arguments"] for e in events if e["type"].endswith("arguments.done")] == ['{"at": 0}', '{"at": 1}']


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user"}]}, "input.0"),
        ({"input": [{"content": "Hi"}]}, "input.0"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError) as error:
        body(**fields)
    assert error.value.param == named


def test_an_answer_without_text_is_an_empty_message() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4, "prompt_tokens_details": {}}
    made = ResponseForm(body(), "tiny").whole([([], "stop")], usage | {"completion_tokens_details": {}})
    ((part,),) = (item["content"] for item in made["output"])
    assert (part["type"], part["text"], made["status"]) == ("output_text", "", "completed")


def test_an_error_in_a_stream_is_an_event_of_its_own() -> None:
    said = ResponseForm(body(), "tiny").failed(ApiError(503, "no room", code="busy").to_dict())
    error = json.loads(said.split("data: ")[1])
    assert error == {"type": "error", "sequence_number": 0, "message": "no room", "param": None, "code": "busy"}


def test_what_chat_refuses_is_refused() -> None:
    tool = {"type": "function", "name": "look"}
    with pytest.raises(ApiError, match="it goes with no tools"):
        body(tools=[tool], text={"format": {"type": "json_object"}}).chat("tiny")
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{"}
    with pytest.raises(ApiError, match="tool_calls"):
        body(input=[call]).chat("tiny")


def test_errors_are_told_as_everywhere(served: Served) -> None:
    with served.client() as client:
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.responses.create(model="tiny", input="x" * 6000)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.responses.create(model="other", input="x")
