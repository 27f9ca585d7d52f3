"""The help of every command as Markdown, which `tables.py` writes into `docs/cli.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from kvcli.cli.app import app
from kvcli.cli.flags import SHARED_FLAGS
from kvcli.commands.tables import DataTable


def commands(_: str) -> str:
    """All commands, in the order of `kvcli --help`."""
    return "\n".join(_sections(get_command(app), "kvcli"))


def _sections(command: Any, path: str) -> Iterator[str]:
    """A command and those below it."""
    below = {name: command.get_command(None, name) for name in getattr(command, "commands", ())}
    if path == "kvcli":
        first = next(iter(below.values()))
        yield f"Every command has\n\n{_table([x for x in first.params if x.name in SHARED_FLAGS])}"
    else:
        heading = "##" if path.count(" ") == 1 else "###"
        yield f"{heading} {path}\n\n{command.help}\n"
        yield f"`{command.epilog.removeprefix('Example: ')}`\n"
        if options := [x for x in command.params if x.name not in SHARED_FLAGS and not getattr(x, "hidden", False)]:
            yield _table(options)
    for name, inner in below.items():
        yield from _sections(inner, f"{path} {name}")


def _table(options: list[Any]) -> str:
    rows = [[_name(x), " ".join((x.help or "").split())] for x in options]
    return DataTable("", ["option", "meaning"], rows).markdown()


def _name(option: Any) -> str:
    """The option as it is typed, its negation and short form too; an argument in capitals."""
    flags = [*option.opts, *option.secondary_opts]
    return ", ".join(f"`{x}`" for x in flags) if flags[0].startswith("-") else f"`{option.name.upper()}`"
