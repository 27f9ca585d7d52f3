"""`kvcli plan` and `--dry-run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from console import invoke
from factories import make_model, record

from kvcli.cli.compress import CompressOptions
from kvcli.cli.dry_run import dry_compress, planned_model
from kvcli.cli.options import ModelOptions
from kvcli.cli.output import Output
from kvcli.cli.prompt_sources import Source
from kvcli.plan.stages import fit
from kvcli.registry import get_method, parse_method

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
        assert (row["fit"] is not None) == needs == bool(row["artifact_bytes"]) == bool(row["break_even"])
        assert row["generate"]["peak_bytes"] > row["memory"]["allocated_bytes"] >= row["memory"]["cache_bytes"]
        assert row["memory"]["num_tokens"] == 600 + 9 - 1
        assert row["fits"] is None
    assert made["calibrate"]["seconds"] is None
    assert made["calibrate"]["tokens"] == 512


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_fits_is_the_most_that_fits(device: str) -> None:
    words = ("--method", "kivi-2", "--setting", "group_size=8", "--device", device)
    budget = 2 * plan(*words)["methods"][1]["generate"]["peak_bytes"]
    row = plan(*words, "--memory", str(budget))["methods"][1]
    for option, found in (("--prompt-tokens", row["fits"]["context"]), ("--batch", row["fits"]["batch"])):
        most, more = (
            plan(*words, option, str(count))["methods"][1]["generate"]["peak_bytes"]
            for count in (found, found + found // 50 + 9)
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
    assert "time unknown" in done.stderr


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


def test_dry_runs_need_no_weights_and_write_nothing(saved_model: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    calibrated = invoke("calibrate", saved_model, "--tokens", "512", "--dry-run", "--json")
    assert calibrated.exit_code == 0, calibrated.stderr
    assert json.loads(calibrated.stdout)["disk_bytes"] > 512 * 2 * 2 * 32 * 2
    words = ("generate", saved_model, "--method", "kivi", "--setting", "group_size=8", "--prompt", "x" * 4000)
    generated = invoke(*words, "--dry-run")
    assert generated.exit_code == 0, generated.stderr
    assert generated.stdout.startswith("generate: 1064 tokens, peak memory of the process ")
    assert "a token is taken to have 4 characters" in generated.stderr
    assert "next:" not in generated.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_names_an_artifact_that_is_not_there(saved_model: str) -> None:
    done = invoke("generate", saved_model, "--artifact", "nowhere", "--prompt", "x", "--dry-run")
    assert done.exit_code == 1
    assert "no artifact in nowhere: kvcli.json is missing" in done.stderr


def test_a_quantized_checkpoint_is_planned_as_if_it_were_not(saved_model: str) -> None:
    plain = invoke("plan", saved_model, "--device", "cpu", *SMALL)
    path = Path(saved_model) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "gptq"}}))
    quantized = invoke("plan", saved_model, "--device", "cpu", *SMALL)
    assert quantized.exit_code == 0, quantized.stderr
    assert "is quantized (gptq): its weights, and all peaks, are smaller than these" in quantized.stderr
    assert "is quantized" not in plain.stderr


def test_the_dry_run_of_a_fit(tiny: Any, tmp_path: Path) -> None:
    record(tiny.model, tmp_path / "recorded")
    small = ("--setting", "codebook_size=8", "--setting", "key_iterations=2", "--setting", "value_iterations=2")
    planned = invoke("fit", "recorded", *small, "--dry-run", "--json")
    assert planned.exit_code == 0, planned.stderr
    assert not (tmp_path / "runs").exists()
    assert invoke("fit", "recorded", *small).exit_code == 0
    folder = invoke("export").stdout.strip()
    written = (tmp_path / folder / "codec.safetensors").stat().st_size
    assert json.loads(planned.stdout)["artifact_bytes"] == pytest.approx(written, rel=0.02)


def test_the_dry_run_of_compressing(saved_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = CompressOptions(model=saved_model, device="cpu", method="kivi-2", setting=["group_size=8"])
    text = Source("text", 4 * 300 * "x")
    sizes = []
    for sources in ([text], [text, text]):
        dry_compress(options, sources, Output(as_json=True))
        sizes.append(json.loads(capsys.readouterr().out))
    one, two = sizes
    assert two["disk_bytes"] == 2 * one["disk_bytes"]
    assert two["peak_bytes"] == pytest.approx(one["peak_bytes"], rel=0.05)
    assert one["in_fp16"] == 300 * 3 * 2 * 32 * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "c.safetensors", "--store", "s"), "--store is of the store, and --out writes a file"),
        (("--out", "c.safetensors", "--max-bytes", "1GiB"), "--max-bytes is of the store, and --out writes a file"),
        (("--out", "there.safetensors"), "there.safetensors exists already; use --overwrite"),
        (("--name", "a", "--prompt-file", "there.safetensors"), "--name is one name, but there are 2 texts"),
        (("--name", "a b"), "'a b' is no name of a context"),
        (("--max-bytes", "much"), "much"),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses(arguments: tuple[str, ...], said: str) -> None:
    Path("text.txt").write_text("word")
    Path("there.safetensors").write_text("word")
    before = sorted(Path().iterdir())
    for dry in ((), ("--dry-run",)):
        done = invoke("compress", "--prompt-file", "text.txt", *arguments, *dry)
        assert done.exit_code == 2, done.output
        assert said in done.stderr
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
    Path("text.txt").write_text(4 * tokens * "x")
    planned = invoke(*words, saved_model, "--dry-run")
    assert planned.exit_code == 0, planned.stderr
    record = json.loads(planned.stdout)
    assert record["tokens"] == tokens
    assert record["disk_bytes"] == pytest.approx(written, rel=0.1)


def test_the_dry_run_of_going_on_from_a_context(saved_model: str, tiny: Any) -> None:
    Path("text.txt").write_text("word " * 400)
    words = ("--method", "kivi-2", "--setting", "group_size=8", "--residual-length", "64")
    made = invoke("compress", "tiny", *words, "--prompt-file", "text.txt", "--out", "c.safetensors", "--json")
    assert made.exit_code == 0, made.stderr
    held = json.loads(made.stdout)["contexts"][0]["tokens"]
    options = ("--prompt", 40 * "x", "--max-new-tokens", "5", "--dry-run", "--json")
    record = json.loads(invoke("generate", saved_model, "--context", "c.safetensors", *options).stdout)
    assert record["tokens"] == held + 10 + 5
    assert record["cache_bytes"] > 0


@pytest.mark.parametrize("count", [1, 2])
def test_the_dry_run_of_a_shard_is_of_its_share(saved_model: str, count: int) -> None:
    words = ("calibrate", saved_model, "--tokens", "512", "--seq-len", "64", "--batch-size", "2", "--dry-run", "--json")
    whole = json.loads(invoke(*words).stdout)
    shares = [json.loads(invoke(*words, "--shard", f"{i + 1}/{count}").stdout) for i in range(count)]
    assert sum(share["tokens"] for share in shares) == whole["tokens"]
    refused = invoke(*words, "--shard", "1/9")
    assert refused.exit_code == 2
    assert "cannot be shared among 9" in json.loads(refused.stdout)["error"]


def test_a_fit_in_blocks_needs_no_more_for_more_tokens(saved_model: str) -> None:
    model = planned_model(ModelOptions(model=saved_model, device="cpu"))
    for name in ("commvq", "kvquant", "oscar"):
        method = get_method(name)
        config = method.config_cls(**method.example_settings).resolve(model.spec)
        few, many, one = (
            fit(model.spec, method, config, tokens=tokens, query_tokens=512, block_tokens=block).peak_bytes
            for tokens, block in ((2**17, 2**14), (2**20, 2**14), (2**20, 2**20))
        )
        assert few == many < one


def test_a_probe_tells_times(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcli.plan.probe._SECONDS", 0.01)
    made = plan("--method", "rtn-4", "--setting", "group_size=8", "--probe")
    assert 0 < made["prompt_seconds"] < 60
    assert 0 < made["calibrate"]["seconds"] < 60
