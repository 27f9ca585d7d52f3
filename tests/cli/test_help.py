"""What every command promises: help, options, files of options, one line where they are wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from console import imported, invoke, refused, result, says
from typer.main import get_command

from kvcli.cli.app import COMMANDS as REGISTERED
from kvcli.cli.app import app
from kvcli.commands.options import ComputeOptions
from kvcli.registry import BENCH_SUITES, EVAL_SUITES, METHODS

COMMANDS = ("demo", "calibrate", "fit", "train-codebook", "fit-subspace", "export", "generate", "compress", "chat")
COMMANDS += ("ask", "eval", "bench", "tune", "methods", "env")


def _paths(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """A command and all below it."""
    below = getattr(command, "commands", ())
    return [path, *(x for name in below for x in _paths(command.get_command(None, name), (*path, name)))]


def test_help_loads_nothing_slow() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "kvcli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "numpy", "ssl", "asyncio", "yaml", "safetensors", "huggingface_hub"} & loaded
    says(done.stdout, *COMMANDS)


def test_validators_of_options_are_built_where_they_are_used() -> None:
    """They took a quarter of the time of `kvcli --help`."""
    program = """
import kvcli.cli.app, pydantic
waiting = [pydantic.BaseModel]
for model in waiting:
    waiting += model.__subclasses__()
print([x.__name__ for x in waiting if x.__module__.startswith("kvcli.") and x.__pydantic_complete__])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_options_of_all(name: str) -> None:
    suite = {"eval": ["kl"], "bench": ["attention"]}.get(name, [])
    shown = result(name, *suite, "--help").stdout
    says(shown, "--json", "--config", "--quiet", "--verbose", "--debug")
    assert ("--seed" in shown) == ("--device" in shown) == (name not in ("export", "methods", "env"))


def test_version_methods_and_env() -> None:
    assert re.fullmatch(r"kvcli \d+\.\d+\.\d+\n", invoke("--version").stdout)
    assert [method["name"] for method in result("methods", "--json")["methods"]] == list(METHODS)
    assert "commvq" in invoke("methods").stdout
    bits = result("methods", "--bits", "llama-3.1-8b", "--contexts", "4096", "--json")["rows"]
    assert {row["method"]: row["key_bits"] for row in bits}["commvq-1"] == pytest.approx(1072 / 1024)
    env = result("env", "--json")
    assert env["packages"]["torch"]
    assert env["cpu_count"] >= 1


SLIPS = {
    "generate --method kivvi": (2, "did you mean 'kivi-2'?"),
    "generate --method kivi-3": (2, "choose kivi-1, kivi-2, kivi-4 or kivi-8"),
    "generate --method turboquant-7": (2, "choose turboquant-1, turboquant-2"),
    "generate --method kivi-2 --setting k_bit=2": (2, "did you mean 'k_bits'?"),
    "generate --method oscar-2 --artifact missing": (1, "no artifact in missing"),
    "generate --method magic": (2, "choose one of fp16"),
    "generate --method commvq": (1, "kvcli fit --method commvq"),
    "generate --context missing --prompt x": (1, "no context 'missing'"),
    "generate --context x --reuse --prompt x": (2, "give one of them"),
    "generate --prompt-file missing": (2, "cannot read missing"),
    "generate --prompt x --prompt-file y": (2, "cannot read y"),
    "ask": (2, "the question is missing"),
    "ask missing x": (2, "cannot read missing"),
    "ask . x --method kivvi": (2, "did you mean 'kivi-2'?"),
    "generate no-such-folder": (1, "no such folder"),
    "generate missing.gguf": (1, "no such GGUF file"),
    "generate --impl fussed": (2, "--impl: Input should be 'auto', 'fused' or 'reference'"),
    "generate --bits 2": (2, "--method NAME-2"),
    "generate --method klt-2bits": (2, "did you mean 'klt-2'?"),
    "plan tiny --memory 24": (2, "'24' is not a size; write it like 24GiB"),
    "methods --contexts 4k": (2, "--contexts goes with --bits"),
    "inspect short.txt": (2, "and is no artifact, recording, context or recipe (.yaml)"),
    "chat --resume missing": (1, "no context 'missing'"),
    "chat --method kivvi": (2, "did you mean 'kivi-2'?"),
    "compress --prompt-file missing": (2, "cannot read missing"),
    "calibrate --corpus missing.txt": (1, "missing.txt"),
    "fit --method kivvi": (2, "did you mean 'kivi-2'?"),
    "fit missing": (1, "no recorded samples in missing"),
    "train-codebook --codebook-size 1000": (2, "--codebook-size"),
    "export missing": (1, "no run in missing"),
    "fit": (1, "kvcli calibrate"),
    "train-codebook": (1, "kvcli calibrate"),
    "export": (1, "kvcli fit"),
    "methods kivvi": (2, "did you mean 'kivi-2'?"),
    "inspect missing": (2, "missing does not exist"),
    "diff missing": (2, "name two paths"),
    "report missing": (2, "cannot read missing"),
    "eval --corpus missing.txt": (1, "no such file or folder: missing.txt"),
    "eval needle --corpus missing.txt": (1, "no such file or folder: missing.txt"),
    "eval --corpus short.txt": (1, "fewer than one sequence of 2048 tokens; give more text, or a lower --seq-len"),
    "eval drift --corpus short.txt": (1, "or a lower --prompt-tokens"),
    "tune --max-kld 1 --corpus missing.txt": (1, "no such file or folder: missing.txt"),
    "tune --max-kld 1 --corpus short.txt": (1, "fewer than one sequence of 1024 tokens"),
    "tune --max-kld 1 no-such-folder": (1, "no such folder"),
    "plan llama3-8b": (1, "did you mean 'llama-3.1-8b'?"),
    "recommend llama3-8b --memory 24GiB": (1, "did you mean 'llama-3.1-8b'?"),
    "calibrate --shard 3/2": (2, "such as 1/4 to 4/4, not '3/2'"),
    "warmup nonsense": (1, "no such folder"),
    "warmup --shape llama3": (2, "did you mean 'llama-3.1-8b'?"),
    "bench --shape llama3": (2, "did you mean 'llama-3.1-8b'?"),
    "bench generate --random-weights llama3": (2, "did you mean 'llama-3.1-8b'?"),
    "methods --bits gpt-9": (2, "choose one of llama-3.1-8b"),
    "ask short.txt x --model model": (2, "model has no chat template"),
    "chat model": (2, "model has no chat template"),
    "contexts list": (2, "there is no store of contexts"),
    "contexts show nothing": (2, "there is no store of contexts"),
    "contexts show nothing --store model": (1, "there is no context 'nothing' in model"),
    "contexts prune --max-bytes 20 --store model": (2, "'20' is not a size"),
    "contexts import": (2, "name one or more files of contexts"),
    "library show x --store model": (1, "there is no library 'library' in model"),
    "library rm --name x --store model": (1, "there is no library 'x' in model"),
    "ask --library x y --store model": (1, "there is no library 'x' in model"),
    "eval --recipe no.yaml": (2, "cannot read no.yaml"),
    "eval --baseline no.jsonl": (2, "cannot read no.jsonl"),
    "contexts rm nothing --store model": (1, "there is no context 'nothing' in model"),
    "serve --engine vllm --store here": (2, "vLLM has nothing for --store; omit it"),
    "serve -- --enforce-eager": (2, "name the model before -- --enforce-eager"),
    "serve model -- --enforce-eager": (2, "options after -- are vLLM's, with --engine vllm"),
    "merge": (1, "run 'kvcli calibrate --shard' first"),
    "merge a b": (1, "no recorded samples in a"),
}


def test_slips_are_told_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("ten tokens")
    (tmp_path / "model").mkdir()
    for name in ("config", "tokenizer_config"):
        (tmp_path / "model" / f"{name}.json").write_text("{}")
    program = f"""
import contextlib, io, sys
from kvcli.cli.app import run_command_line
for line, (exit_code, expected) in {SLIPS!r}.items():
    sys.argv = ["kvcli", *line.split()]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = run_command_line()
    assert code == exit_code and expected in said.getvalue(), (line, code, said.getvalue())
    assert not {{"torch", "transformers"}} & sys.modules.keys(), line
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_needs_no_model_imports_no_transformers() -> None:
    assert "transformers" not in imported("warmup --device cpu")


def test_every_help_fits_100_columns_and_has_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = {path: invoke(*path, "--help").stdout for path in _paths(get_command(app))}
    assert ("contexts", "show") in shown
    assert [path for path, text in shown.items() if "…" in text or max(map(len, text.splitlines())) > 100] == []
    for path in shown.keys() - {()}:
        words = " ".join(path[:1] if path[1:] in (("kl",), ("attention",)) else path)  # suites that need no name
        assert f"Example: kvcli {words}" in " ".join(shown[path].split()), path


@pytest.mark.parametrize("name", ["ask", "generate", "chat", "compress", "calibrate", "fit", "train-codebook"])
def test_options_are_in_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = invoke(name, "--help").stdout
    flags = re.findall(r"^│ (--[a-z-]+)", shown, re.MULTILINE)
    machine = [flag for flag in ("--device", "--devices", "--dtype", "--seed") if flag in flags]
    place = flags.index(machine[0])
    assert flags[place : place + len(machine)] == machine
    assert flags.index("--out" if "--out" in flags else "--store") < place
    assert "--prompt" not in flags[1:]


WRONG = {
    "train-codebook x --bits 9": (2, "--bits"),
    "fit --method kivi": (2, "choose one of squat, squat-pre, blockgtq, oscar, kvquant, klt, klt-tcq, commvq"),
    "generate no/such/model/here": (1, "cannot load model"),
    "generate --temperature -1": (2, "--temperature"),
    "calibrate --tokens 0": (2, "--tokens"),
    "generate --device toaster": (2, "--device cpu"),
    "eval --device auto": (2, "name one"),
    "generate --seed 99999999999999999999": (2, "--seed"),
    "generate --prompt-file .": (2, "directory"),
    "methods --bits llama-3.1-8b --contexts 0": (2, "--contexts"),
    "calibrate --corpus .": (1, "holds no"),
    "calibrate --config missing.yaml": (2, "missing.yaml"),
}


@pytest.mark.parametrize("arguments", WRONG)
def test_bad_input_gets_one_line_and_its_exit_code(arguments: str) -> None:
    code, said = WRONG[arguments]
    assert said in refused(*arguments.split(), code=code)


@pytest.mark.parametrize(
    ("text", "said"), [("tokns: 3", "did you mean 'tokens'?"), ("- 3", ""), ("a: [", "cannot be read as YAML")]
)
def test_files_of_options_are_mappings_of_known_keys(text: str, said: str) -> None:
    Path("c.yaml").write_text(text)
    assert said in refused("calibrate", "--config", "c.yaml")


def test_flags_win_over_the_file(tiny: Any) -> None:
    Path("c.yaml").write_text("tokens: 256\nseq_len: 64\n")
    assert result("calibrate", "--config", "c.yaml", "--tokens", "128", "--json")["num_tokens"] == 128


def test_calibrate_reads_the_corpus_that_the_options_name(tiny: Any) -> None:
    Path("c.csv").write_text("said\n" + "a b c\n" * 64)
    words = ("--tokens", "64", "--seq-len", "32", "--corpus", "c.csv", "--text-column", "said", "--seed", "5")
    samples = result("calibrate", *words, "--fisher-tokens", "0", "--json")["samples"]
    found = json.loads(Path(samples, "samples.json").read_text())["provenance"]["corpus"]
    expected = {"source": "c.csv", "split": "train", "name": None, "revision": None, "text_column": "said", "seed": 5}
    assert found == expected


def test_cuda_is_the_default_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ComputeOptions().torch_device() == "cuda"


@pytest.mark.parametrize("arguments", ["--nope", "nonsense", "generate --max-new-tokens many"])
def test_misused_flags_are_one_line_too(arguments: str) -> None:
    command = [sys.executable, "-m", "kvcli", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("error: .*\n", done.stderr)
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["exit_code"] == 2


def test_a_plan_may_be_for_all_gpus() -> None:
    result("plan", "tiny", "--device", "auto", "--method", "fp16")


IMPORTED = {
    "--version": [],
    "ask --help": ["kvcli.cli.ask", "kvcli.cli.generate"],
    "generate --help": ["kvcli.cli.generate"],
    "env --help": ["kvcli.cli.doctor"],
    "eval kl --help": ["kvcli.cli.suites", "kvcli.eval.kl"],
}
"""What is imported of the modules of commands and suites."""


@pytest.mark.parametrize("words", IMPORTED)
def test_a_command_imports_no_other(words: str) -> None:
    paths = [*map("kvcli.cli.{}".format, REGISTERED.values()), *BENCH_SUITES.values(), *EVAL_SUITES.values()]
    assert sorted({path.partition(":")[0] for path in paths} & imported(words)) == IMPORTED[words]
