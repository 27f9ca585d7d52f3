"""The hub: no connection, names that do not exist, data files only."""

import json
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from factories import make_model
from huggingface_hub import errors

from kvcli.errors import ModelError, UnsupportedModelError
from kvcli.models import hub
from kvcli.models.load import load_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Stands in for the hub: a folder, and what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[dict[str, Any]] = []
        self.failure: Exception | None = None

    def model_info(self, name: str, *, revision: str | None, timeout: float) -> Any:
        if self.failure is not None:
            raise self.failure
        return type("Info", (), {"sha": COMMIT})

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.asked.append(options)
        if options["local_files_only"] and not self.folder.is_dir():
            raise errors.LocalEntryNotFoundError("no copy")
        return str(self.folder)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    made = Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    return made


def test_a_name_that_no_hub_has_and_an_unknown_one_without_a_connection_fail_at_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(hub, "_REACH_SECONDS", 60)
    with pytest.raises(ModelError, match="neither a folder here nor a name of the form OWNER/MODEL"):
        load_model("no body/mo del", device="cpu")
    started = time.perf_counter()
    with pytest.raises(ModelError, match="the hub cannot be reached nor does its cache have a copy"):
        load_model("nobody/no-such-model", device="cpu", revision="v1")
    assert time.perf_counter() - started < hub._REACH_SECONDS


def test_a_hub_that_does_not_answer_is_given_up(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_REACH_SECONDS", 0.05)
    given_up = threading.Event()
    monkeypatch.setattr(stand_in, "model_info", lambda *_, **__: given_up.wait(60) or pytest.fail("it was waited for"))
    with pytest.raises(ModelError, match="cannot be reached"):
        load_model("nobody/model", device="cpu")
    given_up.set()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (errors.RepositoryNotFoundError, "there is no such model, or it is private"),
        (errors.RevisionNotFoundError, "it has no such revision"),
        (errors.GatedRepoError, "access is restricted"),
    ],
)
def test_what_the_hub_refuses_is_said(stand_in: Hub, kind: type[errors.HfHubHTTPError], said: str) -> None:
    response: Any = type("Response", (), {"headers": {}, "request": None})()
    stand_in.failure = kind("refused", response=response)
    with pytest.raises(ModelError, match=said):
        load_model("nobody/model", device="cpu")
    assert stand_in.asked == []


def test_the_config_refuses_before_weights_are_downloaded_and_no_code_is(stand_in: Hub) -> None:
    stand_in.folder.mkdir()
    (stand_in.folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "x.Y"}}))
    with pytest.raises(UnsupportedModelError, match=r"'evil'.*never runs"):
        load_model("nobody/model", device="cpu", revision="v1")
    assert [asked["allow_patterns"] for asked in stand_in.asked] == [["config.json"]]
    assert stand_in.asked[0]["revision"] == COMMIT
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in hub._DATA)


def test_a_copy_in_the_cache_does_without_a_connection(stand_in: Hub) -> None:
    make_model("llama").save_pretrained(stand_in.folder)
    stand_in.failure = OSError("no route")
    with pytest.raises(ModelError, match=r"it has no tokenizer\.json"):  # everything before it was read
        load_model("nobody/model", device="cpu", revision="v1")
    assert [(asked["revision"], asked["local_files_only"]) for asked in stand_in.asked] == [("v1", True)] * 2


def test_a_download_that_breaks_off_says_that_it_resumes(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=ConnectionError("reset\nby peer"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(ModelError, match=r"download failed \(reset by peer\); run the same command again"):
        load_model("nobody/model", device="cpu")
