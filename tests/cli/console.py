"""Calls the command line as a user does."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from kvcli.cli.app import app


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))
