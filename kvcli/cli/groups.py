"""Groups of commands, each of which is imported when it is asked for."""

from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.core import TyperGroup

TYPER: dict[str, Any] = {"add_completion": False, "rich_markup_mode": "rich", "pretty_exceptions_enable": False}
"""Options of typer for all commands."""


def group(
    name: str, sources: Mapping[str, Any], make: Callable[[Any], typer.Typer], base: Any = TyperGroup, **options: Any
) -> typer.Typer:
    """A group of commands in the order of its help; `make` makes one of its source, `options` are those of typer."""

    class Group(base):
        """Has the names of its commands from the start, and makes what `get_command` is asked for."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "commands": dict.fromkeys(sources)})
            self._sources = {**sources}

        def get_command(self, ctx: Any, name: str) -> Any:
            if name in self._sources and self.commands[name] is None:
                self.commands[name] = typer.main.get_command(make(self._sources[name]))
            return self.commands.get(name)

    app = typer.Typer(name=name, cls=Group, **{**TYPER, **options})
    app.callback()(lambda: None)  # without one, typer takes it for a command
    return app
