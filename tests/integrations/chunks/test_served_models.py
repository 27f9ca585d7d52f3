"""Models and artifacts that chunks of LMCache are coded for: loaded, refused, and where chunks begin."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chunks_made import decoded, real_chunks, stored_bytes
from factories import FAMILIES, make_model, make_spec
from families import make

import kvcli
from kvcli.artifact.artifact import Artifact
from kvcli.artifact.recipe import Recipe
from kvcli.errors import ChunkError, ConfigError, KvcliError
from kvcli.integrations.chunks.codec import ChunkCodec, find_starts
from kvcli.integrations.chunks.served import ChunkSettings, Served, StoreSettings
from kvcli.integrations.lmcache.layout import decode_chunk, encode_chunk
from kvcli.integrations.skeleton import rope_of, skeleton
from kvcli.methods.method import Method
from kvcli.models.checkpoint import read_config
from kvcli.registry import get_method, make_config, parse_method
from kvcli.rope import Rope
from kvcli.spec import ModelSpec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_starts_are_found_again(tiny_model: Any, model_folder: Path, artifact: Path, dtype: torch.dtype) -> None:
    codec = ChunkCodec(Served.load(ChunkSettings(model=str(model_folder), artifact=str(artifact))))
    wrong, errors = 0, []
    for index, chunk in enumerate(real_chunks(tiny_model, 16)):
        stored = encode_chunk(codec, chunk.to(dtype))
        assert stored.numel() == stored_bytes(codec, chunk.shape, dtype)
        target = torch.empty_like(chunk, dtype=dtype)
        wrong += decode_chunk(codec, stored, target).start != 16 * index
        errors.append(float((target - chunk)[0].square().sum() / chunk[0].square().sum()))
    assert wrong <= 2
    assert max(errors) < 0.5


def test_the_best_start_is_found_where_there_are_many(tiny_artifact: Callable[[Method], Artifact]) -> None:
    """Keys that the codebooks hold exactly, at a start beyond those that are tried closely."""
    artifact = tiny_artifact(get_method("commvq"))
    codecs = artifact.build_codecs(artifact.config)
    rope = Rope(make_model("llama").model.rotary_emb)
    rotation = rope.rotation(torch.arange(64 * 37, 64 * 38).unsqueeze(0), torch.float32)
    x = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(1))
    keys = [codec.decode_keys(codec.key.encode(x, None), None, rotation, torch.float32) for codec in codecs]
    assert find_starts(lambda i: keys[i], codecs, rope, 8192) == [64 * 37]


def test_an_artifact_codes_all_heads_together(model_folder: Path, artifact: Path) -> None:
    codec = ChunkCodec(Served.load(ChunkSettings(model=str(model_folder), artifact=str(artifact))))
    for shape in ([2, 3, 64, 16], [2, 2, 64, 32]):
        with pytest.raises(ChunkError, match="parallelism"):
            stored_bytes(codec, shape)


ENGINES_OWN = ("backend_name", "module_path", "class_name", "interface_v1")

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"rope_type": "llama3", **LLAMA3}])
def test_rope_is_read_from_the_config_alone(family: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(family, rope_parameters={"rope_theta": 5e4, **scaling})
    model.config.save_pretrained(tmp_path)
    loaded = Served.load(ChunkSettings(model=str(tmp_path), method="kivi-2"))
    assert loaded.spec == ModelSpec.from_config(model.config)
    positions = torch.arange(500).unsqueeze(0)
    ours = rope_of(skeleton(read_config(tmp_path)))
    rotation, expected = (x.rotation(positions, torch.float32) for x in (ours, Rope(model.model.rotary_emb)))
    assert torch.equal(rotation.cos, expected.cos)
    assert torch.equal(rotation.sin, expected.sin)


def test_an_engines_config_without_what_its_rope_needs_is_refused() -> None:
    """As flags that leave out `rope_theta` make it; what the engine has stays as it is."""
    config = make_model("llama").config
    config._attn_implementation = "sdpa"
    skeleton(config)
    assert config._attn_implementation == "sdpa"
    config.rope_parameters = {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(KvcliError, match="model type 'llama'"):
        skeleton(config)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss", "mistral"])
def test_rope_is_that_of_layers_of_full_attention(family: str) -> None:
    """As a session finds it in the model: of several kinds of layers, or with each pair's angle given once."""
    model = make(family)
    with kvcli.attach(model, "kivi-2") as session:
        expected = session.seam.attention.rope
        ours, positions = rope_of(skeleton(model.config)), torch.arange(500).unsqueeze(0)
        assert (ours.layout, ours.arguments) == (expected.layout, expected.arguments)
        x, y = (rope.rotation(positions, torch.float32) for rope in (ours, expected))
        assert torch.equal(x.cos, y.cos)
        assert torch.equal(x.sin, y.sin)


@pytest.mark.parametrize(
    ("values", "named"),
    [({"method": "kivi-2", "exact_tokens": -1}, "exact_tokens"), ({"metod": "kivi-2"}, "did you mean 'method'")],
)
def test_wrong_settings_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ChunkSettings.read({"model": "m", **values})
    with pytest.raises(ConfigError, match="model: Field required"):
        ChunkSettings.read({})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "name a method, an artifact or a recipe"),
        ({"method": "nothing-2"}, "unknown method"),
        ({"method": "rtn-4", "settings": {"flush_block": 4}}, "omit flush_block"),
        ({"recipe": "none.yaml"}, "cannot read none.yaml"),
        ({"method": "commvq-2"}, "needs an artifact"),
        ({"method": "squat-2"}, "state"),
        ({"method": "fp8"}, "key_offset"),
        ({"method": "kivi-2", "settings": {"group_size": 7}}, "group_size"),
        ({"method": "kivi-2", "device": "nowhere"}, "device 'nowhere'"),
        ({"method": "kivi-2", "device": "meta"}, "device 'meta'"),
        ({"artifact": "/nonexistent"}, "nonexistent"),
    ],
)
def test_what_cannot_be_served_is_refused(model_folder: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(KvcliError, match=named):
        Served.load(ChunkSettings.read({"model": str(model_folder), **changes}))


def test_other_weights_or_artifacts_are_another_identity(model_folder: Path, artifact: Path) -> None:
    def identity(**coding: str) -> bytes:
        return Served.load(ChunkSettings(model=str(model_folder), **coding)).identity

    found = {identity(method="kivi-2"), identity(method="kivi-4")}
    for name in ("model.safetensors", "pytorch_model.bin", "model.gguf"):
        for content in (f"{name} a", f"{name} b", ""):
            (model_folder / name).write_text(content)
            found.add(identity(method="kivi-2"))
    assert len(found) == 2 + 3 * 2  # an empty file is as none
    one = Artifact.load(artifact)
    tensors = {name: x + 1 if "codebook" in name else x for name, x in one.tensors.items()}
    Artifact(one.metadata, tensors).save(artifact.with_name("other"))
    assert identity(artifact=str(artifact)) != identity(artifact=str(artifact.with_name("other")))


def test_a_model_of_the_hub_is_read_at_the_engines_commit(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, of_flags = list[Any](), SimpleNamespace(hf_config=read_config(model_folder), revision="c0ffee")
    monkeypatch.setattr(f"{Served.__module__}.download_config", lambda *rest: asked.append(rest) or model_folder)
    for changes in ({}, {"model": "a/tiny"}, {"revision": "v2"}, {"model": "b/other"}):
        Served.load(StoreSettings(method="kivi-2", folder="store", **changes), "a/tiny", of_flags)
    assert asked == [("a/tiny", "c0ffee")] * 2 + [("a/tiny", "v2"), ("b/other", None)]


def test_codes_of_another_rope_are_of_another_model() -> None:
    spec, (record, bits) = make_spec(), parse_method("kivi-2")
    parameters = ({"rope_type": "default", "rope_theta": theta} for theta in (1e4, 2e4))
    ropes = (Rope(make_model("llama", head_dim=16, rope_parameters=x).model.rotary_emb) for x in parameters)
    config = make_config(record.name, bits)
    assert len({Served(spec, rope, record, config).identity for rope in ropes}) == 2


def test_the_page_of_tiers_has_settings_that_are_accepted(repo_root: Path) -> None:
    page = (repo_root / "docs" / "tiers.md").read_text()
    vllm, sglang, lmcache = (json.loads(x) for x in re.findall(r"'(\{.*?\})'\n", page, re.DOTALL))
    (tier,) = vllm["kv_connector_extra_config"]["secondary_tiers"]
    for values, settings, of_the_engine in (
        (tier, StoreSettings, ("type", "module_path")),
        (sglang, StoreSettings, (*ENGINES_OWN, "hicache_storage_pass_prefix_keys")),
        (lmcache["serde"], ChunkSettings, ("type",)),
    ):
        assert settings.read({name: x for name, x in values.items() if name not in of_the_engine}).method == "kivi-2"
    fields = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(fields) == sorted(StoreSettings.model_fields)


def test_an_artifact_of_another_model_is_refused(artifact: Path, tmp_path: Path) -> None:
    make_model("llama", num_hidden_layers=2).config.save_pretrained(tmp_path / "other")
    with pytest.raises(KvcliError, match="num_layers 3 instead of 2"):
        Served.load(ChunkSettings(model=str(tmp_path / "other"), artifact=str(artifact)))


def test_bits_by_layer_of_a_recipe_are_of_the_whole_model(model_folder: Path, tmp_path: Path) -> None:
    settings, recipe = {"k_bits": [4, 2, 1], "v_bits": 2, "group_size": 8}, tmp_path / "r.yaml"
    Recipe(model="m", fingerprint="f", method="kivi", settings=settings).save(recipe)
    codec = ChunkCodec(Served.load(ChunkSettings(model=str(model_folder), recipe=str(recipe))))
    of_all: dict[str, Any] = {"model": str(model_folder), "settings": {"group_size": 8}}
    sizes = (ChunkSettings(method=x, **of_all) for x in ("kivi-1", "kivi-k4v2"))
    least, most = (stored_bytes(ChunkCodec(Served.load(x)), [2, 3, 64, 32]) for x in sizes)
    assert least < stored_bytes(codec, [2, 3, 64, 32]) < most
    with pytest.raises(ChunkError, match="k_bits has 3 numbers, but 1 layers"):
        stored_bytes(codec, [2, 1, 64, 32])


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["kivi-2", "commvq"])
def test_a_gpu_and_a_cpu_read_what_the_other_wrote(
    method: str, tiny_model: Any, model_folder: Path, artifact: Path
) -> None:
    coding = {"artifact": str(artifact)} if method == "commvq" else {"method": method}
    settings = (ChunkSettings(model=str(model_folder), device=device, **coding) for device in ("cpu", "cuda"))
    codecs = [ChunkCodec(Served.load(x)) for x in settings]
    chunk = real_chunks(tiny_model, 64)[3].bfloat16()
    energy, errors = chunk.float().square().sum(), []
    for writer in codecs:
        first, second = (decoded(reader, encode_chunk(writer, chunk), chunk).float() for reader in codecs)
        assert (first - second).square().sum() / energy < 1e-4
        errors.append(float((first - chunk.float()).square().sum() / energy))
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
