"""`python -m research domains` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from research.__main__ import app


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


SIZES = ("--tokens", "256", "--fit-seq-len", "64", "--query-tokens", "64", "--num-sequences", "1", "--seq-len", "64")
SETTINGS = ("--setting", "codebook_size=8", "--setting", "num_residuals=2", "--setting", "key_iterations=2")


def test_the_matrix_has_a_row_per_fit_and_a_column_per_text(tiny: Any, artifact: Path) -> None:
    rows = ("--fit-on", "builtin:code", "--compare", "kivi-2", "--artifact", str(artifact))
    columns = ("--text", "builtin:code", "--text", "builtin:essays")
    result = invoke("domains", *SIZES, *SETTINGS, *rows, *columns, "--residual-length", "32", "--json")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["folder"] == "runs/smollm2-135m/domains"
    expected = [
        (row, text) for text in ("builtin:code", "builtin:essays") for row in ("builtin:code", "kivi-2", str(artifact))
    ]
    assert [(cell["row"], cell["text"]) for cell in record["cells"]] == expected
    assert all(cell["kl_mean"] > 0 for cell in record["cells"])
    shown = invoke("domains", *SIZES, *SETTINGS, *rows, *columns, "--residual-length", "32").stdout
    assert "fitted on" in shown
    assert "worst" in shown
    assert f"{record['cells'][0]['kl_mean']:.4f}" in shown


def test_a_method_that_needs_an_artifact_is_no_method_to_compare_with() -> None:
    result = invoke("domains", "--compare", "commvq-1")
    assert result.exit_code == 2
    assert "give one with --artifact" in result.stderr


def test_a_method_that_is_not_fitted_is_refused(tiny: Any) -> None:
    result = invoke("domains", "--method", "kivi-2", *SIZES)
    assert result.exit_code == 2
    assert "has nothing to fit" in result.stderr


def test_a_text_that_cannot_be_read_is_refused_before_anything_is_fitted() -> None:
    result = invoke("domains", "--text", "builtin:essay")
    assert result.exit_code == 1
    assert "did you mean 'essays'" in result.stderr
    assert "record" not in result.stderr
