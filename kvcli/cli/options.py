"""Options defined once: a pydantic model a command gives its flags, its config file and their checks.

Values come from the command line, else from the --config file, else from the defaults.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from kvcli.builtin_models import BUILTIN_MODELS, DEFAULT_MODEL
from kvcli.cli.next_command import next_command
from kvcli.cli.output import Output, describe_error, duration
from kvcli.cli.start import stop_reason
from kvcli.errors import ConfigError, OutputError, UsageError, suggestion
from kvcli.registry import METHODS

if TYPE_CHECKING:
    from kvcli.models import LoadedModel


class Options(BaseModel):
    """Options of every command.

    Attributes:
        former_names: names that options had, which still work but are not shown.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    former_names: ClassVar[dict[str, str]] = {}

    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of every random choice")
    device: str | None = Field(default=None, description="torch device; default: a GPU if there is one")

    @field_validator("*", mode="before")
    @classmethod
    def _expand_paths(cls, value: Any, info: ValidationInfo) -> Any:
        """`~` is the home folder, and an empty text is not the current folder."""
        if info.field_name is None or not _is_path(cls.model_fields[info.field_name].annotation):
            return value
        return [_expanded(item) for item in value] if isinstance(value, list) else _expanded(value)

    def torch_device(self) -> str:
        """The device asked for, or a GPU if there is one.

        Raises:
            UsageError: no such device.
        """
        import torch

        if self.device is None:
            return "cuda" if torch.cuda.is_available() else "cpu"
        try:
            if torch.empty(0, device=self.device).is_meta:
                raise UsageError("device 'meta' holds no numbers; try --device cpu")
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"device '{self.device}' is not available; try --device cpu") from error
        return self.device


class ModelOptions(Options):
    """Options of commands that load a model."""

    model: str = Field(default=DEFAULT_MODEL, description="built-in name, hub name, folder or .gguf file")
    model_revision: str | None = Field(default=None, description="commit, tag or branch of a model on a hub")
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
        revision = {} if self.model_revision is None else {"revision": self.model_revision}
        return models.load_model(
            self.model,
            device=self.torch_device(),
            dtype=dtype,
            base_config=self.base_config,
            say=output.say,
            **revision,
        )


IMPL_HELP = "attention and encoding: auto (Triton kernels on a GPU, PyTorch elsewhere), fused or reference"
"""Help of every `--impl`."""

_COMPLETED: dict[str, Collection[str]] = {"method": METHODS, "model": BUILTIN_MODELS}
"""Values that the shell offers for options whose values are not in their type."""

OptionsT = TypeVar("OptionsT", bound=Options)

_SHARED: dict[str, tuple[Any, Any]] = {
    "as_json": (bool, typer.Option("--json", help="print one JSON object on standard output")),
    "config": (
        Path | None,
        typer.Option("--config", help="YAML file with options of the command, by the names that are shown here"),
    ),
    "quiet": (bool, typer.Option("--quiet", "-q", help="print results, warnings and errors only")),
    "verbose": (bool, typer.Option("--verbose", "-v", help="print also what libraries say, time and memory")),
    "debug": (bool, typer.Option("--debug", help="show the traceback of an error")),
}


def command(
    app: typer.Typer,
    name: str,
    options: type[OptionsT],
    example: str,
    arguments: tuple[str, ...] = (),
    settings: Collection[str] = (),
    resumes: bool = False,
) -> Callable[[Callable[[OptionsT, Output], None]], Callable[[OptionsT, Output], None]]:
    """Registers a command whose flags are the fields of an options model.

    Args:
        app: where to register.
        name: the command's name.
        options: its options; a field's description is its help.
        example: a runnable command line, shown at the end of the help.
        arguments: fields that are positional.
        settings: fields that are settings of a method, which the help shows apart.
        resumes: whether the same command goes on where it was interrupted.
    """

    def register(run: Callable[[OptionsT, Output], None]) -> Callable[[OptionsT, Output], None]:
        def invoke(**given: Any) -> None:
            shared = {name: given.pop(name) for name in _SHARED}
            output = Output(shared["as_json"], shared["quiet"], shared["verbose"])
            try:
                _run(run, name, options, given, shared, output)
            except (typer.Exit, BrokenPipeError):
                raise
            except (Exception, KeyboardInterrupt) as error:
                if shared["debug"]:
                    raise
                raise typer.Exit(_report(stop_reason() or error, output, resumes)) from None

        invoke.__doc__ = run.__doc__
        signature, annotations = _signature(options, arguments, settings)
        invoke.__signature__ = signature  # type: ignore[attr-defined]
        invoke.__annotations__ = annotations
        app.command(name, help=inspect.cleandoc(run.__doc__ or ""), epilog=f"Example: {example}")(invoke)
        return run

    return register


def _run(
    run: Callable[[OptionsT, Output], None],
    name: str,
    options: type[OptionsT],
    given: dict[str, Any],
    shared: dict[str, Any],
    output: Output,
) -> None:
    """Runs a command and says what to do next.

    Args:
        run: the command's function.
        name: the command's name.
        options: its options.
        given: its flags as typer read them.
        shared: the flags that all commands have.
        output: where it talks.
    """
    level = "info" if output.verbose else "error"
    for variable in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(variable, "critical" if level == "error" and "DATASETS" in variable else level)
    started = time.monotonic()
    chosen = resolve(options, given, shared["config"])
    output.detail(f"options: {chosen.model_dump(mode='json')}")
    run(chosen, output)
    output.detail(f"took {duration(time.monotonic() - started)}{_peak_memory()}")
    if not output.as_json and (following := next_command(name, chosen.model_dump(), output.record or {})):
        output.say(f"next: {following}")


def _report(error: BaseException, output: Output, resumes: bool) -> int:
    """Says an error in one line; returns the exit code."""
    code, line = describe_error(error, resumes)
    if output.as_json and output.record is None:
        with suppress(OutputError):  # the line on standard error is all that can be said
            output.result({"error": line, "exit_code": code})
    output.warn(f"error: {line}")
    return code


def _peak_memory() -> str:
    """The most memory that this process held, where the system tells."""
    try:
        import resource
    except ImportError:
        return ""
    return f", peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"


def resolve(options: type[OptionsT], given: dict[str, Any], path: Path | None) -> OptionsT:
    """Flags over file over defaults.

    Raises:
        ConfigError: a file that cannot be read, unknown keys (with a suggestion), or values that do not fit.
    """
    values = {} if path is None else _read_config(path, options)
    values.update(_renamed({name: value for name, value in given.items() if value is not None}, options))
    try:
        return options(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])).replace("_", "-")
        flag = f"--{name}: " if name else ""
        got = f" (got {first['input']!r})" if name else ""  # a check of several options gets all of them
        raise ConfigError(f"{flag}{first['msg'].removeprefix('Value error, ')}{got}") from error


def _renamed(values: dict[str, Any], options: type[Options]) -> dict[str, Any]:
    """Values by the names that options have now.

    Raises:
        ConfigError: an option under both names.
    """
    for former, now in options.former_names.items():
        if former in values:
            if now in values:
                flags = [f"--{name.replace('_', '-')}" for name in (now, former)]
                raise ConfigError(f"{flags[1]} is the former name of {flags[0]}; give one of them")
            values[now] = values.pop(former)
    return values


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
        except (yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"the value of '{name}' cannot be read") from error
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
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping of options")
    values = _renamed({str(key).replace("-", "_"): value for key, value in loaded.items()}, options)
    for key, value in values.items():
        if isinstance(value, dict) and key == "setting":  # NAME=VALUE texts on the command line
            values[key] = [f"{name}={yaml.safe_dump(inner).split(chr(10))[0]}" for name, inner in value.items()]
    for key in values:
        if key in _SHARED or key == "json":
            raise ConfigError(f"{path}: '{key}' is given on the command line, not in a file")
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
        complete = _completion(choices or tuple(_COMPLETED.get(name, ())))
        metavar = "PATH" if _is_path(field.annotation) else None
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
    for name, (kind, info) in _SHARED.items():
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
    return False if name in _SHARED and _SHARED[name][0] is bool else None


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _is_path(annotation: Any) -> bool:
    return annotation is Path or any(_is_path(kind) for kind in get_args(annotation))


def _expanded(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        raise ValueError("an empty path")
    return Path(value).expanduser() if isinstance(value, (str, Path)) else value


def _plain_type(annotation: Any) -> Any:
    """What typer parses for an annotation: a literal's base type, an optional's inner type; pydantic checks more."""
    if _is_path(annotation):
        return list[str] if get_origin(annotation) is list else str
    if choices := _choices(annotation):
        return type(choices[0])
    if get_origin(annotation) in (Union, UnionType):
        return _plain_type(next(kind for kind in get_args(annotation) if kind is not type(None)))
    return annotation
