"""`kvcli compress` into the store, and `kvcli generate` with what the store has of a prompt."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from console import invoke, refused, result, says
from contexts_made import flip_a_byte

from kvcli.contexts import ContextStore

STORE = Path("runs/smollm2-135m/contexts")
METHOD = ("--method", "kivi-2", "--setting", "group_size=8", "--residual-length", "16", "--sink-length", "4")
SHORT = ("--max-new-tokens", "8")
JSON = (*SHORT, "--json")
BEGINNING = "".join(f"line {i} of the beginning. " for i in range(20))
END = "".join(f"an end {i * i}. " for i in range(20))


def text(name: str, content: str) -> str:
    Path(f"{name}.txt").write_text(content)
    return f"{name}.txt"


def compressed(*names: str, options: tuple[str, ...] = ()) -> Any:
    files = [word for name in names for word in ("--prompt-file", f"{name}.txt")]
    return result("compress", *files, *METHOD, "--prefill-chunk", "64", *options, "--json")


@pytest.fixture
def texts(tiny: Any) -> None:
    text("a", BEGINNING + END)
    text("b", BEGINNING + "another end " * 20)
    text("c", "something else " * 20)


def test_texts_that_begin_alike_are_read_once(texts: None) -> None:
    made = compressed("a", "b", "c")
    assert made["store"] == str(STORE)
    keys = ("context", "reused_tokens", "reused_from", "shared_bytes")
    rows = [[row[key] for key in keys] for row in made["contexts"]]
    shared = rows[1][3]
    assert shared > 0
    assert rows == [["a", 0, None, 0], ["b", 260, "a", shared], ["c", 0, None, 0]]
    said = invoke("compress", "--prompt-file", "b.txt", *METHOD, "--name", "again").stderr
    assert "again: 750 tokens, 750 of them from 'b' in" in said
    store = ContextStore(STORE)
    assert store.damages(["a", "b", "c"]) == {}
    assert store.get("again").record.blocks == store.get("b").record.blocks


def test_the_last_tokens_stay_in_full_precision(texts: None) -> None:
    """However much is reused, at least a window of tokens is read again."""
    text("shorter", (BEGINNING + END)[: 4 + 256 + 3])
    row = compressed("a", "shorter")["contexts"][1]
    assert (row["tokens"], row["reused_tokens"]) == (263, 0)
    (alone,) = compressed("shorter", options=("--no-reuse",))["contexts"]
    assert row["memory"]["window_bytes"] == alone["memory"]["window_bytes"]


def test_without_reuse_everything_is_read(texts: None) -> None:
    made = compressed("a", "b", options=("--no-reuse",))
    assert [row["reused_tokens"] for row in made["contexts"]] == [0, 0]
    assert made["contexts"][1]["shared_bytes"] > 0  # equal chunks of equal tokens give equal blocks


@pytest.mark.parametrize("end", ["", " And then?"])
def test_generate_reuses_what_is_stored(texts: None, end: str) -> None:
    compressed("a", "c")
    prompt = BEGINNING + END + end
    plain = result("generate", "--prompt", prompt, *METHOD, *JSON, "--prefill-chunk", "64")
    assert (plain["reused_tokens"], plain["reused_from"]) == (0, None)
    made = result("generate", "--prompt", prompt, *METHOD, *JSON, "--reuse")
    assert (made["reused_from"], made["prompt_tokens"]) == ("context 'a'", len(prompt))
    assert made["reused_tokens"] == len(BEGINNING + END) - (0 if end else 1)
    if end:
        assert result("generate", "--context", "a", "--prompt", end, *JSON)["text"] == made["text"]
    said = invoke("generate", "--prompt", prompt, *METHOD, *SHORT, "--reuse").stderr
    assert f"{made['reused_tokens']} of {len(prompt)} tokens reused from context 'a', loaded in " in said
    assert result("generate", "--prompt", BEGINNING + "?", *METHOD, *JSON, "--reuse")["reused_tokens"] == 260


def test_generate_says_when_nothing_is_reused(texts: None) -> None:
    compressed("a")
    for options in (("--prompt", "x" * 300, *METHOD), ("--prompt", BEGINNING + END, "--method", "fp8")):
        done = result("generate", *options, *SHORT, "--reuse")
        assert f"no context of this model, method and settings in {STORE} begins like the prompt" in done.stderr
    assert invoke("generate", "--prompt", "x", *SHORT, "--reuse", "--store", "none").exit_code == 0
    assert not Path("none").exists()


def test_a_context_by_name(texts: None) -> None:
    compressed("a", options=("--store", "s", "--name", "book"))
    words = ("generate", "--store", "s", *SHORT, "--prompt", " And?", "--context")
    made = result(*words, "book", "--json")
    assert (made["method"], made["reused_tokens"]) == ("kivi-2", len(BEGINNING + END))
    assert "no context 'bok' in s; did you mean 'book'?" in refused(*words, "bok", code=1)
    said = "context 'book' was made with residual_length 16, which is 24 here"
    assert said in refused(*words, "book", "--residual-length", "24", code=1)


def test_names_and_sizes(texts: None) -> None:
    compressed("a")
    text("a", "x" * 400)
    words = ("compress", *METHOD, "--prompt-file")
    assert "a context 'a' of other tokens or another model already" in refused(*words, "a.txt", code=1)
    assert compressed("a", options=("--overwrite",))["contexts"][0]["tokens"] == 400
    room = f"{ContextStore(STORE).sizes()[0] + 1000}B"
    assert compressed("c", options=("--max-bytes", room))["contexts"][0]["evicted"] == ["a"]
    assert "more than the 10000 of the whole store" in refused(*words, "b.txt", "--max-bytes", "10kB", code=1)
    text("My notes, 1st", "y" * 300)
    assert compressed("My notes, 1st")["contexts"][0]["context"] == "My-notes-1st"
    text("file", "x")
    nowhere = result(*words, "a.txt", "--store", "file.txt/s", exit_code=1).stderr
    assert "file.txt/s" in nowhere
    assert "read and compressed" not in nowhere


def test_damage_is_one_line_and_exit_code_1(texts: None) -> None:
    compressed("a")
    flip_a_byte(STORE, "a", "last")
    for options in (("--prompt", BEGINNING + END + ".", *METHOD, "--reuse"), ("--context", "a", "--prompt", ".")):
        says(refused("generate", *options, *SHORT, code=1), "context 'a' is damaged", "kvcli contexts rm a")
    compressed("a", options=("--no-reuse",))
    result("contexts", "verify")


@pytest.mark.parametrize("target", [("--store", "s", "--name", "c"), ("--out", "c.safetensors")])
def test_a_context_finds_the_artifact_that_it_was_made_with(tiny: Any, artifact: Path, target: tuple[str, ...]) -> None:
    """Wherever that is: nothing of it is below runs/. The command that `compress` prints is the one to type."""
    elsewhere = artifact.rename(Path.cwd() / "elsewhere")
    text("a", BEGINNING + END)
    made = result("compress", "--prompt-file", "a.txt", "--artifact", str(elsewhere), *target)
    words = shlex.split(made.stderr.splitlines()[-1].removeprefix("next: kvcli "))
    assert "--context" in words
    assert "--artifact" not in words
    followed = result(*words, *SHORT)
    assert f"using {elsewhere}" in followed.stderr
    elsewhere.rename("moved")
    assert "no commvq artifact" in refused(*words, *SHORT, code=1)
    assert invoke(*words, "--artifact", "moved", *SHORT).stdout == followed.stdout
