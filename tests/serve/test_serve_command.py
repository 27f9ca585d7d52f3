"""`kvcli serve` as a process: what it refuses to start with, how it ends, and what a killed one leaves."""

import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from console import METHOD, invoke, refused
from served import answered, request, start_server, until

from kvcli.artifact.recipe import Recipe
from kvcli.cli.output import Output
from kvcli.cli.serve import ServeOptions, _engine
from kvcli.commands.sizes import parse_size
from kvcli.contexts import ContextStore
from kvcli.models.load import load_model
from kvcli.serve.continuous import ContinuousEngine
from kvcli.serve.sequential import SequentialEngine

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 4


@pytest.fixture
def start(tiny_folder: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], openai.OpenAI]]]:
    """Starts servers, and makes clients of them."""
    processes: list[subprocess.Popen[str]] = []

    def start_one(*options: str, key: str = "none") -> tuple[subprocess.Popen[str], openai.OpenAI]:
        process, url = start_server(tiny_folder, *METHOD, *options, cwd=tmp_path)
        processes.append(process)
        return process, openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)

    yield start_one
    for process in processes:
        process.kill()
        process.communicate()


def complete(client: openai.OpenAI, tiny_folder: Path, prompt: str, **options: Any) -> Any:
    return client.completions.create(model=str(tiny_folder), prompt=prompt, **options)


def test_servers_that_others_could_use_unasked_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    empty, binary, good = (tmp_path / name for name in ("empty", "binary", "good"))
    empty.write_text(" \n\n")
    binary.write_bytes(b"\xff\xfe")
    good.write_text("sesame\n")
    serve = ("serve", str(tiny_folder), "--method", "kivi-2")
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        assert "--api-key-file is needed" in refused(*serve, "--host", host)
    assert "holds no keys" in refused(*serve, "--api-key-file", str(empty))
    assert "cannot read the keys" in refused(*serve, "--api-key-file", str(binary))
    assert "cannot read the keys" in refused(*serve, "--api-key-file", str(tmp_path / "none"))
    assert "--store-per-key needs --api-key-file" in refused(*serve, "--store-per-key")
    good.write_text("schlüssel\n")
    assert "of ASCII characters" in refused(*serve, "--api-key-file", str(good))


def test_options_that_cannot_be_met_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    serve = ("serve", str(tiny_folder), "--method", "kivi-2")
    assert "exclude each other" in refused(*serve, "--store", str(tmp_path / "store"), "--no-store")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port}: Address already in use" in refused(*serve, "--port", port)
    assert "192.0.2.1" in refused(*serve, "--port", "0", "--host", "192.0.2.1", "--api-key-file", str(key))
    assert "no.such.name." in refused(*serve, "--port", "0", "--host", "no.such.name.", "--api-key-file", str(key))
    assert "..name" in refused(*serve, "--port", "0", "--host", "..name", "--api-key-file", str(key))
    for options in (("--store-limit", "much"), ("--hot-memory", "-1"), ("--max-model-len", "1"), ("--port", "65536")):
        refused(*serve, *options)


def test_requests_in_the_same_passes_follow_a_recipe(tiny_folder: Path, tmp_path: Path) -> None:
    """But for its `flush_block`, which pages do not have."""
    settings = {"k_bits": [4, 3, 2], "v_bits": 2, "sink_length": 2, "residual_length": 8, "flush_block": 4}
    fingerprint = load_model(str(tiny_folder)).fingerprint
    recipe = Recipe(model=str(tiny_folder), fingerprint=fingerprint, method="turboquant", settings=settings)
    recipe.save(tmp_path / "r.yaml")
    options, output = ServeOptions(recipe=tmp_path / "r.yaml"), Output(quiet=True)
    kept = {"hot_bytes": 2**24, "store": None, "store_bytes": None}
    with _engine(options, kept, output, print) as (_, engine, _):
        assert isinstance(engine, ContinuousEngine)
        config = engine.model.session.config
    assert {name: getattr(config, name) for name in settings} == {**settings, "k_bits": (4, 3, 2), "flush_block": 0}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "qjl"}, "codes of method 'qjl' depend on other tokens"),
        ({"method": "rtn-4", "setting": ["flush_block=4"]}, "tokens of a paged cache are encoded at once"),
        ({"method": "rtn-4", "hot_memory": "1KiB"}, "more than the 1024 of all pages"),
        ({"method": "rtn-4", "max_batch": 1}, None),
    ],
)
def test_what_has_no_pages_is_answered_one_by_one(
    options: dict[str, Any], reason: str | None, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a line that says why, or because that was asked for; settings hold all the same."""
    made = ServeOptions(model=str(tiny_folder), residual_length=32, **options)
    kept = {"hot_bytes": parse_size(made.hot_memory), "store": None, "store_bytes": None}
    with _engine(made, kept, Output(), print) as (_, engine, _):
        assert isinstance(engine, SequentialEngine)
        assert engine.session.config.flush_block == 4 or "setting" not in options
        assert engine.session.config.residual_length == 32
    told = " ".join(capsys.readouterr().err.split())
    assert ("one request is answered at a time: " in told) == (reason is not None)
    assert (reason or "") in told


def test_a_server_listens_before_it_says_so(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(_: Any, sockets: list[socket.socket]) -> None:
        socket.create_connection(sockets[0].getsockname(), timeout=30).close()

    monkeypatch.setattr("uvicorn.Server.run", connect)
    assert "serving http" in invoke("serve", str(tiny_folder), *METHOD, "--port", "0", "--no-store").stderr


@pytest.mark.parametrize("option", ["--max-batch=1", "--no-store"])
def test_a_signal_lets_an_answer_end(option: str, start: Callable[..., Any], tiny_folder: Path) -> None:
    process, client = start(option, "--grace", "300")
    stream = complete(client, tiny_folder, "Go on", max_tokens=300, stream=True, stream_options={"include_usage": True})
    next(stream)
    process.terminate()
    events = [*stream]
    assert events[-1].usage.completion_tokens == 300
    assert process.wait(120) == 0
    assert "ended" in process.stderr.read()


@pytest.mark.parametrize("option", ["--max-batch=1", "--no-store"])
def test_ctrl_c_ends_answers_that_take_too_long(option: str, start: Callable[..., Any], tiny_folder: Path) -> None:
    process, client = start(option, "--grace", "0")
    body = {"prompt": "Go on", "max_tokens": 4000, "stream": True}
    with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=60) as connection:
        connection.sendall(request("/v1/completions", body))
        connection.recv(1)
        process.send_signal(signal.SIGINT)
        assert b"[DONE]" not in answered(connection).body
    assert process.wait(120) == 0


def test_what_was_read_outlives_a_kill(start: Callable[..., Any], tiny_folder: Path, tmp_path: Path) -> None:
    """The second server needs one of several keys."""
    process, client = start("--store", "contexts")
    first = complete(client, tiny_folder, TEXT, max_tokens=12)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    until(lambda: ContextStore(tmp_path / "contexts").names())
    process.kill()
    process.wait(120)
    (tmp_path / "keys").write_text("sesame\r\n\n  open-up  \n")
    process, client = start("--store", "contexts", "--api-key-file", "keys", key="open-up")
    again = complete(client, tiny_folder, TEXT, max_tokens=12)
    assert again.usage.prompt_tokens_details.cached_tokens > len(TEXT) / 2
    assert again.choices[0].text == first.choices[0].text
    with pytest.raises(openai.AuthenticationError):
        complete(client.with_options(api_key="other"), tiny_folder, "Hi", max_tokens=2)
    process.terminate()
    assert process.wait(120) == 0
