"""The method that environment variables name, and the codecs of the model that vLLM loads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from safetensors import safe_open
from torch import nn

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.choice import MethodChoice
from kvcli.artifact.recipe import Recipe
from kvcli.errors import ConfigError, ModelError, UnsupportedModelError, UsageError, error_text
from kvcli.integrations.skeleton import rope_of, skeleton
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.models.fingerprint import fingerprint
from kvcli.paged.pages import check_codecs, device_of
from kvcli.registry import parse_method
from kvcli.rope import NoRope, Rope
from kvcli.seam.model import attention_of_config
from kvcli.spec import ModelSpec

METHOD, ARTIFACT, RECIPE, SETTINGS = "KVCLI_METHOD", "KVCLI_ARTIFACT", "KVCLI_RECIPE", "KVCLI_SETTINGS"


@dataclass(frozen=True)
class Settings:
    """A method, its artifact, settings of the method, and the recipe if that named them."""

    method: str
    artifact: Artifact | None
    values: Mapping[str, Any]
    recipe: Recipe | None = None

    @classmethod
    def read(cls) -> Self | None:
        """The settings in the environment; None: KVCLI_METHOD, KVCLI_ARTIFACT and KVCLI_RECIPE are not there.

        KVCLI_SETTINGS change those of a recipe, but for `flush_block`, which pages do not have.

        Raises:
            UsageError: several of them, settings of none, an unknown method, or one that needs an artifact.
            ConfigError: KVCLI_SETTINGS is no JSON object, or a recipe that cannot be read or lacks its artifact.
            ArtifactError: an artifact that cannot be read.
        """
        named = {x: value for x in (METHOD, ARTIFACT, RECIPE) if (value := os.environ.get(x))}
        if not named:
            if os.environ.get(SETTINGS):
                raise UsageError(f"{SETTINGS} are of a method: set {METHOD}, {ARTIFACT} or {RECIPE}, or unset it")
            return None
        if len(named) > 1:
            raise UsageError(f"a recipe and an artifact say their method: set one of {', '.join(named)}")
        try:
            values = json.loads(os.environ.get(SETTINGS) or "{}")
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{SETTINGS} is no JSON: {error_text(error)}") from error
        if not isinstance(values, dict):
            raise ConfigError(f'{SETTINGS} is a JSON object of settings, such as {{"key_offset": "none"}}')
        if "flush_block" in values:
            raise UsageError("tokens of a paged cache are encoded at once; omit flush_block")
        recipe = Recipe.read(named[RECIPE]) if RECIPE in named else None
        folder = named.get(ARTIFACT) if recipe is None else recipe.find_artifact()
        artifact = Artifact.load(folder) if folder else None
        if recipe is not None:
            values = {**recipe.settings, **values}
            values.pop("flush_block", None)
            return cls(recipe.method, artifact, values, recipe)
        name = named[METHOD] if artifact is None else artifact.method
        if parse_method(name)[0].needs_artifact and artifact is None:
            raise UsageError(f"method '{name}' needs an artifact; name its folder in {ARTIFACT} instead")
        return cls(name, artifact, values)


def codecs_of(
    config: Any, settings: Settings, ranks: int, weights: Callable[[], Path] | None
) -> tuple[CacheConfig, list[LayerCodec], Rope]:
    """The settings, codecs of all layers of a model on the CPU, and its RoPE, which rotates by 0 if no codec needs it.

    Args:
        config: of transformers, of the model's text.
        ranks: processes among which heads are divided.
        weights: returns the folder of the checkpoint; None: weights are random, those of every artifact and recipe.

    Raises:
        KvcliError: a method whose codes depend on other tokens or on heads of other processes, an artifact or a recipe
            of another model, a model that is not understood.
    """
    model, spec = skeleton(config), ModelSpec.from_config(config)
    artifact, recipe, whole, kv_heads = settings.artifact, settings.recipe, spec, spec.num_kv_heads
    if spec.other_layers:
        raise UnsupportedModelError("layers without full attention, such as a sliding window, have no codes in pages")
    if ranks > 1 and artifact is None:
        spec = replace(spec, num_heads=spec.num_heads // ranks, num_kv_heads=max(1, kv_heads // ranks))
    with_weights, with_biases = bool(artifact or recipe), settings.values.get("key_offset") != "none"
    read_projections(model, weights, with_weights=with_weights, with_biases=with_biases)
    if recipe is not None and weights is not None:
        recipe.check_model(fingerprint(model, whole))

    def digest() -> str:
        if weights is None and artifact is not None:
            return str(artifact.metadata["fingerprint"])
        return fingerprint(model, spec)

    choice = MethodChoice(settings.method, settings.values, artifact)
    exact, codecs = choice.codecs(spec, lambda: attention_of_config(model), digest)
    check_codecs(settings.method, codecs)
    groups = [codec.key.tokens_per_group for codec in codecs]
    if odd := [i for i, group in enumerate(groups) if group != max(groups)]:
        raise UsageError(
            "layers whose keys are encoded in groups of different sizes are not supported in vLLM's pages: layer "
            f"{odd[0]} has groups of {groups[odd[0]]} (keys of 16 bits: of 1), others of {max(groups)} tokens"
        )
    if ranks > 1 and artifact is not None:
        codecs = _fitted_of_rank(exact, codecs, ranks)
    elif ranks > 1:
        for codec in codecs:
            if codec.key_offset is not None:  # biases are of all heads
                first = _rank() * kv_heads // ranks
                codec.key_offset = codec.key_offset[first : first + spec.num_kv_heads]
    if any(codec.needs_rotations for codec in codecs):
        if spec.unrotated:
            raise UnsupportedModelError("some layers of this model have no RoPE; choose a method that codes after RoPE")
        return exact, codecs, rope_of(model)
    return exact, codecs, NoRope(spec.rope.rotary_dim, device_of(codecs[0].key))


def _fitted_of_rank(exact: CacheConfig, codecs: list[LayerCodec], ranks: int) -> list[LayerCodec]:
    """Fitted codecs of the heads of this process; UsageError: codes are of heads of other processes, too."""
    try:
        return [codec.of_rank(_rank(), ranks) for codec in codecs]
    except UsageError as error:
        names = [name for name in ("value_groups", "head_groups") if hasattr(exact, name)]
        hint = "".join(f"; fit with --setting {name}={ranks}" for name in names)
        raise UsageError(f"no tensor parallelism with this artifact: {error}{hint}") from error


def _rank() -> int:
    """Which of the processes that divide heads this one is."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def read_projections(
    model: nn.Module, weights: Callable[[], Path] | None, *, with_weights: bool, with_biases: bool
) -> None:
    """Gives projections of keys and values on `meta` the first column of their weights, and keys their biases.

    ModelError: these are not in the checkpoint as safetensors of floating point. Random weights have no biases.
    """
    named = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in ("k_proj", "v_proj")}
    if weights is None:
        for module in named.values():
            module.bias = None
        return
    wanted = {f"{name}.weight" for name in named if with_weights}
    if with_biases:
        wanted |= {f"{name}.bias" for name, x in named.items() if x.bias is not None and name.endswith("k_proj")}
    for path in sorted(weights().glob("*.safetensors")) if wanted else ():
        with safe_open(path, framework="pt") as file:
            for key in wanted & set(file.keys()):
                name, _, what = key.rpartition(".")
                # a fingerprint samples the first column
                x = file.get_slice(key)[:, :1] if what == "weight" else file.get_tensor(key)
                if x.is_floating_point() and x.itemsize > 1:
                    setattr(named[name], what, nn.Parameter(x, requires_grad=False))
                    wanted.remove(key)
    if wanted:
        hint = "" if with_weights else f'; {SETTINGS}=\'{{"key_offset": "none"}}\' does without biases'
        raise ModelError(f"{min(wanted)} is not in the checkpoint as safetensors in floating point{hint}")
