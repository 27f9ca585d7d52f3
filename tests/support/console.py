"""Calls the command line as a user does, and compresses a text with it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kvcli.cli.app import app

WINDOW = ("--residual-length", "8", "--sink-length", "2")
GROUPED = (*WINDOW, "--setting", "group_size=8")
METHOD = ("--method", "kivi-2", *GROUPED)
SHORT = ("--max-new-tokens", "12", "--json")
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom"


def invoke(*arguments: str, stdin: Any = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def result(*arguments: str, exit_code: int = 0, stdin: Any = None) -> Any:
    """What a command prints with `--json`, else all that it says; it ends with this exit code."""
    done = invoke(*arguments, stdin=stdin)
    assert done.exit_code == exit_code, done.output
    return json.loads(done.stdout) if "--json" in arguments else done


def refused(*arguments: str, code: int = 2, stdin: Any = None) -> str:
    """The one line of the error with which a command ends, and of nothing else."""
    done = result(*arguments, exit_code=code, stdin=stdin)
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    return str(line)


def imported(line: str) -> set[str]:
    """The modules that a command line imports in a process of its own."""
    program = "import sys; from kvcli.cli.app import run_command_line; code = run_command_line(); "
    program += "sys.stderr.write(' '.join(sys.modules)); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", program, *line.split()], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 2), done.stderr
    return set(done.stderr.splitlines()[-1].split())


def says(text: str, *parts: str) -> None:
    """What was printed contains all of these."""
    assert [part for part in parts if part not in text] == [], text


def compressed(*arguments: str, text: str = TEXT) -> dict[str, Any]:
    Path("text.txt").write_text(text)
    options = ("--prompt-file", "text.txt", "--out", "c.safetensors", "--prefill-chunk", "32", "--json")
    return dict(result("compress", *options, *arguments))
