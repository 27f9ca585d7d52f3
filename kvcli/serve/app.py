"""HTTP: the endpoints of the OpenAI API, who may use them, limits, and errors in its form."""

import asyncio
import hashlib
import hmac
import re
import secrets
from array import array
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvcli.cache.record import start_of
from kvcli.contexts import identity_of
from kvcli.contexts.reader import documents_of
from kvcli.errors import ContextError, KvcliError, ModelError, UsageError
from kvcli.models.load import LoadedModel
from kvcli.serve import LOOPBACK
from kvcli.serve.answers import Answer, Form, Piece, response_parser, usage_of
from kvcli.serve.grammar import JsonGrammars
from kvcli.serve.jobs import Cancelled, Job, JobThread
from kvcli.serve.requests import ApiError, Body, ChatBody, CompletionBody, parse, prompt_of
from kvcli.serve.responses import ResponseForm, ResponsesBody
from kvcli.text.document import BLANK_LINE, around
from kvcli.text.prompts import chat_text, ids_of_text, prompt_ids

_BODY_BYTES_PER_TOKEN = 64
"""Bytes of a body per token that a prompt may have: no text of so many tokens is larger, escaped as JSON."""

_LEAST_BODY_BYTES = 2**20

Event = tuple[int, Piece | Exception | None]
"""Of which answer a piece is, the error that it has failed with, or None at its end."""

T = TypeVar("T")


class Server:
    """A server of a model.

    Args:
        engine: makes tokens.
        keys: of which a request needs one; none: it needs none.
        per_key: whether a request uses contexts of its own key alone.
    """

    def __init__(
        self, loaded: LoadedModel, engine: JobThread, *, keys: Sequence[str] = (), per_key: bool = False
    ) -> None:
        self.loaded, self.engine, self.name, self._keys, self._per_key = loaded, engine, engine.name, keys, per_key
        self.max_model_len, self.metrics = engine.max_length, engine.metrics
        self.headers = {"x-kvcli-method": engine.method, "x-kvcli-bits": f"{engine.bits:.2f}"}
        self._tokenize, self._ends = ThreadPoolExecutor(1, "kvcli-tokenize"), loaded.end_tokens
        self._grammars = JsonGrammars(loaded.tokenizer, loaded.spec.vocab_size, self._ends)

    def app(self) -> Starlette:
        """The application."""
        routes = [
            self._route("/v1/chat/completions", self._chat, "POST"),
            self._route("/v1/completions", self._complete, "POST"),
            self._route("/v1/responses", self._respond, "POST"),
            self._route("/v1/models", self._models),
            self._route("/v1/models/{name:path}", self._models),
            self._route("/v1/contexts", self._contexts),
            self._route("/metrics", self._count),
            self._route("/", self._page),
            Route("/health", self._health),
        ]
        handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _unexpected}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False  # nobody is sent to an address that a Host header says
        return app

    def _route(self, path: str, answer: Callable[[Request, str], Any], method: str = "GET") -> Route:
        """An endpoint that needs a key, tells errors in the form of the API, and is counted."""

        async def endpoint(request: Request) -> Response:
            try:
                response: Response = await answer(request, self._owner(request))
            except (ApiError, ClientDisconnect, asyncio.CancelledError) as error:
                response = api_error(error).response()
            self.metrics.requests.labels(path, response.status_code).inc()
            return response

        return Route(path, endpoint, methods=[method])

    def _owner(self, request: Request) -> str:
        """Whose contexts a request may use; ApiError without a key where one is needed."""
        if not self._keys:
            host = re.sub(r":\d*$", "", request.headers.get("host", "").lower()).strip("[]")
            if host not in LOOPBACK:  # a page that has made its own name mean this machine
                raise ApiError(403, f"without an API key, only {', '.join(LOOPBACK)} are served")
        if not self._keys or request.scope["path"] == "/":  # our own page asks for a key itself
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(key.encode(), x.encode()) for x in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        return hashlib.sha256(key.encode()).hexdigest() if self._per_key else ""

    async def _body(self, request: Request) -> bytes:
        """The body, not larger than any that can be answered."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the content type is application/json")
        limit = max(_LEAST_BODY_BYTES, _BODY_BYTES_PER_TOKEN * self.max_model_len)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise ApiError(413, f"the body has more than {limit} bytes")
        return bytes(body)

    async def _chat(self, request: Request, owner: str) -> Response:
        return await self._reply(request, owner, parse(await self._body(request), ChatBody, self.name))

    async def _respond(self, request: Request, owner: str) -> Response:
        body = parse(await self._body(request), ResponsesBody, self.name)
        return await self._reply(request, owner, body.chat(self.name), ResponseForm(body, self.name))

    async def _reply(self, request: Request, owner: str, body: ChatBody, form: ResponseForm | None = None) -> Response:
        tools = body.tools or None if body.tool_choice != "none" else None
        messages, loaded = [message.plain() for message in body.messages], self.loaded

        def read() -> tuple[torch.Tensor, list[Any], tuple[str, ...]]:
            variables = body.chat_template_kwargs
            text, before = (chat_text(loaded, messages, to_reply, tools, variables) for to_reply in (True, False))
            with suppress(ModelError):  # a template may refuse calls and results without tools
                if tools and text == chat_text(loaded, messages, True, None, variables):
                    raise UsageError(f"the chat template of {loaded.name} shows the model no tools; leave 'tools' out")
            start = text[len(before) :] if text.startswith(before) else ""
            parsed = range(body.n if body.schema_of_answer() is None else 0)  # JSON is all of an answer, and content
            parsers = [response_parser(loaded.tokenizer, loaded.model, start, tools) for _ in parsed]
            if body.documents:
                ids, names = self._documents(body, messages[0]["content"])
                return ids, parsers, names
            return ids_of_text(loaded, text), parsers, ()

        ids, parsers, documents = await self._in_tokenizer_thread(read, "documents" if body.documents else "messages")
        return await self._answer(request, body, ids, owner, parsers, documents, form)

    def _documents(self, body: ChatBody, question: str) -> tuple[torch.Tensor, tuple[str, ...]]:
        """Token ids of documents and a question about them, and the names of their contexts."""
        store, identity = self.engine.contexts.store, identity_of(self.engine.session, self.loaded.tokenizer)
        if store is None or not self.engine.takes_documents:
            raise UsageError("documents need a store, and a server that answers one request at a time: --max-batch 1")
        known, ids = documents_of(store, body.library), list[torch.Tensor]()
        for name in body.documents:
            if name not in known:
                said = f"'{name[:80]}'" + (f" of library '{body.library[:80]}'" if body.library is not None else "")
                raise UsageError(f"{store.folder}, the store of this server, has no document {said}")
            tokens = store.token_ids(store.whole(known[name].name, identity).context)
            ids.append(tokens[start_of(known[name].record.notes) if ids else 0 :])
        after = around(self.loaded, question, variables=body.chat_template_kwargs)[1]
        asked = ids_of_text(self.loaded, BLANK_LINE * (body.library is None) + after, follows=True)[0].cpu()
        return torch.cat((*ids, asked)).unsqueeze(0), tuple(known[name].name for name in body.documents)

    async def _complete(self, request: Request, owner: str) -> Response:
        body = parse(await self._body(request), CompletionBody, self.name)
        prompt = prompt_of(body, self.loaded.spec.vocab_size)
        if isinstance(prompt, str):
            ids = await self._in_tokenizer_thread(lambda: prompt_ids(self.loaded, prompt, chat=False), "prompt")
        else:
            ids = torch.frombuffer(array("q", prompt), dtype=torch.int64).unsqueeze(0)  # 8 times sooner than `tensor`
        echo = prompt if body.echo else None
        if isinstance(echo, list):
            echo = await self._in_tokenizer_thread(lambda: str(self.loaded.tokenizer.decode(prompt)), "prompt")
        return await self._answer(request, body, ids, owner, echo=echo)

    async def _in_tokenizer_thread(self, make: Callable[[], T], param: str) -> T:
        """What is made of a text, apart from the thread that serves: long texts take a while."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenize, make)
        except (UsageError, ModelError, ContextError) as error:
            raise ApiError(400, str(error), param) from error

    async def _answer(
        self,
        request: Request,
        body: Body,
        ids: torch.Tensor,
        owner: str,
        parsers: Sequence[Any] = (),
        documents: tuple[str, ...] = (),
        form: ResponseForm | None = None,
        echo: str | None = None,
    ) -> Response:
        """The response to a prompt, int64 [1, time]."""
        ids, count, limit, chat = ids.cpu(), ids.shape[1], self.max_model_len, isinstance(body, ChatBody)
        most = body.limit() or max(1, min(body.default_limit, limit - count))
        if count + most > limit:
            asked = f"However, you requested {most} of an answer to {count} tokens."
            message = f"This model's maximum context length is {limit} tokens. {asked}"
            raise ApiError(400, message, "messages" if chat else "prompt", "context_length_exceeded")
        grammars = list[Any]()
        if (schema := body.schema_of_answer()) is not None:
            make = partial(self._grammars.of, schema, body.n)
            grammars = await self._in_tokenizer_thread(make, "response_format")
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def send(index: int, event: Piece | Exception | None) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

        name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        writer = form or Form(name, self.name, chat, body.n, body.stream_options.include_usage)
        prompt, jobs = ids[0].tolist(), list[Job]()
        for index in range(body.n):
            parser, grammar = (x[index] if x else None for x in (parsers, grammars))
            tell = partial(send, index)
            answer = Answer(self.loaded.tokenizer, most, self._ends, body.stop, parser, tell, prompt, echo=echo)
            seed = None if body.seed is None else body.seed + index
            of_prompt = echo is not None and body.num_logprobs() is not None
            rest = body.store and not of_prompt, tell, body.num_logprobs(), grammar, of_prompt, documents
            jobs.append(Job(ids, body.sampling(most), seed, answer, owner, *rest, getattr(body, "repair", 0.0)))
        try:
            for job in jobs:
                self.engine.submit(job)
        except ApiError:
            _cancel(jobs)
            raise
        if body.stream:
            stream = self._stream(jobs, writer, _stream_pieces(events, body.n))
            return StreamingResponse(stream, media_type="text/event-stream", headers=self.headers)
        watching = asyncio.ensure_future(_cancel_without_client(request, jobs))
        pieces: list[list[Piece]] = [[] for _ in jobs]
        try:
            async for index, piece in _stream_pieces(events, body.n):
                if piece is not None:
                    pieces[index].append(piece)
        finally:
            _cancel(jobs)
            watching.cancel()
        answers = [(made, str(job.answer.finish_reason)) for made, job in zip(pieces, jobs, strict=True)]
        return JSONResponse(writer.whole(answers, _usage(jobs)), headers=self.headers)

    async def _stream(
        self, jobs: Sequence[Job], form: Form | ResponseForm, pieces: AsyncIterator[tuple[int, Piece | None]]
    ) -> AsyncIterator[str]:
        """Server-sent events of answers; the work stops when the client goes away."""
        try:
            for event in form.begin():
                yield event
            async for index, piece in pieces:
                reason = jobs[index].answer.finish_reason if piece is None else None
                for event in form.add(piece, reason, index):
                    yield event
            for event in form.end(_usage(jobs)):
                yield event
        except ApiError as error:
            yield form.failed(error.to_dict())
        finally:
            _cancel(jobs)

    async def _models(self, request: Request, owner: str) -> Response:
        limit = self.max_model_len
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "kvcli", "max_model_len": limit}
        if "name" not in request.path_params:
            return JSONResponse({"object": "list", "data": [model]}, headers=self.headers)
        if request.path_params["name"] != self.name:
            raise ApiError(404, f"The model does not exist; this is '{self.name}'", "model", "model_not_found")
        return JSONResponse(model, headers=self.headers)

    async def _contexts(self, request: Request, owner: str) -> Response:
        identities = [self.engine.identity_of(owner, length) for length in (1, self.max_model_len)]
        listed = await asyncio.to_thread(self.engine.contexts.listed, identities)
        return JSONResponse({"object": "list", "data": listed})

    async def _page(self, request: Request, owner: str) -> Response:
        page = Path(__file__).with_name("page.html").read_text()
        policy = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'"
        for kind in ("script", "style"):
            digest = hashlib.sha256(page.split(f"<{kind}>")[1].split(f"</{kind}>")[0].encode()).digest()
            policy += f"; {kind}-src 'sha256-{b64encode(digest).decode()}'"
        return HTMLResponse(page, headers={"content-security-policy": policy})

    async def _count(self, request: Request, owner: str) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _health(self, request: Request) -> Response:
        alive = self.engine.is_alive
        return JSONResponse({"status": "ok" if alive else "ending"}, 200 if alive else 503)


ERROR_RESPONSES = (
    ((Cancelled, ClientDisconnect), 499, "the client has gone away"),
    (asyncio.CancelledError, 503, "the server ends"),  # after the time that answers are given to be finished
    (torch.OutOfMemoryError, 503, "out of memory; send a shorter prompt, or try again later"),
    (ModelError, 500, "the model computed values that are not finite"),
    (KvcliError, 500, "the request failed"),
    (BaseException, 500, "internal error"),
)


def api_error(error: BaseException) -> ApiError:
    """An error as clients are told: nothing of paths or of the program."""
    if isinstance(error, ApiError):
        return error
    return next(ApiError(status, message) for kind, status, message in ERROR_RESPONSES if isinstance(error, kind))


async def _stream_pieces(events: asyncio.Queue[Event], count: int) -> AsyncIterator[tuple[int, Piece | None]]:
    """The pieces of so many answers as they come, None at the end of each; ApiError: one has failed."""
    while count:
        index, event = await events.get()
        if isinstance(event, Exception):
            raise api_error(event) from event
        count -= event is None
        yield index, event


def _cancel(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.cancelled.set()


def _usage(jobs: Sequence[Job]) -> dict[str, Any]:
    return usage_of(jobs[0].ids.shape[1], jobs[0].cached, [job.answer for job in jobs])


async def _cancel_without_client(request: Request, jobs: Sequence[Job]) -> None:
    """Cancels jobs when the client goes away; the body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    _cancel(jobs)


async def _http_error(request: Request, error: HTTPException) -> Response:
    unknown = f"Unknown request URL: {request.method} {request.scope['path'][:80]}"
    message = unknown if error.status_code == 404 else error.detail
    return ApiError(error.status_code, message).response(error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    return api_error(error).response()
