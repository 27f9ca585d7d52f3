"""`python -m research bench chunks`: rows of methods, and what the table compares."""

import json
from pathlib import Path

from laboratory import run_research

TINY = ("--random-weights", "tiny", "--layers", "1", "--prompt-tokens", "50", "--chunk", "4", "--device", "cpu")


def test_rows_are_compared_with_fp16_and_with_dynamic_cache(tmp_path: Path) -> None:
    command = [
        *("bench", "chunks", *TINY, "--passes", "4", "--batch-size", "2", "--method", "kivi-2", "--method", "rtn-4"),
        *("--setting", "group_size=8", "--setting", "residual_length=8", "--out", str(tmp_path / "x.jsonl")),
    ]
    done = run_research(*command)
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [(x["method"], x["batch"], x["chunk"], x["mode"]) for x in records] == [
        (name, 2, 4, "passes") for name in ("fp16", "kivi-2", "rtn-4")
    ]
    assert all(min(x["ms"], x["pass_ms"], x["stock_ms"]) > 0 for x in records)
    assert "passes of 2 x 4 tokens after 50" in " ".join(done.output.split())


def test_a_method_that_cannot_take_the_model_is_a_row_without_figures(tmp_path: Path) -> None:
    command = ["bench", "chunks", *TINY, "--passes", "4", "--method", "kivi-2", "--out", str(tmp_path / "x.jsonl")]
    done = run_research(*[*command, "--setting", "group_size=8", "--impl", "fused"])
    assert done.exit_code != 0
    assert json.loads((tmp_path / "x.jsonl").read_text().splitlines()[-1])["status"] == "refused"
