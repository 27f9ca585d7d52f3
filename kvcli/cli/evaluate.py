"""`kvcli eval`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvcli.cli.command import command
from kvcli.cli.eval_options import EvalOptions, check
from kvcli.cli.eval_suites import Measured, open_suite
from kvcli.cli.eval_tables import quality_table, table_of
from kvcli.cli.next_command import last_method
from kvcli.cli.output import Output
from kvcli.cli.paths import newest_artifact
from kvcli.cli.values import parse_settings
from kvcli.errors import ArtifactError, ConfigError, QualityGateError, UsageError
from kvcli.registry import BASELINE, DEFAULT_METHOD, METHODS, get_method, method_name, parse_method

if TYPE_CHECKING:
    from kvcli.eval.case import Case
    from kvcli.eval.gates import GateResult
    from kvcli.eval.records import Record
    from kvcli.methods.method import Method
    from kvcli.models import LoadedModel

__all__ = ["EvalOptions", "choose_cases", "quality_table", "register", "run"]

_WITH_REFERENCE = ("needle", "recall", "tasks")
"""Suites whose first row is the uncompressed model."""


def run(options: EvalOptions, output: Output) -> None:
    """Measure quality through the real cache, next to the uncompressed model; --suite says what is measured."""
    from kvcli.eval.gates import check_labels
    from kvcli.eval.records import read_rows, to_plain
    from kvcli.machine import environment_info
    from kvcli.storage.records import append_record

    check(options)
    cases = make_cases(options)
    compared = compared_label(options, cases)
    former = None if options.baseline is None else read_rows(options.baseline)
    if former is not None and options.suite != "layers":
        check_labels(options.suite, [case.label for case in cases], former)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.open("a").close()  # fails before the measurement, not after it
    loaded = options.load(output)
    suite = open_suite(options, loaded, cases, output)
    environment = environment_info()
    records: list[Record] = []
    plain: list[dict[str, Any]] = []
    gates: list[GateResult] = []
    try:
        for measured in suite.rows:
            records.append(make_record(options, loaded, suite.protocol, measured, records, compared, environment))
            plain.append(to_plain(records[-1]))
            if options.out is not None:
                append_record(options.out, plain[-1])
        gates = check_gates(options, records, former)
    finally:  # what was measured is shown, also when the next method fails or the disk is full
        if plain:
            shown = {"suite": options.suite, "rows": plain, "gates": [gate.to_dict() for gate in gates]}
            output.result(shown, table_of(plain, options), ["kvcli", "bench", "--method", last_method(plain)])
    if missed := [gate.reason for gate in gates if not gate.passed]:
        raise QualityGateError(f"quality gate missed: {'; '.join(missed)}")


def make_cases(options: EvalOptions) -> list[Case]:
    """The methods with their artifacts and settings; settings that cannot be used are refused here, not after a row.

    Raises:
        UsageError: no such method.
        ArtifactError: an artifact that is missing.
        ConfigError: a setting that no method has, or a value out of range.
    """
    from kvcli.attention.attach import make_config
    from kvcli.eval.case import Case

    given, cases, unknown = parse_settings(options.setting), [], set(parse_settings(options.setting))
    for name, artifact in choose_cases(options):
        method, from_bits = parse_method(name)
        unknown -= method.config_cls.model_fields.keys()
        settings = {**window_of(method, options)}
        settings.update((key, value) for key, value in given.items() if key in method.config_cls.model_fields)
        if artifact is None:
            make_config(method, {**from_bits, **settings})
        cases.append(Case(name if artifact is None else artifact.name, name, artifact, settings, options.impl))
    if unknown:
        raise ConfigError(f"none of the methods has a setting '{min(unknown)}'")
    return cases


def window_of(method: Method, options: EvalOptions) -> dict[str, Any]:
    """The same window for all methods; tokens leave it one by one where the method has no schedule of its own."""
    from kvcli.methods.schedule import sliding_window

    one_by_one = {"flush_block": 1} if method.schedules is sliding_window else {}
    return {"sink_length": options.sink_length, "residual_length": options.residual_length, **one_by_one}


def make_record(
    options: EvalOptions,
    loaded: LoadedModel,
    protocol: dict[str, Any],
    measured: Measured,
    before: Sequence[Record],
    compared: str | None,
    environment: dict[str, Any],
) -> Record:
    """The record of a row, with differences to the row compared with if that was measured before.

    Args:
        options: of the command.
        loaded: the model.
        protocol: what was asked.
        measured: the row.
        before: the records so far, in order.
        compared: its label.
        environment: machine and versions.
    """
    import torch

    from kvcli.artifact.metadata import METADATA, Metadata
    from kvcli.eval.metrics import metrics_of
    from kvcli.eval.records import record_class
    from kvcli.storage.manifest import json_sha256

    other = next((record for record in before if record.label == compared), None)
    case, memory = measured.case, measured.memory
    config = case.settings if case.artifact is None else Metadata.read(case.artifact / METADATA).config
    return record_class(options.suite)(
        label=measured.label,
        model=options.model,
        fingerprint=loaded.fingerprint,
        method=method_name(case.method, config),
        artifact=None if case.artifact is None else str(case.artifact),
        protocol=json_sha256({"suite": options.suite, **protocol}),
        options=options.model_dump(mode="json"),
        metrics=metrics_of(measured.units, other, options.seed),
        memory=None if memory is None else memory.to_dict(),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        device=str(loaded.model.device),
        threads=torch.get_num_threads(),
        machine=environment,
        units=list(measured.units),
        **measured.fields,
    )


def compared_label(options: EvalOptions, cases: list[Case]) -> str | None:
    """The label of the row that others are compared with; one that is named is measured first.

    Raises:
        UsageError: no such row.
    """
    from kvcli.eval.case import UNCOMPRESSED

    labels = [case.label for case in cases]
    if options.suite == "layers":
        if options.compare_with is not None:
            raise UsageError("--compare-with does not go with --suite layers")
        return None
    if options.compare_with is None:
        if options.suite in _WITH_REFERENCE:
            return UNCOMPRESSED
        chosen = next((case for case in cases if case.method != BASELINE), None)
    else:
        if options.compare_with == UNCOMPRESSED and options.suite in _WITH_REFERENCE:
            return UNCOMPRESSED
        chosen = next((case for case in cases if case.label == options.compare_with), None)
        if chosen is None:
            raise UsageError(f"--compare-with {options.compare_with}: the rows are {', '.join(labels)}")
        cases.sort(key=lambda case: case is not chosen)
    return None if chosen is None or len(cases) < 2 else chosen.label


def check_gates(options: EvalOptions, records: Sequence[Record], former: Sequence[Record] | None) -> list[GateResult]:
    """Compares the rows with limits and with a former record."""
    from kvcli.eval.gates import check_baseline, check_limits

    results = check_limits(records, options.max_kld, options.max_flips)
    return results if former is None else [*results, *check_baseline(records, former, options.seed)]


def choose_cases(options: EvalOptions) -> list[tuple[str, Path | None]]:
    """Methods with their artifacts, in the order of the table.

    A fitted method asked for by name is measured with the artifacts given for it, else with the newest one.

    Raises:
        UsageError: a method that does not exist.
        ArtifactError: an artifact that is missing.
    """
    from kvcli.artifact import Artifact

    artifacts = [(Artifact.load(folder), folder) for folder in options.artifact]
    cases: list[tuple[str, Path | None]] = []
    for name in options.method or [BASELINE]:
        method, from_bits = parse_method(name)
        if not method.needs_artifact:
            cases.append((name, None))
        elif not any(
            artifact.method == method.name and from_bits.items() <= artifact.metadata["config"].items()
            for artifact, _ in artifacts
        ):
            cases.append((name, newest_artifact(options.model, name)))
    if not options.method and not artifacts:
        for name in METHODS:
            if get_method(name).needs_artifact:
                with suppress(ArtifactError):
                    cases.append((name, newest_artifact(options.model, name)))
    return cases + [(artifact.method, folder) for artifact, folder in artifacts]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    artifact = f"runs/smollm2-135m/{DEFAULT_METHOD}-2bit"
    example = f"kvcli eval --method {BASELINE} --artifact {artifact} --num-sequences 4"
    memory = "lower --batch-size, --chunk, --seq-len or --num-sequences"
    command(app, "eval", EvalOptions, example, ("model",), saves_memory=memory)(run)
