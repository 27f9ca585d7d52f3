"""Tables of docs are those of the committed records, links lead somewhere, and docs stay short."""

import re
import subprocess
import sys
from pathlib import Path

from kvcli import errors


def test_no_table_is_stale(repo_root: Path) -> None:
    script = repo_root / "docs" / "results" / "tables.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "<!-- table: attention-h100 -->" in (repo_root / "docs" / "benchmarks.md").read_text()


def test_a_changed_record_makes_a_table_stale(repo_root: Path, tmp_path: Path) -> None:
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    for path in (repo_root / "docs" / "results").iterdir():
        if path.is_file():
            (results / path.name).write_text(path.read_text())
    (tmp_path / "kvcli" / "cli").mkdir(parents=True)
    for name in ("README.md", "docs/benchmarks.md", "kvcli/cli/losses.json"):
        (tmp_path / name).write_text((repo_root / name).read_text())
    for name in ("attention-h100.jsonl", "quality-smollm2-135m.jsonl"):
        record = results / name
        record.write_text(record.read_text().replace('"method": "kivi-2"', '"method": "kivi-9"'))
    script = results / "tables.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    stale = ["benchmarks.md", "losses.json", "pareto.svg", "attention.svg"]
    assert [line.split()[0] for line in done.stderr.splitlines() if "is stale" in line] == stale


def test_links_between_pages_lead_to_a_page_and_a_heading(repo_root: Path) -> None:
    pages = [path for folder in ("", "docs", "notes", "examples") for path in (repo_root / folder).glob("*.md")]
    for page in pages:
        for name, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", _prose(page)):
            target = (page.parent / name) if name else page
            assert target.exists(), f"{page.name}: {name}"
            assert not anchor or anchor in _anchors(target), f"{page.name}: {name}#{anchor}"


MAX_WORDS = 30_000
"""Docs and cap do not rise in one commit, as lines in `test_foundation.py`."""


def test_docs_stay_short(repo_root: Path) -> None:
    """But for the help of the commands, which is generated."""
    pages = {*(repo_root / "docs").glob("*.md")} - {repo_root / "docs" / "cli.md"}
    assert sum(len(page.read_text().split()) for page in pages) <= MAX_WORDS


def test_pages_say_first_for_whom_they_are(repo_root: Path) -> None:
    pages = [*(repo_root / "docs").glob("*.md"), *(repo_root / x for x in ("CONTRIBUTING.md", "examples/README.md"))]
    assert [x.name for x in pages if not x.read_text().split("\n")[2].startswith("For ")] == []


def test_every_error_and_exit_code_is_explained(repo_root: Path) -> None:
    page = (repo_root / "docs" / "troubleshooting.md").read_text()
    codes = {
        name: str(error.exit_code)
        for name, error in vars(errors).items()
        if isinstance(error, type) and issubclass(error, BaseException) and error.__module__ == errors.__name__
    }
    assert dict(re.findall(r"^\| `(\w+)` \| (\d+) \| \S.* \| \S.* \|$", page, re.MULTILINE)) == codes
    assert {*re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == {"0", "130", *codes.values()}


def _prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}
