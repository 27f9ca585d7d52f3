"""Calibrate, fit and export are killed at many moments; the same call afterwards gives the same bytes."""

import shutil
from pathlib import Path

import pytest
from folders import SEQUENCES, bytes_of, fitted, recorded
from kills import MOMENTS, killed, run_and_kill

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.fit import assemble
from kvcli.calibrate.recording import Recording
from kvcli.errors import ArtifactError, SamplesError

OTHER_TEXT = SEQUENCES.flip(0)


@pytest.fixture(scope="module")
def made(folders_made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording, a run and an artifact, and the first two of another text."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(folders_made, folder, dirs_exist_ok=True)
    fitted(folder / "run-of-other-text", recorded(folder / "other-text", OTHER_TEXT))
    return folder


def test_calibrate_resumes_after_kills(made: Path, tmp_path: Path) -> None:
    """Fault (kills): `calibrate`, `fit`, `calibrate --shard` or `merge` killed at any file operation. Result: the same
    command keeps the complete parts and layers.
    """
    said: list[str] = []
    for folder in killed(recorded, tmp_path):
        recorded(folder, say=said.append)
        assert bytes_of(folder) == bytes_of(made / "samples")
    assert len(said) > MOMENTS // 2


def test_fit_resumes_after_kills(made: Path, tmp_path: Path) -> None:
    recording, reused = Recording(made / "samples"), []
    names = {path.name for path in (made / "run").iterdir()}
    for folder in killed(lambda folder: fitted(folder, recording), tmp_path):
        fitted(folder, recording, done=lambda _, __, layer_reused: reused.append(layer_reused))
        assert {path.name for path in folder.iterdir()} == names
        assemble([folder]).save(folder / "artifact")
        assert bytes_of(folder / "artifact") == bytes_of(made / "artifact")
    assert sum(reused) > MOMENTS // 2
    assert "seconds" not in (made / "artifact" / "kvcli.json").read_text()


def test_discarding_a_run_can_be_killed(made: Path, tmp_path: Path) -> None:
    """What is left resumes as the recording that was being discarded, or as the new one.

    Fault (kills): `calibrate --overwrite` killed while it discards. Result: what is left resumes as the old
    recording or as the new one, never as a mixture.
    """
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
    for folder in killed(artifact.save, tmp_path):
        try:
            assert Artifact.load(folder).same_content(artifact)
        except ArtifactError as error:
            assert "no artifact in" in str(error)  # noqa: PT017
            artifact.save(folder)
        artifact.save(folder, overwrite=True)
        assert bytes_of(folder) == bytes_of(made / "artifact")


def test_an_artifact_is_replaced_at_once(made: Path, tmp_path: Path) -> None:
    """At whatever moment an export is killed, the old artifact or the new one can be loaded from the folder.

    Fault (kills): `export` killed, also with `--overwrite`. Result: the folder has no artifact, the old one or the
    new one; the next export removes what was left.
    """
    old, new, seen = assemble([made / "run-of-other-text"]), assemble([made / "run"]), []

    def prepare(folder: Path) -> None:
        old.save(folder)
        (folder / "notes.txt").write_text("mine")

    def replace(folder: Path) -> None:
        new.save(folder, overwrite=True)

    for target in killed(replace, tmp_path, prepare):
        moment = int(target.name.rpartition("-")[2])
        for again in (0, moment // 2):  # once more, a bit earlier
            if again:
                run_and_kill(lambda target=target: replace(target), target, again)
            there = Artifact.load(target)
            seen.append(there.same_content(new))
            assert seen[-1] or there.same_content(old)
        replace(target)
        assert bytes_of(target) == {**bytes_of(made / "artifact"), "notes.txt": b"mine"}
    assert len(set(seen)) == 2
