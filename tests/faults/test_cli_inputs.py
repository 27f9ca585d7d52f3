"""The command line given wrong values: empty texts, options that do nothing, odd files, corpora of every kind."""

from __future__ import annotations

import gzip
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from factories import make_model
from typer.testing import CliRunner

from kvcli import paths
from kvcli.calibrate.corpus import CorpusConfig, documents
from kvcli.cli.app import app
from kvcli.cli.fit import generate_with
from kvcli.errors import ArtifactError, CorpusError
from kvcli.fingerprint import differs, fingerprint
from kvcli.spec import ModelSpec


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(*arguments: str, stdin: Any = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def said(result: Any, code: int = 2) -> str:
    """The one line of an error."""
    assert result.exit_code == code, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    return str(errors[0])


@pytest.mark.parametrize("arguments", [["--prompt", "-"], ["--prompt-file", "-"], []])
def test_an_empty_file_or_input_is_refused(arguments: list[str], tmp_path: Path) -> None:
    """Fault (inputs): an empty prompt file or text, a corpus of a format that is not read, a dataset without a
    connection. Result: refused; the message names option or file.
    """
    (tmp_path / "empty.txt").write_text("\n")
    arguments = arguments or ["--prompt-file", "empty.txt"]
    assert "the prompt is empty" in said(invoke("generate", *arguments, stdin=""))


def test_the_demo_refuses_an_empty_prompt() -> None:
    assert "the prompt is empty" in said(invoke("demo", "--prompt", ""))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("generate --method=", "--method: an empty text"),
        ("generate --device=", "--device: an empty text"),
        ("calibrate --corpus=", "--corpus: an empty text"),
        ("calibrate --revision=", "--revision: an empty text"),
        ("calibrate --config=", "--config: an empty text"),
        ("generate x --base-config y", "--base-config goes with a GGUF file"),
        ("generate --temperature inf", "--temperature: Input should be a finite number"),
        ("generate --repetition-penalty inf", "--repetition-penalty: Input should be a finite number"),
        ("generate --max-new-tokens 99999999999999999999", "--max-new-tokens: Input should be less than"),
        ("methods commvq-9", "commvq-9: bits: Input should be less than or equal to 4"),
        ("methods --contexts 5", "--contexts goes with --bits"),
        ("methods kivi --contexts 5", "--contexts goes with --bits"),
        ("methods --bits llama-3.1-8b --contexts 99999999999999999999", "--contexts takes lengths from 1 to"),
        ("methods --quiet --verbose", "--quiet and --verbose exclude each other"),
        ("methods --seed 1", ""),
        ("env --device cpu", ""),
        ("export --seed 1", ""),
    ],
)
def test_values_without_a_meaning_are_refused(arguments: str, part: str) -> None:
    result = invoke(*arguments.split())
    if part:
        assert part in said(result)
    else:
        assert result.exit_code == 2
        assert "No such option" in result.output


def test_a_positional_argument_is_named_as_the_help_names_it() -> None:
    assert "error: model: an empty text" in said(invoke("generate", ""))
    assert "error: runs: an empty text" in said(invoke("export", ""))


@pytest.mark.parametrize("value", ["5", "[a]", "{a: 1}"])
def test_a_path_in_a_file_is_a_text(tmp_path: Path, value: str) -> None:
    (tmp_path / "c.yaml").write_text(f"out: {value}\n")
    assert "--out: not a path" in said(invoke("calibrate", "--config", "c.yaml"))


MEMORY = {
    "calibrate": "--batch-size",
    "fit": "kvcli calibrate",
    "train-codebook": "kvcli calibrate",
    "demo": "--tokens",
    "generate": "--max-new-tokens",
    "eval": "--chunk",
    "bench": "--contexts",
}


@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["python", "torch"],
)
def test_out_of_memory_names_the_remedy_of_the_command(
    monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
) -> None:
    """Fault (inputs): memory does not suffice. Result: one line with the options of this command that lower it."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("kvcli.cli.command._run", fail)
    line = said(invoke(name), 1)
    assert line.startswith("error: out of memory; ")
    assert MEMORY[name] in line
    for flag in {word.strip(",") for word in line.split() if word.startswith("--")}:
        owner = "calibrate" if "kvcli calibrate" in line else name
        assert (
            flag in invoke(*{"eval": ("eval", "kl"), "bench": ("bench", "attention")}.get(owner, (owner,)), "-h").stdout
        )


ODD_METADATA = [
    "",
    "null",
    "[]",
    '"method"',
    "[" * 100_000,
    '{"method": "commvq"}',
    '{"method": "commvq", "config": null}',
    '{"method": "commvq", "config": []}',
    '{"method": "commvq", "config": "bits"}',
    '{"method": ["commvq"], "config": {"bits": [2]}}',
]


@pytest.mark.parametrize("text", ODD_METADATA, ids=range(len(ODD_METADATA)))
def test_a_folder_with_an_odd_kvcli_json_is_no_artifact(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "runs" / "m" / "a"
    folder.mkdir(parents=True)
    (folder / "kvcli.json").write_text(text)
    with pytest.raises(ArtifactError, match="no commvq-2 artifact for m"):
        paths.newest_artifact("m", "commvq-2")
    assert generate_with(str(folder))[:2] in ([], ["kvcli", "generate"])


def test_folders_and_dangling_links_in_the_place_of_files_are_passed_over(tmp_path: Path) -> None:
    good, folder, link = (tmp_path / "runs" / "m" / name for name in ("good", "folder", "link"))
    (folder / "kvcli.json").mkdir(parents=True)
    for made in (good, link):
        made.mkdir()
    (link / "kvcli.json").symlink_to("nowhere")
    (good / "kvcli.json").write_text('{"method": "commvq", "config": {"bits": 2}}')
    assert paths.newest_artifact("m", "commvq").name == "good"
    (tmp_path / "runs" / "m" / "samples").mkdir()
    (tmp_path / "runs" / "m" / "samples" / "samples.json").symlink_to("nowhere")
    assert "kvcli calibrate" in said(invoke("fit"), 1)


def test_fingerprints_that_cannot_be_read() -> None:
    model = make_model("llama")
    mine = fingerprint(model, ModelSpec.from_config(model.config))
    shapes, _, values = mine.partition(":")
    for other in ("", shapes, f"{shapes}:", f"{shapes}:00", mine + "00", "x" * len(mine), shapes + ":" + "0" * 9):
        assert not _same(mine, other)
    for unreadable in ("z" * len(values), "\u0660" * len(values)):
        with pytest.raises(ValueError, match=r"hex|buffer|empty|length|no fingerprint"):
            differs(mine, f"{shapes}:{unreadable}")
    for nothing in ("", ":", ":0", ":000"):
        with pytest.raises(ValueError, match=r"hex|buffer|empty|length|no fingerprint"):
            differs(nothing, nothing)
    assert not _same(mine, f"{shapes}:{'ff' * (len(values) // 2)}")  # not a number


def _same(first: str, second: str) -> bool:
    try:
        return differs(first, second) is None
    except ValueError:
        return False


RECORDS = '{"text": "first, one"}\n{"text": "second"}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", RECORDS),
        ("a.JSONL.GZ", RECORDS),
        ("a.json.gz", RECORDS),
        ("a.csv", 'text,n\n"first, one",1\nsecond,2\n'),
        ("a.csv.gz", 'n,text\n1,"first, one"\n2,second\n'),
        ("first.txt.gz", "first, one"),
    ],
)
def test_compressed_files_and_tables_are_read(tmp_path: Path, name: str, content: str) -> None:
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.lower().endswith("gz") else data)
    if name == "first.txt.gz":
        (tmp_path / "second.txt").write_text("second")
    for source in (tmp_path, tmp_path / name):
        texts = sorted(documents(CorpusConfig(str(source))))
        assert texts == (["first, one"] if source != tmp_path and "txt" in name else ["first, one", "second"])


@pytest.mark.parametrize("name", ["a.zip", "a.gz", "a.parquet.gz", "a.md", "a"])
def test_a_file_that_is_not_read_is_refused_with_those_that_are(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"text")
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(CorpusError, match=r"\.parquet, \.jsonl, \.json, \.csv, \.txt .*\.gz"):
            list(documents(CorpusConfig(str(source))))


def test_a_gz_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_text(RECORDS)
    with pytest.raises(CorpusError, match="cannot read the corpus"):
        list(documents(CorpusConfig("a.jsonl.gz")))


@pytest.mark.parametrize("text", ["null", ' \n null\n{"text": "x"}', '[null, {"text": "x"}]'])
def test_json_that_begins_with_null_is_refused(tmp_path: Path, text: str) -> None:
    # pyarrow's reader ends the process
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(CorpusError, match="begins with null"):
        list(documents(CorpusConfig("a.json")))


def test_a_record_without_text_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"other": "y"}\n')
    with pytest.raises(CorpusError, match="has no text in column 'text'"):
        list(documents(CorpusConfig("a.jsonl")))


@pytest.mark.parametrize("name", ["texts/a.jsonl", "texts/a.txt.gz", "link/a"])
def test_a_missing_file_is_not_looked_for_on_the_hub(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "a").symlink_to("nowhere")
    with pytest.raises(CorpusError, match="no such file or folder"):
        list(documents(CorpusConfig(name, "train")))


@pytest.mark.parametrize("source", ["missing.jsonl", "folder", "a.md", "builtin --corpus-split nosuch"])
def test_a_wrong_corpus_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.md").write_text("text")
    monkeypatch.setattr("kvcli.models.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    assert source.split(maxsplit=1)[0] in said(invoke("calibrate", "--corpus", *source.split()), 1)


def test_a_dataset_is_refused_at_once_when_the_hub_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    from kvcli import hub

    def silent(question: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr(hub, "_answer", silent)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("it was asked for"))
    with pytest.raises(CorpusError, match="the hub cannot be reached"):
        list(documents(CorpusConfig("owner/name", "train")))


def test_warnings_of_imports_are_details(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("torchao")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    invoke("env", "--verbose", "--json")
    assert logger.level == logging.NOTSET
    assert json.loads(invoke("env", "--json").stdout)["kvcli"]
    assert logger.level == logging.ERROR


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not bind the superuser")
def test_an_unreadable_kvcli_json_is_no_artifact(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "m" / "a"
    folder.mkdir(parents=True)
    (folder / "kvcli.json").write_text("{}")
    (folder / "kvcli.json").chmod(0)
    with pytest.raises(ArtifactError):
        paths.newest_artifact("m", "commvq")
