"""Calls `python -m research` as a user does."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from research.__main__ import app


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))
