"""The domain matrix on a tiny model: cells are what `measure` says, and a run that was cut off resumes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import CONFIG

from kvcli.artifact.artifact import Artifact
from kvcli.attention.attach import attach
from kvcli.calibrate.builtin_text import mixture
from kvcli.calibrate.corpus import token_sequences
from kvcli.errors import ArtifactError, CorpusError
from kvcli.eval.quality import measure, reference_states
from kvcli.registry import get_method
from research import domain_matrix as domains
from research.domain_fit import DomainSettings, Report, file_name, split_documents
from research.domain_matrix import Row, run_matrix

FIT = {"tokens": 256, "fit_seq_len": 64, "query_tokens": 128, "fisher_tokens": 64, "seed": 0}
TEXT = {"num_sequences": 2, "seq_len": 48, "batch_size": 2, "chunk": 8}
WINDOW = {"sink_length": 2, "residual_length": 4}


@pytest.fixture
def corpora(tmp_path: Path) -> list[str]:
    """Two corpora of random text with alphabets of their own."""
    generator, files = torch.Generator().manual_seed(0), []
    for name, alphabet in (("low", "abcdefgh"), ("high", "QRSTUVWXYZ")):
        picks = torch.randint(len(alphabet), (40, 60), generator=generator).tolist()
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps({"text": "".join(alphabet[i] for i in row)}) + "\n" for row in picks))
    return [str(file) for file in files]


def run(loaded: Any, rows: list[Row], columns: list[str], folder: Path, chunk: int = 8, **options: Any) -> list[Any]:
    settings = DomainSettings(**{**FIT, **TEXT, **WINDOW, "chunk": chunk})
    config = CONFIG.model_copy(update=WINDOW).resolve(loaded.spec)
    options = {"overwrite": False, "report": None, **options}
    return run_matrix(loaded, rows, columns, get_method("commvq"), config, settings, folder / "matrix", **options)


def test_a_cell_is_what_measure_says_on_the_held_out_text(loaded: Any, corpora: list[str], tmp_path: Path) -> None:
    rows = [Row("low", "commvq", corpora[0]), Row("fp8", "fp8")]
    cells = {(cell["row"], cell["text"]): cell for cell in run(loaded, rows, corpora, tmp_path)}
    assert set(cells) == {(row.label, column) for row in rows for column in corpora}
    tokens = token_sequences(split_documents(corpora[1], "heldout", 0), loaded.tokenizer, 2, 48)
    states = [reference_states(loaded.model, tokens)]
    fitted = Artifact.load(tmp_path / "matrix" / "fits" / file_name(corpora[0]) / "artifact")
    for row, name, artifact in (("low", "commvq", fitted), ("fp8", "fp8", None)):
        session = partial(attach, loaded, name, artifact=artifact, **WINDOW, flush_block=1)
        expected = measure(loaded.model, session, tokens, states, chunk=8, batch_size=2)
        assert cells[row, corpora[1]]["kl_mean"] == expected.figures["kl_mean"] > 0
    assert fitted.metadata["provenance"]["corpus"]["source"] == corpora[0]


def test_a_run_resumes_and_keeps_cells_when_rows_and_texts_are_added(
    loaded: Any, corpora: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low, high = (Row(name, "commvq", name) for name in corpora)
    once = run(loaded, [low], corpora[:1], tmp_path)
    labels: list[str] = []
    report = Report(progress=lambda label, *rest: labels.append(label) or Report().progress(label, *rest))
    assert run(loaded, [low], corpora[:1], tmp_path, report=report) == once
    assert labels == []
    both = run(loaded, [low, high], corpora, tmp_path, report=report)
    assert both[0] == once[0]
    assert len(both) == 4
    assert not any(label.startswith((f"record {corpora[0]}", f"{low.label} on {low.label}")) for label in labels)
    assert not list(tmp_path.glob("matrix/fits/*/samples"))
    monkeypatch.setattr(domains, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert run(loaded, [high, low], corpora[::-1], tmp_path) == [both[3], both[2], both[1], both[0]]


def test_a_changed_corpus_is_fitted_and_measured_again(loaded: Any, corpora: list[str], tmp_path: Path) -> None:
    rows = [Row("own", "commvq", corpora[0])]
    before = run(loaded, rows, corpora[:1], tmp_path)
    Path(corpora[0]).write_text(Path(corpora[1]).read_text())
    after = run(loaded, rows, corpora[:1], tmp_path)
    assert before[0]["token_ids_sha256"] != after[0]["token_ids_sha256"]
    assert before[0]["artifact_sha256"] != after[0]["artifact_sha256"]


def test_another_matrix_in_the_folder_is_refused_by_name(loaded: Any, corpora: list[str], tmp_path: Path) -> None:
    rows = [Row("fp8", "fp8")]
    run(loaded, rows, corpora[:1], tmp_path)
    with pytest.raises(ArtifactError, match=r"holds another matrix \(differs in chunk: 8 there, 16 here"):
        run(loaded, rows, corpora[:1], tmp_path, chunk=16)
    run(loaded, rows, corpora[:1], tmp_path, chunk=16, overwrite=True)


def test_a_damaged_cell_is_measured_again(loaded: Any, corpora: list[str], tmp_path: Path) -> None:
    rows = [Row("fp8", "fp8")]
    before = run(loaded, rows, corpora[:1], tmp_path)
    (cell,) = (tmp_path / "matrix" / "cells").glob("*.json")
    cell.write_text(cell.read_text().replace('"kl_mean": ', '"kl_mean": 1'))
    assert run(loaded, rows, corpora[:1], tmp_path) == before


@pytest.mark.parametrize("name", ["essays", "cpp", "french", "japanese"])
def test_a_domain_that_is_held_out_cannot_be_fitted_on_by_its_name(name: str) -> None:
    with pytest.raises(CorpusError, match=f"'builtin:{name}' is held out as a whole"):
        list(split_documents(f"builtin:{name}", "calibration", 0))
    assert name not in {record["domain"] for record in mixture("calibration", 0)}


def test_a_corpus_of_ones_own_is_split_by_content(tmp_path: Path) -> None:
    source = str(tmp_path / "own.jsonl")

    def split(texts: list[str], part: str, seed: int = 0) -> list[str]:
        Path(source).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return list(split_documents(source, part, seed))

    own = [f"document {number}" for number in range(200)]
    heldout = split(own, "heldout")
    assert sorted([*heldout, *split(own, "calibration")]) == sorted(own)
    assert 30 < len(heldout) < 70
    assert set(heldout) == set(split([*own, "one more"][::-1], "heldout", 1)) - {"one more"}
    with pytest.raises(CorpusError, match=r"has no documents in the (heldout|calibration) split"):
        [split(["alone"], part) for part in ("heldout", "calibration")]
    with pytest.raises(CorpusError, match="read once"):
        list(split_documents("-", "heldout", 0))
