"""`kvcli compress` is killed at many moments: the store is whole, keeps what it had, and goes on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from factories import load, make_model
from kills import MOMENTS, moments, run_and_kill
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
    monkeypatch.setattr(models, "load_model", lambda name="tiny", **_: replace(made, name=name))
    monkeypatch.chdir(tmp_path)
    Path("old.txt").write_text(OLD)
    Path("new.txt").write_text(NEW)
    compress("old.txt", tmp_path / "base")
    return tmp_path / "base"


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def compress(text: str, store: Path, *arguments: str) -> dict[str, Any]:
    """The whole command; it has to succeed."""
    done = invoke("compress", "--prompt-file", text, "--store", str(store), *WINDOW, *arguments, "--json")
    assert done.exit_code == 0, done.output
    made: dict[str, Any] = json.loads(done.stdout)["contexts"][0]
    return made


def content(store: Path, name: str) -> dict[str, Any]:
    """What a context says of itself."""
    return ContextStore(store).get(name).record.model_dump()


def check_whole(store: Path) -> None:
    verified = invoke("contexts", "verify", "--store", str(store))
    assert verified.exit_code == 0, verified.output


def test_another_context(base: Path, tmp_path: Path) -> None:
    """The new one goes on from the old one, whose files it shares."""
    old, seen = content(base, "old"), []
    shutil.copytree(base, tmp_path / "counted")
    at = moments(lambda: compress("new.txt", tmp_path / "counted"), tmp_path / "counted")
    assert len(at) == MOMENTS
    new = content(tmp_path / "counted", "new")
    for moment in at:
        store = tmp_path / f"store-{moment}"
        shutil.copytree(base, store)
        run_and_kill(lambda store=store: compress("new.txt", store), store, moment)
        check_whole(store)
        assert content(store, "old") == old
        seen.append("new" in ContextStore(store).names())
        made = compress("new.txt", store)
        assert made["reused_from"] == ("new" if seen[-1] else "old")
        check_whole(store)
        assert content(store, "old") == old
        assert content(store, "new") == new
    assert not all(seen)


def test_another_text_under_the_same_name(base: Path, tmp_path: Path) -> None:
    """There is always one of the two."""
    options = ("--name", "old", "--overwrite", "--no-reuse")
    shutil.copytree(base, tmp_path / "counted")
    at = moments(lambda: compress("new.txt", tmp_path / "counted", *options), tmp_path / "counted")
    known = [content(base, "old"), content(tmp_path / "counted", "old")]
    seen = set()
    for moment in at:
        store = tmp_path / f"store-{moment}"
        shutil.copytree(base, store)
        run_and_kill(lambda store=store: compress("new.txt", store, *options), store, moment)
        check_whole(store)
        found = content(store, "old")
        assert found in known
        seen.add(known.index(found))
        compress("new.txt", store, *options)
        check_whole(store)
        assert content(store, "old") == known[1]
        assert not list(store.rglob("*.tmp"))
    assert seen == {0, 1}
