"""`python -m research domains`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from kvcli.cli.command import Command
from kvcli.cli.output import Output
from kvcli.commands.options import ModelOptions, parse_settings
from kvcli.commands.paths import model_folder
from kvcli.commands.tables import DataTable
from kvcli.registry import DEFAULT_METHOD, parse_method


class DomainsOptions(ModelOptions):
    """Options of `python -m research domains`."""

    method: str = Field(default=f"{DEFAULT_METHOD}-2", description="method that is fitted, with or without bits")
    setting: list[str] = Field(default=[], description="setting of that method, NAME=VALUE; repeatable")
    fit_on: list[str] = Field(
        default=[],
        description="corpus to fit on: 'builtin', 'builtin:DOMAIN', a file, a folder or a hub name; repeatable; "
        "default: 'builtin' and each of its domains",
    )
    text: list[str] = Field(
        default=[], description="corpus to measure on, likewise; repeatable; default: every built-in domain"
    )
    compare: list[str] = Field(default=[], description="method without artifact as one more row; repeatable")
    artifact: list[Path] = Field(default=[], description="artifact as one more row; repeatable")
    tokens: int = Field(default=16384, ge=2, description="calibration tokens of each fit")
    fit_seq_len: int = Field(default=2048, ge=2, description="tokens per calibration sequence")
    query_tokens: int = Field(default=8192, ge=1, description="calibration tokens whose queries are recorded too")
    fisher_tokens: int = Field(
        default=4096, ge=0, description="calibration tokens whose gradients tell what errors cost"
    )
    num_sequences: int = Field(default=4, ge=1, description="sequences measured per cell")
    seq_len: int = Field(default=1024, ge=2, description="tokens per measured sequence")
    batch_size: int = Field(default=4, ge=1, description="sequences per forward pass")
    chunk: int = Field(default=32, ge=1, description="tokens fed at once when measuring")
    sink_length: int = Field(default=4, ge=0, description="first tokens in full precision")
    residual_length: int = Field(default=32, ge=0, description="last tokens in full precision")
    out: Path | None = Field(default=None, description="work folder; default: runs/MODEL/domains")
    overwrite: bool = Field(default=False, description="discard what is in the work folder and start again")


def run(options: DomainsOptions, output: Output) -> None:
    """Fit on each kind of text and measure KL on every other; resumes where it stopped."""
    from kvcli.calibrate.builtin_text import BUILTIN, domains
    from kvcli.registry import make_config
    from research.domain_fit import DomainSettings, Report, split_documents
    from research.domain_matrix import run_matrix

    method, from_bits = parse_method(options.method)
    fit_on = options.fit_on or [BUILTIN, *(f"{BUILTIN}:{name}" for name in domains("calibration"))]
    columns = options.text or [f"{BUILTIN}:{name}" for name in domains()]
    rows = choose_rows(options, list(dict.fromkeys(fit_on)))
    output.settings(options.model_dump(mode="json"))
    for names, split in ((fit_on, "calibration"), (columns, "heldout")):
        for name in names:  # a name that cannot be read is refused before hours of fitting
            next(split_documents(name, split, options.seed))
    loaded = options.load(output)
    settings = DomainSettings(**{name: getattr(options, name) for name in DomainSettings.__dataclass_fields__})
    window = {"sink_length": options.sink_length, "residual_length": options.residual_length}
    config = make_config(method.name, {**from_bits, **window, **parse_settings(options.setting)}).resolve(loaded.spec)
    folder = options.out or model_folder(options.model, "domains")
    cells = run_matrix(
        loaded,
        rows,
        list(dict.fromkeys(columns)),
        method,
        config,
        settings,
        folder,
        overwrite=options.overwrite,
        report=Report(output.say, output.progress),
    )
    title = (
        f"{options.model}, {options.method} fitted on {options.tokens} tokens: KL in nats per token on "
        f"{options.num_sequences} x {options.seq_len} tokens of held-out text"
    )
    output.result({"folder": str(folder), "cells": cells}, matrix_table(cells, title))


def choose_rows(options: DomainsOptions, fit_on: list[str]) -> list[Any]:
    """The rows of the matrix: a fit per corpus, then methods and artifacts to compare with.

    Raises:
        UsageError: a method that does not exist or needs an artifact.
        ArtifactError: an artifact that cannot be read.
    """
    from kvcli.artifact.artifact import Artifact
    from kvcli.errors import UsageError
    from research.domain_matrix import Row

    rows = [Row(corpus, options.method, corpus) for corpus in fit_on]
    for name in options.compare:
        if parse_method(name)[0].needs_artifact:
            raise UsageError(f"--compare {name}: method '{name}' needs an artifact; give one with --artifact")
        rows.append(Row(name, name))
    return rows + [Row(str(path), Artifact.load(path).method, None, path) for path in options.artifact]


def matrix_table(cells: list[dict[str, Any]], title: str) -> DataTable:
    """KL per row and text, and the largest of each row."""
    rows, columns = (list(dict.fromkeys(cell[name] for cell in cells)) for name in ("row", "text"))
    kl = {(cell["row"], cell["text"]): cell["kl_mean"] for cell in cells}
    shown = [column.removeprefix("builtin:") for column in columns]
    lines = []
    for row in rows:
        figures = [kl[row, column] for column in columns]
        lines.append([row.removeprefix("builtin:"), *(f"{figure:.4f}" for figure in (*figures, max(figures)))])
    return DataTable(title, ("fitted on", *shown, "worst"), lines)


EXAMPLE = "python -m research domains --fit-on builtin --fit-on builtin:code --text builtin:code --text builtin:essays"
COMMAND = Command("domains", DomainsOptions, run, EXAMPLE, ("model",), resumes=True)
