"""The flags of a command, made from its options model: names, types, help and what the shell completes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel

from kvcli.builtin_models import BUILTIN_MODELS
from kvcli.options import Options, is_path
from kvcli.registry import METHODS

_COMPLETED: dict[str, Collection[str]] = {"method": METHODS, "model": BUILTIN_MODELS}
"""Values that the shell offers for options whose values are not in their type."""

_SETTINGS = "Settings of the method"

_PANELS: dict[str, tuple[str, ...]] = {
    "Options": (
        *("prompt", "prompt_file", "messages", "system", "chat", "context", "resume", "reuse", "corpus"),
        *("corpus_name", "corpus_split", "revision", "text_column", "samples", "layers", "tokens", "seq_len"),
        *("query_tokens", "fisher_tokens", "max_new_tokens"),
    ),
    "Method": ("method", "artifact", "sink_length", "residual_length", "setting"),
    _SETTINGS: (),
    "Where": ("out", "save", "store", "name", "max_bytes", "overwrite"),
    "How": ("compare_with", "baseline", "max_kld", "max_flips", "batch_size", "chunk"),
    "Machine": ("model_revision", "base_config", "impl", "device", "dtype", "seed"),
    "Output": ("stats",),
}
"""Groups of options in the help, in order; others are in `Options.other_panel`, and `Options` is typer's own."""

SHARED_FLAGS: dict[str, tuple[Any, Any]] = {
    name: (kind, typer.Option(*names, help=text, rich_help_panel="Output", metavar=metavar))
    for name, kind, names, metavar, text in (
        ("as_json", bool, ("--json",), None, "print one JSON object on standard output"),
        ("config", str | None, ("--config",), "PATH", "YAML file with options of the command, by the names shown here"),
        ("quiet", bool, ("--quiet", "-q"), None, "print results, warnings and errors only"),
        ("verbose", bool, ("--verbose", "-v"), None, "print also what libraries say, time and memory"),
        ("debug", bool, ("--debug",), None, "show the traceback of an error"),
    )
}
"""Flags of every command."""


def signature(
    options: type[Options], arguments: tuple[str, ...], settings: type[BaseModel] | None = None
) -> tuple[inspect.Signature, dict[str, Any]]:
    """The function signature that typer reads: all optional, so that an absent flag can be told from a default.

    Args:
        options: the options of the command.
        arguments: fields that are positional.
        settings: of a method, which are options too.
    """
    fields = {**options.model_fields, **(settings.model_fields if settings else {})}
    annotations: dict[str, Any] = {}
    for name in sorted(fields, key=lambda name: _place(name, options, arguments)):
        field = fields[name]
        kind, text = _plain_type(field.annotation), field.description or ""
        default = field.get_default(call_default_factory=True)
        if settings is not None and name in settings.model_fields:
            default = getattr(settings, "fit_settings", {}).get(name, default)
        if choices := _choices(field.annotation):
            text += f" ({', '.join(map(str, choices[:-1]))} or {choices[-1]})"
        if default is not False and default not in (None, [], (), ""):
            shown = ", ".join(map(str, default)) if isinstance(default, list) else str(default)
            text += f"; default: {'true' if default is True else shown}"
        complete = _completion(choices or tuple(_COMPLETED.get(name, ())))
        metavar = "PATH" if is_path(field.annotation) else None
        if name in arguments:
            info: Any = typer.Argument(help=text, show_default=False, autocompletion=complete, metavar=metavar)
        else:
            flag = name.replace("_", "-")
            info = typer.Option(
                f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}",
                help=text,
                show_default=False,
                rich_help_panel=_panel(name, options),
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
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if name in SHARED_FLAGS and SHARED_FLAGS[name][0] is bool else None,
            annotation=annotation,
        )
        for name, annotation in annotations.items()
    ]
    return inspect.Signature(parameters), annotations


def _panel(name: str, options: type[Options]) -> str:
    if name not in options.model_fields:
        return _SETTINGS
    return next((panel for panel, names in _PANELS.items() if name in names), options.other_panel)


def _place(name: str, options: type[Options], arguments: tuple[str, ...]) -> tuple[int, int]:
    """Where an option stands in the help: arguments, then panels, each in its order."""
    if name in arguments:
        return -1, arguments.index(name)
    panel = _panel(name, options)
    return [*_PANELS].index(panel), _PANELS[panel].index(name) if name in _PANELS[panel] else 0


def _completion(values: tuple[Any, ...]) -> Callable[[], list[str]] | None:
    """What the shell offers for an option."""
    return (lambda: [str(value) for value in values]) if values else None


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _plain_type(annotation: Any) -> Any:
    """What typer parses for an annotation: a literal's base type, an optional's inner type; pydantic checks more."""
    if is_path(annotation):
        return list[str] if get_origin(annotation) is list else str
    if choices := _choices(annotation):
        return type(choices[0])
    if get_origin(annotation) is Annotated:
        return _plain_type(get_args(annotation)[0])
    if get_origin(annotation) is list:
        return list[_plain_type(get_args(annotation)[0])]  # type: ignore[misc]
    if get_origin(annotation) is tuple:
        return list[get_args(annotation)[0]]  # type: ignore[misc]
    if get_origin(annotation) in (Union, UnionType):
        return _plain_type(next(kind for kind in get_args(annotation) if kind is not type(None)))
    return annotation
