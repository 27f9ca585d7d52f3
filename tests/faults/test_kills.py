"""Calibrate, fit and export are killed at many moments; the same call afterwards gives the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import SEQUENCES, bytes_of, fitted, make, recorded
from kills import MOMENTS, moments, run_and_kill

from kvcli.artifact import Artifact
from kvcli.calibrate.recording import Recording
from kvcli.errors import ArtifactError, SamplesError
from kvcli.fit import assemble

OTHER_TEXT = SEQUENCES.flip(0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder)
    fitted(folder / "run-of-other-text", recorded(folder / "other-text", OTHER_TEXT))
    assemble([folder / "run-of-other-text"]).save(folder / "old")
    return folder


def test_calibrate_resumes_after_kills(made: Path, tmp_path: Path) -> None:
    expected, reused = bytes_of(made / "samples"), 0
    for moment in moments(lambda: recorded(tmp_path / "counted"), tmp_path / "counted"):
        folder = tmp_path / f"samples-{moment}"
        run_and_kill(lambda folder=folder: recorded(folder), folder, moment)
        said: list[str] = []
        recorded(folder, say=said.append)
        reused += len(said)
        assert bytes_of(folder) == expected
    assert reused > MOMENTS // 2


def test_fit_resumes_after_kills(made: Path, tmp_path: Path) -> None:
    recording = Recording(made / "samples")
    names, reused = {path.name for path in (made / "run").iterdir()}, 0
    for moment in moments(lambda: fitted(tmp_path / "counted", recording), tmp_path / "counted"):
        folder, seen = tmp_path / f"run-{moment}", []
        run_and_kill(lambda folder=folder: fitted(folder, recording), folder, moment)
        fitted(folder, recording, done=lambda _, __, layer_reused, seen=seen: seen.append(layer_reused))
        reused += sum(seen)
        assert {path.name for path in folder.iterdir()} == names
        assemble([folder]).save(tmp_path / f"artifact-{moment}")
        assert bytes_of(tmp_path / f"artifact-{moment}") == bytes_of(made / "artifact")
    assert reused > MOMENTS // 2


def test_discarding_a_run_can_be_killed(made: Path, tmp_path: Path) -> None:
    """What is left resumes as the recording that was being discarded, or as the new one."""
    work, seen = tmp_path / "samples", set()
    for moment in range(1, 16):
        recorded(work, overwrite=True)
        run_and_kill(lambda: recorded(work, OTHER_TEXT, overwrite=True), work, moment)
        try:
            recorded(work)
            expected = "samples"
        except SamplesError:
            recorded(work, OTHER_TEXT)
            expected = "other-text"
        assert bytes_of(work) == bytes_of(made / expected)
        seen.add(expected)
    assert len(seen) == 2


def test_export_after_kills(made: Path, tmp_path: Path) -> None:
    """A new artifact is there whole or not at all, and is made by the same call."""
    artifact = assemble([made / "run"])
    for moment in moments(lambda: artifact.save(tmp_path / "counted"), tmp_path / "counted"):
        folder = tmp_path / f"artifact-{moment}"
        run_and_kill(lambda folder=folder: artifact.save(folder), folder, moment)
        try:
            assert Artifact.load(folder).same_content(artifact)
        except ArtifactError as error:
            assert "no artifact in" in str(error)  # noqa: PT017
            artifact.save(folder)
        artifact.save(folder, overwrite=True)
        assert bytes_of(folder) == bytes_of(made / "artifact")


def test_an_artifact_is_replaced_at_once(made: Path, tmp_path: Path) -> None:
    """At whatever moment an export is killed, the old artifact or the new one can be loaded from the folder."""
    old, new, target = assemble([made / "run-of-other-text"]), assemble([made / "run"]), tmp_path / "artifact"

    def start() -> None:
        old.save(target, overwrite=True)
        (target / "notes.txt").write_text("mine")

    seen = []
    start()
    every_moment = moments(lambda: new.save(target, overwrite=True), target)
    for moment in every_moment:
        start()
        run_and_kill(lambda: new.save(target, overwrite=True), target, moment)
        there = Artifact.load(target)
        seen.append(there.same_content(new))
        assert seen[-1] or there.same_content(old)
        run_and_kill(lambda: new.save(target, overwrite=True), target, moment // 2)  # once more, a bit earlier
        there = Artifact.load(target)
        assert there.same_content(new) or there.same_content(old)
        new.save(target, overwrite=True)
        assert bytes_of(target) == {**bytes_of(made / "artifact"), "notes.txt": b"mine"}
    assert len(set(seen)) == 2
