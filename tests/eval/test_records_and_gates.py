"""The schema of records, and the gates that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvcli.errors import UsageError
from kvcli.eval.drift import DriftPrompt, DriftRecord
from kvcli.eval.intervals import MIN_UNITS, check_baseline, check_limits, metrics_of
from kvcli.eval.kl import KLRecord, TokenBlock
from kvcli.eval.records import from_plain, read_rows
from kvcli.storage.atomic import append_record

FINGERPRINT = "00:003c003c"


def kl_record(values: list[float], label: str = "kivi-2", **changes: Any) -> KLRecord:
    blocks = [
        {"sequence": 0, "start": 256 * i, "tokens": 256, "predicted": 256, "kl": x, "flips": x / 2, "nll": 3.0 + x}
        for i, x in enumerate(values)
    ]
    units = [TokenBlock(**block, reference_nll=3.0) for block in blocks]
    fields = {
        "label": label,
        "model": "tiny",
        "fingerprint": FINGERPRINT,
        "method": label,
        "artifact": None,
        "protocol": "text",
        "options": {"seq_len": 2048},
        "metrics": metrics_of(KLRecord, units, None),
        "memory": None,
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "machine": {},
        "kl_mean": sum(values) / len(values),
        "kl_p99": max(values),
        "flips": sum(values) / len(values) / 2,
        "perplexity": 20.0,
        "reference_perplexity": 19.0,
        "num_tokens": 256 * len(values),
        "units": units,
    }
    return KLRecord(**{**fields, **changes})


def drift_record(equal: list[float]) -> DriftRecord:
    units = [
        DriftPrompt(prompt=i, prompt_tokens=8, tokens=10, first_divergence=5, agreed=5, equal=x)
        for i, x in enumerate(equal)
    ]
    shared = kl_record([0.1] * 8).model_dump()
    for name in (*KLRecord.model_fields.keys() - DriftRecord.model_fields.keys(), "suite", "unit", "units", "metrics"):
        del shared[name]
    return DriftRecord(**shared, units=units, metrics=metrics_of(DriftRecord, units, None))


NOISE = [0.1, 0.4, 0.2, 0.9, 0.3, 0.5, 0.2, 0.7, 0.6, 0.1, 0.3, 0.8]


def test_a_record_is_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    record = kl_record(NOISE)
    path = tmp_path / "rows.jsonl"
    append_record(path, record.to_plain())
    append_record(path, drift_record(NOISE).to_plain())
    assert read_rows(path) == [record, drift_record(NOISE)]
    (tmp_path / "rows.json").write_text(json.dumps({"suite": "kl", "rows": [record.to_plain()], "gates": []}))
    assert read_rows(tmp_path / "rows.json") == [record]
    infinite = kl_record(NOISE, perplexity=float("inf")).to_plain()
    assert infinite["perplexity"] is None
    assert from_plain(infinite).perplexity is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"suite": "speed"}, "suite"),
        ({"kl_mean": "much"}, "kl_mean"),
        ({"extra": 1}, "extra"),
        ({"schema_version": 2}, "schema_version"),
        ({"units": [{"sequence": 0}]}, "units.0"),
        ({"label": None}, "label"),
    ],
)
def test_what_is_no_record_is_refused_by_field(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    path = tmp_path / "rows.jsonl"
    plain = {**kl_record(NOISE).to_plain(), **change}
    path.write_text(json.dumps(plain))
    with pytest.raises(ValidationError):
        from_plain(plain)
    with pytest.raises(UsageError, match=rf"row 0 is no record of kvcli eval \(.*{named}"):
        read_rows(path)


def test_what_is_written_is_checked() -> None:
    broken = kl_record(NOISE).model_copy(update={"kl_mean": float("nan")})
    with pytest.raises(ValidationError, match="kl_mean"):
        broken.to_plain()


@pytest.mark.parametrize("text", ["", "[1, 2]", "no json\n", '{"rows": 3}', '{"rows": []}'])
def test_files_without_records_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"rows\.json"):
        read_rows(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_rows(tmp_path / "none.json")


def test_limits_are_compared_with_measured_means() -> None:
    record = kl_record(NOISE)
    mean = record.kl_mean
    for max_kld, max_flips, passed in (
        (mean, None, [True]),
        (0.99 * mean, None, [False]),
        (None, 50 * mean, [True]),
        (None, 49 * mean, [False]),
        (1.0, 1.0, [True, False]),
        (None, None, []),
    ):
        found = check_limits([record], max_kld, max_flips)
        assert [gate.passed for gate in found] == passed
        assert all(bool(gate.reason) != gate.passed for gate in found)


def worse(record: Any, former: Any) -> set[str]:
    return {gate.metric for gate in check_baseline([record], [former]) if not gate.passed}


def test_a_row_that_is_significantly_worse_misses_the_baseline() -> None:
    former = kl_record(NOISE)
    assert worse(former, former) == set()
    assert worse(kl_record([x + 0.05 for x in NOISE]), former) == {"kl_mean", "flips"}  # every block by as much
    assert worse(kl_record([1.1 * x for x in NOISE]), former) == {"kl_mean", "flips"}
    assert worse(kl_record([0.9 * x for x in NOISE]), former) == set()  # better
    assert worse(kl_record([1.005 * x for x in NOISE]), former) == set()  # negligible
    swapped = [x + (0.15 if i % 2 else -0.1) for i, x in enumerate(NOISE)]
    assert sum(swapped) > 1.05 * sum(NOISE)
    assert worse(kl_record(swapped), former) == set()  # worse, but not by more than blocks vary


def test_where_higher_is_better_a_lower_value_is_worse() -> None:
    former = drift_record(NOISE)
    assert worse(drift_record([0.8 * x for x in NOISE]), former) == {"equal"}
    assert worse(drift_record([1.2 * x for x in NOISE]), former) == set()


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (kl_record(NOISE, label="kivi-4"), "no row 'kivi-4' of suite kl; its rows are: kivi-2"),
        (drift_record(NOISE), "no row 'kivi-2' of suite drift"),
        (kl_record(NOISE, fingerprint="00:003c0040"), "another model"),
        (kl_record(NOISE, protocol="other", options={"seq_len": 1024}), "seq_len 2048 there, 1024 here"),
        (kl_record(NOISE[:8], protocol="other"), "not measured on the same text"),
        (kl_record(NOISE[: MIN_UNITS - 1]), "too few"),
    ],
)
def test_rows_that_cannot_be_compared_are_refused(record: Any, named: str) -> None:
    former = kl_record(NOISE[: MIN_UNITS - 1] if named == "too few" else NOISE)
    with pytest.raises(UsageError, match=named):
        check_baseline([record], [former])


def test_the_last_former_record_of_a_row_counts() -> None:
    first, last = kl_record([2 * x for x in NOISE]), kl_record(NOISE)
    assert worse(first, first) == set()
    assert {gate.metric for gate in check_baseline([first], [first, last]) if not gate.passed} == {"kl_mean", "flips"}


def test_a_difference_to_another_row_is_recorded_with_its_interval() -> None:
    other = kl_record(NOISE)
    units = kl_record([x + 0.1 + 0.01 * (i % 3) for i, x in enumerate(NOISE)], label="kivi-1").units
    found = metrics_of(KLRecord, units, other)["kl_mean"].difference
    assert found is not None
    assert found.to == "kivi-2"
    assert found.mean == pytest.approx(0.11)
    assert found.low < 0.11 < found.high  # type: ignore[operator]
    assert found.real
    assert metrics_of(KLRecord, other.units, None)["kl_mean"].difference is None
