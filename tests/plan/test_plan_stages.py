"""Planned memory, disk and files against what happens: commands in processes of their own, on a model of 300 MB."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from factories import make_model

from kvcli.plan.memory import MethodPlan, PlannedModel
from kvcli.registry import METHODS, get_method

SHAPE = {"vocab_size": 48000, "hidden_size": 512, "intermediate_size": 2048, "max_position_embeddings": 8192}
LAYERS = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 76 million weights in 16 bits, and texts of two lengths."""
    made = tmp_path_factory.mktemp("planned")
    make_model("llama", **SHAPE, **LAYERS).half().save_pretrained(made / "model")
    byte_tokenizer().save_pretrained(made / "model")
    (made / "prompt.txt").write_text("All work and no play. " * 120)
    (made / "corpus.txt").write_text("\n".join("A text of several words. " * 400 for _ in range(3)))
    return made


def kvcli(folder: Path, *words: str) -> tuple[dict[str, Any], float]:
    """Runs a command in a process of its own: its record, and the most memory that it held, in bytes."""
    command = [sys.executable, "-m", "kvcli", *words, "--json", "--verbose", "--device", "cpu"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    peak = re.search(r"peak memory ([\d.]+) GiB", done.stderr)
    assert peak is not None, done.stderr
    return json.loads(done.stdout), float(peak[1]) * 2**30


@pytest.mark.slow
def test_generating_takes_no_more_than_the_bound(folder: Path) -> None:
    words = ("model", "--method", "kivi-2", "--max-new-tokens", "8")
    record, actual = kvcli(folder, "generate", *words, "--prompt-file", "prompt.txt")
    plan, _ = kvcli(folder, "plan", *words, "--prompt-tokens", str(record["prompt_tokens"]))
    row = plan["methods"][1]
    assert row["memory"]["allocated_bytes"] == record["memory"]["allocated_bytes"]
    assert actual <= row["peak_bytes"] <= 1.4 * actual


@pytest.mark.slow
def test_the_memory_and_disk_of_calibrating(folder: Path) -> None:
    words = ("model", "--tokens", "2048", "--fisher-tokens", "512")
    record, actual = kvcli(folder, "calibrate", *words, "--corpus", "corpus.txt", "--out", "samples")
    planned = kvcli(folder, "plan", *words)[0]["calibrate"]
    assert planned["tokens"] == record["num_tokens"]
    written = sum(path.stat().st_size for path in (folder / "samples").glob("*.safetensors"))
    assert planned["disk_bytes"] == pytest.approx(written, rel=0.01)
    assert actual <= planned["peak_bytes"] <= 2 * actual


def planned_method(name: str) -> MethodPlan:
    planned, method = PlannedModel("tiny", make_model("llama").config, torch.float32, CPU), get_method(name)
    return MethodPlan(planned, name, method, method.config_cls(**method.example_settings).resolve(planned.spec))


@pytest.mark.parametrize("name", [name for name in METHODS if get_method(name).needs_artifact])
def test_the_size_of_an_artifact(name: str, tiny_artifact: Any, tmp_path: Path) -> None:
    tiny_artifact(get_method(name)).save(tmp_path)
    written = (tmp_path / "codec.safetensors").stat().st_size
    assert planned_method(name).artifact_bytes == pytest.approx(written, rel=0.01, abs=512)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_bytes_of_weights(family: str, tied: bool, dtype: torch.dtype) -> None:
    model = make_model(family, tie_word_embeddings=tied, num_hidden_layers=5)
    planned = PlannedModel("tiny", model.config, dtype, CPU)
    assert planned.weights_bytes == sum(dtype.itemsize * x.numel() for x in model.parameters())


@pytest.mark.parametrize("name", METHODS)
def test_memory_grows_with_tokens_and_batch(name: str) -> None:
    plan = planned_method(name)
    peaks = [plan.peak_bytes(tokens, 8, batch) for tokens, batch in ((9, 1), (900, 1), (900, 4), (9000, 4))]
    assert peaks == sorted(peaks)
    assert peaks[-1] > peaks[0]
