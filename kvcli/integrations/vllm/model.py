"""The codecs of the model that vLLM loads."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from kvcli.artifact.choice import MethodChoice
from kvcli.errors import ModelError, UnsupportedModelError, UsageError
from kvcli.integrations.skeleton import rope_of, skeleton
from kvcli.integrations.vllm.environment import SETTINGS
from kvcli.methods.config import BiasOffsetConfig, CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.models.fingerprint import fingerprint
from kvcli.paged.pages import check_codecs, device_of
from kvcli.rope import NoRope, Rope
from kvcli.seam.model import attention_of_config
from kvcli.spec import NO_ROPE, ModelSpec, layer_kinds

_KINDS = {"full_attention", "sliding_attention", "linear_attention", "mamba", "conv"}
"""Of layers, all but the first of which vLLM keeps as they are."""


def codecs_of(
    config: Any, choice: MethodChoice, ranks: int, weights: Callable[[], Path] | None
) -> tuple[CacheConfig, list[LayerCodec], Rope]:
    """The settings, codecs of all layers of a model on the CPU, and its RoPE, which rotates by 0 if no codec needs it.

    Args:
        config: of transformers, of the model's text.
        ranks: processes among which heads are divided.
        weights: returns the folder of the checkpoint; None: weights are random, those of every artifact and recipe.

    KvcliError: a method whose codes depend on other tokens or on heads of other processes, an artifact or a recipe of
    another model, a model that is not understood.
    """
    model, spec = skeleton(config), ModelSpec.from_config(config)
    whole, kv_heads, fitted = spec, spec.num_kv_heads, choice.artifact is not None
    if others := {*layer_kinds(config)} - _KINDS:
        raise UnsupportedModelError(f"layers of {min(others)} beside codes in pages are not supported")
    if ranks > 1 and not fitted:
        spec = replace(spec, num_heads=spec.num_heads // ranks, num_kv_heads=max(1, kv_heads // ranks))
    kind, with_weights = choice.record.config_cls, fitted or choice.recipe is not None
    with_biases = issubclass(kind, BiasOffsetConfig) and choice.named.get("key_offset") != "none"
    with_norms = with_biases and getattr(kind, "key_units", False)
    read_projections(model, weights, with_weights=with_weights, with_biases=with_biases, with_norms=with_norms)
    digest = None if weights is None else lambda: fingerprint(model, whole)
    exact, codecs = choice.codecs(spec, lambda: attention_of_config(model), digest)
    check_codecs(choice.method, codecs)
    groups = [codec.key.tokens_per_group for codec in codecs]
    if odd := [i for i, group in enumerate(groups) if group != max(groups)]:
        raise UsageError(
            "layers whose keys are encoded in groups of different sizes are not supported in vLLM's pages: layer "
            f"{odd[0]} has groups of {groups[odd[0]]} (keys of 16 bits: of 1), others of {max(groups)} tokens"
        )
    if ranks > 1 and fitted:
        codecs = _fitted_of_rank(exact, codecs, ranks)
    elif ranks > 1:
        for codec in codecs:
            if codec.key_offset is not None:  # biases are of all heads
                first = _rank() * kv_heads // ranks
                codec.key_offset = codec.key_offset[first : first + spec.num_kv_heads]
    if spec.rope.rope_type == NO_ROPE or not any(codec.needs_rotations for codec in codecs):
        return exact, codecs, NoRope(spec.rope.rotary_dim, device_of(codecs[0].key))
    if spec.unrotated:
        raise UnsupportedModelError("some layers of this model have no RoPE; choose a method that codes after RoPE")
    return exact, codecs, rope_of(model)


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
    model: nn.Module, weights: Callable[[], Path] | None, *, with_weights: bool, with_biases: bool, with_norms: bool
) -> None:
    """Gives projections of keys and values on `meta` the first column of their weights, keys their biases and norms.

    ModelError: these are not in the checkpoint as safetensors of floating point. Random weights have no biases.
    """
    kinds = ("k_proj", "v_proj", *("k_norm", "q_norm") * with_norms)
    named = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in kinds}
    if weights is None:
        for module in named.values():
            module.bias = None
        return
    norms = {f"{name}.{part}" for name, x in named.items() if name.endswith("norm") for part, _ in x.named_parameters()}
    wanted = norms | {f"{name}.weight" for name in named if with_weights and name.endswith("_proj")}
    if with_biases:
        wanted |= {f"{name}.bias" for name, x in named.items() if name.endswith("k_proj") and x.bias is not None}
    for path in sorted(weights().glob("*.safetensors")) if wanted else ():
        with safe_open(path, framework="pt") as file:
            for key in wanted & set(file.keys()):
                name, _, what = key.rpartition(".")
                # a fingerprint samples the first column
                x = file.get_slice(key)[:, :1] if what == "weight" and key not in norms else file.get_tensor(key)
                if x.is_floating_point() and x.itemsize > 1:
                    setattr(named[name], what, nn.Parameter(x, requires_grad=False))
                    wanted.remove(key)
    if wanted:
        hint = "" if with_weights else f'; {SETTINGS}=\'{{"key_offset": "none"}}\' does without biases and norms'
        raise ModelError(f"{min(wanted)} is not in the checkpoint as safetensors in floating point{hint}")
