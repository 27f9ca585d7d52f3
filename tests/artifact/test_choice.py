"""One choice of a method: what names it, which setting counts, and what is refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvcli
from kvcli.artifact.artifact import Artifact
from kvcli.artifact.choice import MethodChoice
from kvcli.artifact.recipe import Recipe
from kvcli.errors import ArtifactError, ConfigError, UsageError
from kvcli.methods.method import Method
from kvcli.registry import get_method


def test_an_artifact_names_its_method(
    tiny_model: Any, tiny_artifact: Callable[[Method], Artifact], tmp_path: Path
) -> None:
    artifact, folder = tiny_artifact(get_method("oscar")), tmp_path / "a"
    artifact.save(folder)
    for given in (artifact, folder, str(folder)):
        with kvcli.attach(tiny_model, artifact=given, sink_length=2) as session:
            assert (session.method.name, session.config.sink_length) == ("oscar", 2)
    with pytest.raises(ArtifactError, match="the artifact is for method 'oscar', not 'klt'"):
        MethodChoice.of("klt", artifact=folder).check()
    with pytest.raises(ConfigError, match="settings of the fit cannot be changed: k_bits is"):
        kvcli.attach(tiny_model, "oscar-8", artifact=folder)
    with pytest.raises(ConfigError, match="colour"):
        MethodChoice.of(artifact=folder, settings={"colour": 1}).check()
    with pytest.raises(ArtifactError, match="no artifact in"):
        MethodChoice.of(artifact=tmp_path)
    (folder / "kvcli.json").write_text("{}")
    with pytest.raises(ArtifactError, match="export it again"):
        MethodChoice.of(artifact=folder)


def test_what_is_asked_for_counts_before_a_recipe_and_a_recipe_before_bits(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    settings = {"k_bits": 4, "residual_length": 64, "sink_length": 1}
    Recipe(model="m", fingerprint="f", method="kivi-2", settings=settings).save(recipe)
    config = MethodChoice.of(recipe=recipe, settings={"sink_length": 2}).config.model_dump()
    expected = {"k_bits": 4, "v_bits": 2, "residual_length": 64, "sink_length": 2}
    assert {name: config[name] for name in expected} == expected


def test_a_choice_is_made_again_of_plain_values(tiny_artifact: Callable[[Method], Artifact], tmp_path: Path) -> None:
    artifact, given = tiny_artifact(get_method("oscar")), {"artifact": tmp_path / "a", "recipe": tmp_path / "r.yaml"}
    artifact.save(given["artifact"])
    Recipe(model="m", fingerprint="f", method="kivi-2", settings={"k_bits": 4}).save(given["recipe"])
    for named in ({"method": "kivi-2"}, *({name: x} for name, x in given.items())):
        choice = MethodChoice.of(**named, settings={"sink_length": 2})  # type: ignore[arg-type]
        assert MethodChoice.of(**json.loads(json.dumps(choice.to_dict()))) == choice
    with pytest.raises(UsageError, match="in memory alone"):
        MethodChoice.of(artifact=artifact).to_dict()


def test_flush_block_is_refused_for_pages_where_it_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="omit flush_block"):
        MethodChoice.of("rtn-4", settings={"flush_block": 4}).for_pages()
    Recipe(model="m", fingerprint="f", method="rtn-4", settings={"flush_block": 4}).save(tmp_path / "r.yaml")
    MethodChoice.of(recipe=tmp_path / "r.yaml").for_pages()


def test_a_choice_is_checked_without_torch() -> None:
    code = """
import sys
from kvcli.artifact.choice import MethodChoice
MethodChoice("kivi-2", {"residual_length": 64}).check()
for choice in (MethodChoice("kivi-2", {"residual_length": -1}), MethodChoice("commvq"), MethodChoice("kivvi")):
    try:
        choice.check()
    except Exception as error:
        print(type(error).__name__)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ConfigError", "UsageError", "UsageError"]
