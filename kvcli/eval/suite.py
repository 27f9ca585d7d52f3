"""What all suites of `kvcli eval` share: which methods are measured on which text, records, differences and gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from kvcli.errors import ArtifactError, ConfigError, KvcliError, QualityGateError, UsageError
from kvcli.eval.records import UNCOMPRESSED, EvalRecord, check_labels, read_rows
from kvcli.hub import check_model_name
from kvcli.options import IMPL_HELP, ModelOptions, parse_settings
from kvcli.paths import artifact_method, is_artifact_of, newest_artifact
from kvcli.progress import Reporter
from kvcli.registry import (
    BASELINE,
    DEFAULT_METHOD,
    METHODS,
    check_settings,
    get_config,
    get_method,
    method_name,
    parse_name,
)
from kvcli.suite import Records, Run, Suite, Summary
from kvcli.tables import DataTable

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.cache.memory import MemoryReport
    from kvcli.calibrate.corpus import CorpusConfig
    from kvcli.eval.case import Case
    from kvcli.models import LoadedModel

STAR = "*: the 95 % interval of the difference excludes 0"

_MAX_DOCUMENTS = 1024
"""Documents that prompts are made from."""


class EvalOptions(ModelOptions):
    """Options of every suite."""

    other_panel: ClassVar[str] = "Options"

    method: list[str] = Field(
        default=[],
        description=f"method to measure, such as {DEFAULT_METHOD}-2; repeatable; default: {BASELINE} and fitted "
        "methods that have an artifact",
    )
    setting: list[str] = Field(default=[], description="setting of every method that has it, NAME=VALUE; repeatable")
    artifact: list[Path] = Field(default=[], description="artifact to measure, with its own method; repeatable")
    sink_length: int = Field(default=4, ge=0, description="first tokens in full precision")
    residual_length: int = Field(default=32, ge=0, description="last tokens in full precision")
    impl: str = Field(default="auto", description=IMPL_HELP)
    baseline: Path | None = Field(
        default=None,
        description="records of an earlier run, from --json or --out; exit with code 3 if a row is significantly worse",
    )
    out: Path | None = Field(default=None, description="append one JSON record per row to this file")


class ComparedOptions(EvalOptions):
    """And of suites whose rows are compared with one of them."""

    compare_with: str | None = Field(
        default=None,
        description="row that the others are compared with, by its name in the table; default: the uncompressed model "
        "where it is a row, else the first method that compresses",
    )


class CorpusOptions(EvalOptions):
    """And of suites that read text."""

    corpus: str = Field(
        default="builtin:docs",
        description="held-out text: file, folder, hub name, '-', 'builtin', a mixture of domains, or 'builtin:DOMAIN'",
    )
    corpus_name: str | None = Field(default=None, description="configuration of a hub dataset")
    corpus_split: str | None = Field(default=None, description="split; default: heldout for built-in text, else train")
    revision: str | None = Field(default=None, description="revision of a hub dataset")
    text_column: str = Field(default="text", description="column that holds the text")

    def corpus_config(self) -> CorpusConfig:
        """The corpus."""
        from kvcli.calibrate.builtin_text import is_builtin
        from kvcli.calibrate.corpus import CorpusConfig

        split = self.corpus_split or ("heldout" if is_builtin(self.corpus) else "train")
        return CorpusConfig(self.corpus, split, self.corpus_name, self.revision, self.text_column, self.seed)

    def documents(self) -> list[str]:
        """The first documents of the corpus in its seeded order; a dataset on a hub has no end worth waiting for."""
        from kvcli.calibrate.corpus import documents

        return list(islice(documents(self.corpus_config()), _MAX_DOCUMENTS))

    def sequences(self, loaded: LoadedModel, count: int, length: int, reporter: Reporter) -> Tensor:
        """Token sequences of the corpus, int64 [count or fewer, length]."""
        from kvcli.calibrate.corpus import documents, token_sequences

        sequences = token_sequences(documents(self.corpus_config()), loaded.tokenizer, count, length)
        if len(sequences) < count:
            reporter.say(f"the corpus fills {len(sequences)} of {count} sequences")
        return sequences


@dataclass(frozen=True)
class Measured:
    """One row.

    Attributes:
        label: its name.
        case: what was measured.
        units: what is resampled.
        memory: of a cache; None for the uncompressed model.
        fields: fields that only the suite's record has.
    """

    label: str
    case: Case
    units: Sequence[Any]
    memory: MemoryReport | None
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A suite whose texts are made.

    Attributes:
        protocol: what was asked, plain JSON values: rows of the same one can be compared unit by unit.
        rows: measured while they are iterated over.
    """

    protocol: dict[str, Any]
    rows: Iterator[Measured]


@dataclass(frozen=True, kw_only=True)
class EvalSuite(Suite):
    """A suite of `kvcli eval`.

    Attributes:
        record: class of its records, with their figures.
        prepare: (options, model, cases, reporter) to the rows.
        tabulate: (records, options) to the table.
        with_reference: whether the first row is the uncompressed model.
        rows_per_method: whether a method has several rows, which are not compared with other methods'.
        check: checks options that only this suite has.
    """

    record: type[EvalRecord]
    prepare: Callable[[Any, LoadedModel, Sequence[Case], Reporter], Prepared]
    tabulate: Callable[[Records, Any], DataTable]
    with_reference: bool = False
    rows_per_method: bool = False
    check: Callable[[Any], None] = lambda options: None

    def open(self, options: Any) -> EvalRun:
        """A run; methods, settings, artifacts and the baseline are checked.

        Raises:
            ModelError: no such model.
            UsageError: no such method, or a baseline without a row.
            ArtifactError: an artifact that is missing.
            ConfigError: a setting that no method has, or a value out of range.
        """
        return EvalRun(self, options)


class EvalRun(Run):
    """A run of a suite of `kvcli eval`."""

    def __init__(self, suite: EvalSuite, options: EvalOptions) -> None:
        self.suite, self.options, self.out = suite, options, options.out
        check_model_name(options.model)
        suite.check(options)
        self._chosen = choose_cases(options)
        self._check_settings()
        labels = [name if artifact is None else artifact.name for name, artifact in self._chosen]
        self._compared = self._compared_label(labels)
        self._records: list[EvalRecord] = []
        self._former = None if options.baseline is None else read_rows(options.baseline)
        if self._former is not None and not suite.rows_per_method:
            check_labels(suite.name, labels, self._former)

    def records(self, reporter: Reporter) -> Iterator[dict[str, Any]]:
        """Measures rows, one after another."""
        from kvcli.machine import environment_info

        cases = self._cases()
        loaded = self.options.load(reporter)
        prepared, environment = self.suite.prepare(self.options, loaded, cases, reporter), environment_info()
        for measured in prepared.rows:
            self._records.append(self._record(loaded, prepared.protocol, measured, environment))
            yield self._records[-1].to_plain()

    def summary(self, records: Records) -> Summary:
        """The gates."""
        from kvcli.eval.gates import check_baseline, check_limits

        failure: KvcliError | None = None
        limits = [getattr(self.options, name, None) for name in ("max_kld", "max_flips")]
        gates = check_limits(self._records, *limits) if any(x is not None for x in limits) else []
        try:
            gates += [] if self._former is None else check_baseline(self._records, self._former, self.options.seed)
        except UsageError as error:
            failure = error
        if missed := "; ".join(gate.reason for gate in gates if not gate.passed):
            failure = failure or QualityGateError(f"quality gate missed: {missed}")
        return Summary({"gates": [gate.to_dict() for gate in gates]}, failure=failure)

    def table(self, records: Records) -> DataTable:
        """As the suite says."""
        return self.suite.tabulate(records, self.options)

    def _check_settings(self) -> None:
        """Raises ConfigError for settings that no method has, or that one cannot have."""
        given = parse_settings(self.options.setting)
        unknown = set(given)
        for name, artifact in self._chosen:
            method, from_bits = parse_name(name)
            fields = get_config(method).model_fields.keys()
            unknown -= fields
            if artifact is None:
                lengths = {"sink_length": self.options.sink_length, "residual_length": self.options.residual_length}
                check_settings(method, {**from_bits, **lengths, **{x: given[x] for x in given.keys() & fields}})
        if unknown:
            raise ConfigError(f"none of the methods has a setting '{min(unknown)}'")

    def _cases(self) -> list[Case]:
        """The methods with their artifacts and settings, the one that others are compared with first if it is named.

        All have the same window; tokens leave it one by one where the method has no schedule of its own.
        """
        from kvcli.eval.case import Case
        from kvcli.methods.method import sliding_window

        options, given, cases = self.options, parse_settings(self.options.setting), []
        for name, artifact in self._chosen:
            method = get_method(parse_name(name)[0])
            settings = {"sink_length": options.sink_length, "residual_length": options.residual_length}
            if method.schedules is sliding_window:
                settings["flush_block"] = 1
            settings.update((key, value) for key, value in given.items() if key in method.config_cls.model_fields)
            cases.append(Case(name if artifact is None else artifact.name, name, artifact, settings, options.impl))
        if getattr(options, "compare_with", None) is not None:
            cases.sort(key=lambda case: case.label != self._compared)
        return cases

    def _compared_label(self, labels: Sequence[str]) -> str | None:
        """The label of the row that others are compared with.

        Raises:
            UsageError: no such row.
        """
        named = getattr(self.options, "compare_with", None)
        if self.suite.with_reference and named in (None, UNCOMPRESSED):
            return UNCOMPRESSED
        if self.suite.rows_per_method:
            return None
        if named is not None and named not in labels:
            raise UsageError(f"--compare-with {named}: the rows are {', '.join(labels)}")
        compressing = (label for label, (name, _) in zip(labels, self._chosen, strict=True) if name != BASELINE)
        chosen = named or next(compressing, None)
        return chosen if len(labels) > 1 else None

    def _record(
        self, loaded: LoadedModel, protocol: dict[str, Any], measured: Measured, environment: dict[str, Any]
    ) -> EvalRecord:
        """The record of a row, with differences to the row compared with if that was measured before."""
        import torch

        from kvcli.artifact.metadata import METADATA, Metadata
        from kvcli.storage.manifest import json_sha256

        options, case = self.options, measured.case
        other = next((record for record in self._records if record.label == self._compared), None)
        config = case.settings if case.artifact is None else Metadata.read(case.artifact / METADATA).config
        return self.suite.record(
            label=measured.label,
            model=options.model,
            fingerprint=loaded.fingerprint,
            method=method_name(case.method, config),
            artifact=None if case.artifact is None else str(case.artifact),
            protocol=json_sha256({"suite": self.suite.name, **protocol}),
            options=options.model_dump(mode="json"),
            metrics=self.suite.record.metrics_of(measured.units, other, options.seed),
            memory=None if measured.memory is None else measured.memory.to_dict(),
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            device=str(loaded.model.device),
            threads=torch.get_num_threads(),
            machine=environment,
            units=list(measured.units),
            **measured.fields,
        )


def choose_cases(options: EvalOptions) -> list[tuple[str, Path | None]]:
    """Methods with their artifacts, in the order of the table.

    A fitted method asked for by name is measured with the artifacts given for it, else with the newest one.

    Raises:
        UsageError: a method that does not exist.
        ArtifactError: an artifact that is missing.
    """
    artifacts: list[tuple[str, Path | None]] = []
    for folder in options.artifact:
        method = artifact_method(folder)
        if method is None:  # loading says what is wrong with it
            from kvcli.artifact import Artifact

            method = Artifact.load(folder).method
        artifacts.append((method, folder))
    cases: list[tuple[str, Path | None]] = []
    for name in options.method or [BASELINE]:
        method, from_bits = parse_name(name)
        if not get_config(method).needs_artifact:
            cases.append((name, None))
        elif not any(is_artifact_of(folder / "kvcli.json", method, from_bits) for folder in options.artifact):
            cases.append((name, newest_artifact(options.model, name)))
    if not options.method and not artifacts:
        for name in METHODS:
            if get_config(name).needs_artifact:
                with suppress(ArtifactError):
                    cases.append((name, newest_artifact(options.model, name)))
    return cases + artifacts


def mean(units: Sequence[dict[str, Any]], name: str) -> float:
    """The mean of a field of units."""
    return float(sum(unit[name] for unit in units) / len(units))


def interval(record: Any, name: str, template: str, factor: float = 1) -> str:
    """The interval of a figure as text."""
    metric = record.get("metrics", {}).get(name)
    if metric is None or metric["low"] is None:
        return "-"
    return f"{template.format(factor * metric['low'])}-{template.format(factor * metric['high'])}"


def difference(record: Any, name: str, template: str, factor: float = 1) -> str:
    """The difference to the row compared with, with a star if it is real."""
    versus = record.get("metrics", {}).get(name, {}).get("difference")
    if versus is None or versus["mean"] is None:
        return "-"
    return template.format(factor * versus["mean"]) + ("*" if versus["real"] else " ")
