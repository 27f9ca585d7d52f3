"""What commands print, what is fitted and which tokens are generated, against the records of an earlier commit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from golden.scenarios import PORTABLE, RECORDS, WRITE


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*.json"))


NAMES = names_in(RECORDS)
AGAIN = f"if the change is meant, write the records again with `{WRITE}`, and say in the commit message why"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of records of the present code."""
    folder = tmp_path_factory.mktemp("golden")
    command = [sys.executable, "-m", "golden.scenarios", str(folder)]
    subprocess.run(command, env={**os.environ, **PORTABLE, "PYTHONPATH": os.pathsep.join(sys.path)}, check=True)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_as_recorded(name: str, written: Path) -> None:
    actual, expected = (json.loads((folder / name).read_text()) for folder in (written, RECORDS))
    same_arithmetic = expected.pop("platform") == actual.pop("platform")
    compare(actual, expected, f"{AGAIN}: {name}", same_arithmetic)


def test_everything_is_recorded(written: Path) -> None:
    assert names_in(written) == NAMES, AGAIN


def compare(actual: Any, expected: Any, path: str, exactly: bool) -> None:
    """Equal keys, words, whole numbers and lists; floats to 1e-6, or to a half on machines with other arithmetic.

    There, one token of 96 may flip.

    Args:
        actual: of the present code.
        expected: as recorded.
        path: of both within the record.
        exactly: whether the machine computes as the one that recorded; digests of floats are compared only then.
    """
    if isinstance(expected, dict):
        assert isinstance(actual, dict), path
        assert sorted(actual) == sorted(expected), path
        for key, value in expected.items():
            if key != "kvcli_version" and (exactly or not key.startswith(("sha256", "blake"))):
                compare(actual[key], value, f"{path}.{key}", exactly)
    elif isinstance(expected, list):
        assert isinstance(actual, list), path
        assert len(actual) == len(expected), path
        for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            compare(ours, theirs, f"{path}[{i}]", exactly)
    elif isinstance(expected, float):
        loose = 1.01 / 96 if "flips" in path else 1e-3
        assert actual == pytest.approx(expected, rel=1e-6 if exactly else 0.5, abs=1e-8 if exactly else loose), path
    else:
        assert actual == expected, path
