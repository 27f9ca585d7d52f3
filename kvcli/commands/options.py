"""Options that commands share, as pydantic models: a command adds fields of its own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from kvcli.errors import ConfigError, UsageError, error_text
from kvcli.models.builtin_models import DEFAULT_MODEL
from kvcli.progress import Reporter
from kvcli.storage.ranks import local_device

if TYPE_CHECKING:
    from kvcli.models.load import LoadedModel

Impl = Literal["auto", "fused", "reference"]
IMPL_HELP = "attention and encoding; auto: Triton kernels on a GPU, PyTorch elsewhere"
"""Help of every `--impl`."""

DEVICES_HELP = "GPUs of this machine to share the work, a process on each: a number, or all; on a CPU, processes"
"""Help of every `--devices`."""


def _check_devices(value: Any) -> str:
    text = str(value)
    if text != "all" and not (text.isdecimal() and 0 < int(text) < 1000):
        raise ValueError("a number of processes, or 'all' for the GPUs of this machine")
    return text


Devices = Annotated[str, BeforeValidator(_check_devices)]

_CHARACTERS, _DEPTH = 2**16, 12
"""Of YAML, at most."""

AUTO_DEVICE = "auto"
"""All GPUs, for commands that run models whose layers are on several."""


class Options(BaseModel):
    """Base of the options of every command; those that `kvcli.cli.flags` names no group for are in `other_panel`."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    other_panel: ClassVar[str] = "How"

    @field_validator("*", mode="before")
    @classmethod
    def _read_texts(cls, value: Any, info: ValidationInfo) -> Any:
        """`~` is the home folder, 128K is 131072; an empty text is neither the current folder nor no option."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if get_origin(annotation) is list and isinstance(value, list):
            return [cls._read_texts(each, info) for each in value]
        if info.field_name != "prompt" and isinstance(value, str) and not value.strip():
            raise ValueError("an empty text")
        if isinstance(value, str) and not holds(annotation, Path) and re.search(r"[\ud800-\udfff]", value):
            raise ValueError("no UTF-8 text")
        if isinstance(value, str) and holds(annotation, int) and value[:-1].isdecimal() and value[-1] in "kKmM":
            return int(value[:-1]) * (2**10 if value[-1] in "kK" else 2**20)
        if value is None or not holds(annotation, Path):
            return value
        if not isinstance(value, (str, Path)):
            raise ValueError("not a path")
        return Path(value).expanduser()


class ComputeOptions(Options):
    """Options of commands that compute with torch."""

    seed: int = Field(0, ge=0, lt=2**32, description="seed of every random choice")
    device: str | None = Field(
        None, description="torch device; auto: all GPUs (generate, chat, calibrate); default: a GPU if there is one"
    )

    def torch_device(self) -> str:
        """The device asked for, or a GPU if there is one; UsageError: no such device, or all of them."""
        import torch

        if self.device == AUTO_DEVICE:
            raise UsageError("this command runs a model on one device, so '--device auto' is not for it; name one")
        if self.device is None and not torch.cuda.is_available():
            return "cpu"
        if self.device is None:
            return "cuda" if "LOCAL_RANK" not in os.environ else f"cuda:{local_device()}"
        try:
            if torch.empty(0, device=self.device).is_meta:
                raise UsageError("device 'meta' holds no numbers; try --device cpu")
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"device '{self.device}' is not available; try --device cpu") from error
        return self.device


class ModelOptions(ComputeOptions):
    """Options of commands that load a model."""

    takes_several_gpus: ClassVar[bool] = False
    """Whether the command runs models whose layers are on several GPUs."""

    model: str = Field(DEFAULT_MODEL, description="built-in name, hub name, folder or .gguf file")
    model_revision: str | None = Field(None, description="commit, tag or branch of a model on a hub")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="dtype of the model; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    base_config: str | None = Field(None, description="config of the original model, for GGUF files")

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.base_config is not None and not self.model.endswith(".gguf"):
            raise ValueError(f"--base-config goes with a GGUF file, not with '{self.model}'")
        return self

    def load(self, output: Reporter) -> LoadedModel:
        """Loads the model; errors as `kvcli.load_model`; UsageError: several devices where the command takes one."""
        import torch

        from kvcli.models import load as models

        several = self.device == AUTO_DEVICE and self.takes_several_gpus and "LOCAL_RANK" not in os.environ
        dtype = None if self.dtype == "auto" else getattr(torch, self.dtype)
        return models.load_model(
            self.model,
            device=AUTO_DEVICE if several else self.torch_device(),
            dtype=dtype,
            base_config=self.base_config,
            revision=self.model_revision,
            say=output.say,
            progress=output.progress,
        )


def parse_yaml(text: str) -> Any:
    """Values of YAML that JSON has, too.

    ValueError: no YAML, longer or deeper than options are, with tags, a key twice, or an alias, by which it would grow.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            alias = isinstance(event, yaml.AliasEvent)
            refused = f"alias *{event.anchor}" if alias else event.tag and f"tag {event.tag}"
            if refused or self.depth == _DEPTH:
                raise yaml.MarkedYAMLError(None, None, refused or f"more than {_DEPTH} levels", event.start_mark)
            self.depth += 1
            node: yaml.Node | None = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            mapping = super().construct_mapping(node, deep)
            if len(mapping) < len(node.value):
                keys = [self.construct_object(key) for key, _ in node.value]
                again = next(key for i, (key, _) in enumerate(node.value) if keys[i] in keys[:i])
                raise yaml.MarkedYAMLError(None, None, f"'{again.value}' stands twice", again.start_mark)
            return mapping

    if len(text) > _CHARACTERS:
        raise ValueError(f"more than {_CHARACTERS} characters")
    try:
        return json.loads(json.dumps(yaml.load(text, Loader)))
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{error.problem}{where}") from error
    except (yaml.YAMLError, OverflowError, TypeError) as error:  # a number; a date
        raise ValueError(error_text(error)) from error


def read_yaml(path: str | Path) -> Any:
    """What a YAML file holds, as `parse_yaml`; ConfigError: it cannot be read, or is no such file."""
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            return parse_yaml(file.read(_CHARACTERS + 1))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error


def parse_settings(texts: list[str]) -> dict[str, Any]:
    """Settings of a method from NAME=VALUE, with values as YAML: 3, 0.1, true or words.

    ConfigError: a text without `=`, or a value that is not YAML.
    """
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"a setting is given as NAME=VALUE, not '{text}'")
        try:
            settings[name.strip().replace("-", "_")] = parse_yaml(value)
        except ValueError as error:
            raise ConfigError(f"the value of '{name}' cannot be read: {error}") from error
    return settings


def parse_layers(text: str | None, layers: Sequence[int], what: str) -> list[int]:
    """Those of `layers` in a range such as 4-7 or of a single number; all without one.

    UsageError: neither a number nor a range, or other layers; `what` says what these are, as `were recorded`.
    """
    if text is None:
        return [*layers]
    first, dash, last = text.partition("-")
    low, high = (int(x) if x.isdecimal() else -1 for x in (first, last if dash else first))
    if not 0 <= low <= high:
        raise UsageError(f"--layers takes a number or a range such as 0-7, not '{text}'")
    if not {low, high} <= set(layers):
        raise UsageError(f"--layers {text}: only layers {layers[0]}-{layers[-1]} {what}")
    return list(range(low, high + 1))


def holds(annotation: Any, kind: type) -> bool:
    """Whether an option holds a value of a kind, or several."""
    return annotation is kind or any(holds(inner, kind) for inner in get_args(annotation))
