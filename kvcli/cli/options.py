"""Options defined once: a pydantic model a command gives its flags, its config file and their checks.

Values come from the command line, else from the --config file, else from the defaults.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvcli.builtin_models import DEFAULT_MODEL
from kvcli.cli.output import Output, describe_error
from kvcli.errors import ConfigError, UsageError, suggestion

if TYPE_CHECKING:
    from kvcli.models import LoadedModel


class Options(BaseModel):
    """Options of every command."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of every random choice")
    device: str | None = Field(default=None, description="torch device; default: a GPU if there is one")

    def torch_device(self) -> str:
        """The device asked for, or a GPU if there is one.

        Raises:
            UsageError: no such device.
        """
        import torch

        if self.device is None:
            return "cuda" if torch.cuda.is_available() else "cpu"
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"device '{self.device}' is not available; try --device cpu") from error
        return self.device


class ModelOptions(Options):
    """Options of commands that load a model."""

    model: str = Field(default=DEFAULT_MODEL, description="built-in name, hub name, folder or .gguf file")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="dtype of the model; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    base_config: str | None = Field(default=None, description="config of the original model, for GGUF files")

    def load(self, output: Output) -> LoadedModel:
        """Loads the model.

        Raises:
            UsageError: no such device.
            ModelError: the model cannot be found, verified or loaded.
        """
        import torch

        from kvcli import models

        dtype = None if self.dtype == "auto" else getattr(torch, self.dtype)
        return models.load_model(
            self.model, device=self.torch_device(), dtype=dtype, base_config=self.base_config, say=output.say
        )


IMPL_HELP = "attention and encoding: auto (Triton kernels on a GPU, PyTorch elsewhere), fused or reference"
"""Help of every `--impl`."""

OptionsT = TypeVar("OptionsT", bound=Options)

_SHARED: dict[str, tuple[Any, Any]] = {
    "as_json": (bool, typer.Option("--json", help="print one JSON object on standard output")),
    "config": (Path | None, typer.Option("--config", help="YAML file with any of these options")),
    "debug": (bool, typer.Option("--debug", help="show the traceback of an error")),
}


def command(
    app: typer.Typer,
    name: str,
    options: type[OptionsT],
    example: str,
    arguments: tuple[str, ...] = (),
    settings: Collection[str] = (),
) -> Callable[[Callable[[OptionsT, Output], None]], Callable[[OptionsT, Output], None]]:
    """Registers a command whose flags are the fields of an options model.

    Args:
        app: where to register.
        name: the command's name.
        options: its options; a field's description is its help.
        example: a runnable command line, shown at the end of the help.
        arguments: fields that are positional.
        settings: fields that are settings of a method, which the help shows apart.
    """

    def register(run: Callable[[OptionsT, Output], None]) -> Callable[[OptionsT, Output], None]:
        def invoke(**given: Any) -> None:
            _invoke(run, options, given)

        invoke.__doc__ = run.__doc__
        signature, annotations = _signature(options, arguments, settings)
        invoke.__signature__ = signature  # type: ignore[attr-defined]
        invoke.__annotations__ = annotations
        app.command(name, help=inspect.cleandoc(run.__doc__ or ""), epilog=f"Example: {example}")(invoke)
        return run

    return register


def _invoke(run: Callable[[OptionsT, Output], None], options: type[OptionsT], given: dict[str, Any]) -> None:
    """Runs a command; every error becomes one line and an exit code."""
    shared = {name: given.pop(name) for name in _SHARED}
    output = Output(shared["as_json"])
    try:
        run(resolve(options, given, shared["config"]), output)
    except BrokenPipeError:
        sys.stderr.close()  # standard output was closed by its reader
        raise typer.Exit(1) from None
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, typer.Exit) or shared["debug"]:
            raise
        code, line = describe_error(error)
        if output.as_json:
            output.result({"error": line, "exit_code": code})
        output.say(f"error: {line}")
        raise typer.Exit(code) from None


def resolve(options: type[OptionsT], given: dict[str, Any], path: Path | None) -> OptionsT:
    """Flags over file over defaults.

    Raises:
        ConfigError: a file that cannot be read, unknown keys (with a suggestion), or values that do not fit.
    """
    values = {} if path is None else _read_config(path, options)
    values.update({name: value for name, value in given.items() if value is not None})
    try:
        return options(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])).replace("_", "-")
        flag = f"--{name}: " if name else ""
        raise ConfigError(f"{flag}{first['msg'].removeprefix('Value error, ')} (got {first['input']!r})") from error


def parse_settings(texts: list[str]) -> dict[str, Any]:
    """Settings of a method given as NAME=VALUE; values are read as YAML, so that 3, 0.1, true and words work.

    Raises:
        ConfigError: a text without `=`, or a value that is not YAML.
    """
    import yaml

    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"a setting is given as NAME=VALUE, not '{text}'")
        try:
            settings[name.strip().replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"the value of '{text}' cannot be read") from error
    return settings


def _read_config(path: Path, options: type[Options]) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping of options")
    values = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    for key, value in values.items():
        if isinstance(value, dict) and key in ("setting", "settings"):  # NAME=VALUE texts on the command line
            values[key] = [f"{name}={yaml.safe_dump(inner).split(chr(10))[0]}" for name, inner in value.items()]
    for key in values:
        if key not in options.model_fields:
            raise ConfigError(f"{path}: unknown option '{key}'{suggestion(key, options.model_fields)}")
    return values


def _signature(
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
        if default not in (None, [], ""):
            text += f"; default: {_shown(default)}"
        if name in arguments:
            info: Any = typer.Argument(help=text, show_default=False)
        else:
            flag = name.replace("_", "-")
            names = f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}"
            panel = "Settings of the method" if name in settings else None
            info = typer.Option(names, help=text, show_default=False, rich_help_panel=panel)
        annotations[name] = Annotated[kind | None, info]
    for name, (kind, info) in _SHARED.items():
        annotations[name] = Annotated[kind, info]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_flag_default(name), annotation=annotation)
        for name, annotation in annotations.items()
    ]
    return inspect.Signature(parameters), annotations


def _shown(default: Any) -> str:
    if isinstance(default, list):
        return ", ".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def _flag_default(name: str) -> Any:
    return False if name in _SHARED and _SHARED[name][0] is bool else None


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _plain_type(annotation: Any) -> Any:
    """What typer parses for an annotation: a literal's base type, an optional's inner type; pydantic checks more."""
    if choices := _choices(annotation):
        return type(choices[0])
    if get_origin(annotation) in (Union, UnionType):
        return _plain_type(next(kind for kind in get_args(annotation) if kind is not type(None)))
    return annotation
