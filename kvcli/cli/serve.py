"""`kvcli serve`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from pydantic import Field

from kvcli.cli.command import Command
from kvcli.cli.inputs import MAX_BYTES_HELP
from kvcli.cli.output import Output
from kvcli.cli.session_options import SessionOptions, choose_method, say_notes
from kvcli.cli.signals import stop_reason
from kvcli.commands.paths import model_folder
from kvcli.commands.sizes import parse_size, size
from kvcli.errors import UsageError
from kvcli.progress import Say
from kvcli.registry import UNFITTED_METHOD
from kvcli.serve import LOOPBACK

if TYPE_CHECKING:
    from kvcli.contexts import ContextStore
    from kvcli.models.load import LoadedModel
    from kvcli.serve.jobs import JobThread


class ServeOptions(SessionOptions):
    """Options of `kvcli serve`."""

    engine: Literal["kvcli", "vllm"] = Field(
        "kvcli", description="what computes; vllm: 'vllm serve' with codes in its pages"
    )
    vllm_options: list[str] = Field([], description="after --: options of vLLM's own, with --engine vllm")
    host: str = Field("127.0.0.1", description="address to listen on; others than this machine's need a key")
    port: int = Field(8000, ge=0, lt=2**16, description="port to listen on; 0: any that is free")
    api_key_file: Path | None = Field(None, description="file of keys, one per line; requests need one of them")
    store: Path | None = Field(None, description="folder of contexts; default: runs/MODEL/served")
    no_store: bool = Field(False, description="keep contexts in memory only")
    store_limit: str = Field("50GiB", description=MAX_BYTES_HELP)
    store_per_key: bool = Field(False, description="requests use contexts of their own key alone")
    hot_memory: str = Field("2GiB", description="memory of contexts, beside the store")
    max_model_len: int | None = Field(None, ge=2, description="tokens of a prompt and its answer; default: the model's")
    max_waiting: int = Field(64, ge=1, description="requests that may wait; others get status 429")
    max_batch: int = Field(8, ge=1, description="requests that are answered at once at most; 1: none has pages")
    grace: int = Field(30, ge=0, description="seconds in which answers are finished after SIGTERM or Ctrl-C")


def run(options: ServeOptions, output: Output) -> None:
    """Serve the OpenAI API: contexts are compressed, found again by prefix, and kept on disk."""
    if options.model.startswith("-"):
        raise UsageError(f"name the model before -- {options.model}")
    options.check()
    if options.no_store and options.store is not None:
        raise UsageError("--store and --no-store exclude each other")
    keys = _keys(options.api_key_file)
    if options.host not in LOOPBACK and not keys:
        raise UsageError(f"{options.host} can be reached by others: --api-key-file is needed")
    if options.store_per_key and not keys:
        raise UsageError("--store-per-key needs --api-key-file")
    if options.engine == "vllm":
        _become_vllm(options, keys, output)
    if options.vllm_options:
        raise UsageError(f"got {options.vllm_options[0]}: options after -- are vLLM's, with --engine vllm")
    try:
        import uvicorn

        from kvcli.serve.app import Server
    except ImportError as error:
        raise UsageError("kvcli serve needs packages that are not installed: pip install 'kvcli[serve]'") from error

    def say(line: str) -> None:
        with suppress(OSError, SystemExit):  # rich's, when nobody reads standard error any more: answers go on
            output.warn(line)

    kept: dict[str, Any] = {"store_bytes": parse_size(options.store_limit), "hot_bytes": parse_size(options.hot_memory)}
    store = kept["store"] = _store(options)
    with _bind(options) as listening, _engine(options, kept, output, say) as (loaded, engine, contexts):
        server = Server(loaded, engine, keys=keys, per_key=options.store_per_key)
        config = uvicorn.Config(
            server.app(),
            log_level="info" if output.verbose else "error",
            timeout_graceful_shutdown=options.grace,
            server_header=False,
        )
        host, port = listening.getsockname()[:2]
        method, bits = server.headers.values()
        listening.listen()  # who reads the next lines may connect at once
        output.say(f"{options.model} with {method}, {bits} bits per value; {contexts}")
        output.say(f"serving http://{f'[{host}]' if ':' in host else host}:{port}/v1 (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):  # the signal that ended it, which uvicorn raises again
            uvicorn.Server(config).run(sockets=[listening])
        stop_reason()  # which is no error
    output.say("ended")
    output.result({"model": options.model, "method": method, "store": None if store is None else str(store.folder)})


def _become_vllm(options: ServeOptions, keys: list[str], output: Output) -> NoReturn:
    """Runs vLLM in the place of this process."""
    from kvcli.integrations.vllm.command import check_options, serve_command

    values = {name: getattr(options, name) for name in {*options.model_fields_set, "model", "host", "grace"}}
    choice = options.choice()
    check_options(values, choice, keys)
    with _bind(options) as listening:
        values["port"] = listening.getsockname()[1]
    command = serve_command(values, choice, output)
    line = command.line(options.api_key_file)
    output.say(f"vLLM {command.version} takes over, as by\n{line}")
    output.result({"model": options.model, "method": choice.method, "engine": "vllm", "command": line})
    command.run(keys)


@contextmanager
def _engine(
    options: ServeOptions, kept: dict[str, Any], output: Output, say: Say
) -> Iterator[tuple[LoadedModel, JobThread, str]]:
    """The model, what makes tokens inside the block, and a word on where contexts are."""
    from kvcli.serve.continuous import ContinuousEngine
    from kvcli.serve.engine import open_engine
    from kvcli.serve.sequential import SequentialEngine

    chosen = choose_method(options, output)
    loaded = options.load(output)
    sys.setswitchinterval(0.001)  # the thread that makes tokens leaves the others waiting for so long each time
    chosen.fit_missing(loaded, output)
    sizes = {name: getattr(options, name) for name in ("max_model_len", "max_waiting", "max_batch", "impl")}
    told: dict[str, Any] = {"say": say, "note": output.warn, "progress": output.progress}
    with open_engine(loaded, chosen.choice, options.model, **kept, **sizes, **told) as engine:
        say_notes(engine.session, output)
        where = "in memory only"
        if engine.contexts.store is not None:
            where = f"in {engine.contexts.store.folder}, at most {options.store_limit}"
        hot = f"{options.hot_memory} hot"
        if isinstance(engine, ContinuousEngine):
            pages, positions = engine.model, loaded.spec.max_position_embeddings
            hot = f"{pages.num_pages * pages.page_size} tokens in {size(pages.nbytes)} of memory"
            if options.max_model_len is None and engine.max_length < positions:
                output.warn(f"--hot-memory holds {engine.max_length} tokens of the {positions} that the model takes")
        elif isinstance(engine, SequentialEngine) and engine.prefixes.note is not None:
            output.warn(engine.prefixes.note)
        yield loaded, engine, f"contexts {where}, {hot}"


def _keys(file: Path | None) -> list[str]:
    """The keys in a file; UsageError: it cannot be read, or it has none."""
    if file is None:
        return []
    try:
        keys = [line.strip() for line in file.read_text("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the keys in {file}") from error
    if not keys or not all(key.isascii() and key.isprintable() for key in keys):
        raise UsageError(f"{file} holds no keys, one per line, of ASCII characters")
    return keys


def _bind(options: ServeOptions) -> socket.socket:
    """A socket of the address, before anything is loaded; UsageError: it is in use, or none of this machine."""
    listening = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host, options.port))
    except (OSError, UnicodeError) as error:  # no name of a host, of which Python says the latter
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {options.host} port {options.port}: {reason}") from error
    return listening


def _store(options: ServeOptions) -> ContextStore | None:
    """The store, which can be written to; ContextError or OSError: it cannot."""
    if options.no_store:
        return None
    from kvcli.contexts import ContextStore

    store = ContextStore(options.store or model_folder(options.model, "served"))
    store.check_writable()
    return store


EXAMPLE = f"kvcli serve --method {UNFITTED_METHOD}"
SAVES_MEMORY = "lower --hot-memory or --max-model-len, or choose a --method with fewer bits"
COMMAND = Command("serve", ServeOptions, run, EXAMPLE, ("model", "vllm_options"), saves_memory=SAVES_MEMORY)
