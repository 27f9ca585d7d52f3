"""vLLM's pages as codes, beside sessions of the same codes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import NEW_TOKENS, answers, check, engine, session_of
from factories import make_model

import kvcli
from kvcli.artifact import Artifact
from kvcli.registry import get_method, parse_method

pytestmark = pytest.mark.filterwarnings("default")  # of vLLM and of what it imports
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.v1.attention.backend", reason="needs vLLM, see docs/engines.md", exc_type=ImportError)

METHODS = ("turboquant-3", "rtn-4", "fp8", "klt", "commvq", "blockgtq", "oscar", "kvquant")


def prompts_of(model: Any, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Names a method, or an artifact, to engines."""

    def name(method: str, artifact: Artifact | None = None, settings: str = "") -> None:
        for variable in ("KVCLI_METHOD", "KVCLI_ARTIFACT", "KVCLI_SETTINGS"):
            monkeypatch.delenv(variable, raising=False)
        if artifact is None:
            monkeypatch.setenv("KVCLI_METHOD", method)
        else:
            artifact.save(tmp_path / method)
            monkeypatch.setenv("KVCLI_ARTIFACT", str(tmp_path / method))
        monkeypatch.setenv("KVCLI_SETTINGS", settings)

    return name


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize("name", METHODS)
def test_answers_are_those_of_a_session_without_a_window(
    name: str, ask: Any, tiny_model: Any, tiny_artifact: Callable[[Any], Artifact], tmp_path: Path
) -> None:
    method, _ = parse_method(name)
    artifact = tiny_artifact(method) if method.needs_artifact else None
    ask(name, artifact)
    prompts = prompts_of(tiny_model, 20, 9, 3, 17, 70)
    with engine(saved(tiny_model, tmp_path)) as llm:
        found = answers(llm, prompts)
    with session_of(tiny_model, name, artifact) as session:
        for prompt, answer in zip(prompts, found, strict=True):
            check(tiny_model, session, prompt, answer, rtol=1e-4)
