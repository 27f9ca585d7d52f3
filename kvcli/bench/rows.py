"""What became of a row: one method's trouble is written into its row and is not the end of the others."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from kvcli.bench.budget import free, is_out_of_memory
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Status = Literal["ok", "mismatch", "out of memory", "refused", "failed"]
"""A mismatch with the reference and a failure are errors; the others are findings."""

ERRORS = ("mismatch", "failed")

RowT = TypeVar("RowT", bound="DataclassInstance")


def guarded(measure: Callable[[], RowT], empty: RowT) -> RowT:
    """A measured row, or the empty one with the status and the note that say what kept it from being measured."""
    try:
        return measure()
    except Exception as error:  # a kernel may fail in any way
        status, note = trouble(error)
    free()  # not inside the handler, where the error still holds the failed run's tensors
    return replace(empty, status=status, note=note)


def trouble(error: Exception) -> tuple[Status, str | None]:
    """An error as status and note; of one that nobody foresaw, the note names the place."""
    if isinstance(error, UsageError):
        return "refused", str(error)
    if is_out_of_memory(error):
        return "out of memory", None
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    line = " ".join(str(error).split())
    return "failed", f"{type(error).__name__}: {line}{where}"
