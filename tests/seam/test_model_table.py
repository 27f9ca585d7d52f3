"""Every causal language model of transformers: right or refused, and docs/models.md says which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from model_table import BEGIN, END, Outcome, outcomes, tables

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # families warn of their own configs


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    return outcomes()


def test_no_type_of_model_is_silently_wrong(found: list[Outcome]) -> None:
    assert not [x for x in found if x.result == "wrong"]
    assert sum(x.result == "works" for x in found) > 50
    assert all(x.reason and "\n" not in x.reason for x in found if x.result == "refused")


def test_tables_of_models_are_fresh(found: list[Outcome], repo_root: Path) -> None:
    page = (repo_root / "docs" / "models.md").read_text()
    written = page.partition(BEGIN)[2].partition(END)[0].strip()
    (version,) = re.findall(r"transformers ([\d.]+):", written)
    pinned = re.findall(r"^transformers==(.*)$", (repo_root / ".ci" / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned == [version], "run python tests/support/model_table.py"
    if transformers.__version__ != version:
        pytest.skip(f"the tables are of transformers {version}, not {transformers.__version__}")
    assert written == tables(found), "run python tests/support/model_table.py"
