"""Corpora of every kind, through the same code: hub schema, local files, standard input, the built-in text."""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from tokenizers.processors import TemplateProcessing

from kvcli.calibrate.builtin_text import domains
from kvcli.calibrate.corpus import FINEWEB_EDU_REVISION, CorpusConfig, beginning, documents, token_sequences
from kvcli.errors import CorpusError

FINEWEB = {"dump": "CC-MAIN-2024-10", "url": "http://example.invalid", "file_path": "x", "language": "en"}
FINEWEB |= {"language_score": 0.9, "token_count": 7, "score": 3.5, "int_score": 4}
TEXTS = [f"document {number} " + "words " * number for number in range(1, 20)]


def write(folder: Path, kind: str) -> Path:
    """The same texts in every format; parquet in FineWeb-Edu's schema, in two files of a nested folder."""
    if kind == "jsonl":
        path = folder / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS))
        return path
    if kind == "txt":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text)
        return folder
    (data := folder / "sample" / "10BT").mkdir(parents=True)
    for part in range(2):
        rows = [{"text": text, "id": f"<urn:uuid:{part}-{i}>", **FINEWEB} for i, text in enumerate(TEXTS[part::2])]
        pq.write_table(pa.Table.from_pylist(rows), data / f"{part:03d}_00000.parquet")
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
    calibration, heldout = (set(documents(CorpusConfig(split=split))) for split in ("calibration", "heldout"))
    assert not calibration & heldout
    assert sum(len(text.encode()) for text in calibration | heldout) >= 2_000_000


def test_corpora_that_share_text() -> None:
    docs, stdin = CorpusConfig("builtin:docs"), CorpusConfig("-", "train")
    part = f"builtin:{domains()['docs'][0]}"
    assert all(docs.shares_text(CorpusConfig(x).provenance()) for x in ("builtin", "builtin:docs", part))
    others = [CorpusConfig("builtin:docs", "heldout"), *map(CorpusConfig, ("builtin:code", "docs"))]
    assert not any(docs.shares_text(x) for x in ({}, {"source": "-"}, *(x.provenance() for x in others)))
    assert CorpusConfig.fineweb_edu().shares_text(CorpusConfig.fineweb_edu(seed=1).provenance())
    assert not stdin.shares_text(stdin.provenance())  # the same name for any text


def test_fineweb_edu_is_pinned_and_asked_for_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: dict[str, Any] = {}

    class Stream(list[Any]):
        def shuffle(self, **options: Any) -> Any:
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


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.jsonl", None, "no such file or folder"),
        ("no/such/folder", None, "no such file or folder"),
        (".", None, "holds no"),
        ("x.bin", "x", "none of"),
        ("bad.jsonl", "{]\n", "cannot read"),
        ("empty.jsonl", "", "is empty"),
        ("columns.jsonl", '{"body": "x"}\n', "no column 'text' [(]--text-column[)]; its columns are body"),
        ("numbers.jsonl", '{"text": 5}\n', "holds int, not text"),
    ],
)
def test_bad_sources_are_named(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CorpusError, match=said):
        list(documents(CorpusConfig(str(tmp_path / name))))


GOOD, ROW = json.dumps({"text": "good"}), "row 2: it "


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", f'{GOOD}\n{{"text": null}}\n', f"{ROW}has no text in column 'text'"),
        ("a.jsonl", f'{GOOD}\n{{"text": ["a"]}}\n', f"{ROW}holds list, not text, in column 'text'"),
        ("a.jsonl", f'{GOOD}\n{{"id": 3}}\n', f"{ROW}has no column 'text' [(]--text-column[)]; its columns are id"),
        ("a.jsonl", f'{GOOD}\n{{"text": "\\ud83d"}}\n', f"{ROW}has no UTF-8 text in column 'text'"),
        ("a.jsonl", f"{GOOD}\n{GOOD[:-3]}", "row 2: cannot read it as JSON"),
        ("a.jsonl", f"\n3\n{GOOD}\n", f"{ROW}is no record"),
        ("a.json", f'[{GOOD}, "x"]', f"{ROW}is no record"),
        ("a.csv", "id,text\n1,good\n2\n", f"{ROW}has no text in column 'text'"),
        ("a.csv", b"id,text\n1,good\n2,caf\xe9\n", f"{ROW}has no UTF-8 text in column 'text'"),
        ("a.csv", "id,text\n1,good,\n2,bad, worse\n", f"{ROW}has more fields than"),
        ("a.csv", 'id,text\n1,good\n2,"bad"r\n', "row 2: its quotes are wrong"),
        ("a.parquet", ["good", None], f"{ROW}has no text in column 'text'"),
    ],
)
def test_a_bad_row_is_named_or_left_out_and_counted(tmp_path: Path, name: str, content: Any, said: str) -> None:
    path, lines = tmp_path / name, list[str]()
    if isinstance(content, list):
        pq.write_table(pa.table({"text": content, "n": [1] * len(content)}), path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CorpusError, match=f"{path}, {said}.*--skip-bad-rows"):
        list(documents(CorpusConfig(str(path))))
    assert list(documents(CorpusConfig(str(path)), skipping=lines.append)) == ["good"]
    assert [line.partition(", row")[0] for line in lines] == [f"rows without text that were left out: 1, first {path}"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    content = {"a.jsonl": GOOD, "a.json": f"[{GOOD}]", "a.csv": "text\ngood\n", "a.txt": "good"}[name]
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert list(documents(CorpusConfig(str(tmp_path / name)))) == ["good"]
    assert list(documents(CorpusConfig("-"), io.StringIO("\ufeffgood\n"))) == ["good"]


def test_files_of_a_folder_may_have_other_columns_beside_the_text(tmp_path: Path) -> None:
    for name, more in (("a", {"id": 1}), ("b", {"id": "x"}), ("c", {"other": []})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name, **more}))
    assert sorted(documents(CorpusConfig(str(tmp_path)))) == ["a", "b", "c"]


def test_rows_of_files_are_in_the_order_that_datasets_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr("kvcli.calibrate.corpus._SHUFFLE_BUFFER", 40)
    for i in range(12):
        (tmp_path / f"{i}.jsonl").write_text("".join(f'{{"text": "{i} {row}"}}\n' for row in range(i + 1)))
    files = [str(path) for path in sorted(tmp_path.iterdir())]
    data = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    expected = [row["text"] for row in data.shuffle(seed=3, buffer_size=40)]
    actual = list(documents(CorpusConfig(str(tmp_path), seed=3)))
    assert sorted(actual) == sorted(expected)
    if datasets.__version__.startswith("5.2."):
        assert actual == expected


def test_sequences_begin_as_the_tokenizer_begins_a_text() -> None:
    tokenizer = byte_tokenizer()
    assert beginning(tokenizer) == []
    plain = token_sequences(["abcdefghijkl"], tokenizer, 9, 4)
    begins = [("<s>", 1)]
    pieces = {"single": "<s> $A", "pair": "<s> $A $B", "special_tokens": begins}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**pieces)
    assert beginning(tokenizer) == [1]
    actual = token_sequences(["abcdefghijkl"], tokenizer, 9, 4)
    assert actual[:, 0].tolist() == [1] * len(actual)
    assert actual[:, 1:].flatten().tolist() == plain.flatten()[: actual[:, 1:].numel()].tolist()
    with pytest.raises(CorpusError, match="no room"):
        token_sequences(["abc"], tokenizer, 1, 1)


def test_sequences_are_packed_without_loss() -> None:
    tokenizer = byte_tokenizer()
    actual = token_sequences(["abc", "de", "fghij"], tokenizer, 9, 4)
    assert tokenizer.decode(actual.flatten()) == "abc</s>de</s>fghij"
    assert token_sequences(["abcdefgh"] * 9, tokenizer, 2, 3).shape == (2, 3)
    with pytest.raises(CorpusError, match=r"fewer than one sequence of 8 tokens; .* lower --seq-len"):
        token_sequences(["ab"], tokenizer, 1, 8)
    assert actual.dtype == torch.int64
