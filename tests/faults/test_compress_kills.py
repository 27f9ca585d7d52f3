"""`kvcli compress` is killed at many moments: the store is whole, keeps what it had, and goes on."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from console import result
from factories import load, make_model
from kills import MOMENTS, killed
from typer.main import get_command

from kvcli.cli.app import app
from kvcli.contexts import ContextStore
from kvcli.models import load as models

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


def compress(text: str, store: Path, options: tuple[str, ...] = ()) -> Any:
    """The whole command; it has to succeed."""
    return result("compress", "--prompt-file", text, "--store", str(store), *WINDOW, *options, "--json")["contexts"][0]


def contents(store: Path) -> dict[str, Any]:
    """What the contexts of a store, which are whole, say of themselves."""
    contexts = ContextStore(store)
    assert contexts.damages(contexts.names()) == {}
    return {name: contexts.get(name).record.model_dump() for name in contexts.names()}


def test_another_context(base: Path, tmp_path: Path) -> None:
    """The new one goes on from the old one, whose files it shares.

    Fault (kills): `compress` into the store killed. Result: the store has the new context or not, and all that it
    had; the same command completes it.
    """
    old, seen = contents(base), []
    for store in killed(partial(compress, "new.txt"), tmp_path, partial(shutil.copytree, base)):
        after = contents(tmp_path / "counted")
        seen.append(contents(store))
        assert seen[-1] in (old, after)
        assert compress("new.txt", store)["reused_from"] == ("old" if seen[-1] == old else "new")
        assert contents(store) == after
    assert len(seen) == MOMENTS
    assert after.keys() - old.keys() == {"new"}
    assert old in seen


def test_another_text_under_the_same_name(base: Path, tmp_path: Path) -> None:
    """There is always one of the two."""
    replace_old = partial(compress, "new.txt", options=("--name", "old", "--overwrite", "--no-reuse"))
    old, seen = contents(base), []
    for store in killed(replace_old, tmp_path, partial(shutil.copytree, base)):
        known = [old, contents(tmp_path / "counted")]
        seen.append(known.index(contents(store)))
        replace_old(store)
        assert contents(store) == known[1]
        assert not list(store.rglob("*.tmp"))
    assert set(seen) == {0, 1}
