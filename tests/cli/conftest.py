"""A tiny model for every command, and an empty folder to work in."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from factories import CONFIG, load, make_model, record

from kvcli.artifact.fit import assemble, fit_recording
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


def loaded_by_commands(monkeypatch: pytest.MonkeyPatch, loaded: Any) -> Any:
    from kvcli.models import hub
    from kvcli.models import load as models

    monkeypatch.setattr(models, "load_model", lambda name="tiny", **_: replace(loaded, name=name))
    monkeypatch.setattr(hub, "local_folder", lambda name: None)  # any name will do
    return loaded


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets every command load a tiny model instead of a real one."""
    return loaded_by_commands(monkeypatch, replace(load(make_model("llama")), tokenizer=Words()))


@pytest.fixture
def recorded(tiny: Any, tmp_path: Path) -> Any:
    """A recording of the tiny model in the folder `recorded`."""
    return record(tiny.model, tmp_path / "recorded")


@pytest.fixture
def artifact(recorded: Any, tmp_path: Path) -> Path:
    """An artifact for the tiny model where `generate` looks for it."""
    fit_recording(recorded, get_method("commvq"), CONFIG.resolve(recorded.spec), tmp_path / "fitted")
    folder = tmp_path / "runs" / "smollm2-135m" / "commvq-2bit"
    assemble([tmp_path / "fitted"]).save(folder)
    return folder


@pytest.fixture
def chatty(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model whose tokenizer decodes what it encodes and has a chat template."""
    from byte_tokenizer import CHAT, byte_tokenizer

    tokenizer = byte_tokenizer(CHAT)
    model = load(make_model("llama", vocab_size=300, eos_token_id=2))
    return loaded_by_commands(monkeypatch, replace(model, tokenizer=tokenizer))


@pytest.fixture
def adding(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Puts the file of a page into a package, and its line into a registry: its name there, and what it says."""
    modules = []

    def add(page: str, package: ModuleType, registry: dict[str, str], attribute: str) -> tuple[str, str]:
        text = (repo_root / "docs" / page).read_text()
        file, line = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        match = re.fullmatch(rf'"(\w+)": "({package.__name__}\.(\w+)):{attribute}",\n', line)
        assert match is not None
        name, module, stem = match.groups()
        assert name not in registry
        assert not list((repo_root / "kvcli").rglob(f"{name}*"))
        (tmp_path / "added").mkdir()
        (tmp_path / "added" / f"{stem}.py").write_text(file)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / "added")])
        monkeypatch.setitem(registry, name, f"{module}:{attribute}")
        modules.append((package, module, stem))
        return name, file

    yield add
    for package, module, stem in modules:
        sys.modules.pop(module, None)
        vars(package).pop(stem, None)
