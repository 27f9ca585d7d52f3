"""`kvcli plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from console import invoke
from factories import make_model

from kvcli.registry import parse_method

SMALL = ("--prompt-tokens", "600", "--max-new-tokens", "9", "--tokens", "512", "--seq-len", "128", "--batch-size", "2")


def plan(*words: str) -> dict[str, Any]:
    done = invoke("plan", "tiny", "--device", "cpu", *SMALL, *words, "--json")
    assert done.exit_code == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_every_compared_method_by_default() -> None:
    made = plan("--setting", "group_size=8")
    rows = {row["method"]: row for row in made["methods"]}
    assert next(iter(rows)) == "fp16"
    assert all(parse_method(name) for name in rows)
    assert {"kivi-2", "commvq-1"} <= set(rows)
    for row in rows.values():
        needs = parse_method(row["method"])[0].needs_artifact
        assert needs == bool(row["artifact_bytes"]) == bool(row["break_even"])
        assert row["peak_bytes"] > row["memory"]["allocated_bytes"] >= row["memory"]["cache_bytes"]
        assert row["memory"]["num_tokens"] == 600 + 9 - 1
        assert row["fits"] is None
    assert made["calibrate"]["tokens"] == 512


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_fits_is_the_most_that_fits(device: str) -> None:
    words = ("--method", "kivi-2", "--setting", "group_size=8", "--device", device)
    budget = 2 * plan(*words)["methods"][1]["peak_bytes"]
    row = plan(*words, "--memory", str(budget))["methods"][1]
    for option, found in (("--prompt-tokens", row["fits"]["context"]), ("--batch", row["fits"]["batch"])):
        most, more = (
            plan(*words, option, str(count))["methods"][1]["peak_bytes"] for count in (found, found + found // 50 + 9)
        )
        assert most <= budget * 1.02  # the program itself is measured anew
        assert more > budget * 0.98


def test_an_artifact_pays_from_where_it_is_said_to() -> None:
    words = ("--method", "commvq-2", "--method", "kivi-4", "--setting", "group_size=8")
    against = {pays["against"]: pays for pays in plan(*words)["methods"][1]["break_even"]}
    assert set(against) == {"fp16", "kivi-4"}
    context = against["fp16"]["context"]
    for tokens, pays in ((context, True), (context - 1, False)):
        rows = plan(*words, "--prompt-tokens", str(tokens), "--max-new-tokens", "1")["methods"]
        theirs, ours = (row["memory"] for row in rows[:2])
        assert (ours["artifact_bytes"] + ours["cache_bytes"] < theirs["cache_bytes"]) == pays
    assert against["kivi-4"]["context"] > context
    few = plan(*words, "--prompt-tokens", str(context - 20))["methods"][1]["break_even"][0]
    assert few["contexts"] > 1


def test_the_table() -> None:
    words = ("--method", "commvq-1", "--method", "rtn-4", "--setting", "group_size=8", "--memory", "1GiB")
    done = invoke("plan", "tiny", "--device", "cpu", *SMALL, *words)
    assert done.exit_code == 0, done.stderr
    assert "pays from: tokens, against fp16 / " in done.stdout
    assert all(column in done.stdout for column in ("method", "cache", "peak", "longest", "batch"))
    assert "calibrate 512 tokens: disk" in done.stderr


@pytest.mark.parametrize(
    ("words", "named", "code"),
    [
        (("no-such-model",), "llama-3.1-8b", 1),
        (("tiny", "--memory", "much"), "'much' is not a size", 2),
        (("tiny", "--device", "mps"), "cpu and cuda", 2),
        (("tiny", "--device", "gpu9000"), "gpu9000", 2),
        (("tiny", "--setting", "colour=red"), "colour", 2),
        (("tiny", "--method", "zip"), "unknown method 'zip'", 2),
        (("tiny", "--method", "kivi-2", "--setting", "group_size=7"), "group_size", 2),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(words: tuple[str, ...], named: str, code: int) -> None:
    done = invoke("plan", *words)
    assert done.exit_code == code
    assert named in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


@pytest.fixture
def saved_model(tmp_path: Path) -> str:
    """A model's folder that has a config and no weights."""
    make_model("llama").config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_quantized_checkpoint_is_planned_as_if_it_were_not(saved_model: str) -> None:
    plain = invoke("plan", saved_model, "--device", "cpu", *SMALL)
    path = Path(saved_model) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "gptq"}}))
    quantized = invoke("plan", saved_model, "--device", "cpu", *SMALL)
    assert quantized.exit_code == 0, quantized.stderr
    assert "is quantized (gptq): its weights, and all peaks, are smaller than these" in quantized.stderr
    assert "is quantized" not in plain.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "c.safetensors", "--store", "s"), "--store is of the store, and --out writes a file"),
        (("--out", "c.safetensors", "--max-bytes", "1GiB"), "--max-bytes is of the store, and --out writes a file"),
        (("--out", "there.safetensors"), "there.safetensors exists already; use --overwrite"),
        (("--name", "a", "--prompt-file", "there.safetensors"), "--name is one name, but there are 2 texts"),
        (("--name", "a b"), "'a b' is no name of a context"),
        (("--max-bytes", "much"), "much"),
    ],
)
def test_compress_refuses_options_before_it_reads(arguments: tuple[str, ...], message: str) -> None:
    Path("text.txt").write_text("word")
    Path("there.safetensors").write_text("word")
    before = sorted(Path().iterdir())
    done = invoke("compress", "--prompt-file", "text.txt", *arguments)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize("method", ["fp16", "kivi-2", "qjl"])
def test_the_planned_size_of_a_context_is_that_of_its_file(saved_model: str, tiny: Any, method: str) -> None:
    Path("text.txt").write_text("word " * 300)
    words = ("compress", "--prompt-file", "text.txt", "--method", method, "--sink-length", "2", "--json")
    words += ("--residual-length", "64", *(("--setting", "group_size=8") if method == "kivi-2" else ()))
    made = invoke(*words, "tiny", "--out", "c.safetensors")
    assert made.exit_code == 0, made.stderr
    written, tokens = Path("c.safetensors").stat().st_size, json.loads(made.stdout)["contexts"][0]["tokens"]
    small = ("--setting", "group_size=8") if method == "kivi-2" else ()
    settings = ("--setting", "sink_length=2", "--setting", "residual_length=64", *small)
    row = plan("--method", method, *settings, "--prompt-tokens", str(tokens))["methods"][-1]
    assert row["context_bytes"] == pytest.approx(written, rel=0.1)
