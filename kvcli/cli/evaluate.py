"""`kvcli eval`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from pydantic import Field

from kvcli.cli.options import IMPL_HELP, ModelOptions, command, parse_settings
from kvcli.cli.output import Output
from kvcli.cli.paths import newest_artifact
from kvcli.cli.tables import DataTable
from kvcli.errors import ArtifactError
from kvcli.registry import BASELINE, DEFAULT_METHOD, METHODS, get_method, parse_method


class EvalOptions(ModelOptions):
    """Options of `kvcli eval`."""

    method: list[str] = Field(
        default=[],
        description=f"method to measure, such as {DEFAULT_METHOD}-2; repeatable; default: {BASELINE} and fitted "
        "methods that have an artifact",
    )
    setting: list[str] = Field(default=[], description="setting of every method measured, NAME=VALUE; repeatable")
    artifact: list[Path] = Field(default=[], description="artifact to measure, with its own method; repeatable")
    corpus: str = Field(
        default="builtin:docs",
        description="held-out text: file, folder, hub name, '-', 'builtin', a mixture of domains, or 'builtin:DOMAIN'",
    )
    corpus_name: str | None = Field(default=None, description="configuration of a hub dataset")
    corpus_split: str | None = Field(default=None, description="split; default: heldout for built-in text, else train")
    revision: str | None = Field(default=None, description="revision of a hub dataset")
    text_column: str = Field(default="text", description="column that holds the text")
    seq_len: int = Field(default=2048, ge=2, description="tokens per sequence")
    num_sequences: int = Field(default=8, ge=1, description="sequences")
    batch_size: int = Field(default=4, ge=1, description="sequences per batch")
    chunk: int = Field(
        default=32, ge=1, description="tokens fed at once; attention within a chunk is in full precision"
    )
    sink_length: int = Field(default=4, ge=0, description="first tokens in full precision")
    residual_length: int = Field(default=32, ge=0, description="last tokens in full precision")
    impl: str = Field(default="auto", description=IMPL_HELP)
    out: Path | None = Field(default=None, description="append one JSON record per row to this file")


def run(options: EvalOptions, output: Output) -> None:
    """Measure KL to the uncompressed model, flips, perplexity and bits on held-out text, through the real cache."""
    import torch

    from kvcli.attention.session import attach
    from kvcli.calibrate.builtin_text import is_builtin
    from kvcli.calibrate.corpus import CorpusConfig, documents, token_sequences
    from kvcli.eval.quality import measure, reference_states
    from kvcli.files import append_record
    from kvcli.machine import environment_info

    cases = choose_cases(options)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.open("a").close()  # fails before the measurement, not after it
    loaded = options.load(output)
    split = options.corpus_split or ("heldout" if is_builtin(options.corpus) else "train")
    corpus = CorpusConfig(
        options.corpus, split, options.corpus_name, options.revision, options.text_column, options.seed
    )
    sequences = token_sequences(documents(corpus), loaded.tokenizer, options.num_sequences, options.seq_len)
    if len(sequences) < options.num_sequences:
        output.say(f"the corpus fills {len(sequences)} of {options.num_sequences} sequences")
    batches = sequences.split(options.batch_size)
    with output.progress("uncompressed", sequences.numel(), "tokens") as advance:
        states = []
        for batch in batches:
            states.append(reference_states(loaded.model, batch.to(loaded.model.device)).cpu())
            advance(batch.numel())
    window: dict[str, Any] = {
        "sink_length": options.sink_length,
        "residual_length": options.residual_length,
        "flush_block": 1,
        **parse_settings(options.setting),
    }
    records: list[dict[str, Any]] = []
    environment = environment_info()

    def measure_case(name: str, artifact: Path | None) -> dict[str, Any]:
        label = name if artifact is None else artifact.name
        with output.progress(label, sequences.numel(), "tokens") as advance:
            report = measure(
                loaded.model,
                lambda: attach(loaded.model, name, artifact=artifact, impl=options.impl, **window),
                sequences,
                states,
                chunk=options.chunk,
                batch_size=options.batch_size,
                advance=advance,
            )
        return {
            "label": label,
            "model": options.model,
            "method": name,
            "artifact": None if artifact is None else str(artifact),
            "options": options.model_dump(mode="json"),
            **report.to_dict(),
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "machine": environment,
        }

    try:
        for name, artifact in cases:
            records.append(measure_case(name, artifact))
            if options.out is not None:
                append_record(options.out, records[-1])
    finally:  # what was measured is shown, also when the next method fails or the disk is full
        if records:
            output.result({"rows": records}, quality_table(records, options))


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


def quality_table(records: list[dict[str, Any]], options: EvalOptions) -> DataTable:
    """The rows as a table."""
    columns = ("method", "bits K", "bits V", "bits mean", "KL mean", "KL p99", "flips %", "perplexity", "cache / fp16")
    rows = []
    for record in records:
        memory = record["memory"]
        rows.append(
            [
                record["label"],
                f"{memory['key_bits']:.3f}",
                f"{memory['value_bits']:.3f}",
                f"{memory['true_bits']:.3f}",
                f"{record['kl_mean']:.4f}",
                f"{record['kl_p99']:.3f}",
                f"{100 * record['flips']:.2f}",
                f"{record['perplexity']:.2f}",
                f"1/{memory['ratio']:.2f}",
            ]
        )
    title = (
        f"{options.model}: {records[0]['num_tokens']} tokens in sequences of {options.seq_len}, chunk {options.chunk}, "
        f"residual {options.residual_length}, sinks {options.sink_length}; "
        f"uncompressed perplexity {records[0]['reference_perplexity']:.2f}"
    )
    optional = ("KL p99", "bits mean", "perplexity", "cache / fp16")
    return DataTable(title, columns, rows, optional=optional)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    artifact = f"runs/smollm2-135m/{DEFAULT_METHOD}-2bit"
    example = f"kvcli eval --method {BASELINE} --artifact {artifact} --num-sequences 4"
    command(app, "eval", EvalOptions, example, ("model",))(run)
