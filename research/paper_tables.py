"""Tables and figures of the papers, made again on another model: what the papers ablate, in our own figures.

A table about coding errors fits one layer of a recording. A table about accuracy is a list of methods with settings, of
which KL divergence is measured instead of the papers' tasks, because a small model solves few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcli.methods.method import Method
from kvcli.methods.samples import LayerSamples
from kvcli.spec import ModelSpec

Row = dict[str, Any]
"""Figures of a row by column; `paper` is the paper's own figure, on its own model."""


@dataclass(frozen=True)
class LayerInputs:
    """What a table about coding errors is made from.

    Attributes:
        spec: the model's shapes.
        train: samples of one layer to fit on.
        heldout: samples of the same layer to measure on.
        seed: of fitting.
    """

    spec: ModelSpec
    train: LayerSamples
    heldout: LayerSamples
    seed: int


@dataclass(frozen=True)
class Measurement:
    """A row whose quality is to be measured.

    Attributes:
        columns: what tells it from other rows.
        method: the method.
        settings: of the method.
        paper: the paper's figure.
    """

    columns: Mapping[str, Any]
    method: Method
    settings: Mapping[str, Any]
    paper: Any


@dataclass(frozen=True)
class PaperTable:
    """One table or figure; it has either `errors` or `measurements`.

    Attributes:
        title: what it shows, and where it is in the paper.
        paper: what the paper's figures are.
        errors: makes rows from samples of one layer.
        measurements: rows to be measured, for a model's shapes.
    """

    title: str
    paper: str
    errors: Callable[[LayerInputs], Iterator[Row]] | None = None
    measurements: Callable[[ModelSpec], Sequence[Measurement]] | None = None
