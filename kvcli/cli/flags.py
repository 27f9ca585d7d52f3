"""The flags of a command, made from its options model, and their values: flags over the --config file over defaults."""

import inspect
import json
from collections.abc import Callable, Collection
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BaseModel, ValidationError

from kvcli.commands.options import Options, holds, read_yaml
from kvcli.errors import ConfigError, suggestion
from kvcli.models.builtin_models import BUILTIN_MODELS
from kvcli.registry import METHODS

OptionsT = TypeVar("OptionsT", bound=Options)

_COMPLETED: dict[str, Collection[str]] = {"method": METHODS, "model": BUILTIN_MODELS}
"""Values that the shell offers for options whose values are not in their type."""

_SETTINGS = "Settings of the method"

_PANELS: dict[str, tuple[str, ...]] = {
    "Options": (
        *("prompt", "prompt_file", "messages", "system", "chat", "context", "resume", "reuse", "corpus"),
        *("corpus_name", "corpus_split", "revision", "text_column", "skip_bad_rows", "samples", "layers", "tokens"),
        *("seq_len", "query_tokens", "fisher_tokens", "max_new_tokens"),
    ),
    "Method": ("method", "artifact", "recipe", "fit", "sink_length", "residual_length", "setting"),
    _SETTINGS: (),
    "Where": ("out", "save", "store", "name", "max_bytes", "overwrite"),
    "How": ("compare_with", "baseline", "max_kld", "max_flips", "batch_size", "chunk"),
    "Machine": ("model_revision", "base_config", "impl", "device", "devices", "dtype", "seed"),
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

    Fields in `arguments` are positional; `settings` of a method are options too.
    """
    fields = {**options.model_fields, **(settings.model_fields if settings else {})}
    panel_of = {name: panel for panel, names in _PANELS.items() for name in names}
    panels = {x: panel_of.get(x, options.other_panel) if x in options.model_fields else _SETTINGS for x in fields}

    def place(name: str) -> tuple[int, int]:
        """Where an option stands in the help: arguments, then panels, each in its order."""
        if name in arguments:
            return -1, arguments.index(name)
        names = _PANELS[panels[name]]
        return [*_PANELS].index(panels[name]), names.index(name) if name in names else 0

    annotations: dict[str, Any] = {}
    for name in sorted(fields, key=place):
        field = fields[name]
        kind, text = _plain_type(field.annotation), field.description or ""
        default = field.get_default(call_default_factory=True)
        if settings is not None and name in settings.model_fields:
            default = getattr(settings, "fit_settings", {}).get(name, default)
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        if choices:
            text += f" ({', '.join(map(str, choices[:-1]))} or {choices[-1]})"
        if default is not False and default not in (None, [], (), ""):
            shown = ", ".join(map(str, default)) if isinstance(default, list) else str(default)
            text += f"; default: {'true' if default is True else shown}"
        shared: dict[str, Any] = {
            "help": text,
            "show_default": False,
            "autocompletion": _completion(choices or tuple(_COMPLETED.get(name, ()))),
            "metavar": "PATH" if holds(field.annotation, Path) else None,
        }
        if kind in (int, list[int]):  # which the options read, 128K too
            kind, shared["metavar"] = (str, "<int>") if kind is int else (list[str], "<list[int]>")
        flag = name.replace("_", "-")
        negated = f"/--no-{flag}" if kind is bool and not flag.startswith("no-") else ""
        words = [f"--{flag}{negated}", *["-o"] * (name == "out")]
        panel = panels[name]
        info = typer.Argument(**shared) if name in arguments else typer.Option(*words, rich_help_panel=panel, **shared)
        annotations[name] = Annotated[kind | None, info]
    for name, (kind, info) in SHARED_FLAGS.items():
        annotations[name] = Annotated[kind, info]
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(x, kind, default=None, annotation=y) for x, y in annotations.items()]
    return inspect.Signature(parameters), annotations


def _completion(values: tuple[Any, ...]) -> Callable[[], list[str]] | None:
    return (lambda: [str(value) for value in values]) if values else None


def _plain_type(annotation: Any) -> Any:
    """What typer parses for an annotation: a literal's base type, an optional's inner type; pydantic checks more."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if holds(annotation, Path):
        return list[str] if origin is list else str
    if origin is Literal:
        return type(inner[0])
    if origin is Annotated:
        return _plain_type(inner[0])
    if origin in (list, tuple):
        return list[_plain_type(inner[0])]  # type: ignore[misc]
    if origin in (Union, UnionType):
        return _plain_type(next(kind for kind in inner if kind is not NoneType))
    return annotation


def resolve(
    options: type[OptionsT],
    flags: dict[str, Any],
    path: str | None,
    arguments: Collection[str] = (),
    settings: type[BaseModel] | None = None,
) -> OptionsT:
    """Flags, None where absent, over the YAML file at `path` over defaults.

    Errors name positional `arguments` without dashes; `settings` of a method become entries of `setting`.

    ConfigError: a file that cannot be read, unknown keys (with a suggestion), or values that do not fit.
    """
    if path == "":
        raise ConfigError("--config: an empty text")
    values = {} if path is None else _read_config(Path(path), options, settings)
    values.update({name: value for name, value in flags.items() if value is not None})
    try:
        if settings is not None:
            typed = {name: values.pop(name) for name in [*values] if name in settings.model_fields}
            settings(**typed)
            values["setting"] = [*(f"{name}={value}" for name, value in typed.items()), *values.get("setting", ())]
        return options(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        what = f"{name}: " if name in arguments else f"--{name.replace('_', '-')}: " if name else ""
        got = f" (got {first['input']!r})" if name else ""  # a check of several options gets all of them
        said = "no whole number, such as 8192 or 8K" if first["type"].startswith("int_") else first["msg"]
        raise ConfigError(f"{what}{said.removeprefix('Value error, ')}{got}") from error


def _read_config(path: Path, options: type[Options], settings: type[BaseModel] | None) -> dict[str, Any]:
    loaded = read_yaml(path)
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping of options")
    values = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    known = [*options.model_fields, *(settings.model_fields if settings else ())]
    for key, value in values.items():
        if key in SHARED_FLAGS or key in ("json", "suite"):
            raise ConfigError(f"{path}: '{key}' is given on the command line, not in a file")
        if key not in known:
            raise ConfigError(f"{path}: unknown option '{key}'{suggestion(key, known)}")
        if isinstance(value, dict) and key == "setting":  # NAME=VALUE texts on the command line
            values[key] = [f"{name}={json.dumps(inner)}" for name, inner in value.items()]
    return values
