"""Tables of docs are those of the committed records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_no_table_is_stale(repo_root: Path) -> None:
    script = repo_root / "docs" / "results" / "tables.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "<!-- table: attention-h200 -->" in (repo_root / "docs" / "benchmarks.md").read_text()


def test_a_changed_record_makes_a_table_stale(repo_root: Path, tmp_path: Path) -> None:
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    for path in (repo_root / "docs" / "results").iterdir():
        if path.is_file():
            (results / path.name).write_text(path.read_text())
    for name in ("README.md", "docs/benchmarks.md"):
        (tmp_path / name).write_text((repo_root / name).read_text())
    record = results / "attention-h200.jsonl"
    record.write_text(record.read_text().replace('"method": "kivi-2"', '"method": "kivi-9"'))
    script = results / "tables.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "benchmarks.md is stale" in done.stderr
