"""Per-row error handling: a failing method is recorded in its row and the run goes on."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from kvcli.bench.budget import is_out_of_memory, release_gpu_memory
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Status = Literal["ok", "mismatch", "out of memory", "refused", "failed"]
"""A mismatch with the reference and a failure are errors; out of memory and refused are results."""

ERRORS = ("mismatch", "failed")

RowT = TypeVar("RowT", bound="DataclassInstance")


def run_row(measure: Callable[[], RowT], empty: RowT) -> RowT:
    """Measures a row.

    Args:
        measure: returns the row with its figures.
        empty: the row without figures, with fields `status` and `note`.

    Returns:
        The measured row, or after an error the empty one with status and note.
    """
    try:
        return measure()
    except Exception as error:  # a kernel may fail in any way
        status, note = classify_error(error)
    release_gpu_memory()  # outside the handler: there the error still holds the failed run's tensors
    return replace(empty, status=status, note=note)


def classify_error(error: Exception) -> tuple[Status, str | None]:
    """Status and note of an error; the note of an unexpected one names file and line."""
    if isinstance(error, UsageError):
        return "refused", str(error)
    if is_out_of_memory(error):
        return "out of memory", None
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    line = " ".join(str(error).split())
    return "failed", f"{type(error).__name__}: {line}{where}"
