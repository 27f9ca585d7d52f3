"""The versions of transformers that are promised, and the two names of the argument that takes a cache."""

import re
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import WINDOW, make_model
from passes import ids

import kvcli
from kvcli.errors import CacheError, UnsupportedModelError, UsageError
from kvcli.seam import versions
from kvcli.seam.versions import CACHE_ARGUMENT, NEWEST, OLDEST, with_cache


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_either_name_of_the_cache_works_where_transformers_takes_it(tiny_model: Any, name: str) -> None:
    if name == "cache" != CACHE_ARGUMENT:
        pytest.skip("this transformers takes no cache=")
    with kvcli.attach(tiny_model, "rtn-2", **WINDOW) as session, torch.no_grad():
        expected = tiny_model(ids(1, 60), **with_cache(session.new_cache())).logits
        for call in (tiny_model, tiny_model.model, tiny_model.generate):
            options = {"max_new_tokens": 2} if call == tiny_model.generate else {}
            with nullcontext() if name == CACHE_ARGUMENT else pytest.warns(FutureWarning, match=name):
                made = call(ids(1, 60), **{name: (cache := session.new_cache())}, **options)
            assert cache.get_seq_length() == 60 + bool(options)
            assert call != tiny_model or torch.equal(made.logits, expected)


def test_a_session_takes_either_name(tiny_model: Any) -> None:
    with kvcli.attach(tiny_model, "fp16", **WINDOW) as session:
        made = [session.generate(ids(1, 9), **{x: session.new_cache()}) for x in ("cache", "past_key_values")]
        assert torch.equal(*(x.sequences for x in made))
        with pytest.raises(UsageError, match="one of the two"):
            session.generate(ids(1, 9), cache=made[0].cache, past_key_values=made[0].cache)


@pytest.mark.parametrize("grad", [True, False])
def test_a_cache_that_checkpointing_leaves_on_is_refused(grad: bool) -> None:
    """Without gradients, transformers 5.24 makes a cache of its own though layers are checkpointed."""
    model = make_model("llama")
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model.train()
    with kvcli.attach(model, "fp16") as session, torch.set_grad_enabled(grad):
        model(ids(1, 5), use_cache=False)
        with nullcontext() if grad else pytest.raises(CacheError, match="use_cache=False"):
            model(ids(1, 5))
        assert session.notes == ()


@pytest.mark.parametrize(("version", "newer"), [("5.4.0", False), (f"{NEWEST}.3", False), ("5.99.0.dev0", True)])
def test_a_newer_version_is_used_with_a_line(monkeypatch: pytest.MonkeyPatch, version: str, newer: bool) -> None:
    monkeypatch.setattr(versions.transformers, "__version__", version)
    with kvcli.attach(make_model("llama"), "fp16") as session:
        assert [f"transformers {version} is newer than {NEWEST}" in note for note in session.notes] == [True] * newer


def test_a_transformers_with_another_name_is_refused_at_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.transformers, "__version__", "6.0.0")
    monkeypatch.setattr(versions, "CACHE_ARGUMENT", "kv_cache")
    with pytest.raises(UnsupportedModelError, match=r"between the cache and attention; transformers 6\.0\.0 is newer"):
        kvcli.attach(make_model("llama"), "fp16")


def test_one_place_says_which_versions_were_tried(repo_root: Path) -> None:
    needed = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"transformers>={OLDEST},<6" in needed
    assert re.search(rf"^transformers=={NEWEST}\.\d+$", (repo_root / ".ci/constraints.txt").read_text(), re.MULTILINE)
    assert f"transformers=={OLDEST}.0" in (repo_root / ".ci/run").read_text()
