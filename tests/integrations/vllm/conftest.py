"""How a test names a method to engines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcli.artifact.artifact import Artifact


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Names a method, or an artifact, to engines; by default without sinks and recent tokens."""

    def name(method: str, artifact: Artifact | None = None, **settings: Any) -> None:
        for variable in ("KVCLI_METHOD", "KVCLI_ARTIFACT", "KVCLI_SETTINGS"):
            monkeypatch.delenv(variable, raising=False)
        if artifact is None:
            monkeypatch.setenv("KVCLI_METHOD", method)
        else:
            artifact.save(tmp_path / method)
            monkeypatch.setenv("KVCLI_ARTIFACT", str(tmp_path / method))
        monkeypatch.setenv("KVCLI_SETTINGS", json.dumps({"sink_length": 0, "residual_length": 0, **settings}))

    return name
