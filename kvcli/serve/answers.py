"""Answers: text of tokens, piece by piece, until one of the ends of an answer; and the JSON of the OpenAI API."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple

from kvcli.serve.requests import Function
from kvcli.text.detokenizer import Detokenizer, token_text

Piece = tuple[str, Any]
"""A part of an answer: `content`, `reasoning_content`, `tool_calls` or `logprobs`, and its text, or JSON."""


class TokenLogprob(NamedTuple):
    """The log-probability of a token, before sampling, and those of the most probable ones; None: of the very first."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


def response_parser(tokenizer: Any, model: Any, start: str, tools: Any) -> Any:
    """What finds tool calls and reasoning in an answer, transformers' own; None for models that it does not know.

    `start` is what a chat template has put before the answer, such as <think>; more of a prompt would be parsed, too.
    """
    try:
        from transformers.cli.serving.utils import build_response_parser
    except ImportError:  # before transformers 5.20
        return None
    ids = tokenizer(start.rstrip(), add_special_tokens=False)["input_ids"]
    types = {"tools": tools} if "tools" in signature(build_response_parser).parameters else {}  # 5.23 and newer
    return build_response_parser(tokenizer, model, ids, **types)


@dataclass
class Answer:
    """An answer in the making."""

    tokenizer: Any
    max_tokens: int
    ends: Sequence[int]  # tokens that end it
    stop: Sequence[str]  # texts that end it and are not part of it
    parser: Any  # see `response_parser`
    send: Callable[[Piece], None]  # called with the pieces of new tokens, as few as they can be
    prompt: Sequence[int] = ()  # the tokens before the answer, of which its text depends
    num_tokens: int = 0
    reasoning_tokens: int = 0  # those after which what was sent so far ends with reasoning
    finish_reason: str | None = None  # why it ended; None before
    echo: str | None = None  # the prompt, which the answer begins with; None: it does not
    _held: str = ""
    _length: int = 0
    _num_calls: int = 0
    _pieces: list[Piece] = field(default_factory=list)
    _unparsed: str = ""
    _end: str = ""
    _kind: str = ""
    _text: Detokenizer = field(init=False)

    def __post_init__(self) -> None:
        self._text = Detokenizer(self.tokenizer, self.prompt, skip_special_tokens=self.parser is None)
        self._piece("content", self.echo or "")

    def add_prompt_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Takes those of the next tokens of the prompt, which are sent with the first token of the answer."""
        if logprobs and logprobs[0].logprob is None:  # the first one, which is read again where the rotation changes
            self._pieces = [piece for piece in self._pieces if piece[0] != "logprobs"]
            self._offsets = self._offsets_of_prompt()
        self._pieces.append(("logprobs", [self._logprob(x, next(self._offsets)) for x in logprobs]))

    def _offsets_of_prompt(self) -> Iterator[int]:
        """Characters of the echo before each token of the prompt; what the tokenizer puts before it has none."""
        text = Detokenizer(self.tokenizer, skip_special_tokens=False)
        length = min(0, len(self.echo or "") - len(self.tokenizer.decode(self.prompt)))
        for token in self.prompt:
            yield max(0, length)
            length += len(text.add([token]))

    def feed(self, tokens: Iterable[int], logprob: TokenLogprob | None = None, is_over: bool = False) -> bool:
        """Takes new tokens until the answer ends, and returns whether it has.

        `logprob` is of the only one; after the last, nothing can follow where the answer `is_over`.
        """
        for token in tokens:
            if self.finish_reason is not None:
                break
            self.num_tokens += 1
            ended = token in self.ends
            if logprob is not None and (not ended or self.echo is not None):
                self._pieces.append(("logprobs", [self._logprob(logprob, self._length + len(self._held))]))
            if not ended or self.parser is not None:
                self._end = self.tokenizer.decode([token]) if ended else ""
                self._add(self._text.add([token]))
            if self.finish_reason is None and (ended or is_over or self.num_tokens >= self.max_tokens):
                self._finish("stop" if ended or is_over else "length")
            self.reasoning_tokens += self._kind == "reasoning_content"
        for piece in self._pieces:
            self.send(piece)
        self._pieces.clear()
        return self.finish_reason is not None

    def _logprob(self, made: TokenLogprob, offset: int) -> dict[str, Any]:
        """An entry of OpenAI's, and characters before the token."""
        entries = list[dict[str, Any]]()
        for token, logprob in [(made.token, made.logprob), *made.top]:
            text, data = token_text(self.tokenizer, token)
            entries.append({"token": text, "logprob": logprob, "bytes": None if data is None else [*data]})
        return {**entries[0], "top_logprobs": entries[1:], "text_offset": offset}

    def _add(self, text: str) -> None:
        """Sends text, but for an end of it that may be the beginning of a stop string."""
        text = self._held + text
        if found := [(i + len(stop), i) for stop in self.stop if (i := text.find(stop)) >= 0]:
            self._held = text[: min(found)[1]]  # of the one that is whole first, however the text came in pieces
            self._finish("stop")
            return
        longest = max((len(stop) for stop in self.stop), default=1) - 1
        starts = range(max(0, len(text) - longest), len(text))
        kept = next((i for i in starts if any(stop.startswith(text[i:]) for stop in self.stop)), len(text))
        self._held = text[kept:]
        self._emit(text[:kept])

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self._emit(self._held)
        if self.parser is not None:
            self._parse(lambda: self.parser.finalize()[1])
        if self._num_calls and reason == "stop":  # else another call may have been cut off
            self.finish_reason = "tool_calls"

    def _emit(self, text: str) -> None:
        if text and self.parser is None:
            self._piece("content", text)
        elif text:
            self._unparsed += text
            self._parse(lambda: self.parser.feed(text))

    def _parse(self, events: Callable[[], Any]) -> None:
        """Sends what was parsed; the text of a tool call that is none is content, and so is all after it."""
        from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

        try:
            found = events()
            for event in found:
                if event["type"] == "region_close" and event["field"] == "tool_calls":
                    event["value"]["function"] = Function.model_validate(event["value"]["function"]).model_dump()
            chunks = response_events_to_chunks(found)
        except Exception:  # the model wrote it, and parsers raise errors of many kinds
            self.parser, chunks = None, [self._unparsed] if self._unparsed else []
        for chunk in chunks:
            if isinstance(chunk, ToolCall):
                call = {"index": self._num_calls, "name": chunk.name, "arguments": chunk.arguments}
                self._pieces.append(("tool_calls", call))
                self._num_calls, self._unparsed = self._num_calls + 1, ""
                continue
            self._unparsed = self._unparsed.rpartition(chunk)[2]
            text = str(chunk.removesuffix(self._end))  # a token that ends answers, of which the parser does not know
            self._piece("reasoning_content" if isinstance(chunk, ReasoningText) else "content", text)

    def _piece(self, kind: str, text: str) -> None:
        """Appends text to the last piece if both are of one kind."""
        if text:
            self._kind, self._length = kind, self._length + len(text)
            before = self._pieces.pop()[1] if self._pieces and self._pieces[-1][0] == kind else ""
            self._pieces.append((kind, before + text))


@dataclass(frozen=True)
class Form:
    """How answers of an endpoint are written."""

    id: str  # of the request
    model: str
    chat: bool  # whether messages are answered, or a text is continued
    count: int = 1  # answers to the request
    include_usage: bool = False  # whether a stream ends with the number of tokens, which is null in events before
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[tuple[Sequence[Piece], str]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a response that is not streamed: pieces of each answer, and why it ended."""
        choices = [self._whole(*answer, index) for index, answer in enumerate(answers)]
        return self._body("chat.completion", choices) | {"usage": usage}

    def _whole(self, pieces: Sequence[Piece], finish_reason: str, index: int) -> dict[str, Any]:
        text = "".join(x for kind, x in pieces if kind == "content")
        reasoning = "".join(x for kind, x in pieces if kind == "reasoning_content")
        calls = [self._call(x) for kind, x in pieces if kind == "tool_calls"]
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        logprobs = [x for kind, entries in pieces if kind == "logprobs" for x in entries]
        return self._choice({"message": message}, text, logprobs, finish_reason, index)

    def begin(self) -> Iterator[str]:
        """The first events of a stream."""
        yield from (event(self.chunk(None, index=index)) for index in range(self.count if self.chat else 0))

    def add(self, piece: Piece | None, reason: str | None, index: int) -> Iterator[str]:
        """The events of a piece of an answer; None: of its end."""
        yield event(self.chunk(piece, reason, index))

    def end(self, usage: dict[str, Any]) -> Iterator[str]:
        """The last events."""
        if self.include_usage:
            yield event(self.chunk(None) | {"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def failed(self, error: dict[str, Any]) -> str:
        """The event of an error."""
        return event(error)

    def chunk(self, piece: Piece | None, finish_reason: str | None = None, index: int = 0) -> dict[str, Any]:
        """An event of a stream: a piece of an answer; without one its beginning, or its end."""
        logprobs = piece[1] if piece is not None and piece[0] == "logprobs" else []
        said: Piece = ("content", "") if piece is None or logprobs else piece
        kind, value = said
        if kind == "tool_calls":
            value = [{"index": value["index"], **self._call(value)}]
        delta = {} if finish_reason is not None else {kind: value} if piece else {"role": "assistant", kind: value}
        choice = self._choice({"delta": delta}, value, logprobs, finish_reason, index)
        return self._body("chat.completion.chunk", [choice]) | ({"usage": None} if self.include_usage else {})

    def _choice(
        self, said: dict[str, Any], text: Any, logprobs: list[Any], finish_reason: str | None, index: int
    ) -> dict[str, Any]:
        told: dict[str, Any] | None = None
        if logprobs and self.chat:
            told = {"content": [{k: x[k] for k in x if k != "text_offset"} for x in logprobs], "refusal": None}
        elif logprobs:
            names = {"text_offset": "text_offset", "tokens": "token", "token_logprobs": "logprob"}
            told = {name: [x[key] for x in logprobs] for name, key in names.items()}
            # of tokens with one text, such as parts of characters, the most probable one's
            tops = [{y["token"]: y["logprob"] for y in reversed(x["top_logprobs"])} for x in logprobs]
            told["top_logprobs"] = [None if x["logprob"] is None else y for x, y in zip(logprobs, tops, strict=True)]
        choice = said if self.chat else {"text": text}
        return {"index": index, **choice, "logprobs": told, "finish_reason": finish_reason}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = kind if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _call(self, call: Any) -> dict[str, Any]:
        function = {"name": call["name"], "arguments": call["arguments"]}
        return {"id": f"call_{self.id}_{call['index']}", "type": "function", "function": function}


def event(value: dict[str, Any], name: str | None = None) -> str:
    """A server-sent event, in ASCII: clients split lines at more characters than at these."""
    said = "" if name is None else f"event: {name}\n"
    return f"{said}data: {json.dumps(value)}\n\n"


def usage_of(prompt_tokens: int, cached: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """How many tokens a request had, and how many of the prompt's were not read again."""
    made = sum(answer.num_tokens for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(answer.reasoning_tokens for answer in answers)},
    }
