"""Measures the rows of a paper's table: KL divergence, flips and perplexity of methods with settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kvcli.attention.session import Session
from kvcli.eval.quality import measure
from kvcli.methods.per_layer import build_codecs
from kvcli.models.load import LoadedModel
from kvcli.registry import make_config
from research.paper_tables import Measurement, Row


@dataclass(frozen=True)
class TextInputs:
    """What quality is measured on.

    Attributes:
        loaded: the model.
        sequences: int64 [num_sequences, seq_len] token ids.
        states: what `reference_states` gave for each batch.
        batch_size: sequences fed at once.
        chunk: tokens fed at once.
    """

    loaded: LoadedModel
    sequences: Tensor
    states: Sequence[Tensor]
    batch_size: int
    chunk: int


def measured_rows(inputs: TextInputs, measurements: Sequence[Measurement]) -> Iterator[Row]:
    """The rows of a table, one after another; flips in percent."""
    for one in measurements:
        report = measure(
            inputs.loaded.model,
            partial(_attach, inputs.loaded, one),
            inputs.sequences,
            list(inputs.states),
            chunk=inputs.chunk,
            batch_size=inputs.batch_size,
        ).figures
        figures = {"kl": report["kl_mean"], "flips": 100 * report["flips"], "perplexity": report["perplexity"]}
        yield {**one.columns, **figures, "paper": one.paper}


def _attach(loaded: LoadedModel, one: Measurement) -> Session:
    """A session with a method that need not be in the registry."""
    config = make_config(one.method.name, dict(one.settings))
    codecs = [codec.to(loaded.model.device) for codec in build_codecs(one.method, loaded.spec, config)]
    return Session(loaded.model, loaded.spec, one.method, config, codecs, "auto")
