"""`/v1/responses`: OpenAI's newer form of chat requests and answers, which are those of chat otherwise.

Nothing is kept of a response: a conversation is sent whole, as with chat.
"""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from kvcli.serve.answers import Piece, event
from kvcli.serve.requests import ChatBody, Count, Described, Fields, JsonSchema, OfModel, as_parts, only, parse


class ItemPart(Fields, extra="ignore"):
    """Text of an item."""

    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: str


_NEEDED: dict[str, set[str]] = {
    "message": {"role", "content"},
    "reasoning": set(),
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
}
"""Fields of each type of items."""


class Item(Fields, extra="ignore"):
    """A message, reasoning, a call of a function or its output."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "assistant"
    content: Annotated[list[ItemPart], BeforeValidator(as_parts)] = []
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Annotated[list[ItemPart], BeforeValidator(as_parts)] = []

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if missing := sorted(_NEEDED[self.type] - self.model_fields_set):
            raise ValueError(f"{missing[0]} is missing")
        return self

    def text(self) -> str:
        """Of its content, or of its output."""
        return "".join(part.text for part in (*self.content, *self.output))


class Tool(Described):
    """A function that may be called."""

    type: Literal["function"]
    strict: bool | None = None

    def of_chat(self) -> dict[str, Any]:
        """The same as chat says it."""
        return {"type": "function", "function": self.model_dump(exclude_none=True, exclude={"type", "strict"})}


class Format(JsonSchema):
    """What an answer is; a schema stands beside its type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    of_json: dict[str, Any] = Field({}, alias="schema")

    def of_chat(self) -> dict[str, Any]:
        """The same as chat says it."""
        schema = {"json_schema": {"name": self.name, "schema": self.of_json}} if self.type == "json_schema" else {}
        return {"type": self.type, **schema}

    def told(self) -> dict[str, Any]:
        """The same as a response says it."""
        return self.model_dump(by_alias=True, include=None if self.type == "json_schema" else {"type"})


class Text(Fields):
    """How an answer is written."""

    format: Format = Format()
    verbosity: Any = None


class ResponsesBody(OfModel):
    """Body of `/v1/responses`; fields are as in chat where they have a name of chat."""

    input: Annotated[
        list[Item],
        BeforeValidator(lambda said: [{"role": "user", "content": said}] if isinstance(said, str) else said),
        Field(min_length=1),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float = Field(0.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    text: Text = Text()
    stream: bool = False
    store: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    parallel_tool_calls: Annotated[bool, only(True)] = True
    truncation: Annotated[str, only("disabled")] = "disabled"
    background: Annotated[bool, only(False)] = False
    top_logprobs: Annotated[int, only(0)] = 0
    include: Annotated[list[str], only([])] = []
    stream_options: Any = None
    service_tier: Any = None

    def chat(self, model: str) -> ChatBody:
        """The same request of chat; ApiError, in its names, as of `parse`."""
        same = {"model", "temperature", "top_p", "tool_choice", "stream", "store", "chat_template_kwargs"}
        values = self.model_dump(include=same)
        values |= {"messages": self._messages(), "response_format": self.text.format.of_chat()}
        values |= {"tools": [tool.of_chat() for tool in self.tools], "max_tokens": self.max_output_tokens}
        return parse(json.dumps(values).encode(), ChatBody, model)

    def _messages(self) -> list[dict[str, Any]]:
        """Calls and reasoning are parts of the message of the assistant that they stand beside."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if item.type == "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.text()})
                continue
            last = messages[-1] if messages else {}
            joins = item.type == "function_call" or not {"content", "tool_calls"} & last.keys()
            if not joins or {item.role, last.get("role")} != {"assistant"}:
                last = {"role": item.role}
                messages.append(last)
            if item.type == "message":
                last["content"] = item.text()
            elif item.type == "reasoning":
                last["reasoning_content"] = item.text()
            else:
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                last.setdefault("tool_calls", []).append(call)
        return messages


_TEXT: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
_ITEMS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "content": ("message", "msg", {"role": "assistant"}, _TEXT),
    "reasoning_content": ("reasoning", "rs", {"summary": []}, {"type": "reasoning_text", "text": ""}),
}
"""Type of items of pieces of text, the beginning of their ids, other fields, and their part."""


@dataclass
class ResponseForm:
    """How an answer is written, whole or as events, by the methods of `Form`."""

    body: ResponsesBody
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    _items: list[dict[str, Any]] = field(default_factory=list)
    _count: int = 0
    _reason: str | None = None

    def whole(self, answers: Sequence[tuple[Sequence[Piece], str]], usage: dict[str, Any]) -> dict[str, Any]:
        ((pieces, self._reason),) = answers
        for piece in pieces:
            [*self._add(*piece)]
        [*self._close(is_over=True)]
        return self._response(self._reason, usage)

    def begin(self) -> Iterator[str]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response())

    def add(self, piece: Piece | None, reason: str | None, index: int) -> Iterator[str]:
        self._reason = reason
        yield from self._close(is_over=True) if piece is None else self._add(*piece)

    def end(self, usage: dict[str, Any]) -> Iterator[str]:
        response = self._response(self._reason, usage)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: dict[str, Any]) -> str:
        return self._event("error", **{name: error["error"][name] for name in ("message", "param", "code")})

    def _response(self, reason: str | None = None, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """The object `response`; without a reason why it ended it goes on."""
        said = self.body.model_dump(by_alias=True, include={
            "instructions", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice",
            "parallel_tool_calls", "truncation", "store", "metadata",
        })  # fmt: skip
        status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "output": [*self._items] if reason is not None else [],
            "previous_response_id": None,
            "text": {"format": self.body.text.format.told()},
            # OpenAI's names here for what chat calls otherwise
            "usage": usage and {x.replace("prompt", "input").replace("completion", "output"): usage[x] for x in usage},
            **said,
        }

    def _add(self, kind: str, value: Any) -> Iterator[str]:
        """Adds a piece to the last item, or to a new one of its kind; the events that say so."""
        if kind == "tool_calls":
            yield from self._close()
            names = {"call_id": f"call_{self.id}_{value['index']}", "name": value["name"]}
            yield from self._open("function_call", "fc", **names, arguments="")
            yield self._of_item("function_call_arguments.delta", delta=value["arguments"])
            self._items[-1]["arguments"] = value["arguments"]
            return
        item_type, prefix, more, part = _ITEMS[kind]
        if not self._items or self._items[-1]["status"] != "in_progress" or self._items[-1]["type"] != item_type:
            yield from self._close()
            yield from self._open(item_type, prefix, **more, content=[])
            self._items[-1]["content"].append({**part})
            yield self._of_item("content_part.added", content_index=0, part=part)
        self._items[-1]["content"][0]["text"] += value
        yield self._of_item(f"{part['type']}.delta", content_index=0, delta=value, **_logprobs(part))

    def _open(self, kind: str, prefix: str, **values: Any) -> Iterator[str]:
        item_id = f"{prefix}_{self.id}_{len(self._items)}"
        self._items.append({"id": item_id, "type": kind, "status": "in_progress", **values})
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _close(self, *, is_over: bool = False) -> Iterator[str]:
        """Ends the last item; an answer without any is an empty message."""
        if not self._items and is_over:
            yield from self._add("content", "")
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        if item["type"] == "function_call":
            yield self._of_item("function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        else:
            (part,) = item["content"]
            yield self._of_item(f"{part['type']}.done", content_index=0, text=part["text"], **_logprobs(part))
            yield self._of_item("content_part.done", content_index=0, part=part)
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _of_item(self, name: str, /, **values: Any) -> str:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(f"response.{name}", **place, **values)

    def _event(self, name: str, /, **values: Any) -> str:
        self._count += 1
        return event({"type": name, "sequence_number": self._count - 1, **values}, name)


def _logprobs(part: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": []} if part["type"] == "output_text" else {}
