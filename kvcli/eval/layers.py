"""Per-layer attribution: KL to the uncompressed model when one layer alone is compressed.

All other layers keep their keys and values in full precision, so a row says what one layer's codes cost. That is what
is needed to give layers bits of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kvcli.eval.case import Case
from kvcli.eval.quality import QualityReport, measure
from kvcli.models import LoadedModel


def measure_layer(
    loaded: LoadedModel,
    case: Case,
    layer: int | None,
    sequences: Tensor,
    states: Sequence[Tensor],
    *,
    chunk: int,
    batch_size: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> QualityReport:
    """Measures a method that compresses one layer, or all.

    Args:
        loaded: the model.
        case: the method.
        layer: index of the layer; None for all.
        sequences: int64 [num_sequences, seq_len].
        states: what `reference_states` gave for each batch.
        chunk: tokens fed at once.
        batch_size: sequences fed at once.
        advance: called with the number of tokens processed.

    Returns:
        The figures over all tokens; the memory is that of the mixed cache.
    """
    return measure(
        loaded.model,
        lambda: case.attach(loaded, None if layer is None else [layer]),
        sequences,
        list(states),
        chunk=chunk,
        batch_size=batch_size,
        advance=advance,
    )
