"""The records of `kvcli eval`: one schema for all suites, checked when a record is written and when it is read.

docs/records.md describes every field. This module does not know how anything is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvcli.errors import UsageError
from kvcli.storage.records import read_records, to_json


class Strict(BaseModel):
    """A part of a record: no field but its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Difference(Strict):
    """A figure minus the same figure of another row, over the same units."""

    to: str
    mean: float | None
    low: float | None
    high: float | None
    real: bool | None


class Metric(Strict):
    """A mean over units, with its 95 % confidence interval and its difference to another row."""

    mean: float | None
    low: float | None
    high: float | None
    better: Literal["lower", "higher"]
    difference: Difference | None = None


class TokenBlock(Strict):
    """Unit of `kl` and `layers`: consecutive tokens of a sequence, with means over them."""

    sequence: int
    start: int
    tokens: int
    predicted: int
    kl: float
    flips: float
    nll: float
    reference_nll: float


class NeedlePrompt(Strict):
    """Unit of `needle`: one value hidden in one text."""

    context: int
    depth: float
    prompt: int
    prompt_tokens: int
    exact: float
    prefix: float
    expected: str
    answer: str


class RecallPrompt(Strict):
    """Unit of `recall`: one passage to be quoted after other text."""

    distance: int
    prompt: int
    prompt_tokens: int
    words: int
    quoted: int
    exact: float
    expected: str
    answer: str


class DriftPrompt(Strict):
    """Unit of `drift`: one prompt continued greedily by both models."""

    prompt: int
    prompt_tokens: int
    tokens: int
    first_divergence: int | None
    agreed: int
    equal: float


class TaskDocument(Strict):
    """Unit of `tasks`: one document of one task."""

    task: str
    document: int
    metric: str
    better: Literal["lower", "higher"]
    value: float


class EvalRecord(Strict):
    """What every suite records of a row: a method with its settings, measured on some units."""

    schema_version: Literal[1] = 1
    label: str
    model: str
    fingerprint: str
    method: str
    artifact: str | None
    protocol: str
    options: dict[str, Any]
    metrics: dict[str, Metric]
    memory: dict[str, Any] | None
    dtype: str
    device: str
    threads: int
    machine: dict[str, Any]


class QualityRecord(EvalRecord):
    """What `kl` and `layers` record besides: figures over all tokens, as `QualityReport` has them."""

    kl_mean: float
    kl_p99: float
    flips: float
    perplexity: float | None
    reference_perplexity: float | None
    num_tokens: int
    unit: Literal["block of 256 tokens"] = "block of 256 tokens"
    units: list[TokenBlock]


class KLRecord(QualityRecord):
    """A row of `--suite kl`."""

    suite: Literal["kl"] = "kl"


class LayerRecord(QualityRecord):
    """A row of `--suite layers`: a method that compresses one layer alone, or all of them."""

    suite: Literal["layers"] = "layers"
    layer: int | None


class NeedleRecord(EvalRecord):
    """A row of `--suite needle`."""

    suite: Literal["needle"] = "needle"
    unit: Literal["prompt"] = "prompt"
    units: list[NeedlePrompt]


class RecallRecord(EvalRecord):
    """A row of `--suite recall`."""

    suite: Literal["recall"] = "recall"
    unit: Literal["prompt"] = "prompt"
    units: list[RecallPrompt]


class DriftRecord(EvalRecord):
    """A row of `--suite drift`."""

    suite: Literal["drift"] = "drift"
    unit: Literal["prompt"] = "prompt"
    units: list[DriftPrompt]


class TaskRecord(EvalRecord):
    """A row of `--suite tasks`."""

    suite: Literal["tasks"] = "tasks"
    unit: Literal["document"] = "document"
    versions: dict[str, Any]
    units: list[TaskDocument]


Record = KLRecord | LayerRecord | NeedleRecord | RecallRecord | DriftRecord | TaskRecord
"""A record of any suite."""

_CLASSES: dict[str, type[Any]] = {
    "kl": KLRecord,
    "layers": LayerRecord,
    "needle": NeedleRecord,
    "recall": RecallRecord,
    "drift": DriftRecord,
    "tasks": TaskRecord,
}
_ADAPTER: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="suite")])


def record_class(suite: str) -> type[Any]:
    """The class of a suite's records."""
    return _CLASSES[suite]


def to_plain(record: Record) -> dict[str, Any]:
    """A record as the plain JSON values that are written; checked by reading them again.

    Raises:
        ValidationError: a field that the schema does not have, or a value of another type.
    """
    plain: dict[str, Any] = json.loads(to_json(record.model_dump(mode="json")))
    _ADAPTER.validate_python(plain)
    return plain


def from_plain(values: Mapping[str, Any]) -> Record:
    """The record of plain JSON values.

    Raises:
        ValidationError: a field that is missing, unknown or of another type.
    """
    return _ADAPTER.validate_python(values)


def read_rows(path: Path) -> list[Record]:
    """The records of a file: lines that `--out` wrote, or the object that `--json` printed.

    Raises:
        UsageError: no such file, or none of its records has this schema; the message names the first fault.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from error
    try:
        whole = json.loads(text)
        found = whole.get("rows", [whole]) if isinstance(whole, dict) else []
    except ValueError:
        found = read_records(path)
    if not isinstance(found, list) or not found:
        raise UsageError(f"{path} holds no records of kvcli eval")
    rows = []
    for place, values in enumerate(found):
        try:
            rows.append(from_plain(values))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UsageError(f"{path}: row {place} is no record of kvcli eval ({where}: {first['msg']})") from error
    return rows
