"""Many clients of `kvcli serve`, among kills, a full disk and clients that go away."""

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from console import METHOD
from served import start_server

REQUESTS = int(os.environ.get("KVCLI_STORM", "0"))
CLIENTS = 16
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_p": 0.8, "n": 2},
    {"temperature": 0.0, "stop": ["a", "\n"], "extra_body": {"repetition_penalty": 1.5}},
]
WORDS = [*range(100, 190)]


class Storm:
    """A server that is killed and started again, and clients that ask it until they are answered."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.folder, self.store = folder, store
        self.process: Any = None
        self.client: Any = None
        self.reader: Any = None

    def start(self, *options: str) -> None:
        more = ("--store", str(self.store), "--max-batch", str(CLIENTS), *options)
        self.process, url = start_server(self.folder, *METHOD, *more)
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        self.reader = threading.Thread(target=self.process.stderr.read, daemon=True)
        self.reader.start()

    def fill_disk(self) -> None:
        """No larger file can be written from now on."""
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (2**13, resource.RLIM_INFINITY))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)
        self.reader.join()
        self.process.stderr.close()
        self.client.close()

    def complete(self, **fields: Any) -> Any:
        return self.client.completions.create(model=str(self.folder), **fields)

    def ask(self, prompt: str, sampling: dict[str, Any], count: int = 12) -> tuple[list[str], int]:
        """Texts, and how many tokens of the prompt were cached; asked again where the server was killed."""
        while True:
            with suppress(openai.APIConnectionError, RuntimeError):  # of a client that was closed with its server
                done = self.complete(prompt=prompt, max_tokens=count, **sampling)
                return [x.text for x in done.choices], done.usage.prompt_tokens_details.cached_tokens
            time.sleep(0.2)

    def leave(self, prompt: str) -> None:
        """Asks, and goes away after the first token."""
        stop = suppress(openai.APIConnectionError, RuntimeError)
        with stop, self.complete(prompt=prompt, max_tokens=500, stream=True) as stream:
            next(stream, None)


@pytest.fixture
def storm(tiny_folder: Path, tmp_path: Path) -> Iterator[Storm]:
    """A server of a tiny model, which ends with the test."""
    made = Storm(tiny_folder, tmp_path / "alone")
    yield made
    made.kill()


@pytest.mark.skipif(not REQUESTS, reason="takes minutes: KVCLI_STORM=1000 pytest tests/serve/test_storm.py")
@pytest.mark.timeout(3600)
def test_no_answer_is_another_in_a_storm(storm: Storm, tmp_path: Path) -> None:
    """Fault (kills): `kvcli serve` killed among 16 clients, some of which go away, or on a full disk.
    Result: every answer is the one that a server alone gives; what was stored of a prompt is found.
    """
    rng = random.Random(0)
    books = [" ".join(map(str, rng.choices(WORDS, k=400))) for _ in range(3)]
    prompts = [book[: rng.randrange(40, 1600)] + end for book in books for end in ("", " Why?", " Who was it?", " One")]
    cases = [(prompt, sampling) for prompt in prompts for sampling in SAMPLINGS]
    storm.start()
    expected = {str(case): storm.ask(*case)[0] for case in cases}
    storm.kill()

    storm.store = tmp_path / "contexts"
    wrong: list[Any] = []

    def one(index: int) -> None:
        draw = random.Random(index)
        case = draw.choice(cases)
        if draw.random() < 0.1:
            storm.leave(case[0])
        elif (texts := storm.ask(*case)[0]) != expected[str(case)]:
            wrong.append((case, texts, expected[str(case)]))

    def all_of(start: int, during: Callable[[], None]) -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = [pool.submit(one, start + i) for i in range(REQUESTS // 3)]
            during()
            for answer in answers:
                answer.result()

    def killed() -> None:
        for _ in range(2):
            time.sleep(4)
            storm.kill()
            storm.start()

    storm.start()
    all_of(0, killed)
    storm.kill()
    storm.start()
    storm.fill_disk()
    all_of(10**6, lambda: None)
    storm.kill()
    storm.start("--hot-memory", "2MiB")  # pages are taken from others
    all_of(2 * 10**6, lambda: None)
    assert wrong == []
    long = books[0][:1500] + books[1][:100]
    storm.ask(long, SAMPLINGS[0], 1)
    time.sleep(2)
    storm.kill()
    storm.start()
    assert storm.ask(long, SAMPLINGS[0], 1)[1] >= 0.95 * len(long)
