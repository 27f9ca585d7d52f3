"""What the program sets before anything heavy is imported."""

from __future__ import annotations

import os
from typing import Any

import pytest
from typer.main import get_command

from kvcli.cli import start


@pytest.mark.parametrize(
    ("command", "given", "spins"),
    [
        ("fit", {}, "1000"),
        ("demo", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("calibrate", {"OMP_WAIT_POLICY": "active"}, None),
        ("generate", {}, None),
    ],
)
def test_long_commands_are_prepared(
    monkeypatch: pytest.MonkeyPatch, command: str, given: dict[str, str], spins: str | None
) -> None:
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    start._prepare_long([command, "--seed", "1"])
    assert environment.get("GOMP_SPINCOUNT") == spins
    assert environment.get("THP_MEM_ALLOC_ENABLE") == (None if command == "generate" else "1")
    assert given.items() <= environment.items()


def test_long_commands_exist() -> None:
    from kvcli.cli.app import app

    group: Any = get_command(app)
    assert all(any(name.startswith(prefix) for name in group.commands) for prefix in start._LONG)
