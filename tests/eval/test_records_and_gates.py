"""The schema of records, and the gates that read them."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvcli.errors import UsageError
from kvcli.eval.drift import DriftPrompt
from kvcli.eval.intervals import MIN_UNITS, check_baseline, check_limits, metrics_of
from kvcli.eval.kl import QualityRecord, TokenBlock
from kvcli.eval.records import EvalRecord, from_plain, read_rows, record_type
from kvcli.storage.atomic import append_record

FINGERPRINT = "00:003c003c"


def kl_record(values: list[float], label: str = "kivi-2", **changes: Any) -> Any:
    shared = {"sequence": 0, "tokens": 256, "predicted": 256, "reference_nll": 3.0}
    units = [TokenBlock(**shared, start=256 * i, kl=x, flips=x / 2, nll=3.0 + x) for i, x in enumerate(values)]
    mean = sum(values) / len(values)
    fields = {
        **{"label": label, "method": label, "model": "tiny", "fingerprint": FINGERPRINT, "artifact": None},
        **{"protocol": "text", "options": {"seq_len": 2048}, "metrics": metrics_of(units, None)},
        **{"memory": None, "dtype": "float32", "device": "cpu", "threads": 1, "machine": {}, "units": units},
        **{"kl_mean": mean, "kl_p99": max(values), "flips": mean / 2, "num_tokens": 256 * len(values)},
        **{"perplexity": 20.0, "reference_perplexity": 19.0, "suite": "kl", "unit": TokenBlock.kind},
    }
    return record_type(QualityRecord, TokenBlock)(**{**fields, **changes})


def drift_record(equal: list[float]) -> EvalRecord:
    shared = {"prompt_tokens": 8, "tokens": 10, "first_divergence": 5, "agreed": 5}
    units = [DriftPrompt(prompt=i, **shared, equal=x) for i, x in enumerate(equal)]
    own = {"suite", "unit", "units", "metrics"}
    fields = kl_record([0.1] * 8).model_dump(include=EvalRecord.model_fields.keys() - own)
    of = {"suite": "drift", "unit": "prompt", "metrics": metrics_of(units, None)}
    return record_type(EvalRecord, DriftPrompt)(**fields, **of, units=units)


NOISE = [0.1, 0.4, 0.2, 0.9, 0.3, 0.5, 0.2, 0.7, 0.6, 0.1, 0.3, 0.8]


def test_a_record_is_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    records = [kl_record(NOISE), drift_record(NOISE)]
    for record in records:
        append_record(tmp_path / "rows.jsonl", record.to_plain())
    assert read_rows(tmp_path / "rows.jsonl") == records
    (tmp_path / "rows.json").write_text(json.dumps({"suite": "kl", "rows": [records[0].to_plain()], "gates": []}))
    assert read_rows(tmp_path / "rows.json") == records[:1]
    infinite = kl_record(NOISE, perplexity=float("inf")).to_plain()
    assert infinite["perplexity"] is from_plain(infinite).perplexity is None


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
    for limits, passed in (
        ((mean, None), [True]),
        ((0.99 * mean, None), [False]),
        ((None, 50 * mean), [True]),
        ((None, 49 * mean), [False]),
        ((1.0, 1.0), [True, False]),
        ((None, None), []),
    ):
        found = check_limits([record], *limits)
        assert [gate.passed for gate in found] == passed
        assert all(bool(gate.reason) != gate.passed for gate in found)


def worse(record: Any, *former: Any) -> set[str]:
    return {gate.metric for gate in check_baseline([record], [*former]) if not gate.passed}


SWAPPED = [x + (0.15 if i % 2 else -0.1) for i, x in enumerate(NOISE)]


@pytest.mark.parametrize(
    ("values", "missed"),
    [
        (NOISE, set()),
        ([x + 0.05 for x in NOISE], {"kl_mean", "flips"}),  # every block by as much
        ([1.1 * x for x in NOISE], {"kl_mean", "flips"}),
        ([0.9 * x for x in NOISE], set()),  # better
        ([1.005 * x for x in NOISE], set()),  # negligible
        (SWAPPED, set()),  # worse by more than 5 %, but not by more than blocks vary
    ],
)
def test_a_row_that_is_significantly_worse_misses_the_baseline(values: list[float], missed: set[str]) -> None:
    assert worse(kl_record(values), kl_record(NOISE)) == missed
    assert sum(SWAPPED) > 1.05 * sum(NOISE)


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
    assert worse(first, first, last) == {"kl_mean", "flips"}


def test_a_difference_to_another_row_is_recorded_with_its_interval() -> None:
    other = kl_record(NOISE)
    units = kl_record([x + 0.1 + 0.01 * (i % 3) for i, x in enumerate(NOISE)], label="kivi-1").units
    found = metrics_of(units, other)["kl_mean"].difference
    assert (found.to, found.mean, found.real) == ("kivi-2", pytest.approx(0.11), True)
    assert found.low < 0.11 < found.high
    assert metrics_of(other.units, None)["kl_mean"].difference is None


def test_a_figure_weighs_units_by_what_they_count() -> None:
    counts = {"sequence": 0, "start": 0, "flips": 0.0, "reference_nll": 3.0}
    blocks = [(256, 256, 0.1), (128, 64, 0.4)]
    units = [TokenBlock(**counts, tokens=tokens, predicted=x, kl=kl, nll=kl) for tokens, x, kl in blocks]
    found = metrics_of(units, None)
    assert found["kl_mean"].mean == pytest.approx((256 * 0.1 + 128 * 0.4) / 384)
    assert found["nll"].mean == pytest.approx((256 * 0.1 + 64 * 0.4) / 320)
