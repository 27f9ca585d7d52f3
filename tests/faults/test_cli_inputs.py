"""The command line given wrong values: empty texts, options that do nothing, odd files, corpora of every kind."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from console import invoke, refused
from factories import make_model

from kvcli.calibrate.corpus import CorpusConfig, documents
from kvcli.cli.fit import generate_with
from kvcli.cli.flags import _read_config
from kvcli.cli.session_options import SamplingOptions
from kvcli.commands import paths
from kvcli.errors import ArtifactError, CorpusError
from kvcli.models.fingerprint import differs, fingerprint
from kvcli.spec import ModelSpec


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "arguments", ["generate --prompt -", "generate --prompt-file -", "generate --prompt-file empty.txt", "demo"]
)
def test_an_empty_prompt_is_refused(arguments: str) -> None:
    """Fault: an empty prompt file or text, a corpus of a format that is not read, a dataset without a
    connection. Result: refused; the message names option or file.
    """
    Path("empty.txt").write_text("\n")
    words = arguments.split() if arguments != "demo" else ["demo", "--prompt", ""]
    assert "the prompt is empty" in refused(*words, stdin="")


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
        ("methods kivi --contexts 5", "--contexts goes with --bits"),
        (
            "methods --bits llama-3.1-8b --contexts 99999999999999999999",
            "--contexts: Input should be less than or equal to",
        ),
        ("methods --quiet --verbose", "--quiet and --verbose exclude each other"),
        ("train-codebook --codebook-size 17 x", "must be a power of two, got 17"),
    ],
)
def test_values_without_a_meaning_are_refused_in_one_short_line(arguments: str, part: str) -> None:
    assert part in (line := refused(*arguments.split()))
    assert len(line) < 160


@pytest.mark.parametrize("arguments", ["methods --seed 1", "env --device cpu", "export --seed 1"])
def test_options_that_would_do_nothing_do_not_exist(arguments: str) -> None:
    done = invoke(*arguments.split())
    assert (done.exit_code, "No such option" in done.output) == (2, True)


def test_a_positional_argument_is_named_as_the_help_names_it() -> None:
    assert "error: model: an empty text" in refused("generate", "")
    assert "error: runs: an empty text" in refused("export", "")


UNREAD = {
    "*x": "alias *x, line 2",
    "!!str 3": "tag tag:yaml.org,2002:str, line 2",
    "b\nmodel: c": "'model' stands twice, line 3",
    "b\nyes: 1\ntrue: 2": "'true' stands twice, line 4",
    "[" * 12 + "]" * 12: "more than 12 levels, line 2",
    "b: c": "mapping values are not allowed here, line 2",
    "#" * 2**16: "more than 65536 characters",
}
"""What follows `model: ` in a file of options, and what is said of it."""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((f"out: {x}\n", "--out: not a path") for x in ("5", "[a]", "{a: 1}")),
        *((f"corpus: &x a\nmodel: {x}\n", f"c.yaml cannot be read as YAML: {y}") for x, y in UNREAD.items()),
    ],
)
def test_a_path_in_a_file_is_a_text_and_yaml_that_is_more_than_options_is_refused(text: str, said: str) -> None:
    Path("c.yaml").write_text(text)
    assert said in refused("calibrate", "--config", "c.yaml")
    if "YAML" in said:
        assert said in refused("generate", "--recipe", "c.yaml", "--prompt", "x")


@pytest.mark.parametrize("value", ["{a: 1, a: 2}", "[" * 13 + "]" * 13, "2026-01-01", "1:30:00" + ":00" * 300 + ".5"])
def test_a_setting_is_yaml_that_json_could_hold(value: str) -> None:
    assert "the value of 'x' cannot be read" in refused("generate", "--method", "kivi-2", "--setting", f"x={value}")


def test_a_list_in_a_file_of_options_is_whole(tmp_path: Path) -> None:
    Path("c.yaml").write_text("method: kivi-2\nsetting: {k_bits: [2, 4], residual_length: 32}\n")
    assert _read_config(Path("c.yaml"), SamplingOptions, None)["setting"] == ["k_bits=[2, 4]", "residual_length=32"]


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
def test_out_of_memory_names_the_remedy_of_the_command(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Fault: memory does not suffice. Result: one line with the options of this command that lower it."""
    of_torch = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
    errors = [MemoryError(), RuntimeError(of_torch)]

    def fail(*_: Any) -> None:
        raise errors.pop()

    monkeypatch.setattr("kvcli.cli.command._run", fail)
    line = refused(name, code=1)
    assert line == refused(name, code=1)
    assert line.startswith("error: out of memory; ")
    assert MEMORY[name] in line
    owner = "calibrate" if "kvcli calibrate" in line else name
    shown = invoke(owner, *{"eval": ("kl",), "bench": ("attention",)}.get(owner, ()), "-h").stdout
    assert all(word.strip(",") in shown for word in line.split() if word.startswith("--"))


ODD_METADATA = [
    None,
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
def test_a_folder_with_an_odd_kvcli_json_is_no_artifact(tmp_path: Path, text: str | None) -> None:
    folder = tmp_path / "runs" / "m" / "a"
    folder.mkdir(parents=True)
    (folder / "kvcli.json").write_text(text or "")
    if text is None:
        (folder / "kvcli.json").chmod(0)  # which does not bind the superuser
    with pytest.raises(ArtifactError, match="no commvq-2 artifact for m"):
        paths.newest_artifact("m", "commvq-2")
    assert generate_with(str(folder))[:2] in ([], ["kvcli", "generate"])


def test_folders_and_dangling_links_in_the_place_of_files_are_passed_over(tmp_path: Path) -> None:
    runs = tmp_path / "runs" / "m"
    (runs / "folder" / "kvcli.json").mkdir(parents=True)
    for name in ("good", "link", "samples"):
        (runs / name).mkdir()
    (runs / "link" / "kvcli.json").symlink_to("nowhere")
    (runs / "good" / "kvcli.json").write_text('{"method": "commvq", "config": {"bits": 2}}')
    assert paths.newest_artifact("m", "commvq").name == "good"
    (runs / "samples" / "samples.json").symlink_to("nowhere")
    assert "kvcli calibrate" in refused("fit", code=1)


def test_fingerprints_that_cannot_be_read() -> None:
    model = make_model("llama")
    mine = fingerprint(model, ModelSpec.from_config(model.config))
    shapes, _, values = mine.partition(":")
    unreadable = r"hex|buffer|empty|length|no fingerprint"
    pairs = [(mine, f"{shapes}:{value * len(values)}") for value in ("z", "\u0660")]
    for pair in (*pairs, *((nothing, nothing) for nothing in ("", ":", ":0", ":000"))):
        with pytest.raises(ValueError, match=unreadable):
            differs(*pair)
    not_a_number = f"{shapes}:{'ff' * (len(values) // 2)}"
    others = ("", shapes, f"{shapes}:", f"{shapes}:00", mine + "00", "x" * len(mine), shapes + ":" + "0" * 9)
    for other in (*others, not_a_number):
        try:
            assert differs(mine, other) is not None
        except ValueError:
            continue


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


FORMATS = r"\.parquet, \.jsonl, \.json, \.csv, \.txt .*\.gz"


@pytest.mark.parametrize(
    ("files", "source", "options", "said"),
    [
        ({"a.txt": "text"}, ".", {"revision": "main"}, "no revision 'main'"),
        ({"a.txt": "text"}, ".", {"name": "sample"}, "no configuration 'sample'"),
        ({"a.txt": "text"}, ".", {"split": "test"}, "no split 'test'"),
        ({"a.json": '{"text": "x"}', "b.TXT": "text"}, ".", {}, r"holds .* and .* files"),
        *(({x: "text"}, y, {}, FORMATS) for x in ("a.zip", "a.gz", "a.parquet.gz", "a.md", "a") for y in (".", x)),
        ({"a.jsonl.gz": RECORDS}, "a.jsonl.gz", {}, "cannot read the corpus"),
        ({"a.csv": 'text\n"a\nb\n'}, "a.csv", {}, "cannot read the corpus .*unexpected end of data"),
        *(
            ({"a.json": text}, "a.json", {}, "no record, a JSON object")
            for text in ("3", ' \n "x"\n{"text": "x"}', '["x", {"text": "x"}]')
        ),
        ({"a.jsonl": '{"text": "x"}\n{"other": "y"}\n'}, "a.jsonl", {}, "row 2: it has no column 'text'"),
        # these are not looked for on the hub
        *(({}, x, {"split": "train"}, "no such file or folder") for x in ("t/a.jsonl", "t/a.txt.gz", "link/a")),
    ],
)
def test_what_is_no_corpus_is_refused(files: dict[str, str], source: str, options: Any, said: str) -> None:
    for name, text in files.items():
        Path(name).write_text(text)
    if source == "link/a":
        Path("link").mkdir()
        Path("link/a").symlink_to("nowhere")
    with pytest.raises(CorpusError, match=said):
        list(documents(CorpusConfig(source, **options)))


@pytest.mark.parametrize("source", ["missing.jsonl", "folder", "a.md", "builtin --corpus-split nosuch"])
def test_a_wrong_corpus_is_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    Path("folder").mkdir()
    Path("a.md").write_text("text")
    monkeypatch.setattr("kvcli.models.load.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    assert source.split(maxsplit=1)[0] in refused("calibrate", "--corpus", *source.split(), code=1)


def test_a_dataset_is_refused_at_once_when_the_hub_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(question: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr("kvcli.models.hub._answer", silent)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("it was asked for"))
    with pytest.raises(CorpusError, match="the hub cannot be reached"):
        list(documents(CorpusConfig("owner/name", "train")))


def test_warnings_of_imports_are_details(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("torchao")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    invoke("env", "--verbose", "--json")
    assert logger.level == logging.NOTSET
    assert json.loads(invoke("env", "--json").stdout)["kvcli"]
    assert logger.level == logging.ERROR
