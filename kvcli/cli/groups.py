"""Groups of commands, each of which is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import typer
from typer.core import TyperGroup

T = TypeVar("T")

TYPER: dict[str, Any] = {"add_completion": False, "rich_markup_mode": "rich", "pretty_exceptions_enable": False}
"""Options of typer for all commands."""


class _Commands(Mapping[str, Any]):
    """Typer's commands by name, each of which is made when it is asked for."""

    def __init__(self, sources: Mapping[str, T], make: Callable[[T], typer.Typer]) -> None:
        self._sources, self._make, self._made = sources, make, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = typer.main.get_command(self._make(self._sources[name]))
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def group(
    name: str,
    sources: Mapping[str, T],
    make: Callable[[T], typer.Typer],
    base: type[TyperGroup] = TyperGroup,
    **options: Any,
) -> typer.Typer:
    """A group of commands in the order of its help; `make` makes one of its source, `options` are those of typer."""

    class Group(base):  # type: ignore[misc, valid-type]
        """The group with its commands."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "commands": _Commands(sources, make)})

    app = typer.Typer(name=name, cls=Group, **{**TYPER, **options})
    app.callback()(lambda: None)  # without one, typer takes it for a command
    return app
