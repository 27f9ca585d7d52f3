"""Calls the command line as a user does."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from kvcli.cli.app import app


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
