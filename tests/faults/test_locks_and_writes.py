"""One writer a folder; a write that fails or is cut off costs nothing that was whole."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from folders import fitted, recorded
from safetensors.torch import save_file

from kvcli.artifact.fit import assemble
from kvcli.calibrate.recording import Recording
from kvcli.errors import ArtifactError, SamplesError
from kvcli.storage.atomic import append_record, read_records, replacing
from kvcli.storage.locks import locked
from kvcli.storage.manifest import write_sealed


def test_a_folder_has_one_writer(copy: Path) -> None:
    """Fault (kills): two processes write one context file, or one folder. Result: the second is refused at once; the
    lock (`flock`) ends with its process.
    """
    recording, artifact = Recording(copy / "samples"), assemble([copy / "run"])
    with locked(copy / "samples", SamplesError), pytest.raises(SamplesError, match="another kvcli process writes"):
        recorded(copy / "samples")
    with locked(copy / "run", ArtifactError), pytest.raises(ArtifactError, match="another kvcli process writes"):
        fitted(copy / "run", recording)
    with locked(copy / "artifact", ArtifactError), pytest.raises(ArtifactError, match="another kvcli process writes"):
        artifact.save(copy / "artifact", overwrite=True)


@contextmanager
def small_files() -> Iterator[None]:
    """Not as long as a test is set up and told of: pytest may write to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_names_its_file(tmp_path: Path) -> None:
    """Fault (kills): disk full, `ulimit -f`, quota. Result: one line that names the file; no temporary file stays."""
    big = {"x": torch.zeros(2000)}
    with (
        small_files(),
        pytest.raises(OSError, match=r"File too large: '.*a.safetensors'"),
        replacing(tmp_path / "a.safetensors") as path,
    ):
        save_file(big, path)
    with small_files(), pytest.raises(OSError, match=r"File too large: '.*b.json'"):
        write_sealed(tmp_path / "b.json", {"x": "y" * 2000})
    with small_files(), pytest.raises(OSError, match=r"File too large: '.*c.jsonl'"):
        append_record(tmp_path / "c.jsonl", {"x": "y" * 2000})
    assert not list(tmp_path.glob("*.tmp"))


def test_content_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    fsync, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("fsync"), fsync(handle)))
    monkeypatch.setattr(Path, "replace", lambda self, target: (events.append("rename"), rename(self, target)))
    write_sealed(tmp_path / "a.json", {})
    assert events == ["fsync", "rename", "fsync"]


def test_records_that_a_kill_cut_off_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_record(path, {"a": 1})
    with path.open("ab") as handle:
        handle.write(b'{"a": \xff')
    append_record(path, {"a": 2})
    assert read_records(path) == [{"a": 1}, {"a": 2}]
