"""`python -m research domains` on a tiny model."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from console import says
from laboratory import run_research as invoke

SIZES = ("--tokens", "256", "--fit-seq-len", "64", "--query-tokens", "64", "--num-sequences", "1", "--seq-len", "64")
SETTINGS = ("--setting", "codebook_size=8", "--setting", "num_residuals=2", "--setting", "key_iterations=2")


def test_the_matrix_has_a_row_per_fit_and_a_column_per_text(tiny: Any, artifact: Path) -> None:
    rows = ("--fit-on", "builtin:code", "--compare", "kivi-2", "--artifact", str(artifact))
    columns = ("--text", "builtin:code", "--text", "builtin:essays", "--residual-length", "32")
    words = ("domains", *SIZES, *SETTINGS, *rows, *columns)
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["folder"] == "runs/smollm2-135m/domains"
    expected = product(("builtin:code", "builtin:essays"), ("builtin:code", "kivi-2", str(artifact)))
    assert [(cell["text"], cell["row"]) for cell in record["cells"]] == [*expected]
    assert all(cell["kl_mean"] > 0 for cell in record["cells"])
    says(invoke(*words).stdout, "fitted on", "worst", f"{record['cells'][0]['kl_mean']:.4f}")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--compare commvq-1", 2, "give one with --artifact"),
        ("--method kivi-2", 2, "has nothing to fit"),
        ("--text builtin:essay", 1, "did you mean 'essays'"),
    ],
)
def test_what_makes_no_matrix_is_refused_before_a_recording(tiny: Any, words: str, code: int, said: str) -> None:
    result = invoke("domains", *SIZES, *words.split())
    assert result.exit_code == code
    assert said in result.stderr
    assert "record" not in result.stderr
