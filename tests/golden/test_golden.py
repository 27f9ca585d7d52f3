"""What commands print, what is fitted and which tokens are generated, against the records of an earlier commit."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from golden.scenarios import GROUPS_OF_RECORDS, RECORDS, WRITE, platform

NAMES = sorted((path.parent.name, path.stem) for path in RECORDS.glob("*/*.json"))
AGAIN = f"if the change is meant, write the records again with `{WRITE}`, and say in the commit message why"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The records of the present code, by group; the artifacts are those that the commands have fitted."""
    folder = tmp_path_factory.mktemp("golden")

    @cache
    def run(group: str) -> dict[str, Any]:
        if group == "artifacts":
            run("commands")
        return {name.replace(" ", "_"): record for name, record in GROUPS_OF_RECORDS[group](folder).items()}

    return run


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_as_recorded(group: str, name: str, results: Any) -> None:
    expected = json.loads((RECORDS / group / f"{name}.json").read_text())
    same_arithmetic = expected.pop("platform") == platform()
    compare(json.loads(json.dumps(results(group)[name])), expected, f"{AGAIN}: {name}", same_arithmetic)


@pytest.mark.parametrize("group", GROUPS_OF_RECORDS)
def test_everything_is_recorded(group: str, results: Any) -> None:
    assert sorted(results(group)) == sorted(name for kind, name in NAMES if kind == group), AGAIN


def compare(actual: Any, expected: Any, path: str, exactly: bool) -> None:
    """Equal keys, words, whole numbers and lists; floats to 1e-6, or 1e-3 on machines with other arithmetic.

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
            if exactly or not key.startswith(("sha256", "blake")):
                compare(actual[key], value, f"{path}.{key}", exactly)
    elif isinstance(expected, list):
        assert isinstance(actual, list), path
        assert len(actual) == len(expected), path
        for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            compare(ours, theirs, f"{path}[{i}]", exactly)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-6 if exactly else 1e-3, abs=1e-8 if exactly else 1e-4), path
    else:
        assert actual == expected, path
