"""`kvcli methods`."""

from __future__ import annotations

from typing import Any

import typer
from pydantic import Field

from kvcli.cli.options import Options, command
from kvcli.cli.output import Output, table

PAPER_SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fp16", {}),
    ("fp8", {"sink_length": 0, "residual_length": 0}),
    ("rtn-2", {"sink_length": 0, "residual_length": 32}),
    ("kivi-4", {"sink_length": 0, "residual_length": 128}),
    ("kivi-2", {"sink_length": 0, "residual_length": 128}),
    ("squat-2", {"sink_length": 0, "residual_length": 32}),
    ("squat-pre-2", {"sink_length": 0, "residual_length": 32}),
    ("qjl", {"sink_length": 0, "residual_length": 128}),
    ("commvq-2", {"sink_length": 0, "residual_length": 128}),
    ("commvq-1", {"sink_length": 0, "residual_length": 128}),
)


class MethodsOptions(Options):
    """Options of `kvcli methods`."""

    bits: str | None = Field(
        default=None,
        description="bits of the papers' configurations for a shape: llama-3.1-8b or smollm2-135m",
    )
    contexts: list[int] = Field(default=[4096, 131072], description="context lengths of that table; repeatable")


def run(options: MethodsOptions, output: Output) -> None:
    """List the compression methods, or the bits that the papers' configurations really take."""
    if options.bits is not None:
        print_bits(options.bits, options.contexts, output)
        return
    from kvcli.registry import METHODS, get_method

    records = []
    for name in METHODS:
        method = get_method(name)
        calibration = "needs an artifact" if method.needs_artifact else "optional" if method.fit else "none"
        records.append(
            {
                "name": name,
                "bits": method.bits,
                "paper": method.paper,
                "calibration": calibration,
                "summary": method.summary,
            }
        )
    columns = ("name", "bits", "paper", "calibration", "summary")
    shown = table("methods", columns, [[record[column] for column in columns] for record in records])
    output.result({"methods": records}, shown)


def print_bits(shape: str, contexts: list[int], output: Output) -> None:
    """Nominal bits, bits of the codes, and bits of everything a cache holds at some context lengths.

    Raises:
        UsageError: no such shape.
    """
    from kvcli.bench.shapes import shape_spec
    from kvcli.errors import UsageError
    from kvcli.eval.bits import stored_bits

    if min(contexts) < 1:
        raise UsageError(f"--contexts takes positive lengths, not {min(contexts)}")
    spec = shape_spec(shape)
    records = [stored_bits(name, settings, spec, contexts) for name, settings in PAPER_SETTINGS]
    columns = ("method", "nominal K/V", "codes K", "codes V", *(f"all at {context}" for context in contexts))
    rows = [
        [
            record["method"],
            "/".join(f"{bits:.2f}" for bits in record["nominal"]),
            f"{record['key_bits']:.3f}",
            f"{record['value_bits']:.3f}",
            *(f"{bits:.3f}" for bits in record["effective"]),
        ]
        for record in records
    ]
    output.result({"shape": shape, "rows": records}, table(f"bits a value, {shape}, 16-bit model", columns, rows))


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "methods", MethodsOptions, "kvcli methods --bits llama-3.1-8b")(run)
