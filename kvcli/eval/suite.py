"""What all suites of `kvcli eval` share: which methods are measured on which text, records, differences and gates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from kvcli.artifact.choice import MethodChoice, choose
from kvcli.artifact.recipe import artifact_sha256
from kvcli.calibrate.builtin_text import is_builtin
from kvcli.commands.options import DEVICES_HELP, IMPL_HELP, Devices, Impl, ModelOptions, parse_settings
from kvcli.commands.paths import is_artifact_of, newest_artifact
from kvcli.commands.suite import Records, Run, Suite, SuiteOptions, Summary
from kvcli.errors import ArtifactError, KvcliError, QualityGateError, UsageError
from kvcli.eval.records import UNCOMPRESSED, EvalRecord, Unit, check_labels, read_rows, record_type, verdict
from kvcli.models.hub import check_model_name
from kvcli.progress import Reporter
from kvcli.registry import BASELINE, DEFAULT_METHOD, METHODS, get_config, parse_name
from kvcli.storage.manifest import json_sha256

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.attention.session import Session
    from kvcli.cache.compressed import MemoryReport
    from kvcli.calibrate.corpus import CorpusConfig
    from kvcli.models.load import LoadedModel

NewCache = Callable[[], Any]
"""Makes an empty cache, to be passed to the model."""

_MAX_DOCUMENTS = 1024
"""Documents that prompts are made from."""


class EvalOptions(SuiteOptions):
    """Options of every suite."""

    other_panel: ClassVar[str] = "Options"

    method: list[str] = Field(
        [],
        description=f"method to measure, such as {DEFAULT_METHOD}-2; repeatable; default: {BASELINE} and fitted "
        "methods that have an artifact",
    )
    setting: list[str] = Field([], description="setting of every method that has it, NAME=VALUE; repeatable")
    artifact: list[Path] = Field([], description="artifact to measure, with its own method; repeatable")
    recipe: list[Path] = Field([], description="recipe to measure, with its own settings; repeatable")
    sink_length: int = Field(4, ge=0, description="first tokens in full precision")
    residual_length: int = Field(32, ge=0, description="last tokens in full precision")
    impl: Impl = Field("auto", description=IMPL_HELP)
    devices: Devices | None = Field(None, description=DEVICES_HELP)
    baseline: Path | None = Field(
        None, description="records of an earlier run (--json or --out); exit code 3 if a row is significantly worse"
    )
    out: Path | None = Field(None, description="append one JSON record per row to this file")


class ComparedOptions(EvalOptions):
    """And of suites whose rows are compared with one of them."""

    compare_with: str | None = Field(
        None,
        description="row that the others are compared with, by its name in the table; default: the uncompressed model "
        "where it is a row, else the first method that compresses",
    )


class TextOptions(ModelOptions):
    """Options of what reads text; `length` is the option that says how long sequences of it are."""

    length: ClassVar[str] = "seq_len"

    corpus: str = Field(
        "builtin:docs",
        description="held-out text: file, folder, hub name, '-', 'builtin', a mixture of domains, or 'builtin:DOMAIN'",
    )
    corpus_name: str | None = Field(None, description="configuration of a hub dataset")
    corpus_split: str | None = Field(None, description="split; default: heldout for built-in text, else train")
    revision: str | None = Field(None, description="revision of a hub dataset")
    text_column: str = Field("text", description="column that holds the text")
    skip_bad_rows: bool = Field(False, description="leave out rows without text, and say how many")

    def corpus_config(self) -> CorpusConfig:
        from kvcli.calibrate.corpus import CorpusConfig

        split = self.corpus_split or ("heldout" if is_builtin(self.corpus) else "train")
        return CorpusConfig(self.corpus, split, self.corpus_name, self.revision, self.text_column, self.seed)

    def check_text(self) -> None:
        """Raises CorpusError, before torch is imported, for a corpus that is not there or that is too short."""
        from kvcli.calibrate.corpus import check_source

        shared = getattr(self, "devices", None) is not None
        check_source(self.corpus_config(), getattr(self, self.length, 0), self.length, shared=shared)

    def texts(self, reporter: Reporter) -> Iterator[str]:
        """The documents of the corpus in its seeded order."""
        from kvcli.calibrate.corpus import documents

        return documents(self.corpus_config(), skipping=reporter.warn if self.skip_bad_rows else None)

    def warn_of_fits(self, cases: Iterable[Case], reporter: Reporter) -> None:
        """Says which cases were fitted to text of this corpus."""
        for case in cases:
            record = case.choice.fitted.metadata["provenance"].get("corpus", {}) if case.choice.fitted else {}
            if self.corpus_config().shares_text(record):
                reporter.warn(f"warning: {case.label} was fitted to text of this corpus, and may lose more on others")

    def documents(self, reporter: Reporter) -> list[str]:
        """The first documents of the corpus in its seeded order; a dataset on a hub has no end worth waiting for."""
        return list(islice(self.texts(reporter), _MAX_DOCUMENTS))

    def sequences(self, loaded: LoadedModel, count: int, length: int, reporter: Reporter) -> Tensor:
        """Token sequences of the corpus, int64 [count or fewer, length]."""
        from kvcli.calibrate.corpus import token_sequences

        sequences = token_sequences(self.texts(reporter), loaded.tokenizer, count, length, self.length)
        loaded.check_length(length, reporter.warn)
        if len(sequences) < count:
            reporter.say(f"the corpus fills {len(sequences)} of {count} sequences")
        return sequences


class CorpusOptions(EvalOptions, TextOptions):
    """And of suites that read text."""

    def check(self) -> None:
        self.check_text()


@dataclass(frozen=True)
class Case:
    """What is measured: a method; or, not `compressed`, the model with transformers' own cache."""

    label: str  # the name of the row
    choice: MethodChoice
    impl: str = "auto"  # as in `kvcli.attach`
    compressed: bool = True

    def attach(
        self,
        loaded: LoadedModel,
        reporter: Reporter,
        layers: Collection[int] | None = None,
        batch: int = 1,
        chunk: int | None = None,
    ) -> Session:
        """Attaches the method to some layers of a model, or to all, and compiles its kernels; see `kvcli.attach`."""
        from kvcli.attention.attach import attach

        session = attach(loaded, self.choice, impl=self.impl, layers=layers)
        session.warmup(batch, reporter.progress, chunk)
        return session

    def attached(self, loaded: LoadedModel, reporter: Reporter) -> AbstractContextManager[Session | None]:
        """`attach`, inside a block; the model as it is has no session."""
        return self.attach(loaded, reporter) if self.compressed else nullcontext()


REFERENCE = Case(UNCOMPRESSED, MethodChoice(BASELINE), compressed=False)
"""The model itself."""


@dataclass(frozen=True)
class Measured:
    """One row."""

    case: Case
    units: Sequence[Any]  # what is resampled
    memory: MemoryReport | None  # None for the uncompressed model
    fields: dict[str, Any] = field(default_factory=dict)  # those that only the suite's record has
    label: str = ""  # default: the case's


@dataclass(frozen=True)
class Prepared:
    """Rows, measured while they are iterated over; those of the same protocol can be compared unit by unit."""

    protocol: dict[str, Any]
    rows: Iterator[Measured]


class EvalRun(Run):
    """A run of a suite of `kvcli eval`."""

    def __init__(self, suite: EvalSuite, options: EvalOptions) -> None:
        check_model_name(options.model)
        super().__init__(suite, options)
        self.out, self._records = options.out, list[EvalRecord]()
        self._former = None if options.baseline is None else read_rows(options.baseline)
        cases = [REFERENCE] * suite.with_reference + choose_cases(options)
        labels = [case.label for case in cases]
        self._compared: str | None = getattr(options, "compare_with", None)
        if self._compared not in (None, *labels):
            raise UsageError(f"--compare-with {self._compared}: the rows are {', '.join(labels)}")
        self._cases = sorted(cases, key=lambda case: (case.compressed, case.label != self._compared))
        if suite.rows_per_method:
            return
        if self._compared is None and len(cases) > 1:
            others = (case.label for case in cases if not (case.choice.is_baseline and case.compressed))
            self._compared = next(others, None)
        if self._former is not None:
            check_labels(suite.name, labels, self._former)

    def records(self, reporter: Reporter) -> Iterator[dict[str, Any]]:
        """Measures rows, one after another; they have differences to the row compared with if that came before."""
        import torch

        from kvcli.commands.machine import environment_info
        from kvcli.eval.intervals import metrics_of

        options, suite = self.options, self.suite
        loaded = options.load(reporter)
        for case in self._cases:  # before anything is measured
            case.choice.check_model(loaded.spec, loaded.fingerprint)
        if isinstance(options, TextOptions):
            options.warn_of_fits(self._cases, reporter)
        loaded.check_length(max(getattr(options, "contexts", [0])), reporter.warn)
        with torch.no_grad():
            prepared = suite.prepare(options, loaded, self._cases, reporter)
        shared = {
            "model": options.model,
            "fingerprint": loaded.fingerprint,
            "protocol": json_sha256({"suite": suite.name, **prepared.protocol}),
            "options": options.model_dump(mode="json"),
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "device": str(loaded.model.device),
            "threads": torch.get_num_threads(),
            "machine": environment_info(),
        }

        @torch.no_grad()
        def rows() -> Iterator[Measured]:
            yield from prepared.rows

        for measured in rows():
            case = measured.case
            other = next((record for record in self._records if record.label == self._compared), None)
            record = record_type(suite.record, suite.unit)(
                suite=suite.name,
                label=measured.label or case.label,
                method=case.choice.label,
                artifact=(folder := case.choice.folder) and str(folder),
                artifact_sha256=folder and artifact_sha256(folder),
                metrics=metrics_of(measured.units, other, options.seed),
                memory=None if measured.memory is None else measured.memory.to_dict(),
                unit=suite.unit.kind,
                units=list(measured.units),
                **shared,
                **measured.fields,
            )
            self._records.append(record)
            yield record.to_plain()

    def summary(self, records: Records) -> Summary:
        from kvcli.eval.intervals import check_baseline, check_limits

        failure: KvcliError | None = None
        limits = [getattr(self.options, name, None) for name in ("max_kld", "max_flips")]
        gates = check_limits(self._records, *limits) if any(x is not None for x in limits) else []
        try:
            gates += [] if self._former is None else check_baseline(self._records, self._former, self.options.seed)
        except UsageError as error:
            failure = error
        if missed := "; ".join(gate.reason for gate in gates if not gate.passed):
            failure = failure or QualityGateError(f"quality gate missed: {missed}")
        said = verdict(records)
        return Summary({"gates": [asdict(gate) for gate in gates]}, [said] if said else [], failure)


@dataclass(frozen=True, kw_only=True)
class EvalSuite(Suite):
    """A suite of `kvcli eval`."""

    run = EvalRun

    unit: type[Unit]
    record: type[EvalRecord] = EvalRecord
    prepare: Callable[[Any, LoadedModel, Sequence[Case], Reporter], Prepared]
    with_reference: bool = False  # whether the uncompressed model is the first of the cases
    rows_per_method: bool = False  # whether a method has several rows, which are not compared with other methods'


def choose_cases(options: EvalOptions) -> list[Case]:
    """Methods with their artifacts, then recipes, in the order of the table; artifacts are read.

    A fitted method of --method is measured with its artifacts of --artifact, else with the newest one.

    KvcliError: a method, a setting, an artifact or a recipe that cannot be used.
    """
    window = {"sink_length": options.sink_length, "residual_length": options.residual_length}
    fitted = [] if options.artifact or options.recipe else [x for x in METHODS if get_config(x).needs_artifact]
    chosen, cases = list[MethodChoice](), list[Case]()
    for text in options.method or [BASELINE, *fitted]:
        name, from_bits = parse_name(text)
        if not get_config(name).needs_artifact:
            chosen.append(MethodChoice(text, window))
        elif not any(is_artifact_of(folder, name, from_bits) for folder in options.artifact):
            with nullcontext() if options.method else suppress(ArtifactError):
                chosen.append(MethodChoice(text, window, newest_artifact(options.model, text)))
    chosen += [MethodChoice.of(artifact=folder, settings=window) for folder in options.artifact]
    chosen = choose(chosen, parse_settings(options.setting))
    tuned = [Case(path.stem, MethodChoice.of(recipe=path), options.impl) for path in options.recipe]
    from kvcli.methods.method import sliding_window  # imports torch

    for choice in chosen:  # tokens leave the window one by one where the method has no schedule of its own
        one_by_one = {"flush_block": 1} if choice.record.schedules is sliding_window else {}
        label = choice.method if choice.folder is None else choice.folder.name
        cases.append(Case(label, replace(choice, settings={**one_by_one, **choice.settings}), options.impl))
    for case in (cases := cases + tuned):
        _ = case.choice.fitted
    return cases
