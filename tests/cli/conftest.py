"""A tiny model for every command, and an empty folder to work in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import CONFIG, load, make_model, record

from kvcli.fit import assemble, fit_recording
from kvcli.registry import get_method


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Words:
    """A tokenizer of the tiny models: every character is a token."""

    eos_token_id = pad_token_id = 0
    bos_token_id = 1
    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(c) % 90 for c in text]}

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(97 + int(i) % 26) for i in ids)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets every command load a tiny model instead of a real one."""
    from kvcli import hub, models

    made = replace(load(make_model("llama")), tokenizer=Words())
    monkeypatch.setattr(models, "load_model", lambda name="tiny", **_: replace(made, name=name))
    monkeypatch.setattr(hub, "local_folder", lambda name: None)  # any name will do
    return made


@pytest.fixture
def artifact(tiny: Any, tmp_path: Path) -> Path:
    """An artifact for the tiny model where `generate` looks for it."""
    recording = record(tiny.model, tmp_path / "recorded")
    fit_recording(recording, get_method("commvq"), CONFIG.resolve(recording.spec), tmp_path / "fitted")
    folder = tmp_path / "runs" / "smollm2-135m" / "commvq-2bit"
    assemble([tmp_path / "fitted"]).save(folder)
    return folder


@pytest.fixture
def chatty(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model whose tokenizer decodes what it encodes and has a chat template."""
    from byte_tokenizer import CHAT, byte_tokenizer

    from kvcli import hub, models

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    made = replace(load(make_model("llama", vocab_size=300, eos_token_id=2)), tokenizer=tokenizer)
    monkeypatch.setattr(models, "load_model", lambda name="tiny", **_: replace(made, name=name))
    monkeypatch.setattr(hub, "local_folder", lambda name: None)  # any name will do
    return made
