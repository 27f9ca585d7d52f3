"""A tiny model whose tokens are bytes, and documents."""

from dataclasses import replace
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer
from factories import load, make_model

from kvcli.models.load import LoadedModel


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return replace(load(make_model("llama", vocab_size=260, max_position_embeddings=2048)), tokenizer=byte_tokenizer())


@pytest.fixture
def command_model(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LoadedModel:
    """Lets the command line load the tiny model, in an empty folder."""
    monkeypatch.setattr("kvcli.models.load.load_model", lambda name="tiny", **_: replace(loaded, name=name))
    monkeypatch.chdir(tmp_path)
    return loaded


@pytest.fixture
def texts() -> list[str]:
    """Documents of numbered sentences."""
    return [" ".join(f"Sentence {i} of text {j} is here." for i in range(120)) for j in range(4)]
