"""What a request may say: bodies of the OpenAI API, checked; whatever is not understood is refused by its name."""

import json
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    Json,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)
from starlette.responses import JSONResponse

from kvcli.attention.generation import SamplingConfig


class ApiError(Exception):
    """An error as the OpenAI API tells it: HTTP's status, the field that is wrong, and a word for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_dict(self) -> dict[str, Any]:
        """The body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, headers: Any = None) -> JSONResponse:
        """The response, which says when to try again if there was no room."""
        return JSONResponse(self.to_dict(), self.status, {"Retry-After": "5"} if self.status in (429, 503) else headers)


class Fields(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """An object of the API; null is as if nothing was said."""

    @model_validator(mode="before")
    @classmethod
    def _said(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: x for name, x in values.items() if x is not None}


class Part(Fields, extra="ignore"):
    """Text of a message."""

    type: Literal["text"]
    text: str


def _are_json(arguments: dict[str, Any]) -> dict[str, Any]:
    json.dumps(arguments, allow_nan=False)  # parsers take NaN and Infinity, which clients cannot read
    return arguments


class Function(Fields, extra="ignore"):
    """What was called, by a model or in a history; chat templates iterate over the arguments."""

    name: str
    arguments: Annotated[
        dict[str, Any] | Json[dict[str, Any]],
        Field(validation_alias=AliasChoices("arguments", "parameters")),  # as Llama 3 writes it
        BeforeValidator(lambda said: {} if isinstance(said, str) and said.strip() in ("", "null") else said),
        AfterValidator(_are_json),
    ] = {}


class ToolCall(Fields, extra="ignore"):
    """A call of a tool in an answer before."""

    id: str = ""
    type: Literal["function"] = "function"
    function: Function


def as_parts(content: Any) -> Any:
    """The parts of a message's content, which can be one text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(Fields):
    """A message, of which all content is text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Part], BeforeValidator(as_parts)] = []
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, AfterValidator(lambda calls: calls or None)] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Any = Field(None, exclude=True)

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise ValueError("content is missing")
        return self

    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it: its text, and tool calls whose arguments are objects."""
        role = "system" if self.role == "developer" else self.role
        said = {"role": role, "content": "".join(part.text for part in self.content)}
        if reasoning := self.reasoning_content or self.reasoning:  # templates know it by one name or the other
            said |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return self.model_dump(exclude_none=True) | said


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool = False


def _stops(stop: Any) -> Any:
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list) and "" in stops:
        raise ValueError("a stop string is empty")
    return stops


def only(served: Any) -> AfterValidator:
    """Refuses other values than this one, because nothing else is done."""

    def check(value: Any) -> Any:
        if value != served:
            raise ValueError("this value is not supported")
        return value

    return AfterValidator(check)


Count = Annotated[int, Field(ge=1, lt=2**31)]


MOST_LOGPROBS = 20
"""Tokens of which the probability is told at one place, at most."""


class JsonSchema(Fields, extra="ignore"):
    """A named schema."""

    name: str = ""
    of_json: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Fields):
    """What an answer is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: it is text."""
        if self.type == "json_schema":
            return None if self.json_schema is None else self.json_schema.of_json
        return {"type": "object"} if self.type == "json_object" else None

    @model_validator(mode="after")
    def _has_a_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with the type json_schema alone")
        return self


class Described(Fields, extra="ignore"):
    """What is said of a function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Fields, extra="ignore"):
    """A function that may be called, which a chat template gets as it was sent."""

    type: Literal["function"] = "function"
    function: Described


class OfModel(Fields):
    """A request to the model that is served, which it may name, and what changes no answer."""

    model: str | None = None
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class Body(OfModel):
    """What completions and chat completions have in common."""

    default_limit: ClassVar[int]  # tokens of an answer at most, where nothing is said

    max_tokens: Count | None = None
    temperature: float = Field(0.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    repetition_penalty: float = Field(1.0, ge=0.01, le=10)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str], BeforeValidator(_stops), Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    store: bool = True
    n: int = Field(1, ge=1, le=8)
    frequency_penalty: Annotated[float, only(0)] = 0.0
    presence_penalty: Annotated[float, only(0)] = 0.0
    logit_bias: Annotated[dict[str, Any], only({})] = {}

    def sampling(self, max_new_tokens: int) -> SamplingConfig:
        """How tokens are chosen: the most probable ones, unless a temperature is asked for."""
        temperature = self.temperature if self.temperature >= 1e-5 else 0.0  # so that logits stay finite
        return SamplingConfig(max_new_tokens, temperature, self.top_p, self.top_k, self.repetition_penalty)

    def limit(self) -> int | None:
        """Tokens of the answer at most; None: it does not say."""
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        """How many of the most probable tokens are told at each place, beside the chosen one; None: nothing is."""
        return None

    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that an answer is of, if it is JSON."""
        return None


class CompletionBody(Body):
    """Body of `/v1/completions`."""

    default_limit: ClassVar[int] = 16

    prompt: Any
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: Annotated[int, only(1)] = 1
    echo: bool = False
    suffix: Literal[""] = ""

    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(Body):
    """Body of `/v1/chat/completions`."""

    default_limit: ClassVar[int] = 1024

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    tools: list[Annotated[Tool, WrapValidator(lambda said, check: said if check(said) else None)]] = []
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    parallel_tool_calls: Annotated[bool, only(True)] = True
    tool_choice: Literal["auto", "none"] = "auto"
    response_format: ResponseFormat = ResponseFormat(type="text")
    chat_template_kwargs: dict[str, Any] = {}
    modalities: Annotated[list[str], only(["text"])] = ["text"]
    service_tier: Literal["auto", "default"] = "auto"
    # kept documents that the only message asks about, side by side; without a library one, by its context's name
    library: str | None = None
    documents: list[str] = Field([], max_length=256, validate_default=True)
    repair: float = Field(0.1, ge=0, le=1)  # share of their tokens that is read again, see `Session.compose`

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens  # the newer name counts

    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def schema_of_answer(self) -> dict[str, Any] | None:
        return self.response_format.schema_of_answer()

    @field_validator("documents")
    @classmethod
    def _are_asked_about(cls, names: list[str], info: ValidationInfo) -> list[str]:
        if bool(names) != (info.data.get("library") is not None) and len(names) != 1:
            raise ValueError("documents are named with their library, or one by its context")
        messages = info.data.get("messages", [])
        if names and (len(messages) != 1 or messages[0].role != "user" or info.data.get("tools")):
            raise ValueError("documents go with one message, of the user, and no tools")
        return names

    @field_validator("top_logprobs", "response_format")
    @classmethod
    def _goes_with_others(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "top_logprobs" and value and not info.data.get("logprobs"):
            raise ValueError("it needs logprobs")
        if info.field_name == "response_format" and value.type != "text" and info.data.get("tools"):
            raise ValueError("it goes with no tools")
        return value


BodyT = TypeVar("BodyT", bound=OfModel)


def parse(data: bytes, kind: type[BodyT], model: str) -> BodyT:
    """A checked body; `model` is the only one that it may name.

    ApiError: no JSON object, a field that is unknown, of another type or out of range, or a value that is not served.
    """
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        names = [str(name)[:80] for name in first["loc"]]
        said = first["msg"].removeprefix("Value error, ")
        said = "Unrecognized request argument supplied" if first["type"] == "extra_forbidden" else said
        if not names:
            raise ApiError(400, "the body is no JSON object in UTF-8") from None
        raise ApiError(400, f"{'.'.join(names)}: {said}", ".".join(names[:2])) from None
    if body.model not in (None, model):
        message = f"The model '{str(body.model)[:80]}' does not exist; this is '{model}'"
        raise ApiError(404, message, "model", "model_not_found")
    return body


def prompt_of(body: CompletionBody, vocab_size: int) -> str | list[int]:
    """The prompt, a text or token ids; ApiError for several, which are to be sent one by one."""
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    numbers = isinstance(prompt, list) and {*map(type, prompt)} == {int}
    if not numbers or not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ApiError(400, f"prompt is one text, or a list of token ids below {vocab_size}", "prompt")
    return prompt
