"""Sessions of every method, stores with small blocks, and whole folders of files to damage."""

import shutil
from pathlib import Path

import pytest
from contexts_made import maker, store, two, two_stored  # noqa: F401
from folders import make


@pytest.fixture(scope="session")
def folders_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder)
    return folder


@pytest.fixture
def copy(folders_made: Path, tmp_path: Path) -> Path:
    for name in ("samples", "run", "artifact"):
        shutil.copytree(folders_made / name, tmp_path / name)
    return tmp_path
