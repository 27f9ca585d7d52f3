"""The methods by name. Strings only, so that listing them imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcli.errors import UsageError, suggestion

if TYPE_CHECKING:
    from kvcli.methods.config import CacheConfig
    from kvcli.methods.method import Method
    from kvcli.methods.paper_tables import PaperTable

METHODS = {
    "fp16": "kvcli.methods.fp16:METHOD",
    "fp8": "kvcli.methods.fp8:METHOD",
    "rtn": "kvcli.methods.rtn:METHOD",
    "kivi": "kvcli.methods.kivi:METHOD",
    "squat": "kvcli.methods.squat.method:METHOD",
    "squat-pre": "kvcli.methods.squat.method:METHOD_PRE",
    "qjl": "kvcli.methods.qjl.method:METHOD",
    "turboquant": "kvcli.methods.turboquant:METHOD",
    "oscar": "kvcli.methods.oscar:METHOD",
    "kvquant": "kvcli.methods.kvquant:METHOD",
    "commvq": "kvcli.methods.commvq.method:METHOD",
}
"""Method name to `module:record`."""

BASELINE = "fp16"
"""The method that compresses nothing, with which others are compared."""

DEFAULT_METHOD = "commvq"
"""The method of `kvcli demo`, of `kvcli fit` and of examples."""


@dataclass(frozen=True)
class FitCommand:
    """A command of its own for fitting one method, with the method's settings as typed options.

    `kvcli fit --method NAME` fits every method that can be fitted, with or without such a command.

    Attributes:
        methods: the methods it fits, which share their settings; the first is the default.
        config: `module:class` of their settings, in a module that does not import torch.
        summary: its help, a sentence.
        options: an example of its options.
        run_name: template of the run folder's name, from `method` and the settings.
        defaults: settings whose default differs from the class when the method is fitted.
        quick: settings that fit in less time, for `kvcli demo`.
    """

    methods: tuple[str, ...]
    config: str
    summary: str
    options: str
    run_name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)

    def config_cls(self) -> type[CacheConfig]:
        """The class of the methods' settings."""
        config: type[CacheConfig] = _import(self.config)
        return config


FIT_COMMANDS = {
    "train-codebook": FitCommand(
        methods=("commvq",),
        config="kvcli.methods.commvq.config:CommVQConfig",
        summary="Train CommVQ's key codebooks (EM) and value encoder and codebook, layer by layer; "
        "resumes where it stopped.",
        options="--bits 1",
        run_name="{method}-{bits:g}bit",
        quick={"key_iterations": 4, "key_full_iterations": 1, "value_iterations": 1},
    ),
    "fit-subspace": FitCommand(
        methods=("squat", "squat-pre"),
        config="kvcli.methods.squat.config:SQuatConfig",
        summary="Fit SQuat's query subspace offline on calibration queries; 'kvcli export' makes an artifact of it.",
        options="--subspace-dim 8",
        run_name="{method}-subspace",
        defaults={"subspace_source": "calibration"},
    ),
}
"""Commands that fit one method; optional, a method needs none."""


PAPER_TABLES = {
    "commvq-9": "kvcli.methods.commvq.paper_tables:TABLES",
    "commvq-10": "kvcli.methods.commvq.paper_tables:TABLES",
    "commvq-11": "kvcli.methods.commvq.paper_tables:TABLES",
    "commvq-figure-4": "kvcli.methods.commvq.paper_tables:TABLES",
    "kivi-1": "kvcli.methods.scalar.paper_tables:TABLES",
    "squat-3": "kvcli.methods.squat.paper_tables:TABLES",
}
"""Tables of the papers that `kvcli reproduce` makes again: name to `module:mapping`."""


def get_paper_table(name: str) -> PaperTable:
    """Loads one table.

    Raises:
        UsageError: no such table; the message lists those that exist.
    """
    if name not in PAPER_TABLES:
        hint = suggestion(name, PAPER_TABLES)
        raise UsageError(f"unknown table '{name}'; the tables are {', '.join(PAPER_TABLES)}{hint}")
    table: PaperTable = _import(PAPER_TABLES[name])[name]
    return table


def get_method(name: str) -> Method:
    """Loads one method's record.

    Raises:
        UsageError: no such method; the message lists those that exist.
    """
    if name not in METHODS:
        raise UsageError(f"unknown method '{name}'; choose one of {', '.join(METHODS)}")
    method: Method = _import(METHODS[name])
    return method


def parse_method(text: str) -> tuple[Method, dict[str, Any]]:
    """Reads a method with optional bits, such as `kivi`, `kivi-2` or `commvq-1.5`.

    Returns:
        The method's record and the settings that the bits stand for.

    Raises:
        UsageError: no such method, or one that takes no bits.
    """
    name, dash, bits = text.rpartition("-")
    if text in METHODS or not dash or not re.fullmatch(r"\d+(\.\d+)?", bits):
        return get_method(text), {}
    method = get_method(name)
    if method.for_bits is None:
        raise UsageError(f"method '{name}' takes no bits; say --method {name}")
    return method, method.for_bits(int(bits) if bits.isdigit() else float(bits))


def fit_command(method: str) -> FitCommand | None:
    """The command for fitting a method, if it has one of its own."""
    return next((command for command in FIT_COMMANDS.values() if method in command.methods), None)


def _import(path: str) -> Any:
    """The object at `module:name`."""
    module, name = path.split(":")
    return getattr(import_module(module), name)
