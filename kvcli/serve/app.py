"""HTTP: the endpoints of the OpenAI API, who may use them, limits, and errors in its form."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvcli.attention.generation import stop_tokens
from kvcli.attention.session import Session
from kvcli.contexts import ContextStore
from kvcli.errors import KvcliError, ModelError, UsageError
from kvcli.models import LoadedModel
from kvcli.progress import Say, say_nothing
from kvcli.prompts import chat_text, ids_of_text, prompt_ids
from kvcli.registry import method_name
from kvcli.serve.answers import Answer, Form, Piece, response_parser, usage_of
from kvcli.serve.engine import Cancelled, Engine, Job, Overloaded
from kvcli.serve.metrics import Metrics
from kvcli.serve.prefixes import Prefixes
from kvcli.serve.requests import DEFAULT_TOKENS, ApiError, Body, ChatBody, CompletionBody, parse, prompt_of

_BODY_BYTES_PER_TOKEN = 64
"""Bytes of a body per token that a prompt may have: no text of so many tokens is larger, escaped as JSON."""

_LEAST_BODY_BYTES = 2**20
_RETRY_AFTER_S = 5

T = TypeVar("T")

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine, under which alone requests without a key are answered."""


@dataclass
class Server:
    """What the endpoints share.

    Attributes:
        name: of the model, as clients see it.
        max_model_len: tokens of a prompt and its answer.
        keys: of which a request needs one; none: it needs none.
        per_key: whether a request uses contexts of its own key alone.
        headers: of every answer.
    """

    loaded: LoadedModel
    name: str
    engine: Engine
    metrics: Metrics
    max_model_len: int
    keys: Sequence[str] = ()
    per_key: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    _tokenize: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "kvcli-tokenize"))

    @classmethod
    def open(
        cls,
        loaded: LoadedModel,
        session: Session,
        name: str,
        *,
        store: ContextStore | None,
        store_bytes: int | None = None,
        hot_bytes: int = 2**31,
        max_model_len: int | None = None,
        max_waiting: int = 64,
        max_batch: int = 8,
        say: Say = say_nothing,
        **access: Any,
    ) -> Self:
        """A server of a session, whose engine runs until it is closed; `access`: `keys` and `per_key`."""
        metrics = Metrics()
        prefixes = Prefixes(session, loaded.tokenizer, store, store_bytes, hot_bytes, say, metrics.count_stored)
        limit = max_model_len or loaded.spec.max_position_embeddings
        sizes = {"max_waiting": max_waiting, "max_batch": max_batch, "max_length": limit}
        engine = Engine(session, prefixes, metrics, **sizes, say=say)
        metrics.waiting.set_function(lambda: engine.num_waiting)
        metrics.hot_bytes.set_function(lambda: prefixes.hot_bytes)
        metrics.store_bytes.set_function(prefixes.store_bytes)
        method = method_name(session.method.name, dict(session.config))
        headers = {"x-kvcli-method": method, "x-kvcli-bits": f"{prefixes.true_bits():.2f}"}
        return cls(loaded, name, engine, metrics, limit, headers=headers, **access)

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/v1/chat/completions", self._endpoint(self._chat), methods=["POST"]),
            Route("/v1/completions", self._endpoint(self._complete), methods=["POST"]),
            Route("/v1/models", self._endpoint(self._models)),
            Route("/v1/models/{name:path}", self._endpoint(self._models)),
            Route("/metrics", self._endpoint(self._metrics)),
            Route("/health", self._health),
        ]
        handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _unexpected}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False  # nobody is sent to an address that a Host header says
        return app

    def _endpoint(self, answer: Callable[[Request, str], Any]) -> Callable[[Request], Any]:
        """An endpoint that needs a key, tells errors in the form of the API, and is counted."""

        async def endpoint(request: Request) -> Response:
            try:
                response: Response = await answer(request, self._owner(request))
            except ApiError as error:
                headers = {"Retry-After": str(_RETRY_AFTER_S)} if error.status in (429, 503) else None
                response = JSONResponse(error.to_dict(), error.status, headers)
            except ClientDisconnect:
                response = Response(status_code=499)
            except asyncio.CancelledError:  # at the end of the time that answers are given to be finished
                response = JSONResponse(ApiError(503, "the server ends").to_dict(), 503)
            path = "/v1/models" if "name" in request.path_params else request.scope["path"]
            self.metrics.requests.labels(path, response.status_code).inc()
            return response

        return endpoint

    def _owner(self, request: Request) -> str:
        """Whose contexts a request may use; ApiError without a key where one is needed."""
        if not self.keys:
            host = re.sub(r":\d*$", "", request.headers.get("host", "").lower()).strip("[]")
            if host not in LOOPBACK:  # a page that has made its own name mean this machine
                raise ApiError(403, f"without an API key, only {', '.join(LOOPBACK)} are served")
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(key.encode(), x.encode()) for x in self.keys]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        return hashlib.sha256(key.encode()).hexdigest() if self.per_key else ""

    async def _body(self, request: Request) -> bytes:
        """The body, not larger than any that can be answered."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the content type is application/json")
        limit = max(_LEAST_BODY_BYTES, _BODY_BYTES_PER_TOKEN * self.max_model_len)
        parts, count = [], 0
        async for part in request.stream():
            parts.append(part)
            count += len(part)
            if count > limit:
                raise ApiError(413, f"the body has more than {limit} bytes")
        return b"".join(parts)

    async def _chat(self, request: Request, owner: str) -> Response:
        body = parse(await self._body(request), ChatBody, self.name)
        tools = body.tools if body.tool_choice != "none" else None
        messages, loaded = [message.plain() for message in body.messages], self.loaded

        def read() -> tuple[torch.Tensor, Any]:
            text, before = (chat_text(loaded, messages, to_reply, tools) for to_reply in (True, False))
            start = text[len(before) :] if text.startswith(before) else ""
            return ids_of_text(loaded, text), response_parser(loaded.tokenizer, loaded.model, start, tools)

        ids, parser = await self._apart(read, "messages")
        return await self._answer(request, body, ids, owner, "messages", parser)

    async def _complete(self, request: Request, owner: str) -> Response:
        body = parse(await self._body(request), CompletionBody, self.name)
        prompt = prompt_of(body, self.loaded.spec.vocab_size)
        if isinstance(prompt, str):
            ids = await self._apart(lambda: prompt_ids(self.loaded, prompt, chat=False), "prompt")
        else:
            ids = torch.tensor([prompt])
        return await self._answer(request, body, ids, owner, "prompt")

    async def _apart(self, make: Callable[[], T], param: str) -> T:
        """What is made of a text, apart from the thread that serves: long texts take a while."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenize, make)
        except (UsageError, ModelError) as error:
            raise ApiError(400, str(error), param) from error

    async def _answer(
        self, request: Request, body: Body, ids: torch.Tensor, owner: str, param: str, parser: Any = None
    ) -> Response:
        """The response to a prompt, int64 [1, time]."""
        ids, count, limit, asked = ids.cpu(), ids.shape[1], self.max_model_len, body.limit()
        most = asked if asked is not None else max(1, min(DEFAULT_TOKENS[param], limit - count))
        if count + most > limit:
            message = (
                f"This model's maximum context length is {limit} tokens. However, you requested {most} of an answer "
            )
            raise ApiError(400, f"{message}to {count} tokens.", param, "context_length_exceeded")
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Piece | Exception | None]()

        def send(event: Piece | Exception | None) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        chat = param == "messages"
        form = Form(f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}", self.name, chat)
        ends = stop_tokens(self.loaded.model, None, None)[0]
        answer = Answer(self.loaded.tokenizer, most, ends, body.stop, parser, send)
        job = Job(ids, body.sampling(most), body.seed, answer, owner, body.store, send)
        try:
            self.engine.submit(job)
        except Overloaded:
            if not self.engine.is_alive:
                raise ApiError(503, "the server ends") from None
            raise ApiError(429, "too many requests wait; try again later", code="rate_limit_exceeded") from None
        if body.stream:
            stream = self._stream(job, form, events, body.stream_options.include_usage)
            return StreamingResponse(stream, media_type="text/event-stream", headers=self.headers)
        pieces = await self._collect(request, job, events)
        result = form.whole(pieces, str(answer.finish_reason), usage_of(count, job.cached, answer))
        return JSONResponse(result, headers=self.headers)

    async def _collect(self, request: Request, job: Job, events: asyncio.Queue[Any]) -> list[Piece]:
        """All pieces of an answer; the work stops when the client goes away."""
        gone = asyncio.ensure_future(_disconnected(request))
        gone.add_done_callback(lambda task: None if task.cancelled() else job.cancelled.set())
        pieces: list[Piece] = []
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, Cancelled):
                    raise ClientDisconnect
                if isinstance(event, Exception):
                    raise api_error(event) from event
                pieces.append(event)
            return pieces
        finally:
            job.cancelled.set()
            gone.cancel()

    async def _stream(self, job: Job, form: Form, events: asyncio.Queue[Any], usage: bool) -> AsyncIterator[str]:
        """Server-sent events of an answer; the work stops when the client goes away."""
        counts = {"content": 0, "reasoning_content": 0, "tool_calls": 0}
        try:
            if form.chat:
                yield _event(form.chunk(None))
            while (event := await events.get()) is not None:
                if isinstance(event, Exception):
                    yield _event(api_error(event).to_dict())
                    return
                yield _event(form.chunk(event, counts[event[0]]))
                counts[event[0]] += 1
            yield _event(form.chunk(None, finish_reason=job.answer.finish_reason))
            if usage:
                yield _event(form.usage_chunk(usage_of(job.ids.shape[1], job.cached, job.answer)))
            yield "data: [DONE]\n\n"
        finally:
            job.cancelled.set()

    async def _models(self, request: Request, owner: str) -> Response:
        model = {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "kvcli",
            "max_model_len": self.max_model_len,
        }
        if request.path_params.get("name") not in (None, self.name):
            raise ApiError(404, f"The model does not exist; this is '{self.name}'", "model", "model_not_found")
        return JSONResponse(model if "name" in request.path_params else {"object": "list", "data": [model]})

    async def _metrics(self, request: Request, owner: str) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _health(self, request: Request) -> Response:
        alive = self.engine.is_alive
        return JSONResponse({"status": "ok" if alive else "ending"}, 200 if alive else 503)


def api_error(error: Exception) -> ApiError:
    """An error of the engine as clients are told: nothing of paths or of the program."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        return ApiError(503, "the server ends")
    if isinstance(error, torch.OutOfMemoryError):
        return ApiError(503, "out of memory; send a shorter prompt, or try again later")
    if isinstance(error, ModelError):
        return ApiError(500, "the model computed values that are not finite")
    return ApiError(500, "the request failed" if isinstance(error, KvcliError) else "internal error")


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"  # in ASCII: clients split lines at more characters than at these


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone away; the body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    unknown = f"Unknown request URL: {request.method} {request.scope['path'][:80]}"
    message = unknown if error.status_code == 404 else error.detail
    return JSONResponse(ApiError(error.status_code, message).to_dict(), error.status_code, error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    return JSONResponse(api_error(error).to_dict(), 500)
