"""Run folders: the same run resumes, another one is refused by name and kept."""

import re
from pathlib import Path
from typing import Any

import pytest

from kvcli.errors import ArtifactError
from kvcli.storage.manifest import RunManifest, write_sealed

DESCRIPTION = {"format_version": 1, "seed": 1, "config": {"bits": 2, "size": (1, 2)}, "text": "x" * 100}


class Run(RunManifest):
    VERSION = 1
    ERROR = ArtifactError
    REMEDY = "run it again"
    FILE = "run.json"
    KIND = "run"
    STALE = ("part-*",)


def opened(folder: Path, overwrite: bool = False, **changes: Any) -> Run:
    return Run.open(folder, {**DESCRIPTION, **changes}, overwrite=overwrite)


def test_the_same_run_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    write_sealed(folder / "run.json", {**opened(folder).values, "complete": True})
    (folder / "part-1").touch()
    assert opened(folder).values["complete"]
    assert (folder / "part-1").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 2}, "(differs in seed: 1 there, 2 here);"),
        ({"config": {"bits": 1, "size": (1, 2)}}, "(differs in config.bits: 2 there, 1 here);"),
        ({"config": {"bits": 2}}, "(differs in config.size: [1, 2] there, nothing here);"),
        ({"new": True}, "(differs in new: nothing there, true here);"),
        ({"text": "y"}, f"(differs in text: {'x' * 57}... there, y here);"),
        ({"seed": 2, "config": {}, "text": "y"}, "and 1 more);"),
    ],
)
def test_another_run_is_refused_by_setting_and_kept(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    opened(tmp_path)
    (tmp_path / "part-1").touch()
    with pytest.raises(ArtifactError, match=f"{re.escape(named)}.* or discard it with --overwrite$"):
        opened(tmp_path, **changes)
    assert (tmp_path / "part-1").exists()
    (tmp_path / "mine").touch()
    opened(tmp_path, **changes, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "run.json"]
    opened(tmp_path, **changes)


@pytest.mark.parametrize(("text", "said"), [("{", "damaged"), ("[]", "damaged"), ("{}", "damaged"), (None, "missing")])
def test_files_of_an_unknown_run_are_not_overwritten(tmp_path: Path, text: str | None, said: str) -> None:
    (tmp_path / "part-1").touch()
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(ArtifactError, match=f"its run.json is {said}"):
        opened(tmp_path)
    assert (tmp_path / "part-1").exists()
    opened(tmp_path, overwrite=True)
    assert not (tmp_path / "part-1").exists()
