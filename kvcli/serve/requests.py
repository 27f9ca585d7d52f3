"""What a request may say: bodies of the OpenAI API, checked; whatever is not understood is refused by its name."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvcli.attention.generation import SamplingConfig

MOST_STOPS = 16
"""Stop strings of a request."""

DEFAULT_TOKENS = {"messages": 1024, "prompt": 16}
"""Tokens of an answer at most, where the body says nothing, by what it answers."""

Text = Annotated[str, Field(max_length=2**31)]


class ApiError(Exception):
    """An error as the OpenAI API tells it.

    Attributes:
        status: of HTTP.
        param: the field that is wrong, if one is.
        code: a word for programs, such as context_length_exceeded.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_dict(self) -> dict[str, Any]:
        """The body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class Body(BaseModel):
    """What completions and chat completions have in common.

    Attributes:
        fixed: fields whose only values these are, because nothing else is done: others are refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "logprobs": (False,),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
    }

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    user: Any = None
    metadata: Any = None
    n: Any = None
    logprobs: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None

    def sampling(self, max_new_tokens: int) -> SamplingConfig:
        """How tokens are chosen: the most probable ones, unless a temperature is asked for."""
        said: dict[str, Any] = {
            "temperature": self.temperature if (self.temperature or 0) >= 1e-5 else 0.0,  # so that logits stay finite
            "top_p": self.top_p,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
        }
        return SamplingConfig(max_new_tokens, **{name: x for name, x in said.items() if x is not None})

    def limit(self) -> int | None:
        """Tokens of the answer at most; None: it does not say."""
        return self.max_tokens

    def stops(self) -> list[str]:
        """Stop strings; ApiError for an empty one."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in stops:
            raise ApiError(400, "a stop string is empty", "stop")
        return stops


class CompletionBody(Body):
    """Body of `/v1/completions`."""

    fixed: ClassVar[dict[str, tuple[Any, ...]]] = Body.fixed | {"best_of": (1,), "echo": (False,), "suffix": ("",)}

    prompt: Text | list[Any]
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


class ChatBody(Body):
    """Body of `/v1/chat/completions`."""

    fixed: ClassVar[dict[str, tuple[Any, ...]]] = Body.fixed | {
        "top_logprobs": (0,),
        "parallel_tool_calls": (True,),
        "tool_choice": ("auto", "none"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
    }

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    tools: list[dict[str, Any]] | None = None
    top_logprobs: Any = None
    parallel_tool_calls: Any = None
    tool_choice: Any = None
    response_format: Any = None
    modalities: Any = None
    service_tier: Any = None

    def limit(self) -> int | None:
        """As `Body.limit`; the newer name counts."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def plain_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them: texts, and tool calls whose arguments are objects."""
        return [_plain(message, f"messages[{i}]") for i, message in enumerate(self.messages)]


BodyT = TypeVar("BodyT", bound=Body)


def parse(data: bytes, kind: type[BodyT], model: str) -> BodyT:
    """A checked body; `model` is the only one that it may name.

    ApiError: no JSON object, a field that is unknown, of another type or out of range, or a value that is not served.
    """
    try:
        values = json.loads(data.decode())
        if b"\\u" in data:  # half a surrogate pair is no text
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        _refuse("the body is no JSON object in UTF-8")
    if not isinstance(values, dict):
        _refuse("the body is no JSON object")
    try:
        body = kind(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(map(str, first["loc"][:2])) if len(first["loc"]) > 1 else str(first["loc"][0])
        param = str(first["loc"][0]) if first["loc"][0] in ("stop", "prompt") else param
        if first["type"] == "extra_forbidden":
            _refuse(f"Unrecognized request argument supplied: {param[:80]}", param[:80])
        _refuse(f"{param}: {first['msg']}", param)
    for name, served in kind.fixed.items():
        value = getattr(body, name)
        if value is not None and not any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in served):
            _refuse(f"{name}: this value is not supported", name)
    if body.model not in (None, model):
        message = f"The model '{str(body.model)[:80]}' does not exist; this is '{model}'"
        raise ApiError(404, message, "model", "model_not_found")
    return body


def _refuse(message: str, param: str | None = None) -> NoReturn:
    raise ApiError(400, message, param)


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content"}


def _plain(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message for a chat template; ApiError for what is no text and no tool call."""
    if unknown := sorted(message.keys() - _FIELDS):
        _refuse(f"{where}: unknown field {str(unknown[0])[:80]}", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        _refuse(f"{where}: role is one of {', '.join(_ROLES)}", where)
    plain: dict[str, Any] = {
        "role": _ROLES[role],
        "content": _text(message.get("content"), where, bool(message.get("tool_calls"))),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := message.get(name)) is not None:
            if not isinstance(value, str):
                _refuse(f"{where}: {name} is no text", where)
            plain[name] = value
    if (calls := message.get("tool_calls")) is not None:
        plain["tool_calls"] = _tool_calls(calls, where)
    return plain


def _text(content: Any, where: str, optional: bool) -> str:
    """The text of a message, of parts one after another."""
    if content is None and optional:
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        _refuse(f"{where}: content is a text, or a list of parts of type text", where)
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = str(part.get("type"))[:40] if isinstance(part, dict) else "another kind"
            _refuse(f"{where}: only parts of type text are supported, not {kind}", where)
    return "".join(part["text"] for part in parts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with arguments as objects, over which templates iterate."""
    try:
        plain = []
        for call in calls:
            function = call["function"]
            arguments = function["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(function["name"], str) or not isinstance(arguments, dict):
                raise TypeError
            function = {"name": function["name"], "arguments": arguments}
            plain.append({"id": str(call.get("id", "")), "type": "function", "function": function})
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
        _refuse(f"{where}: tool_calls are a list of functions with name and arguments, a JSON object", where)
    return plain


def prompt_of(body: CompletionBody, vocab_size: int) -> str | list[int]:
    """The prompt, a text or token ids; ApiError for several, which are to be sent one by one."""
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not prompt or not all(type(x) is int and 0 <= x < vocab_size for x in prompt):
        _refuse(f"prompt is one text, or a list of token ids below {vocab_size}", "prompt")
    return prompt
