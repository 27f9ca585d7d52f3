"""Corpora of every kind, through the same code: hub schema, local files, standard input, the built-in text."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kvcli.calibrate.corpus import FINEWEB_EDU_REVISION, CorpusConfig, documents, token_sequences
from kvcli.errors import CorpusError


class Bytes:
    """A tokenizer whose tokens are bytes."""

    eos_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


TEXTS = [f"document {number} " + "words " * number for number in range(1, 20)]


def write(folder: Path, kind: str) -> Path:
    """The same texts in every format; parquet in FineWeb-Edu's schema, in two files of a nested folder."""
    if kind == "parquet":
        data = folder / "sample" / "10BT"
        data.mkdir(parents=True)
        for part in range(2):
            texts = TEXTS[part::2]
            columns = {
                "text": texts,
                "id": [f"<urn:uuid:{part}-{i}>" for i in range(len(texts))],
                "dump": ["CC-MAIN-2024-10"] * len(texts),
                "url": ["http://example.invalid"] * len(texts),
                "file_path": ["x"] * len(texts),
                "language": ["en"] * len(texts),
                "language_score": [0.9] * len(texts),
                "token_count": [len(text) for text in texts],
                "score": [3.5] * len(texts),
                "int_score": [4] * len(texts),
            }
            pq.write_table(pa.table(columns), data / f"{part:03d}_00000.parquet")
        return folder
    if kind == "jsonl":
        path = folder / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS))
        return path
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.mark.parametrize("kind", [pytest.param("parquet", marks=pytest.mark.slow), "jsonl", "txt"])
def test_local_sources_stream_every_document_in_a_seeded_order(tmp_path: Path, kind: str) -> None:
    source = str(write(tmp_path, kind))
    first = list(documents(CorpusConfig(source, seed=1)))
    assert sorted(first) == sorted(TEXTS)
    assert first == list(documents(CorpusConfig(source, seed=1)))
    assert first != list(documents(CorpusConfig(source, seed=2)))


def test_standard_input() -> None:
    stream = io.StringIO("one\n\n two \nthree\n")
    assert sorted(documents(CorpusConfig("-"), stream)) == ["one", "three", "two"]


def test_the_built_in_text_is_split_by_document() -> None:
    parts = {split: set(documents(CorpusConfig(split=split))) for split in ("calibration", "heldout")}
    assert not parts["calibration"] & parts["heldout"]
    assert sum(len(text.encode()) for texts in parts.values() for text in texts) >= 2_000_000


def test_the_built_in_manifest_is_true(repo_root: Path) -> None:
    folder = repo_root / "calibration_data"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert len(manifest["sources"]) >= 3
    for source in manifest["sources"]:
        assert source["license"]
        assert (folder / source["license_file"]).is_file()
    listed = set()
    for entry in manifest["files"]:
        data = (folder / entry["path"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"]
        assert (len(data), data.count(b"\n")) == (entry["bytes"], entry["documents"])
        listed.add(folder / entry["path"])
    assert listed == set(folder.rglob("*.jsonl"))


def test_fineweb_edu_is_pinned_and_asked_for_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: dict[str, Any] = {}

    class Stream(list[Any]):
        def shuffle(self, **options: Any) -> Stream:
            asked.update(options)
            return self

    def load(*arguments: Any, **options: Any) -> Stream:
        asked.update(options, arguments=arguments)
        return Stream([{"text": "x"}])

    monkeypatch.setattr("kvcli.calibrate.corpus.check_dataset", lambda *_: None)  # it asks the hub
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(documents(CorpusConfig.fineweb_edu(seed=3))) == ["x"]
    assert asked == {
        "arguments": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
        "split": "train",
        "revision": FINEWEB_EDU_REVISION,
        "streaming": True,
        "seed": 3,
        "buffer_size": 10_000,
    }


@pytest.mark.parametrize("source", ["missing.jsonl", "/no/such/folder", "nowhere"])
def test_missing_sources(source: str) -> None:
    with pytest.raises(CorpusError, match="no such file or folder"):
        list(documents(CorpusConfig(source)))


def test_bad_sources(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="holds no"):
        list(documents(CorpusConfig(str(tmp_path))))
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(CorpusError, match="none of"):
        list(documents(CorpusConfig(str(tmp_path / "x.bin"))))
    (tmp_path / "bad.jsonl").write_text("{]\n")
    with pytest.raises(CorpusError, match="cannot read"):
        list(documents(CorpusConfig(str(tmp_path / "bad.jsonl"))))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(CorpusError, match="is empty"):
        token_sequences(documents(CorpusConfig(str(tmp_path / "empty.jsonl"))), Bytes(), 1, 8)  # type: ignore[arg-type]
    (tmp_path / "good.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(CorpusError, match="no column 'text'; its columns are body"):
        list(documents(CorpusConfig(str(tmp_path / "good.jsonl"))))


def test_a_column_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "numbers.jsonl").write_text('{"text": 5}\n')
    with pytest.raises(CorpusError, match="holds int, not text"):
        list(documents(CorpusConfig(str(tmp_path / "numbers.jsonl"))))


def test_sequences_are_packed_without_loss() -> None:
    actual = token_sequences(["abc", "de", "fghij"], Bytes(), 9, 4)  # type: ignore[arg-type]
    assert bytes(actual.flatten().tolist()) == b"abc\0de\0fghij"
    assert token_sequences(["abcdefgh"] * 9, Bytes(), 2, 3).shape == (2, 3)  # type: ignore[arg-type]
    with pytest.raises(CorpusError, match="fewer than one sequence"):
        token_sequences(["ab"], Bytes(), 1, 8)  # type: ignore[arg-type]
    assert actual.dtype == torch.int64
