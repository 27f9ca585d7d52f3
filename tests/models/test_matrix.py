"""A sample of the matrix, other cells every day, and the tables of docs/models.md. All cells: `pytest -m matrix`."""

import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import tiny_config
from matrix import ALL, TEXTS, TOKENIZERS, VERBS, records, row

from kvcli.errors import KvcliError
from kvcli.plan.memory import PlannedModel
from kvcli.seam.probe import probe

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # types warn of their own configs

KINDS = (*TEXTS, "bart", "codegen", "jamba", "nanochat", "mllama", "got_ocr2", "gpt_oss", "bamba", "deepseek_v3")
DAY = datetime.now(UTC).date().toordinal()
TODAY = [(x, TOKENIZERS[0], tuple(VERBS)[(DAY + i) % 3 :: 3]) for i, x in enumerate(KINDS)]


def check(model_type: str, tokenizer: str, verbs: tuple[str, ...]) -> None:
    """No cell is wrong, and the record says the same, if it is of the installed transformers."""
    found = row(model_type, tokenizer, verbs)
    (record,) = [x for x in records() if (x["type"], x["tokenizer"]) == (model_type, tokenizer)]
    assert not found["wrong"]
    if transformers.__version__ == record["transformers"]:
        told = {verb: why for verb, why in record["refused"].items() if verb in (*verbs, "attach", "make")}
        assert (found["what"], found["refused"]) == (record["what"], told)


@pytest.mark.parametrize("cells", [*TODAY, ALL[DAY % len(ALL)], ALL[-1 - DAY % 12]], ids=str)
def test_cells_of_today(cells: Any) -> None:
    check(*cells)


@pytest.mark.matrix
@pytest.mark.parametrize("cells", ALL, ids=str)
def test_cells(cells: Any) -> None:
    check(*cells)


def test_what_nothing_compresses_is_not_planned() -> None:
    """A pass without numbers finds all that a pass with numbers does."""
    planned = []
    for model_type in {x["type"] for x in records() if x["what"] == "nothing"}:
        with suppress(KvcliError):
            probe(PlannedModel("tiny", tiny_config(model_type), torch.float32, torch.device("cpu")).empty)
            planned.append(model_type)
    assert planned == []


def test_records_are_of_the_pinned_transformers(repo_root: Path) -> None:
    pinned = re.findall(r"^transformers==(.*)$", (repo_root / ".ci" / "constraints.txt").read_text(), re.MULTILINE)
    assert [*{x["transformers"] for x in records()}] == pinned, "run python tests/models/matrix.py"
    if transformers.__version__ in pinned:
        assert [(x["type"], x["tokenizer"]) for x in records() if not x["wrong"]] == [x[:2] for x in ALL]
