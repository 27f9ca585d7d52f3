"""`python -m research rivals`: the protocol on a tiny model, bytes, records of what fails, and the table."""

import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import make_model
from transformers import DynamicCache

from research.rivals import protocol
from research.rivals.driver import Rival, installation_error, records, replace
from research.rivals.engines import EngineSetting
from research.rivals.protocol import CacheSetting, Job, in_steps
from research.rivals.reach import reachable_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
"""The name that packages and older transformers know."""


class TinyJob(Job):
    """A model of random weights."""

    @property
    def tokens(self) -> list[int]:
        return [3 + token % 90 for token in range(protocol.TOKENS)]

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        return make_model("llama", max_position_embeddings=2048).to(dtype)


@pytest.fixture(scope="module")
def job() -> Job:
    return TinyJob(Path())


def test_bytes_are_counted_once_and_those_of_the_weights_are_not() -> None:
    class Slots:
        __slots__ = ("held",)

    whole, slots = torch.zeros(100), Slots()
    slots.held = [whole[:10], whole.numpy(), np.zeros((4, 4), np.int8)[1:], b"12345"]
    root = {"a": slots, "b": (whole, slots), "model": torch.nn.Linear(3, 3)}
    root["root"] = root
    assert reachable_bytes(root) == 400 + 16 + 5 + 48
    assert reachable_bytes(root, root["model"].parameters()) == 400 + 16 + 5


def test_losses_are_those_of_known_distributions() -> None:
    logits = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    reference = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    expected = 0.25 * math.log(1 / 3) + 0.75 * math.log(3)
    assert protocol.losses(logits, reference) == {"kl": pytest.approx(expected / 2), "flips": 0.5}


def test_transformers_own_cache_loses_nothing_and_holds_16_bits(job: Job) -> None:
    stock = CacheSetting("stock", "", lambda model: DynamicCache())
    found = protocol.attempt(stock, "passes", job)
    assert (found["flips"], found["bits"], found["bits_added"]) == (0, 16, 16)
    assert abs(found["kl"]) < 1e-9
    made = protocol.attempt(stock, "generate", job)
    assert (made["same_tokens"], made["bits"]) == (64, 32)
    assert protocol.attempt(in_steps(stock), "passes", job)["kl"] < 1e-9


def test_what_a_cache_keeps_beside_its_tensors_counts(job: Job) -> None:
    def make(model: Any) -> DynamicCache:
        cache = DynamicCache()
        cache.more = torch.zeros(2, 10, dtype=torch.int64)
        return cache

    spec = job.model().config
    values = 2 * spec.num_hidden_layers * spec.num_key_value_heads * spec.head_dim
    found = protocol.attempt(CacheSetting("more", "", make), "passes", job)
    assert found["bits"] == pytest.approx(16 + 160 * 8 / values / protocol.TOKENS)


def test_a_prompt_is_compressed_once(job: Job) -> None:
    seen = []

    def compress(model: Any, cache: Any) -> Any:
        seen.append(cache.get_seq_length())
        return cache

    setting = CacheSetting("", "", lambda model: DynamicCache(), compress)
    assert protocol.attempt(setting, "generate", job)["same_tokens"] == 64
    setting.read(job.model(), job.ids)
    assert seen == [protocol.PROMPT - 1, protocol.PROMPT]


@pytest.mark.parametrize("first", [1, 64])
def test_passes_read_every_token_once(first: int) -> None:
    found = [*protocol.parts(torch.arange(256)[None], first, 64)]
    assert torch.cat([part for _, part in found], 1)[0].tolist() == [*range(256)]
    assert {start for start, _ in found} >= {0, 64, 128, 192}


def test_what_fails_is_a_record_in_one_line_without_paths(job: Job) -> None:
    def fail(model: Any) -> None:
        raise ValueError("no such file:\n/home/someone/of/that name")

    found = protocol.attempt(CacheSetting("x", "small", fail), "passes", job)
    expected = {"setting": "x", "claim": "small", "way": "passes"}
    assert found == expected | {"error": "ValueError: no such file: PATH name"}
    slow = CacheSetting("x", "small", lambda model: time.sleep(5))
    assert protocol.attempt(slow, "passes", job, limit_s=1)["error"] == "TimeoutError: no result within 1 s"


def test_an_adapter_that_cannot_be_imported_is_a_record(job: Job) -> None:
    rows: list[Any] = []
    protocol.measure("nexusquant", job, rows.append)
    (row,) = rows
    assert (row["way"], row["error"]) == ("import", "ModuleNotFoundError: No module named 'nexusquant'")


def test_a_package_that_cannot_be_installed_is_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed(OSError):
        stderr = "WARNING: x\nERROR: no matching distribution at /some/where\nERROR: more"

    monkeypatch.setattr("research.rivals.driver.environment", lambda *_: (_ for _ in ()).throw(Failed))
    rows = records(Rival("x", ("some-cache[hf]==1.2",), for_transformers=False), tmp_path, [])
    assert [(row["package"], row["version"], row["error"]) for row in rows] == [
        ("some-cache", "1.2", "ERROR: no matching distribution at PATH")
    ]
    assert installation_error(TimeoutError()) == "TimeoutError"


def test_readme_has_what_was_measured_of_llama_cpp(repo_root: Path) -> None:
    rows = [json.loads(line) for line in (repo_root / "docs/results/rivals.jsonl").read_text().splitlines()]
    found = {x["setting"]: x for x in rows if x["package"] in ("ik-llama-cpp-python", "kvcli") and x["way"] == "passes"}
    kl, bits = ({name: f"{x[field]:.{n}f}" for name, x in found.items()} for field, n in (("kl", 4), ("bits", 2)))
    readme = (repo_root / "README.md").read_text()
    assert f"| llama.cpp q8_0 | {bits['q8_0']} | {kl['q8_0']}, other text |" in readme
    assert f"| {bits['q4_0']} | {kl['q4_0']}; {kl['q4_0, Hadamard']}, other text |" in readme
    assert f"where kivi-4 loses {kl['kivi-4']} and klt-2.25 {kl['klt-2.25']} (" in readme


def test_a_package_that_is_measured_again_replaces_its_records(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    for kl in (1, 2):
        for package in ("a", "b"):
            replace(out, package, [{"package": package, "kl": kl}])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == [{"package": package, "kl": 2} for package in ("a", "b")]


class Counter:
    """A program whose next token is one more than the last one; `bits` None: it does not tell its bytes."""

    def __init__(self, job: Job, bits: int | None) -> None:
        self.read_tokens, self.bits = 0, bits

    def read(self, tokens: list[int]) -> Any:
        self.read_tokens += len(tokens)
        return np.eye(256, dtype=np.float32)[(np.array(tokens) + 1) % 256]

    def held(self) -> int | None:
        return None if self.bits is None else self.bits * self.read_tokens * 2 * 2 * 8 // 8


@pytest.mark.parametrize("bits", [4, None])
def test_a_program_is_compared_with_itself(tmp_path: Path, bits: int | None) -> None:
    (tmp_path / "model").mkdir()
    config = {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 8}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    setting = EngineSetting("", "", partial(Counter, bits=bits), partial(Counter, bits=16))
    found = protocol.attempt(setting, "passes", TinyJob(tmp_path))
    assert (found["kl"], found["flips"], found.get("bits"), found.get("bits_added")) == (0, 0, bits, bits)
    made = protocol.attempt(setting, "generate", TinyJob(tmp_path))
    assert (made["same_tokens"], made.get("bits")) == (64, bits)
