"""Values of options: from the command line, else from the --config file, else the defaults."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvcli.cli.flags import SHARED_FLAGS
from kvcli.errors import ConfigError, suggestion
from kvcli.options import Options

OptionsT = TypeVar("OptionsT", bound=Options)


def resolve(
    options: type[OptionsT],
    given: dict[str, Any],
    path: str | None,
    arguments: Collection[str] = (),
    settings: type[BaseModel] | None = None,
) -> OptionsT:
    """Flags over file over defaults.

    Args:
        options: the options of the command.
        given: flags by name; None for those that are absent.
        path: YAML file with options.
        arguments: options that are positional, which errors name without dashes.
        settings: of a method, which are options too and become entries of `setting`.

    Raises:
        ConfigError: a file that cannot be read, unknown keys (with a suggestion), or values that do not fit.
    """
    if path == "":
        raise ConfigError("--config: an empty text")
    values = {} if path is None else _read_config(Path(path), options, settings)
    values.update(_renamed({name: value for name, value in given.items() if value is not None}, options))
    try:
        if settings is not None:
            typed = {name: values.pop(name) for name in [*values] if name in settings.model_fields}
            settings(**typed)
            values["setting"] = [*(f"{name}={value}" for name, value in typed.items()), *values.get("setting", ())]
        return options(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        flag = f"{name}: " if name in arguments else f"--{name.replace('_', '-')}: " if name else ""
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


def _read_config(path: Path, options: type[Options], settings: type[BaseModel] | None) -> dict[str, Any]:
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
        if key in SHARED_FLAGS or key in ("json", "suite"):
            raise ConfigError(f"{path}: '{key}' is given on the command line, not in a file")
        known = [*options.model_fields, *(settings.model_fields if settings else ())]
        if key not in known:
            raise ConfigError(f"{path}: unknown option '{key}'{suggestion(key, known)}")
    return values
