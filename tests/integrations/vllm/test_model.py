"""What environment variables name, and the codecs of a model of which there is a config and a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import fitted, with_biases
from factories import load, make_model
from families import make

from kvcli.artifact.choice import MethodChoice
from kvcli.artifact.recipe import Recipe, artifact_sha256
from kvcli.errors import ArtifactError, ConfigError, ModelError, UnsupportedModelError, UsageError
from kvcli.integrations.skeleton import rope_of, skeleton
from kvcli.integrations.vllm import register
from kvcli.integrations.vllm.environment import choice_of_environment
from kvcli.integrations.vllm.model import codecs_of
from kvcli.registry import get_method
from kvcli.seam.probe import probe


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("METHOD", "ARTIFACT", "RECIPE", "SETTINGS"):
        monkeypatch.delenv(f"KVCLI_{name}", raising=False)


def test_without_variables_there_is_nothing_to_do() -> None:
    assert choice_of_environment() is None
    register()  # needs no vLLM


@pytest.mark.parametrize(
    ("variables", "error", "message"),
    [
        ({"METHOD": "rtn-4", "ARTIFACT": "a"}, ArtifactError, "no artifact in a"),
        ({"RECIPE": "none.yaml"}, ConfigError, "cannot read none.yaml"),
        ({"METHOD": "turboqant-3"}, UsageError, "turboqant"),
        ({"METHOD": "commvq"}, UsageError, "needs an artifact"),
        ({"METHOD": "rtn-4", "SETTINGS": "{"}, ConfigError, "KVCLI_SETTINGS is no JSON"),
        ({"METHOD": "rtn-4", "SETTINGS": "[" * 100_000}, ConfigError, "KVCLI_SETTINGS is no JSON"),
        ({"SETTINGS": '{"key_offset": "none"}'}, UsageError, "set KVCLI_METHOD, KVCLI_ARTIFACT or KVCLI_RECIPE"),
        ({"METHOD": "rtn-4", "SETTINGS": "[1]"}, ConfigError, "is a JSON object"),
        ({"METHOD": "rtn-4", "SETTINGS": '{"flush_block": 4}'}, UsageError, "omit flush_block"),
    ],
)
def test_variables_that_cannot_be_used_are_refused(
    variables: dict[str, str], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"KVCLI_{name}", value)
    with pytest.raises(error, match=message):
        register()


def codecs(model: Any, name: str, folder: Path | None = None, ranks: int = 1, **values: Any) -> Any:
    return codecs_of(model.config, MethodChoice(name, values), ranks, None if folder is None else lambda: folder)[1]


@pytest.mark.parametrize("name", ["squat-2", "squat-pre-2", "qjl", "kvarn"])
def test_codes_that_depend_on_other_tokens_are_refused_by_name(name: str, tiny_model: Any) -> None:
    with pytest.raises(UsageError, match=f"codes of method '{name}' depend on other tokens"):
        codecs(tiny_model, name)


def test_layers_with_groups_of_other_sizes_are_refused_by_name(tiny_model: Any) -> None:
    """A batch has one size of groups for all layers; keys of 16 bits have none."""
    with pytest.raises(UsageError, match="groups of different sizes"):
        codecs(tiny_model, "kivi", k_bits=[16, 2, 2])
    assert len(codecs(tiny_model, "kivi", k_bits=[4, 2, 2])) == 3


SETTINGS = {"k_bits": 3, "v_bits": 2, "sink_length": 2, "residual_length": 8, "flush_block": 4}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., MethodChoice]:
    """Writes a recipe of a method for a model, and reads what KVCLI_RECIPE then names."""

    def named(model: Any, method: str = "turboquant", settings: Any = SETTINGS, **rest: Any) -> MethodChoice:
        made = Recipe(model="tiny", fingerprint=load(model).fingerprint, method=method, settings=dict(settings), **rest)
        made.save(tmp_path / "r.yaml")
        monkeypatch.setenv("KVCLI_RECIPE", str(tmp_path / "r.yaml"))
        read = choice_of_environment()
        assert read is not None
        return read

    return named


def test_a_recipe_gives_method_bits_and_window(recipe: Any, tiny_model: Any, monkeypatch: Any) -> None:
    """Its `flush_block` has no effect in pages; KVCLI_SETTINGS change the rest."""
    read = recipe(tiny_model)
    assert (read.method, read.artifact) == ("turboquant", None)
    assert read.named == SETTINGS | {"flush_block": 0}
    exact, made = codecs_of(tiny_model.config, read, 1, None)[:2]
    assert (exact.sink_length, *(made[0].key.n_bits, made[0].value.n_bits)) == (2, 3, 2)
    monkeypatch.setenv("KVCLI_SETTINGS", '{"residual_length": 16}')
    assert recipe(tiny_model).named["residual_length"] == 16


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_recipe_of_another_model_is_refused(ranks: int, recipe: Any, tiny_model: Any, tmp_path: Path) -> None:
    """Also where a process has a part of the heads; random weights belong to every recipe."""
    tiny_model.save_pretrained(tmp_path)
    read = recipe(tiny_model)
    assert len(codecs_of(tiny_model.config, read, ranks, lambda: tmp_path)[1]) == 3
    for name, x in tiny_model.named_parameters():
        if name.endswith("k_proj.weight"):
            x.data = x.data.flip(0)
    tiny_model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="the recipe was made for tiny, not for this model"):
        codecs_of(tiny_model.config, read, ranks, lambda: tmp_path)
    assert len(codecs_of(tiny_model.config, read, ranks, None)[1]) == 3


def test_a_recipe_names_its_artifact(recipe: Any, tiny_model: Any, tiny_artifact: Any, tmp_path: Path) -> None:
    tiny_artifact(get_method("oscar")).save(tmp_path / "a")
    named = {"artifact": str(tmp_path / "a"), "artifact_sha256": artifact_sha256(tmp_path / "a")}
    read = recipe(tiny_model, "oscar", {"sink_length": 2}, **named)
    assert (read.method, read.named) == ("oscar", {"sink_length": 2})
    assert read.folder == tmp_path / "a"
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(ConfigError, match="does not hold the artifact of the recipe"):
        recipe(tiny_model, "oscar", {"sink_length": 2}, **named)


def test_what_a_recipe_cannot_do_in_pages_is_refused_by_name(recipe: Any, tiny_model: Any) -> None:
    for method, settings, message in (
        ("kivi", {"k_bits": [2, 16, 2]}, "groups of different sizes .* layer 1 has groups of 1 "),
        ("squat", {"k_bits": 2}, "codes of method 'squat' depend on other tokens"),
    ):
        with pytest.raises(UsageError, match=message):
            codecs_of(tiny_model.config, recipe(tiny_model, method, settings), 1, None)


def test_the_mean_of_a_sequence_is_refused_with_what_to_say() -> None:
    model = make_model("qwen3")
    with pytest.raises(UsageError, match="say sequence_offset='none'"):
        codecs(model, "rtn-4")
    assert len(codecs(model, "rtn-4", sequence_offset="none")) == 3


def test_biases_of_keys_are_read_from_the_checkpoint(tmp_path: Path) -> None:
    model = with_biases(make_model("qwen2"))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for codec, layer in zip(codecs(model, "rtn-4", tmp_path), model.model.layers, strict=True):
        torch.testing.assert_close(codec.key_offset, layer.self_attn.k_proj.bias.detach().view(2, 16))
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.k_proj\.bias is not in the checkpoint"):
        codecs(model, "rtn-4", tmp_path)
    assert all(codec.key_offset is None for codec in codecs(model, "rtn-4", tmp_path, key_offset="none"))
    assert all(codec.key_offset is None for codec in codecs(model, "rtn-4"))  # random weights


def test_norms_of_keys_are_read_from_the_checkpoint(tmp_path: Path) -> None:
    model = make_model("qwen3")
    model.model.layers[1].self_attn.k_norm.weight.data[:5] *= 7
    model.save_pretrained(tmp_path)
    found = codecs(model, "turboquant-3", tmp_path, sequence_offset="none")[1].key.units
    assert torch.equal(found, probe(model).layers[1].key_units(16))


@pytest.mark.parametrize("rank", [0, 1])
def test_heads_of_one_process_have_codecs_of_their_own(
    rank: int, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcli.integrations.vllm.model._rank", lambda: rank)
    assert codecs(tiny_model, "turboquant-3", ranks=2)[0].key.spec.num_kv_heads == 1
    assert codecs(tiny_model, "turboquant-3", ranks=4)[0].key.spec.num_kv_heads == 1
    artifact = fitted(tiny_model, "commvq", tmp_path, value_groups=2, key_offset="mean")
    for layer_idx, codec in enumerate(codecs_of(tiny_model.config, MethodChoice("commvq", {}, artifact), 2, None)[1]):
        found = codec.state_dict()
        for name in ("key", "value"):
            prefix = f"layers.{layer_idx}.{name}.parts.{rank}."
            expected = {x[len(prefix) :]: y for x, y in artifact.tensors.items() if x.startswith(prefix)}
            assert "codebook" in expected
            assert all(torch.equal(found.pop(f"{name}.{x}"), y) for x, y in expected.items())
        assert torch.equal(found.pop("key_offset"), artifact.tensors[f"layers.{layer_idx}.key_offset"][[rank]])
        assert not found
    model = with_biases(make_model("qwen2"))
    model.save_pretrained(tmp_path)
    for codec, layer in zip(codecs(model, "rtn-4", tmp_path, ranks=2), model.model.layers, strict=True):
        assert torch.equal(codec.key_offset, layer.self_attn.k_proj.bias.detach().view(2, 16)[[rank]])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("commvq", "2 ranks cannot divide codes of 2 kv heads; fit with --setting value_groups=2"),
        ("klt", r"the heads of 2 ranks have different bytes \(.*\); fit with --setting head_groups=2"),
        ("oscar", "2 ranks cannot divide codes of 2 kv heads$"),
    ],
)
def test_codes_of_heads_of_several_processes_are_refused_by_name(
    name: str, reason: str, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcli.integrations.vllm.model._rank", lambda: 0)
    # 9 bytes per channel of a band for 6 heads
    artifact = fitted(tiny_model, name, tmp_path, **({"bits": 1.5, "joint_heads": 1} if name == "klt" else {}))
    with pytest.raises(UsageError, match=f"no tensor parallelism with this artifact: .*{reason}"):
        codecs_of(tiny_model.config, MethodChoice(name, {}, artifact), 2, None)


def test_other_layers_and_families_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="layers of chunked_attention beside codes in pages"):
        codecs(make("llama4_text"), "rtn-4", sequence_offset="none")
    with pytest.raises(UnsupportedModelError, match="keys of model type 'glm' cannot be rotated back"):
        rope_of(skeleton(make("glm").config))
