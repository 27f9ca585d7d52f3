"""Options of `kvcli bench`: what they mean, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from console import invoke, refused

from kvcli.bench import budget
from kvcli.errors import UsageError
from kvcli.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("24G", 24 * 2**30),
        ("24g", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("500MB", 5 * 10**8),
        ("64kib", 65536),
        ("1000", 1000),
        (None, None),
    ],
)
def test_sizes_are_read(text: str | None, expected: int | None) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["much", "5i", "5iB", "-1GiB", "24GiBB", "0", "", "24 G iB", "GiB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="24GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "expected"), [((), "llama-3.1-8b"), (("--random-weights", "tiny"), "tiny"), (("a-model",), None)]
)
def test_memory_takes_a_model_if_one_is_named(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str | None
) -> None:
    def load(options: Any, shape: str | None, output: Any) -> Any:
        raise UsageError(f"asked for {shape}")

    monkeypatch.setattr(budget, "check_budget", lambda budget, device: None)
    monkeypatch.setattr("kvcli.bench.suite.WholeModelOptions.load_model", load)
    monkeypatch.setattr("kvcli.bench.suite.check_model_name", lambda name: None)
    assert f"asked for {expected}" in invoke("bench", "--suite", "memory", *arguments).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--methods", "magic"), "choose one of fp16"),
        (("--methods", "fp16-3"), "takes no bits"),
        (("--shape", "gpt-9"), "llama-3.1-8b"),
        (("--contexts", "0"), "--contexts"),
        (("--batches", "-1"), "--batches"),
        (("--layer", "3", "--shape", "tiny"), "layers 0 to 2"),
        (("--settings", "colour=3"), "colour"),
        (("--settings", "k_bits=3"), "k_bits"),
        (("--impl", "magic"), "magic"),
        (("--repeats", "0"), "--repeats"),
        (("--batches", "auto"), "goes with suite generate or memory"),
        (("--batches", "auto", "--batches", "2", "--suite", "generate"), "--batches"),
        (("--suite", "generate", "--random-weights", "gpt-9"), "llama-3.1-8b"),
        (("--suite", "generate", "--random-weights", "tiny", "--batches", "auto"), "needs a GPU"),
        (("--suite", "generate", "--random-weights", "tiny", "--memory-budget", "1GiB"), "needs a GPU"),
        (("--suite", "generate", "--memory-budget", "much"), "24GiB"),
        (("--suite", "generate", "--layers", "2"), "--random-weights"),
        (("--suite", "generate", "--prompt-tokens", "0"), "--prompt-tokens"),
        (("--suite", "memory"), "needs a GPU"),
        (("--contexts", "99999999999999999999999"), "--contexts: Input should be less than or equal to 2147483647"),
        (("--batches", "99999999999999999999999"), "numbers from 1 to 2147483647"),
        (("--suite", "generate", "--random-weights", "tiny", "--decode", "graphs"), "CUDA graphs need a GPU"),
        (("--suite", "generate", "--random-weights", "tiny", "--decode", "passes", "--compile"), "graphs or steps"),
        (("--methods", "kivi-2", "--settings", "group_size=48"), "kivi: settings: residual_length 128 must be"),
        (("some-model",), "runs no model"),
        (("some-model", "--suite", "generate", "--random-weights", "tiny"), "not both"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    assert said in refused("bench", *arguments)
