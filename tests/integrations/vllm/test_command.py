"""`kvcli serve --engine vllm` with a stand-in for vLLM that says how it was called, and with vLLM."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.request import urlopen

import openai
import pytest
from console import invoke, refused
from families import tiny_config
from prometheus_client import Gauge

from kvcli.serve.metrics import Metrics


@pytest.fixture(scope="module")
def folder(tiny_folder: Path) -> str:
    """The folder of a tiny model, with a file of one key."""
    (tiny_folder / "key").write_text("sesame\n")
    return str(tiny_folder)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in, as a package and as a program; keys are in the current folder."""
    info = tmp_path / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nvllm = called:main\n")
    says = "import json, os, sys; print(json.dumps([os.getpid(), sys.argv[1:], dict(os.environ)])); sys.exit(7)"
    (tmp_path / "called.py").write_text(says)
    (tmp_path / "vllm").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/called.py "$@"\n')
    (tmp_path / "vllm").chmod(0o755)
    (tmp_path / "keys").write_text("sesame\nopen\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


CODES = ["--attention-backend", "CUSTOM", "--block-size", "512"]
CHOICES: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "kivi-2": ("", {"KVCLI_METHOD": "kivi-2"}, CODES),
    "kivi-2 --setting group_size=16 --sink-length 2": (
        "--max-batch 3 --dtype float32 --hot-memory 1MiB --seed 5 --no-store --api-key-file=FOLDER/key",
        {"KVCLI_METHOD": "kivi-2", "KVCLI_SETTINGS": '{"group_size": 16, "sink_length": 2}', "VLLM_API_KEY": "sesame"},
        ["--dtype", "float32", "--seed", "5", "--max-num-seqs", "3", "--kv-cache-memory-bytes", "1048576", *CODES],
    ),
    "fp16": ("", {}, []),
}


@pytest.mark.parametrize("method", CHOICES)
def test_the_line_that_is_printed_does_what_is_run(method: str, stand_in: Path, folder: str, monkeypatch: Any) -> None:
    """The key is in neither."""
    others, variables, flags = CHOICES[method]
    ran: list[Any] = []
    monkeypatch.setenv("KVCLI_RECIPE", "other.yaml")
    monkeypatch.setattr("os.execve", lambda *call: (ran.append(call), sys.exit(0)))
    words = f"serve FOLDER --engine vllm --port 0 --json {others} --method {method} -- --tensor-parallel-size 2"
    done = invoke(*words.replace("FOLDER", folder).split())
    ((_, arguments, environment),) = ran
    line = json.loads(done.stdout)["command"]
    assert "sesame" not in done.stderr + " ".join(arguments)
    outside = {"PATH": f"{stand_in}:{os.environ['PATH']}", "KVCLI_RECIPE": "other.yaml"}
    called = json.loads(subprocess.run(line, shell=True, env=outside, capture_output=True, check=False).stdout)
    assert [sys.executable, "-P", "-m", "called", *called[1]] == arguments
    assert arguments[4:6] + arguments[-2:] == ["serve", folder, "--tensor-parallel-size", "2"]
    assert [x for x in arguments if x in flags] == flags
    assert ("CUSTOM" in arguments) == (method != "fp16")
    for made in (called[2], environment):
        assert {x: y for x, y in made.items() if re.match("KVCLI_[MARS]|VLLM_API", x) and y} == variables


@pytest.mark.parametrize("method", ["kivi-2", "fp8"])
def test_windows_are_left_to_vllm(method: str, stand_in: Path, tmp_path: Path) -> None:
    """Which of vLLM's backends such layers have is not said; norms are read for methods alone that code in units."""
    tiny_config("gemma3_text").save_pretrained(tmp_path / "gemma")
    command = ["serve", str(tmp_path / "gemma"), "--engine", "vllm", "--port", "0", "--method", method]
    ran: list[Any] = []
    with patch("os.execve", lambda *call: (ran.append(call), sys.exit(0))):
        invoke(*command)
    ((_, arguments, _),) = ran
    config = json.loads(arguments[arguments.index("--attention-config") + 1])
    assert config == {"backend_per_kind": {"full_attention": "CUSTOM"}}
    assert "--attention-backend" not in arguments
    assert "omit it after --" in refused(*command, "--", "--attention-config={}")


def test_vllm_takes_the_place_of_the_process(stand_in: Path, folder: str) -> None:
    command = [sys.executable, "-m", "kvcli", "serve", folder, "--engine", "vllm", "--method", "fp16", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert json.loads(process.communicate()[0])[0] == process.pid
    assert process.returncode == 7


REFUSED = {
    "--method commvq --fit": "vLLM has nothing for --fit; omit it",
    "--api-key-file keys": "vLLM takes one key from its environment; --api-key-file has 2",
    "-- --api_key=sesame": "kvcli says --api-key to vLLM",
    "--method fp16 --sink-length 3": "has no setting 'sink_length'",
    "--method qjl": "codes of method 'qjl' depend on other tokens",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_vllm_cannot_do_is_refused_before_it_runs(options: str, stand_in: Path, folder: str) -> None:
    assert REFUSED[options] in refused("serve", folder, "--engine", "vllm", "--port", "0", *options.split())


def test_other_versions_and_none_are_refused(stand_in: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = ("serve", folder, "--port", "0", "--engine", "vllm")
    monkeypatch.setattr("kvcli.integrations.vllm.command.VERSIONS", ("0.99.",))
    assert "vLLM 0.26 or 0.31 to 0.33, not 0.32.0: pip install 'kvcli[vllm]'" in refused(*serve)
    monkeypatch.setattr("kvcli.integrations.vllm.command.entry_points", lambda **_: ())
    assert "which is not installed beside kvcli: pip install 'kvcli[vllm]'" in refused(*serve)


@pytest.mark.skipif(not find_spec("vllm"), reason="needs vLLM, see docs/engines.md")
def test_figures_of_our_own_server_have_names_and_types_of_vllm() -> None:
    spec: Any = find_spec("vllm")
    text = (Path(spec.origin).parent / "v1/metrics/loggers.py").read_text()
    known = {name: kind for kind, name in re.findall(r'self\._(\w+)_cls\(\s*name="([\w:]+)"', text)}
    metrics = Metrics("tiny")
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        metrics.of_vllm(Gauge, gauge)
    ours = {x.name: x.type for x in metrics.registry.collect() if not x.name.startswith("kvcli_")}
    assert len(ours) >= 19
    assert ours == {name: known[name] for name in ours}


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("model_hosting_container_standards"), reason="needs what is in .ci/vllm.txt")
def test_vllm_answers_from_codes_and_ends_as_kvcli_does(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    command = [sys.executable, "-m", "kvcli", "serve", folder, "--engine", "vllm", "--method", "kivi-2", "--port", "0"]
    command += f"--api-key-file {folder}/key --hot-memory 8MiB -- --enforce-eager --block-size 64".split()
    process: Any = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        text = "".join(takewhile(lambda line: "startup complete" not in line, process.stdout))
        found = re.search(r"--port (\d+).*KV cache size: ([\d,]+) tokens", text, re.DOTALL)
        assert found, text
        assert int(found[2].replace(",", "")) > 3 * 2**23 / (3 * 2 * 2 * 16 * 4)  # 3 times as many as exact ones
        with openai.OpenAI(base_url=f"http://127.0.0.1:{found[1]}/v1", api_key="sesame", max_retries=0) as client:
            assert [x.id for x in client.models.list()] == [folder]
            asked: Any = {"model": folder, "prompt": "It was the best of times. " * 6, "max_tokens": 8}
            _, again = (client.completions.create(**asked).usage for _ in range(2))
            assert (again.completion_tokens, again.prompt_tokens_details.cached_tokens) == (8, 128)
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="other").models.list()
        assert urlopen(f"http://127.0.0.1:{found[1]}/health").status == 200
    finally:
        process.terminate()
        process.communicate()
    assert process.returncode == 0
