"""`kvcli compress` into the store, and `kvcli generate` with what the store has of a prompt."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from console import invoke
from contexts_made import flip_a_byte

from kvcli.contexts import ContextStore

STORE = Path("runs/smollm2-135m/contexts")
METHOD = ("--method", "kivi-2", "--setting", "group_size=8", "--residual-length", "16", "--sink-length", "4")
SHORT = ("--max-new-tokens", "8")
BEGINNING = "".join(f"line {i} of the beginning. " for i in range(20))
END = "".join(f"an end {i * i}. " for i in range(20))


def text(name: str, content: str) -> str:
    Path(f"{name}.txt").write_text(content)
    return f"{name}.txt"


def result(*arguments: str) -> Any:
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def compressed(*names: str, options: tuple[str, ...] = ()) -> Any:
    files = [word for name in names for word in ("--prompt-file", f"{name}.txt")]
    return result("compress", *files, *METHOD, "--prefill-chunk", "64", *options)


@pytest.fixture
def texts(tiny: Any) -> None:
    text("a", BEGINNING + END)
    text("b", BEGINNING + "another end " * 20)
    text("c", "something else " * 20)


def test_texts_that_begin_alike_are_read_once(texts: None) -> None:
    made = compressed("a", "b", "c")
    assert made["store"] == str(STORE)
    assert [row["context"] for row in made["contexts"]] == ["a", "b", "c"]
    assert [(row["reused_tokens"], row["reused_from"]) for row in made["contexts"]] == [
        (0, None),
        (260, "a"),
        (0, None),
    ]
    assert [row["shared_bytes"] > 0 for row in made["contexts"]] == [False, True, False]
    assert ContextStore(STORE).damages(["a", "b", "c"]) == {}
    said = invoke("compress", "--prompt-file", "b.txt", *METHOD, "--name", "again").stderr
    assert "again: 750 tokens, 750 of them from 'b' in" in said
    assert ContextStore(STORE).get("again").record.blocks == ContextStore(STORE).get("b").record.blocks


def test_the_last_tokens_stay_in_full_precision(texts: None) -> None:
    """However much is reused, at least a window of tokens is read again."""
    text("longer", BEGINNING + END)
    text("shorter", (BEGINNING + END)[: 4 + 256 + 3])
    made = compressed("longer", "shorter")
    row = made["contexts"][1]
    assert (row["tokens"], row["reused_tokens"]) == (263, 0)
    assert (
        row["memory"]["window_bytes"]
        == compressed("shorter", options=("--no-reuse",))["contexts"][0]["memory"]["window_bytes"]
    )


def test_without_reuse_everything_is_read(texts: None) -> None:
    made = compressed("a", "b", options=("--no-reuse",))
    assert [row["reused_tokens"] for row in made["contexts"]] == [0, 0]
    assert made["contexts"][1]["shared_bytes"] > 0  # equal chunks of equal tokens give equal blocks


@pytest.mark.parametrize("end", ["", " And then?"])
def test_generate_reuses_what_is_stored(texts: None, end: str) -> None:
    Path("a.txt").write_text(BEGINNING + END)
    compressed("a", "c")
    prompt = BEGINNING + END + end
    plain = result("generate", "--prompt", prompt, *METHOD, *SHORT, "--prefill-chunk", "64")
    assert (plain["reused_tokens"], plain["reused_from"]) == (0, None)
    made = result("generate", "--prompt", prompt, *METHOD, *SHORT, "--reuse")
    named = "context 'a'"
    assert made["reused_from"] == named
    assert made["reused_tokens"] == len(BEGINNING + END) - (0 if end else 1)
    assert made["prompt_tokens"] == len(prompt)
    if end:
        assert result("generate", "--context", "a", "--prompt", end, *SHORT)["text"] == made["text"]
    said = invoke("generate", "--prompt", prompt, *METHOD, *SHORT, "--reuse").stderr
    assert f"{made['reused_tokens']} of {len(prompt)} tokens reused from context 'a', loaded in " in said
    part = result("generate", "--prompt", BEGINNING + "now?", *METHOD, *SHORT, "--reuse")
    assert part["reused_tokens"] == 260


def test_generate_says_when_nothing_is_reused(texts: None) -> None:
    compressed("a")
    for options in (("--prompt", "x" * 300, *METHOD), ("--prompt", BEGINNING + END, "--method", "fp8")):
        done = invoke("generate", *options, *SHORT, "--reuse")
        assert done.exit_code == 0
        assert f"no context of this model, method and settings in {STORE} begins like the prompt" in done.stderr
    assert invoke("generate", "--prompt", "x", *SHORT, "--reuse", "--store", "none").exit_code == 0
    assert not Path("none").exists()


def test_a_context_by_name(texts: None) -> None:
    compressed("a", options=("--store", "s", "--name", "book"))
    made = result("generate", "--context", "book", "--store", "s", "--prompt", " And?", *SHORT)
    assert (made["method"], made["reused_tokens"]) == ("kivi-2", len(BEGINNING + END))
    missing = invoke("generate", "--context", "bok", "--store", "s", "--prompt", "x", *SHORT)
    assert missing.exit_code == 1
    assert "no context 'bok' in s; did you mean 'book'?" in missing.stderr
    other = invoke("generate", "--context", "book", "--store", "s", "--prompt", "x", "--residual-length", "24", *SHORT)
    assert other.exit_code == 1
    assert "context 'book' was made with residual_length 16, which is 24 here" in other.stderr


def test_names_and_sizes(texts: None) -> None:
    compressed("a")
    text("a", "x" * 400)
    taken = invoke("compress", "--prompt-file", "a.txt", *METHOD)
    assert taken.exit_code == 1
    assert "there is a context 'a' of other tokens or another model already" in taken.stderr
    assert compressed("a", options=("--overwrite",))["contexts"][0]["tokens"] == 400
    room = ContextStore(STORE).sizes()[0] + 1000
    made = compressed("c", options=("--max-bytes", str(room)))
    assert made["contexts"][0]["evicted"] == ["a"]
    tiny_room = invoke("compress", "--prompt-file", "b.txt", *METHOD, "--max-bytes", "10kB")
    assert tiny_room.exit_code == 1
    assert "more than the 10000 of the whole store" in tiny_room.stderr
    text("My notes, 1st", "y" * 300)
    assert compressed("My notes, 1st")["contexts"][0]["context"] == "My-notes-1st"
    for options in (
        ("--out", "x.safetensors", "--store", "s"),
        ("--out", "x.safetensors", "--max-bytes", "1GB"),
        ("--name", "a/b"),
        ("--max-bytes", "much"),
        ("--name", "one", "--prompt-file", "c.txt"),
    ):
        assert invoke("compress", "--prompt-file", "a.txt", *METHOD, *options).exit_code == 2
    text("file", "x")
    nowhere = invoke("compress", "--prompt-file", "a.txt", *METHOD, "--store", "file.txt/s")
    assert nowhere.exit_code == 1
    assert "file.txt/s" in nowhere.stderr
    assert "read and compressed" not in nowhere.stderr
    both = invoke("generate", "--context", "a", "--reuse", "--prompt", "x")
    assert both.exit_code == 2


def test_damage_is_one_line_and_exit_code_1(texts: None) -> None:
    compressed("a")
    flip_a_byte(STORE, "a", "last")
    prompt = BEGINNING + END + "."
    for options in (("--prompt", prompt, *METHOD, "--reuse"), ("--context", "a", "--prompt", ".")):
        done = invoke("generate", *options, *SHORT)
        assert done.exit_code == 1
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert "context 'a' is damaged" in errors[0]
        assert "kvcli contexts rm a" in errors[0]
    healed = invoke("compress", "--prompt-file", "a.txt", *METHOD, "--no-reuse", "--prefill-chunk", "64")
    assert healed.exit_code == 0
    assert invoke("contexts", "verify").exit_code == 0


@pytest.mark.parametrize("target", [("--store", "s", "--name", "c"), ("--out", "c.safetensors")])
def test_a_context_finds_the_artifact_that_it_was_made_with(tiny: Any, artifact: Path, target: tuple[str, ...]) -> None:
    """Wherever that is: nothing of it is below runs/. The command that `compress` prints is the one to type."""
    elsewhere = artifact.rename(Path.cwd() / "elsewhere")
    text("a", BEGINNING + END)
    made = invoke("compress", "--prompt-file", "a.txt", "--artifact", str(elsewhere), *target)
    assert made.exit_code == 0, made.stderr
    words = shlex.split(made.stderr.splitlines()[-1].removeprefix("next: kvcli "))
    assert "--context" in words
    assert "--artifact" not in words
    followed = invoke(*words, *SHORT)
    assert followed.exit_code == 0, followed.stderr
    assert f"using {elsewhere}" in followed.stderr
    elsewhere.rename("moved")
    refused = invoke(*words, *SHORT)
    assert refused.exit_code == 1
    assert "no commvq artifact" in refused.stderr
    assert invoke(*words, "--artifact", "moved", *SHORT).stdout == followed.stdout
