"""`kvcli methods`."""

from __future__ import annotations

import typer
from pydantic import Field

from kvcli.cli.options import Options, command
from kvcli.cli.output import Output, table


class MethodsOptions(Options):
    """Options of `kvcli methods`."""

    bits: str | None = Field(
        default=None,
        description="table of stored bits of the papers' configurations, for a shape: llama-3.1-8b or smollm2-135m",
    )
    contexts: list[int] = Field(
        default=[4096, 131072], description="context lengths of that table, in tokens; repeatable"
    )


def run(options: MethodsOptions, output: Output) -> None:
    """List the compression methods, or the stored bits of the papers' configurations."""
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
                "arxiv": method.arxiv,
                "calibration": calibration,
                "summary": method.summary,
            }
        )
    columns = ("name", "bits", "paper", "calibration", "summary")
    cells = [[record[column] for column in columns] for record in records]
    shown = table("methods", columns, cells, text_columns=len(columns))
    output.result({"methods": records}, shown)


def print_bits(shape: str, contexts: list[int], output: Output) -> None:
    """Prints nominal bits, bits of the codes, and bits of a whole cache at some context lengths.

    Args:
        shape: name of a model's shape.
        contexts: tokens in the cache.
        output: where the table goes.

    Raises:
        UsageError: no such shape.
    """
    from kvcli.bench.shapes import shape_spec
    from kvcli.errors import UsageError
    from kvcli.eval.bits import stored_bits
    from kvcli.registry import METHODS, get_method

    if min(contexts) < 1:
        raise UsageError(f"--contexts takes positive lengths, not {min(contexts)}")
    spec = shape_spec(shape)
    rows = [row for name in METHODS for row in (get_method(name).paper_settings or {name: {}}).items()]
    records = [stored_bits(name, dict(settings), spec, contexts) for name, settings in rows]
    columns = ("method", "nominal K/V", "codes K", "codes V", *(f"all at {context}" for context in contexts))
    cells = [
        [
            record["method"],
            "/".join(f"{bits:.2f}" for bits in record["nominal"]),
            f"{record['key_bits']:.3f}",
            f"{record['value_bits']:.3f}",
            *(f"{bits:.3f}" for bits in record["effective"]),
        ]
        for record in records
    ]
    output.result({"shape": shape, "rows": records}, table(f"bits per value, {shape}, 16-bit model", columns, cells))


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "methods", MethodsOptions, "kvcli methods --bits llama-3.1-8b")(run)
