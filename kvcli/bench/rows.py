"""What the rows of all suites share; a failing method is recorded in its row and the run goes on."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from kvcli.bench.budget import is_out_of_memory, release_gpu_memory
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.bench.check import Agreement

Status = Literal["ok", "mismatch", "out of memory", "refused", "failed"]
"""A mismatch with the reference and a failure are errors; out of memory and refused are results."""


@dataclass(frozen=True)
class Row:
    """One line of a suite's table; figures are None unless the status is `ok`.

    Attributes:
        method: its name.
        context: tokens per sequence.
        batch: sequences.
        impl: attention that ran: sdpa, fused or reference.
        status: `ok`, or why there are no figures.
        note: what went wrong, or why it was not faster.
        out_error: |out - reference| / |reference| of one layer; None where the reference itself ran.
    """

    method: str
    context: int
    batch: int
    impl: str
    status: Status = "ok"
    note: str | None = None
    out_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values."""
        return asdict(self)

    def checked(self, agreement: Agreement | None) -> Self:
        """The row with those errors of its kernels that it has fields for, and its status; None: no kernel runs."""
        if agreement is None:
            return self
        row = replace(self, **{name: error for name, error in asdict(agreement).items() if hasattr(self, name)})
        return row if agreement.holds else replace(row, status="mismatch", note=agreement.describe())


RowT = TypeVar("RowT", bound=Row)


def run_row(measure: Callable[[], RowT], empty: RowT) -> RowT:
    """Measures a row.

    Args:
        measure: returns the row with its figures.
        empty: the row without figures.

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
