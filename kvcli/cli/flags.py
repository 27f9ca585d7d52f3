"""The flags of a command, made from its options model: names, types, help and what the shell completes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from kvcli.builtin_models import BUILTIN_MODELS
from kvcli.cli.options import Options, is_path
from kvcli.registry import METHODS

_COMPLETED: dict[str, Collection[str]] = {"method": METHODS, "model": BUILTIN_MODELS}
"""Values that the shell offers for options whose values are not in their type."""

SHARED_FLAGS: dict[str, tuple[Any, Any]] = {
    "as_json": (bool, typer.Option("--json", help="print one JSON object on standard output")),
    "config": (
        str | None,
        typer.Option(
            "--config", metavar="PATH", help="YAML file with options of the command, by the names that are shown here"
        ),
    ),
    "quiet": (bool, typer.Option("--quiet", "-q", help="print results, warnings and errors only")),
    "verbose": (bool, typer.Option("--verbose", "-v", help="print also what libraries say, time and memory")),
    "debug": (bool, typer.Option("--debug", help="show the traceback of an error")),
}
"""Flags of every command."""


def signature(
    options: type[Options], arguments: tuple[str, ...], settings: Collection[str]
) -> tuple[inspect.Signature, dict[str, Any]]:
    """The function signature that typer reads: all optional, so that an absent flag can be told from a default."""
    annotations: dict[str, Any] = {}
    for name in (*arguments, *(name for name in options.model_fields if name not in arguments)):
        field = options.model_fields[name]
        kind, text = _plain_type(field.annotation), field.description or ""
        default = field.get_default(call_default_factory=True)
        if choices := _choices(field.annotation):
            text += f" ({', '.join(map(str, choices[:-1]))} or {choices[-1]})"
        if default not in (None, [], (), ""):
            text += f"; default: {_shown(default)}"
        complete = _completion(choices or tuple(_COMPLETED.get(name, ())))
        metavar = "PATH" if is_path(field.annotation) else None
        if name in arguments:
            info: Any = typer.Argument(help=text, show_default=False, autocompletion=complete, metavar=metavar)
        else:
            flag = name.replace("_", "-")
            names = f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}"
            panel = "Settings of the method" if name in settings else None
            info = typer.Option(
                names,
                help=text,
                show_default=False,
                rich_help_panel=panel,
                autocompletion=complete,
                metavar=metavar,
            )
        annotations[name] = Annotated[kind | None, info]
    for former, now in options.former_names.items():
        kind = _plain_type(options.model_fields[now].annotation)
        annotations[former] = Annotated[kind | None, typer.Option(f"--{former.replace('_', '-')}", hidden=True)]
    for name, (kind, info) in SHARED_FLAGS.items():
        annotations[name] = Annotated[kind, info]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_flag_default(name), annotation=annotation)
        for name, annotation in annotations.items()
    ]
    return inspect.Signature(parameters), annotations


def _completion(values: tuple[Any, ...]) -> Callable[[], list[str]] | None:
    """What the shell offers for an option."""
    return (lambda: [str(value) for value in values]) if values else None


def _shown(default: Any) -> str:
    if isinstance(default, list):
        return ", ".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def _flag_default(name: str) -> Any:
    return False if name in SHARED_FLAGS and SHARED_FLAGS[name][0] is bool else None


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _plain_type(annotation: Any) -> Any:
    """What typer parses for an annotation: a literal's base type, an optional's inner type; pydantic checks more."""
    if is_path(annotation):
        return list[str] if get_origin(annotation) is list else str
    if choices := _choices(annotation):
        return type(choices[0])
    if get_origin(annotation) is tuple:
        return list[get_args(annotation)[0]]  # type: ignore[misc]
    if get_origin(annotation) in (Union, UnionType):
        return _plain_type(next(kind for kind in get_args(annotation) if kind is not type(None)))
    return annotation
