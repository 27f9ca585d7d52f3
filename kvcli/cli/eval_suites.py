"""The suites of `kvcli eval`: from options to rows. Each has what it measures in a file of `kvcli/eval/`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvcli.cli.eval_options import EvalOptions, num_prompts, parse_layers
from kvcli.cli.output import Output
from kvcli.registry import BASELINE

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.cache.memory import MemoryReport
    from kvcli.calibrate.corpus import CorpusConfig
    from kvcli.eval.case import Case
    from kvcli.models import LoadedModel

_MAX_DOCUMENTS = 1024
"""Documents that prompts are made from."""


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
class Suite:
    """A suite that is ready to be measured.

    Attributes:
        protocol: what was asked, plain JSON values: rows of the same one can be compared unit by unit.
        rows: measured while they are iterated over.
    """

    protocol: dict[str, Any]
    rows: Iterator[Measured]


def open_suite(options: EvalOptions, loaded: LoadedModel, cases: Sequence[Case], output: Output) -> Suite:
    """Prepares the texts of a suite, and the rows that are measured as they are asked for."""
    prepare = {
        "kl": _kl,
        "layers": _layers,
        "needle": _needle,
        "recall": _recall,
        "drift": _drift,
        "tasks": _tasks,
    }
    return prepare[options.suite](options, loaded, cases, output)


def corpus_of(options: EvalOptions) -> CorpusConfig:
    """The corpus that the options name."""
    from kvcli.calibrate.builtin_text import is_builtin
    from kvcli.calibrate.corpus import CorpusConfig

    split = options.corpus_split or ("heldout" if is_builtin(options.corpus) else "train")
    return CorpusConfig(options.corpus, split, options.corpus_name, options.revision, options.text_column, options.seed)


def _documents(options: EvalOptions) -> list[str]:
    """The first documents of the corpus in its seeded order; a dataset on a hub has no end worth waiting for."""
    from kvcli.calibrate.corpus import documents

    return list(islice(documents(corpus_of(options)), _MAX_DOCUMENTS))


def _sequences(options: EvalOptions, loaded: LoadedModel, output: Output, count: int, length: int) -> Tensor:
    """Token sequences of the corpus, [count or fewer, length]."""
    from kvcli.calibrate.corpus import documents, token_sequences

    sequences = token_sequences(documents(corpus_of(options)), loaded.tokenizer, count, length)
    if len(sequences) < count:
        output.say(f"the corpus fills {len(sequences)} of {count} sequences")
    return sequences


def _reference_states(options: EvalOptions, loaded: LoadedModel, sequences: Tensor, output: Output) -> list[Tensor]:
    from kvcli.eval.quality import reference_states

    states = []
    with output.progress("uncompressed", sequences.numel(), "tokens") as advance:
        for batch in sequences.split(options.batch_size):
            states.append(reference_states(loaded.model, batch.to(loaded.model.device)).cpu())
            advance(batch.numel())
    return states


def _kl(options: EvalOptions, loaded: LoadedModel, cases: Sequence[Case], output: Output) -> Suite:
    from kvcli.eval.quality import measure
    from kvcli.eval.records import TokenBlock

    sequences = _sequences(options, loaded, output, options.num_sequences, options.seq_len)
    states = _reference_states(options, loaded, sequences, output)

    def rows() -> Iterator[Measured]:
        for case in cases:
            with output.progress(case.label, sequences.numel(), "tokens") as advance:
                report = measure(
                    loaded.model,
                    partial(case.attach, loaded),
                    sequences,
                    states,
                    chunk=options.chunk,
                    batch_size=options.batch_size,
                    advance=advance,
                )
            units = [TokenBlock(**block) for block in report.scores.blocks()]
            fields = {name: value for name, value in report.to_dict().items() if name != "memory"}
            yield Measured(case.label, case, units, report.memory, fields)

    return Suite({"tokens": sequences.tolist(), "chunk": options.chunk}, rows())


def _layers(options: EvalOptions, loaded: LoadedModel, cases: Sequence[Case], output: Output) -> Suite:
    from kvcli.eval.layers import measure_layer
    from kvcli.eval.records import TokenBlock

    layers = parse_layers(options.layers, loaded.spec.num_layers)
    sequences = _sequences(options, loaded, output, options.num_sequences, options.seq_len)
    states = _reference_states(options, loaded, sequences, output)
    compressing = [case for case in cases if case.method != BASELINE] or list(cases)

    def rows() -> Iterator[Measured]:
        for case in compressing:
            with output.progress(case.label, sequences.numel() * (len(layers) + 1), "tokens") as advance:
                for layer in (None, *layers):
                    report = measure_layer(
                        loaded,
                        case,
                        layer,
                        sequences,
                        states,
                        chunk=options.chunk,
                        batch_size=options.batch_size,
                        advance=advance,
                    )
                    units = [TokenBlock(**block) for block in report.scores.blocks()]
                    fields = {name: value for name, value in report.to_dict().items() if name != "memory"}
                    label = f"{case.label} {'all layers' if layer is None else f'layer {layer}'}"
                    yield Measured(label, case, units, report.memory, {**fields, "layer": layer})

    return Suite({"tokens": sequences.tolist(), "chunk": options.chunk}, rows())


def _needle(options: EvalOptions, loaded: LoadedModel, cases: Sequence[Case], output: Output) -> Suite:
    from kvcli.eval.case import REFERENCE
    from kvcli.eval.needle import NeedleConfig, make_prompts, measure
    from kvcli.eval.prompts import uses_chat

    config = NeedleConfig(
        contexts=options.contexts or NeedleConfig.contexts,
        depths=options.depths or NeedleConfig.depths,
        num_prompts=num_prompts(options),
        chat=uses_chat(loaded, options.chat),
        seed=options.seed,
    )
    prompts = make_prompts(loaded, _documents(options), config)

    def rows() -> Iterator[Measured]:
        for case in (REFERENCE, *cases):
            with output.progress(case.label, len(prompts), "prompts") as advance:
                yield Measured(case.label, case, *measure(loaded, case, prompts, advance))

    return Suite({"prompts": prompts}, rows())


def _recall(options: EvalOptions, loaded: LoadedModel, cases: Sequence[Case], output: Output) -> Suite:
    from kvcli.eval.case import REFERENCE
    from kvcli.eval.prompts import uses_chat
    from kvcli.eval.recall import RecallConfig, make_prompts, measure

    config = RecallConfig(
        distances=options.distances or RecallConfig.distances,
        passage_words=options.passage_words,
        num_prompts=num_prompts(options),
        chat=uses_chat(loaded, options.chat),
        seed=options.seed,
    )
    prompts = make_prompts(loaded, _documents(options), config)

    def rows() -> Iterator[Measured]:
        for case in (REFERENCE, *cases):
            with output.progress(case.label, len(prompts), "prompts") as advance:
                yield Measured(case.label, case, *measure(loaded, case, prompts, advance))

    return Suite({"prompts": prompts}, rows())


def _drift(options: EvalOptions, loaded: LoadedModel, cases: Sequence[Case], output: Output) -> Suite:
    from kvcli.eval.drift import measure, reference

    prompts = _sequences(options, loaded, output, num_prompts(options), options.prompt_tokens)
    with output.progress("uncompressed", len(prompts), "prompts") as advance:
        references = reference(loaded, prompts, options.max_new_tokens, advance)

    def rows() -> Iterator[Measured]:
        for case in cases:
            with output.progress(case.label, len(prompts), "prompts") as advance:
                yield Measured(case.label, case, *measure(loaded, case, prompts, references, advance))

    return Suite({"tokens": prompts.tolist(), "max_new_tokens": options.max_new_tokens}, rows())


def _tasks(options: EvalOptions, loaded: LoadedModel, cases: Sequence[Case], output: Output) -> Suite:
    from kvcli.eval.case import REFERENCE
    from kvcli.eval.tasks import TasksConfig, find_tasks, measure

    config = TasksConfig(
        tasks=options.tasks,
        include_path=options.include_path,
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        chat=bool(options.chat),
        chunk=options.chunk,
        seed=options.seed,
    )

    manager = find_tasks(config)

    def rows() -> Iterator[Measured]:
        for case in (REFERENCE, *cases):
            output.say(f"{case.label}: {', '.join(options.tasks)}")
            units, versions, memory = measure(loaded, case, config, manager)
            yield Measured(case.label, case, units, memory, {"versions": versions})

    asked = ("tasks", "limit", "num_fewshot", "chat", "chunk", "seed")
    return Suite({name: getattr(options, name) for name in asked}, rows())
