"""`kvcli compress` is killed at many moments: the store is whole, keeps what it had, and goes on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from factories import load, make_model
from kills import MOMENTS, killed
from typer.main import get_command
from typer.testing import CliRunner

from kvcli import models
from kvcli.cli.app import app
from kvcli.contexts import ContextStore

OLD = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 10
NEW = OLD + "It was the age of foolishness. " * 10
WINDOW = ("--method", "kivi-2", "--residual-length", "16", "--setting", "group_size=8")


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A store with the context `old`, and the texts that are compressed."""
    made = replace(load(make_model("llama", vocab_size=300, eos_token_id=2)), tokenizer=byte_tokenizer())
    commands = get_command(app)
    monkeypatch.setattr("typer.testing._get_command", lambda _: commands)  # takes a quarter of a second
    monkeypatch.setattr(models, "load_model", lambda name="tiny", **_: replace(made, name=name))
    monkeypatch.chdir(tmp_path)
    Path("old.txt").write_text(OLD)
    Path("new.txt").write_text(NEW)
    compress("old.txt", tmp_path / "base")
    return tmp_path / "base"


def compress(text: str, store: Path, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """The whole command; it has to succeed."""
    done = CliRunner().invoke(
        app, ["compress", "--prompt-file", text, "--store", str(store), *WINDOW, *options, "--json"]
    )
    assert done.exit_code == 0, done.output
    made: dict[str, Any] = json.loads(done.stdout)["contexts"][0]
    return made


def content(store: Path, name: str) -> dict[str, Any]:
    """What a context says of itself."""
    return ContextStore(store).get(name).record.model_dump()


def check_whole(store: Path) -> None:
    contexts = ContextStore(store)
    assert contexts.damages(contexts.names()) == {}


def test_another_context(base: Path, tmp_path: Path) -> None:
    """The new one goes on from the old one, whose files it shares.

    Fault (kills): `compress` into the store killed. Result: the store has the new context or not, and all that it
    had; the same command completes it.
    """
    old, seen = content(base, "old"), []
    for store in killed(partial(compress, "new.txt"), tmp_path, partial(shutil.copytree, base)):
        check_whole(store)
        assert content(store, "old") == old
        seen.append("new" in ContextStore(store).names())
        assert compress("new.txt", store)["reused_from"] == ("new" if seen[-1] else "old")
        check_whole(store)
        assert content(store, "old") == old
        assert content(store, "new") == content(tmp_path / "counted", "new")
    assert len(seen) == MOMENTS
    assert not all(seen)


def test_another_text_under_the_same_name(base: Path, tmp_path: Path) -> None:
    """There is always one of the two."""
    replace_old = partial(compress, "new.txt", options=("--name", "old", "--overwrite", "--no-reuse"))
    seen = []
    for store in killed(replace_old, tmp_path, partial(shutil.copytree, base)):
        check_whole(store)
        known = [content(base, "old"), content(tmp_path / "counted", "old")]
        seen.append(known.index(content(store, "old")))
        replace_old(store)
        check_whole(store)
        assert content(store, "old") == known[1]
        assert not list(store.rglob("*.tmp"))
    assert set(seen) == {0, 1}
