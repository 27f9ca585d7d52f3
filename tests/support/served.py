"""A server of a tiny random model in the process of the tests, and clients of it."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import uvicorn
from byte_tokenizer import CHAT, byte_tokenizer
from factories import load, make_model
from prometheus_client.parser import text_string_to_metric_families

import kvcli
from kvcli.artifact.choice import MethodChoice
from kvcli.attention.generation import SamplingConfig
from kvcli.contexts import ContextStore
from kvcli.models.load import LoadedModel
from kvcli.paged.model import open_pages
from kvcli.serve import prefixes as prefixes_module
from kvcli.serve.app import Server
from kvcli.serve.continuous import ContinuousEngine
from kvcli.serve.prefixes import Prefixes
from kvcli.serve.sequential import SequentialEngine
from kvcli.text.prompts import prompt_ids

LONG = 3000
"""Tokens of an answer that takes longer than any test waits."""


def until(happens: Callable[[], Any], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@dataclass
class Answered:
    """Status, headers and body of a response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        """The error that it tells in the form of the OpenAI API."""
        (name,) = json.loads(self.body)
        assert name == "error"
        error = json.loads(self.body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == ("server_error" if self.status >= 500 else "invalid_request_error")
        return dict(error)


@dataclass
class Served:
    """A server that runs."""

    loaded: Any
    session: Any
    engine: Any
    port: int

    @property
    def prefixes(self) -> Prefixes:
        found: Prefixes = self.engine.prefixes
        return found

    def client(self, key: str = "none") -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)

    def complete(self, prompt: Any, max_tokens: int = 8, **fields: Any) -> Any:
        with self.client() as client:
            return client.completions.create(model="tiny", prompt=prompt, max_tokens=max_tokens, **fields)

    def chat(self, text: str, max_tokens: int = 8, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": text}]
        with self.client() as client:
            return client.chat.completions.create(model="tiny", messages=messages, max_tokens=max_tokens, **fields)

    def open(self, data: bytes, receive_bytes: int | None = None) -> socket.socket:
        """A connection on which this was sent."""
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(data)
        return connection

    def ask(self, path: str, body: Any = None, *headers: str, method: str = "", host: str = "localhost") -> Answered:
        """What one request of plain HTTP is answered."""
        with self.open(request(path, body, *headers, method=method, host=host)) as connection:
            return answered(connection)

    def counted(self, name: str, **labels: str) -> float:
        """A counter of `/metrics`."""
        families = text_string_to_metric_families(self.engine.metrics.text().decode())
        samples = [x for family in families for x in family.samples]
        return sum(x.value for x in samples if x.name == name and labels.items() <= x.labels.items())

    def generated(self, prompt: str, count: int, chat: bool = False) -> str:
        """The text that the session's own `generate` makes of a prompt that is too short to be kept."""
        if chat:
            ids = prompt_ids(self.loaded, prompt, chat=True)
        else:
            ids = torch.tensor([self.loaded.tokenizer(prompt)["input_ids"]])
        made = self.session.generate(ids, sampling=SamplingConfig(count)).sequences[0, ids.shape[1] :]
        return str(self.loaded.tokenizer.decode(made)).rstrip("\ufffd")


def request(path: str, body: Any = None, *headers: str, method: str = "", host: str = "localhost") -> bytes:
    """A request of plain HTTP, after which the connection is closed; a body is JSON unless it is bytes."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    if body is not None and not any(line.lower().startswith("transfer-encoding") for line in headers):
        lines.append(f"Content-Length: {len(data)}")
    if body is not None and not any(line.lower().startswith("content-type") for line in headers):
        lines.append("Content-Type: application/json")
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + data


def answered(connection: socket.socket) -> Answered:
    """The response on a connection that the server closes after it."""
    data = b""
    with suppress(ConnectionResetError):  # the server has not read all that was sent
        while part := connection.recv(2**16):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answered(int(first.split()[1]), headers, body)


def tiny(model: Any = None, template: str = CHAT) -> Any:
    """A model whose tokens are bytes, with a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    model = make_model("llama", vocab_size=259, max_position_embeddings=4096) if model is None else model
    return replace(load(model), tokenizer=tokenizer)


@contextmanager
def serving(
    store: Path | None = None,
    *,
    method: str = "rtn-2",
    keys: Sequence[str] = (),
    per_key: bool = False,
    max_waiting: int = 64,
    template: str = CHAT,
    model: Any = None,
) -> Iterator[Served]:
    """A server with boundaries every 16 tokens and buffers of sockets that hold little."""
    loaded = model if isinstance(model, LoadedModel) else tiny(model, template)
    groups = {} if method == "fp16" else {"group_size": 8}
    with kvcli.attach(loaded, method, residual_length=8, sink_length=2, **groups) as session:
        kept = None if store is None else ContextStore(store)
        sizes = {"max_waiting": max_waiting, "max_model_len": 4096}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefixes_module, "UNIT", 16)
            engine = SequentialEngine(loaded, session, "tiny", store=kept, **sizes, say=print)
        with listening(Server(loaded, engine, keys=keys, per_key=per_key)) as port:
            yield Served(loaded, session, engine, port)


@contextmanager
def serving_together(
    method: str = "rtn-2",
    model: Any = None,
    *,
    artifact: Any = None,
    store: Path | None = None,
    keys: Sequence[str] = (),
    per_key: bool = False,
    max_bytes: int = 2**22,
    max_batch: int = 8,
    **options: Any,
) -> Iterator[Served]:
    """A server whose requests run in the same passes, on pages of 32 tokens; the last 8 are exact, or 32."""
    loaded = tiny(model)
    choice = MethodChoice.of(method, artifact, settings={"residual_length": 32 if method.startswith("kivi") else 8})
    sizes = {"max_bytes": max_bytes, "num_rings": max_batch, "max_length": 4096, "page_size": 32}
    with open_pages(loaded, choice, **sizes) as paged:
        kept = None if store is None else ContextStore(store)
        engine = ContinuousEngine(paged, loaded.tokenizer, "tiny", store=kept, say=print, **options)
        with listening(Server(loaded, engine, keys=keys, per_key=per_key)) as port:
            yield Served(loaded, paged.session, engine, port)


@contextmanager
def listening(opened: Server) -> Iterator[int]:
    """The port of a server in a thread, whose engine is closed at the end."""
    accepting = socket.socket()
    accepting.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    accepting.bind(("127.0.0.1", 0))
    config = uvicorn.Config(opened.app(), log_level="critical", timeout_graceful_shutdown=1, server_header=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([accepting],))
    thread.start()
    try:
        until(lambda: server.started)
        yield accepting.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        opened.engine.close()


def start_server(folder: Path, *options: str, cwd: Path | None = None) -> tuple[Any, str]:
    """A process of `kvcli serve` that accepts requests, and its URL."""
    command = [sys.executable, "-m", "kvcli", "serve", str(folder), "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    process: Any = subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True, env=environment)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"serving (http://127\.0\.0\.1:\d+/v1)", line):
            return process, found[1]
    raise AssertionError("".join(lines))


@contextmanager
def busy(served: Served) -> Iterator[None]:
    """The engine works on a request as long as this is open; those that come meanwhile wait."""
    working, release = threading.Event(), threading.Event()
    generate = served.session.generate

    def wait(*args: Any, **options: Any) -> Any:
        working.set()
        release.wait(60)
        return generate(*args, **options)

    served.session.generate = wait
    thread = threading.Thread(target=served.complete, args=("wait", 1))
    thread.start()
    try:
        assert working.wait(30)
        served.session.generate = generate
        yield
    finally:
        release.set()
        thread.join()


def streamed(events: Any) -> tuple[str, list[str], Any]:
    """Text, finish reasons and usage of a stream."""
    text, reasons, usage = "", [], None
    for event in events:
        usage = event.usage or usage
        for choice in event.choices:
            text += (choice.text if hasattr(choice, "text") else choice.delta.content) or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return text, reasons, usage


def session_ids(prompt: str, count: int, seed: int = 0, **sampling: Any) -> list[int]:
    """What a session of the same model without codes generates."""
    loaded = tiny()
    torch.manual_seed(seed)
    with kvcli.attach(loaded, "fp16") as session:
        ids = torch.tensor([loaded.tokenizer(prompt)["input_ids"]])
        made = session.generate(ids, sampling=SamplingConfig(count, **sampling)).sequences
    return made[0, ids.shape[1] :].tolist()


def text_of(ids: list[int]) -> str:
    """The text of an answer, without what is only the beginning of a character."""
    return str(tiny().tokenizer.decode(ids, skip_special_tokens=True)).rstrip("\ufffd")


def session_text(prompt: str, count: int, **sampling: Any) -> str:
    return text_of(session_ids(prompt, count, **sampling))
