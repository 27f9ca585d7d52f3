"""Suite `serve`: requests of several clients at once to `kvcli serve`.

Each client asks about a prompt of its own, and then again with another end: of what was just read, also one client
while all others decode, and once more after the server has ended and begun again, when prompts are on disk only. The
first client is greedy, the others sample, each differently.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvcli.bench.suite import BenchRows, BenchSuite, Lengths, Row, WholeModelOptions, bench_table, run_row
from kvcli.commands.suite import Bars, Records
from kvcli.commands.tables import DataTable
from kvcli.errors import KvcliError, UsageError
from kvcli.progress import Reporter
from kvcli.registry import UNFITTED_METHOD

if TYPE_CHECKING:
    from kvcli.artifact.choice import MethodChoice
    from kvcli.attention.session import Session
    from kvcli.models.load import LoadedModel

_STATES = {
    "cold": "of a prompt that is new",
    "hot": "of one that was just read",
    "disk": "of one that is on disk",
    "direct": "of `Session.generate` from the same cache, without a server; one client",
}

_QUESTION = 32
"""Last tokens of a prompt, which differ from request to request."""


class ServeBenchOptions(WholeModelOptions):
    """Options of `kvcli bench serve`."""

    prompt_tokens: int = Field(1024, ge=256, le=2**24, description="length of each client's prompt")
    new_tokens: int = Field(32, ge=2, le=2**16, description="tokens of an answer")
    clients: Lengths = Field([1, 4, 16], description="clients at once; repeatable")
    max_batch: int = Field(16, ge=1, description="requests that are answered at once at most; 1: without pages")


def prepare(options: ServeBenchOptions, reporter: Reporter) -> BenchRows:
    """Rows of fp16 and of methods."""
    if any(find_spec(name) is None for name in ("starlette", "uvicorn", "prometheus_client")):
        raise UsageError("packages that are not installed are needed: pip install 'kvcli[serve]'")
    from kvcli.bench.model import open_session, random_prompt

    cases = options.choices(kinds_only=True)
    loaded, shared = options.load_model(options.random_weights, reporter)
    model = loaded.model
    if options.random_weights is not None:
        loaded = replace(loaded, tokenizer=_words(loaded.spec.vocab_size))

    def prompts(clients: int) -> list[list[int]]:
        return [random_prompt(model, 1, options.prompt_tokens, seed)[0].tolist() for seed in range(clients)]

    def attach(loaded: LoadedModel, case: MethodChoice, impl: str, **rest: Any) -> Session:
        return open_session(loaded.model, case, impl, options.seed)

    def measure(case: MethodChoice, row: Row) -> Row:
        first = prompts(row.batch)
        second = [[*prompt[:-_QUESTION], *reversed(prompt[-_QUESTION:])] for prompt in first]
        with tempfile.TemporaryDirectory(prefix="kvcli-bench-") as store:
            with _serving(loaded, case, attach, store, row.batch, options) as (port, impl):
                figures = _ask(port, "cold", first, options)
                _ask(port, "hot", second, options)  # not counted, as without a server: a GPU prepares for new lengths
                hot = [_ask(port, "hot", second, options) for _ in range(3)]
                figures |= {name: statistics.median(x[name] for x in hot) for name in hot[0]}
                if row.batch > 1:
                    figures["busy_first_s"] = _while_others_decode(port, second, options)
            with _serving(loaded, case, attach, store, row.batch, options) as (port, impl):
                figures |= _ask(port, "disk", second, options)
        if row.batch == 1:
            with attach(loaded, case, options.impl) as session:
                figures |= _direct(session, loaded.tokenizer, first[0], options.new_tokens)
        return replace(row, impl=impl).plus(**figures)

    def rows() -> Iterator[Row]:
        for clients in options.clients:
            for case in cases:
                yield run_row(partial(measure, case), Row(case.label, options.prompt_tokens, clients, "-"))

    return BenchRows(rows(), len(cases) * len(options.clients), shared)


def _words(vocab_size: int) -> Any:
    """A tokenizer whose tokens are words of their own."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i} ": i for i in range(vocab_size)}, unk_token="w0 "))
    return PreTrainedTokenizerFast(tokenizer_object=words)


@contextmanager
def _serving(
    loaded: Any, case: MethodChoice, attach: Any, store: str, clients: int, options: ServeBenchOptions
) -> Iterator[tuple[int, str]]:
    """The port of a server in threads of this process, which runs inside the block, and what attends in it."""
    import uvicorn

    from kvcli.contexts import ContextStore
    from kvcli.serve.app import Server
    from kvcli.serve.engine import open_engine

    length = options.prompt_tokens + options.new_tokens
    at_once = min(options.max_batch, max(clients, 2))  # as many have pages, which are all made at once
    sizes: dict[str, Any] = {"max_batch": at_once, "max_model_len": length, "hot_bytes": 2**40}
    with open_engine(
        loaded, case, "model", attach=attach, impl=options.impl, store=ContextStore(store), **sizes
    ) as engine:
        listening = socket.create_server(("127.0.0.1", 0))
        running = uvicorn.Server(uvicorn.Config(Server(loaded, engine).app(), log_level="error"))
        thread, before = threading.Thread(target=running.run, args=([listening],), daemon=True), sys.getswitchinterval()
        thread.start()
        sys.setswitchinterval(0.001)  # as kvcli serve does
        try:
            yield int(listening.getsockname()[1]), engine.session.backend.impl
        finally:
            running.should_exit = True
            thread.join()
            sys.setswitchinterval(before)


def _ask(port: int, state: str, prompts: Sequence[Any], options: ServeBenchOptions) -> dict[str, Any]:
    """Figures of one request per client, all at once."""
    bodies = _bodies(prompts, options)
    started = time.perf_counter()
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = [*pool.map(partial(_request, port), bodies)]
    took = time.perf_counter() - started
    firsts, counts, cached = zip(*answers, strict=True)
    figures = {f"{state}_first_s": statistics.median(firsts), f"{state}_tokens_per_s": sum(counts) / took}
    return figures if state == "cold" else figures | {f"{state}_cached": statistics.mean(cached)}


def _bodies(prompts: Sequence[Any], options: ServeBenchOptions) -> list[str]:
    """Requests of clients; to write 32K numbers takes 10 ms, which are not the server's."""
    shared = {"model": "model", "max_tokens": options.new_tokens, "stream": True, "top_p": 0.95}
    shared["stream_options"] = {"include_usage": True}
    return [json.dumps({**shared, "prompt": x, "temperature": i % 16 / 16, "seed": i}) for i, x in enumerate(prompts)]


def _while_others_decode(port: int, prompts: Sequence[Any], options: ServeBenchOptions) -> float:
    """Seconds to the first client's first token, once all others have theirs."""
    first, *others = _bodies(prompts, options)
    have = threading.Semaphore(0)

    def ask(body: str) -> None:
        try:
            _request(port, body, have.release)
        finally:  # whatever comes, nobody waits for it
            have.release()

    with ThreadPoolExecutor(len(others)) as pool:
        running = [pool.submit(ask, body) for body in others]
        for _ in others:
            have.acquire()
        took, *_ = _request(port, first)
        for answer in running:
            answer.result()
    return took


def _request(port: int, body: str, on_first: Callable[[], None] = lambda: None) -> tuple[float, int, float]:
    """Seconds to the first token, tokens, and the share of the prompt that was cached; KvcliError: it was refused."""
    from http.client import HTTPConnection

    started, first, usage, pieces = time.perf_counter(), 0.0, dict[str, Any](), 0
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise KvcliError(f"status {response.status}: {response.read(200).decode(errors='replace')}")
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise KvcliError(str(event["error"])[:200])
        usage = event.get("usage") or usage
        if any(choice.get("text") for choice in event["choices"]):
            if not pieces:
                first = time.perf_counter() - started
                on_first()
            pieces += 1
    connection.close()
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    first = first or time.perf_counter() - started
    return first, usage.get("completion_tokens", pieces), cached / usage.get("prompt_tokens", 1)


def _direct(session: Session, tokenizer: Any, prompt: list[int], new_tokens: int) -> dict[str, float]:
    """Time to the first token, and tokens per second, of `Session.generate` from a cache that is in memory."""
    import torch

    from kvcli.serve.prefixes import Prefixes
    from kvcli.serve.store import ServedContexts

    prefixes = Prefixes(session, ServedContexts(None, tokenizer, None, print), 0)
    ids = torch.tensor([prompt])
    prefix = prefixes.read(ids, "", False, lambda tokens: None)
    prefixes.contexts.close()
    firsts, speeds, times = list[float](), list[float](), list[float]()
    for _ in range(4):  # the first one is not counted
        times[:] = [time.perf_counter()]
        session.generate(
            ids.to(session.model.device),
            max_new_tokens=new_tokens,
            cache=prefix.cache,
            eos_token_id=[],
            on_tokens=lambda tokens: times.append(time.perf_counter()),
        )
        prefix.cache.crop(prefix.flushed - prefix.cache.get_seq_length())
        firsts.append(times[1] - times[0])
        speeds.append(new_tokens / (times[-1] - times[0]))
    return {"direct_first_s": statistics.median(firsts[1:]), "direct_tokens_per_s": statistics.median(speeds[1:])}


def tabulate(records: Records, options: ServeBenchOptions) -> DataTable:
    """Seconds to the first token and tokens per second of all clients, by where the prompts are."""
    columns = {
        "prompt": "{context}",
        "clients": "{batch}",
        "cold s": "{cold_first_s:.3f}",
        "hot s": "{hot_first_s:.3f}",
        "busy s": "{busy_first_s:.3f}",
        "disk s": "{disk_first_s:.3f}",
        "direct s": "{direct_first_s:.3f}",
        "cold tokens/s": "{cold_tokens_per_s:.1f}",
        "hot tokens/s": "{hot_tokens_per_s:.1f}",
        "disk tokens/s": "{disk_tokens_per_s:.1f}",
        "direct tokens/s": "{direct_tokens_per_s:.1f}",
        "cached": "{disk_cached:.1%}",
    }
    title = (
        f"{records[0]['model']}, answers of {options.new_tokens} tokens: median seconds to the first token, and tokens "
        "per second of all clients; cached: share of a prompt that was on disk"
    )
    return bench_table(title, records, columns, ("error", "impl"))


SUITE = BenchSuite(
    name="serve",
    help="Requests of several clients to kvcli serve: prompts that are new, in memory and on disk.",
    options=ServeBenchOptions,
    example=f"kvcli bench serve --method {UNFITTED_METHOD} --clients 1",
    saves_memory="lower --prompt-tokens or --clients",
    prepare=prepare,
    figures={
        **{f"{state}_first_s": f"median seconds to a client's first token, {of}" for state, of in _STATES.items()},
        **{f"{state}_tokens_per_s": f"tokens of all answers per second, {of}" for state, of in _STATES.items()},
        "busy_first_s": "the same of a prompt that was just read, for a client while all others decode",
        "hot_cached": "share of the prompts that was not read again",
        "disk_cached": "the same, of prompts that are on disk",
    },
    tabulate=tabulate,
    bars=(
        Bars("cold_first_s", "first token, new prompt", "s"),
        Bars("disk_first_s", "first token, prompt on disk", "s"),
        Bars("hot_first_s", "first token, prompt in memory", "s"),
    ),
)
