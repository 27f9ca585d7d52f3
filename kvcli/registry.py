"""The methods and suites by name. Strings only, so that listing them imports nothing heavy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from kvcli.errors import ConfigError, UsageError, explain

if TYPE_CHECKING:
    from kvcli.methods.config import CacheConfig
    from kvcli.methods.method import Method

METHODS = {
    "fp16": "kvcli.methods.fp16:METHOD, kvcli.methods.config:CacheConfig",
    "fp8": "kvcli.methods.fp8:METHOD, kvcli.methods.config:BiasOffsetConfig",
    "rtn": "kvcli.methods.kivi:RTN, kvcli.methods.config:RTNConfig",
    "kivi": "kvcli.methods.kivi:METHOD, kvcli.methods.config:KIVIConfig",
    "squat": "kvcli.methods.squat.codec:METHOD, kvcli.methods.config:SQuatConfig",
    "squat-pre": "kvcli.methods.squat.codec:METHOD_PRE, kvcli.methods.config:SQuatConfig",
    "qjl": "kvcli.methods.qjl.codec:METHOD, kvcli.methods.config:QJLConfig",
    "turboquant": "kvcli.methods.turboquant:METHOD, kvcli.methods.config:TurboQuantConfig",
    "blockgtq": "kvcli.methods.blockgtq:METHOD, kvcli.methods.config:BlockGTQConfig",
    "kvarn": "kvcli.methods.kvarn:METHOD, kvcli.methods.config:KVarNConfig",
    "oscar": "kvcli.methods.oscar:METHOD, kvcli.methods.config:OSCARConfig",
    "kvquant": "kvcli.methods.kvquant:METHOD, kvcli.methods.config:KVQuantConfig",
    "klt": "kvcli.methods.klt.method:METHOD, kvcli.methods.config:KLTConfig",
    "klt-tcq": "kvcli.methods.klt.method:METHOD_TCQ, kvcli.methods.config:KLTConfig",
    "commvq": "kvcli.methods.commvq.method:METHOD, kvcli.methods.commvq.config:CommVQConfig",
}
"""Method name to `module:record`; and `module:class` of its settings, if that module does not import torch.

With the latter, the command line checks settings before it imports torch.
"""

EVAL_SUITES = {
    "kl": "kvcli.eval.kl:SUITE",
    "needle": "kvcli.eval.needle:SUITE",
    "recall": "kvcli.eval.recall:SUITE",
    "ruler": "kvcli.eval.ruler:SUITE",
    "tools": "kvcli.eval.tools:SUITE",
    "compose": "kvcli.eval.compose:SUITE",
    "drift": "kvcli.eval.drift:SUITE",
    "long": "kvcli.eval.long:SUITE",
    "layers": "kvcli.eval.kl:LAYERS",
    "tasks": "kvcli.eval.tasks:SUITE",
}
"""Suites of `kvcli eval` to `module:suite`; the modules import torch in functions only."""

BENCH_SUITES = {
    "attention": "kvcli.bench.attention:SUITE",
    "generate": "kvcli.bench.generate:SUITE",
    "memory": "kvcli.bench.generate:MEMORY",
    "contexts": "kvcli.bench.contexts:SUITE",
    "serve": "kvcli.bench.serve:SUITE",
}
"""Suites of `kvcli bench`, likewise."""

BASELINE = "fp16"
"""The method that compresses nothing, with which others are compared."""

DEFAULT_METHOD = "commvq"
"""The method of `kvcli demo`, of `kvcli fit` and of examples."""

UNFITTED_METHOD = "kivi-2"
"""The method of examples that run without an artifact."""

UNFITTED_DEFAULT = "kivi-4"
"""The method of commands that generate, where none is named and no artifact is there: of those that need none and have
kernels, the one with the least loss."""

LIBRARY_METHOD = "klt"
"""The method of `kvcli library add`, where none is named and no artifact is there."""

DEMO_SETTINGS = {"key_iterations": 4, "key_full_iterations": 1, "value_iterations": 1}
"""Settings with which `kvcli demo` fits the default method in less time."""

FIT_NAMES = {"train-codebook": "commvq", "fit-subspace": "squat"}
"""Other names of `kvcli fit` to the method that they fit by default; its settings are options of the command."""


def get_method(name: str) -> Method:
    """One method's record; UsageError: no such method (the message lists those that exist)."""
    check_method_name(name)
    method: Method = resolve_name(METHODS[name].split(",")[0])
    return method


get_suite = resolve_name
"""Imports a suite of `EVAL_SUITES` or `BENCH_SUITES`."""


def get_config(name: str) -> type[CacheConfig]:
    """The class of a method's settings; imports torch only where the registry names the method's record alone.

    UsageError: no such method.
    """
    check_method_name(name)
    _, _, path = METHODS[name].partition(", ")
    config: type[CacheConfig] = resolve_name(path) if path else get_method(name).config_cls
    return config


def check_method_name(name: str, bits: str = "") -> None:
    """Checks that there is a method; one that is suggested has the same bits, such as `-2`, else its default ones.

    UsageError: no such method; the message suggests the closest one, else lists all.
    """
    if name in METHODS:
        return
    texts = (name, name.partition("-")[0])
    close = [x for text in texts for x in difflib.get_close_matches(text, METHODS, n=1, cutoff=0.65)]
    hint = f"did you mean '{close[0] + bits if bits else method_name(close[0], {})}'?" if close else ""
    raise UsageError(f"unknown method '{name}{bits}'; {hint or 'choose one of ' + ', '.join(METHODS)}")


def parse_name(text: str) -> tuple[str, dict[str, Any]]:
    """The name of a method such as `kivi`, `kivi-2`, `kivi-k4v2` or `commvq-1.5`, and the settings of its bits.

    Imports no torch.

    UsageError: no such method, or one that takes no bits; ConfigError: bits that it does not take.
    """
    name, dash, bits = text.rpartition("-")
    apart = re.fullmatch(r"k(\d+)v(\d+)", bits)
    if text in METHODS or not dash or not (apart or re.fullmatch(r"\d+(\.\d+)?", bits)):
        check_method_name(text)
        return text, {}
    check_method_name(name, dash + bits)
    config = get_config(name)
    if not config.bit_settings():
        raise UsageError(f"method '{name}' takes no bits; say --method {name}")
    if apart and len(config.bit_settings()) == 1:
        raise UsageError(f"method '{name}' takes one number of bits for keys and values, like {method_name(name, {})}")
    numbers = map(int, apart.groups()) if apart else [int(bits) if bits.isdigit() else float(bits)] * 2
    settings = dict(zip(config.bit_settings(), numbers, strict=False))
    try:
        config(**settings)
    except ValidationError as error:
        *others, last = [f"{name}-{x}" for x in get_args(config.model_fields[next(iter(settings))].annotation)] or [""]
        names = f"; choose {', '.join(others)}{' or ' if others else ''}{last}" if last else ""
        raise ConfigError(f"{text}: {explain(error, config.model_fields)}{names}") from error
    return name, settings


def make_config(name: str, settings: Mapping[str, Any]) -> CacheConfig:
    """The settings of a method without bits, from plain values; the model's shapes are not known.

    UsageError: no such method; ConfigError: a setting that does not exist or is out of range.
    """
    config = get_config(name)
    try:
        return config(**settings)
    except ValidationError as error:
        raise ConfigError(f"{name}: {explain(error, config.model_fields)}") from error


def parse_method(text: str) -> tuple[Method, dict[str, Any]]:
    """The record of a method with optional bits, and the settings of the bits; errors are those of `parse_name`."""
    name, settings = parse_name(text)
    return get_method(name), settings


def method_name(name: str, settings: Mapping[str, Any]) -> str:
    """A method with its bits, as `--method` takes it and records name it: `kivi-2`, `kivi-k4v2`, `commvq-1.5`, `fp16`.

    Settings that are missing are those of the name, which may have bits, else defaults. A method that takes no bits, or
    whose layers have bits of their own, is named without.
    """
    name, from_bits = parse_name(name)
    fields = get_config(name).model_fields
    known = {setting: field.get_default() for setting, field in fields.items()} | from_bits | dict(settings)
    bits = [known[setting] for setting in get_config(name).bit_settings()]
    if not bits or any(isinstance(x, (list, tuple)) for x in bits):
        return name
    return f"{name}-{bits[0]:g}" if bits[0] == bits[-1] else f"{name}-k{bits[0]}v{bits[-1]}"
