"""The folder of a model whose chunks are stored, and an artifact for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from factories import make_model

from kvcli.artifact.artifact import Artifact
from kvcli.methods.method import Method
from kvcli.registry import get_method


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with the config of a model of 3 layers and 2 kv heads of 16 channels, and nothing else."""
    make_model("llama").config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def artifact(tiny_artifact: Callable[[Method], Artifact], tmp_path: Path) -> Path:
    """An artifact of CommVQ."""
    tiny_artifact(get_method("commvq")).save(tmp_path / "artifact")
    return tmp_path / "artifact"
