"""The record of a compression method: what it is called, how its codecs are built and fitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.samples import LayerFisher, LayerSamples
from kvcli.spec import ModelSpec


@dataclass(frozen=True)
class Schedule:
    """When tokens are encoded: once `block` or more exceed the last `keep`, in multiples of `multiple_of`."""

    keep: int
    block: int
    multiple_of: int = 1

    @property
    def longest(self) -> int:
        """Tokens that are not encoded (without sinks), at most, where each forward pass brings one."""
        return self.keep + max(self.block, self.multiple_of)

    def encoded_now(self, num_tokens: int) -> int:
        """The number of tokens to encode now, the oldest of `num_tokens` that are not encoded (without sinks)."""
        surplus = num_tokens - self.keep
        return 0 if surplus < self.block else surplus - surplus % self.multiple_of


def sliding_window(config: CacheConfig) -> tuple[Schedule, Schedule]:
    """The same schedule for keys and values: encoding `flush_block` tokens at once is cheaper than one per step."""
    schedule = Schedule(config.residual_length, config.flush_block or max(1, config.residual_length // 4))
    return schedule, schedule


@dataclass(frozen=True)
class FitReport:
    """The measurements of fitting one layer.

    Attributes:
        metrics: plain numbers for the artifact's metadata, by name.
        warnings: what is wrong with the fit, a sentence each that names keys or values and the head; empty if nothing.
    """

    metrics: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


Allocate = Callable[[ModelSpec, Any, Sequence[LayerFisher] | None, Callable[[int], LayerSamples]], Any]
"""Settings for fitting, from settings, what errors of each layer cost (None: not recorded), and what gives the training
samples of a layer by its index.
"""

FitLayer = Callable[[Any, LayerSamples, LayerSamples, Any, torch.Generator], FitReport]
"""Fits a layer's `LayerCodec` in place from training and held-out samples, a method config and a seeded generator."""


def mean_bits(spec: ModelSpec, config: CacheConfig) -> tuple[float, float]:
    """Bits per key and per value, the means of all layers."""
    return fmean(config.widths("k_bits", spec.num_layers)), fmean(config.widths("v_bits", spec.num_layers))


@dataclass(frozen=True)
class Method:
    """One compression method.

    Attributes:
        bits: bits it can be asked for, as shown to users.
        paper: title and year, or "-".
        arxiv: arXiv id of the paper, or "".
        build: makes the unfitted codec of a layer from the model's shapes, settings with the bits of that layer (others
            call `per_layer.make_codec`), and its index.
        nominal_bits: the paper's bits per value for K and V, without scales.
        paper_settings: the papers' configurations, settings by name with bits such as `kivi-2`.
        allocate: resolves settings before layers are fitted.
        fit_metrics: what `fit` measures, by name in `FitReport.metrics` (a list with one number per head or one for
            all heads): a label for model cards and progress lines.
        attend_kernels: module with Triton attention over this method's codes, or None: blocks of codes are decoded and
            attended to by the window kernels. The module has `fused_attend` (an `AttendCodes`) and
            `unsupported(codec) -> str | None`, the reason why the kernels cannot read a layer's shapes, which is asked
            before `fused_attend` is called.
        example_settings: small settings for a head of 16 channels, for tests and examples.
        bench: names with bits, such as `kivi-2`, that `kvcli bench` measures by default.
    """

    name: str
    summary: str
    bits: str
    config_cls: type[CacheConfig]
    build: Callable[[ModelSpec, Any, int], LayerCodec[Any, Any]]
    nominal_bits: Callable[[ModelSpec, Any], tuple[float, float]] = mean_bits
    paper: str = "-"
    arxiv: str = ""
    paper_settings: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    schedules: Callable[[Any], tuple[Schedule, Schedule]] = sliding_window
    fit: FitLayer | None = None
    allocate: Allocate | None = None
    fit_metrics: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attend_kernels: str | None = None
    example_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bench: tuple[str, ...] = ()

    @property
    def needs_artifact(self) -> bool:
        """Whether nothing works without fitting."""
        return self.config_cls.needs_artifact
