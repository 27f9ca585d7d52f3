"""The folder of a model whose chunks are stored."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_model


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with the config of a model of 3 layers and 2 kv heads of 16 channels, and nothing else."""
    make_model("llama").config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"
