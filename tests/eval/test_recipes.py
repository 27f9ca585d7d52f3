"""Recipes: files that say a method with its settings for one model, and who follows them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from console import invoke, refused, result
from factories import load, make_model

import kvcli
from kvcli.artifact.recipe import Recipe, artifact_sha256
from kvcli.errors import ConfigError, UsageError
from kvcli.models.load import LoadedModel
from kvcli.registry import get_method
from kvcli.report.tables import unique_names

SETTINGS = {"k_bits": [4, 2, 1], "v_bits": [2, 2, 16], "group_size": 8, "residual_length": 8, "sink_length": 2}
KL = ("--num-sequences", "8", "--seq-len", "64", "--residual-length", "8", "--sink-length", "2")


@pytest.fixture
def recipe(command_model: LoadedModel) -> Path:
    """A recipe for the model of the command line."""
    made = Recipe(model="smollm2-135m", fingerprint=command_model.fingerprint, method="kivi", settings=SETTINGS)
    made.save(Path("made/r.yaml"))
    return Path("made/r.yaml")


def test_a_recipe_is_read_as_it_was_written_with_bits_on_one_line(recipe: Path) -> None:
    assert Recipe.read(recipe).settings == SETTINGS
    assert "k_bits: [4, 2, 1]" in recipe.read_text()


def test_attach_follows_a_recipe(command_model: LoadedModel, recipe: Path) -> None:
    with kvcli.attach(command_model, recipe=recipe) as session:
        assert [x.key.n_bits for x in session.codecs] == [4, 2, 1]
        assert session.config.residual_length == 8
    with kvcli.attach(command_model, recipe=recipe, residual_length=16) as session:
        assert session.config.residual_length == 16
    with pytest.raises(UsageError, match="name a method, an artifact or a recipe"):
        kvcli.attach(command_model)
    with pytest.raises(UsageError, match="the recipe is for method 'kivi', not 'rtn-2'"):
        kvcli.attach(command_model, "rtn-2", recipe=recipe)
    other = load(make_model("qwen2", vocab_size=260, max_position_embeddings=2048))
    with pytest.raises(ConfigError, match="made for smollm2-135m, not for this model: the shapes differ"):
        kvcli.attach(other, recipe=recipe)


def test_commands_follow_a_recipe(recipe: Path) -> None:
    prompt = ("--prompt", "Sentence 1 of text 2 is here. " * 4, "--max-new-tokens", "4", "--json")
    words = [f"{name}={json.dumps(value)}" for name, value in SETTINGS.items()]
    said = ["--method", "kivi", *(x for word in words for x in ("--setting", word))]
    ours, theirs = (result("generate", *prompt, *x) for x in (("--recipe", str(recipe)), said))
    assert ours["memory"] == theirs["memory"]
    assert ours["memory"]["nominal_bits"] == pytest.approx([7 / 3, 20 / 3])
    longer = result("generate", *prompt, "--recipe", str(recipe), "--residual-length", "16")
    assert longer["memory"]["num_encoded"] < ours["memory"]["num_encoded"]
    assert "next: kvcli eval --recipe made/r.yaml" in invoke("generate", *prompt[:-1], "--recipe", str(recipe)).stderr
    rows = result("eval", *KL, "--recipe", str(recipe), *said, "--json")["rows"]
    assert [row["label"] for row in rows] == ["kivi", "r"]
    assert [name for name, _ in unique_names(rows)] == ["kivi", "r (kivi)"]
    assert rows[0]["kl_mean"] == rows[1]["kl_mean"] > 0
    other = refused("generate", *prompt[:-1], "--recipe", str(recipe), "--method", "rtn-2")
    assert "the recipe is for method 'kivi', not 'rtn-2'" in other


def test_a_recipe_of_another_model_is_refused_by_name(recipe: Path) -> None:
    text = recipe.read_text().replace("model: smollm2-135m", "model: qwen2.5-coder-1.5b")
    recipe.write_text(text.replace("fingerprint: ", "fingerprint: f"))
    for command in (("generate", "--prompt", "x", "--recipe", "made/r.yaml"), ("eval", *KL, "--recipe", "made/r.yaml")):
        assert "made for qwen2.5-coder-1.5b, not for this model" in refused(*command)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("method: [", "cannot be read as YAML"),
        ("- 1", "is no recipe of this kvcli: it does not hold names with values"),
        ("{model: m, fingerprint: f, method: kivi, settings: {}}", "was cut off: it does not say what was measured"),
        ("method: kivi", "there is no setting|model: Field required"),
        ("{format_version: 2, model: m, fingerprint: f, method: kivi}", "format_version"),
        ("{model: m, fingerprint: f, method: kivvi}", "unknown method 'kivvi'"),
        ("{model: m, fingerprint: f, method: kivi, settings: {k_bits: [3]}}", "r.yaml: kivi: k_bits"),
        ("{model: m, fingerprint: f, method: kivi, colour: red}", "colour"),
    ],
)
def test_what_is_no_recipe_is_refused_before_torch(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        Recipe.read(tmp_path / "r.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        Recipe.read(tmp_path / "none.yaml")


def test_an_artifact_is_the_one_that_was_measured(tiny_model: Any, tiny_artifact: Any, tmp_path: Path) -> None:
    artifact, folder = tiny_artifact(get_method("oscar")), tmp_path / "a"
    artifact.save(folder)
    loaded = load(tiny_model)
    made = Recipe(
        **{"model": "tiny", "fingerprint": loaded.fingerprint, "method": "oscar", "settings": {"sink_length": 2}},
        artifact=str(folder),
        artifact_sha256=artifact_sha256(folder),
    )
    assert made.artifact_sha256 == json.loads((folder / "kvcli.json").read_text())["sha256"]
    made.save(tmp_path / "r.yaml")
    with kvcli.attach(loaded, recipe=tmp_path / "r.yaml") as session:
        assert session.config.sink_length == 2
        expected = session.codecs[0].state_dict()
    folder.rename(tmp_path / "b")
    with pytest.raises(ConfigError, match="hold the artifact of the recipe; its 'artifact' has to name"):
        kvcli.attach(loaded, recipe=tmp_path / "r.yaml")
    with kvcli.attach(loaded, recipe=tmp_path / "r.yaml", artifact=tmp_path / "b") as session:
        assert all(torch.equal(x, expected[name]) for name, x in session.codecs[0].state_dict().items())
    tiny_artifact(get_method("kvquant")).save(tmp_path / "c")
    with pytest.raises(ConfigError, match="does not hold the artifact"):
        made.find_artifact(tmp_path / "c")
    with pytest.raises(ConfigError, match="the recipe, which has none"):
        made.model_copy(update={"artifact_sha256": None}).find_artifact(tmp_path / "c")


def test_help_says_recipe() -> None:
    assert "--recipe" in invoke("serve", "--help").stdout


def test_nothing_is_written_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    for method, settings in (("kivvi", {}), ("kivi", {"k_bits": 99}), ("rtn-4", {"unknown": 1})):
        with pytest.raises(ConfigError):
            Recipe(model="m", fingerprint="f", method=method, settings=settings).save(path)
        assert not [*tmp_path.iterdir()]
    Recipe(model="m", fingerprint="f", method="kivi", settings={"k_bits": 4}).save(path)
    assert Recipe.read(path).settings == {"k_bits": 4}
