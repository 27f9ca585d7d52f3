"""Shapes of a model, read once from its config.

Only this module derives shapes from a transformers config. It does not load weights and does not import torch.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from pydantic import ConfigDict

from kvcli.errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "longrope")
"""RoPE types whose angles can be computed again from the position, longrope's also from the length of the text."""

NO_ROPE = "none"
"""The RoPE type of a model whose keys are stored as they reach attention: it rotates none, or in a way of its own."""

_WHOLE_HEAD = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose default RoPE rotates all channels, whatever `partial_rotary_factor` says."""

_UNLIMITED_POSITIONS = 2**20
"""What a model whose config names no largest position is taken to have."""

_LIMITS = dict.fromkeys(("num_layers", "num_heads", "num_kv_heads", "head_dim"), 10**4)
_LIMITS |= {"hidden_size": 10**6, "max_position_embeddings": 10**9, "vocab_size": 10**8}
"""Largest values of a specification: beyond every model, and small enough for a product of them to be computed."""

_EXACT_FIELDS = ConfigDict(extra="forbid", strict=True)
"""For specifications in the fields of pydantic models, such as manifests."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of a model: type, base and the number of rotated channels.

    Of the type `none` they are the channels that methods pair all the same. Other types than `ROPE_TYPES` are a
    ValueError.
    """

    rope_type: str
    theta: float
    rotary_dim: int

    __pydantic_config__ = _EXACT_FIELDS

    def __post_init__(self) -> None:
        if self.rope_type not in (*ROPE_TYPES, NO_ROPE) or not 0 < self.theta < math.inf:
            raise ValueError(f"RoPE of type {self.rope_type!r} with base {self.theta!r} is not supported")


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of a decoder-only transformer's attention, as far as its KV cache is concerned.

    Layers are those of full attention, counted from 0 in the order of the model.

    Attributes:
        num_layers: layers of full attention, whose keys and values can be compressed.
        value_head_dim: channels of a value; None: as many as of a key.
        layer_indices: what the model calls the layers; (): all of its layers are of full attention.
        other_layers: layers of other kinds (sliding window, linear attention, convolution), which keep their own cache.
        unrotated: layers whose queries and keys are not rotated, in a model that rotates others.
        latent: whether layers cache latents (MLA): a key that all heads share, and as its value the latent.

    Raises:
        ValueError: a shape that no such model has.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    vocab_size: int
    rope: RopeSpec
    value_head_dim: int | None = None
    layer_indices: tuple[int, ...] = ()
    other_layers: int = 0
    unrotated: tuple[int, ...] = ()
    latent: bool = False

    __pydantic_config__ = _EXACT_FIELDS

    def __post_init__(self) -> None:
        for name in _LIMITS:
            _check_size(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key heads evenly")
        if self.value_head_dim is not None and not 0 < self.value_head_dim <= _LIMITS["head_dim"]:
            raise ValueError(f"value_head_dim is {self.value_head_dim!r}")
        if self.layer_indices and len(self.layer_indices) != self.num_layers:
            raise ValueError(f"{len(self.layer_indices)} layer indices of {self.num_layers} layers")
        if not all(0 <= layer_idx < self.num_layers for layer_idx in self.unrotated):
            raise ValueError(f"unrotated layers {self.unrotated} of {self.num_layers}")
        rotary_dim = self.rope.rotary_dim
        if rotary_dim % 2 or not 0 < rotary_dim <= self.head_dim:
            channels = f"{rotary_dim!r} of {self.head_dim} channels"
            raise ValueError(f"RoPE rotates {channels}; it must be an even number of them")

    @property
    def num_kv_groups(self) -> int:
        """Query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_dim(self) -> int:
        """Channels of all kv heads together, D = num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Channels of a value of one kv head."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def kv_width(self) -> int:
        """Channels of keys and values of all kv heads together."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)

    @property
    def model_layers(self) -> int:
        """Layers of the model, of every kind."""
        return self.num_layers + self.other_layers

    def in_model(self, layer_idx: int) -> int:
        """The index of a layer in the model."""
        return self.layer_indices[layer_idx] if self.layer_indices else layer_idx

    def for_values(self) -> Self:
        """The same with the width of values in place of that of keys, for codecs of values."""
        rope = replace(self.rope, rotary_dim=self.value_dim - self.value_dim % 2)
        return replace(self, head_dim=self.value_dim, value_head_dim=None, rope=rope)

    @property
    def coverage(self) -> str:
        """How many layers are compressed, in words."""
        return coverage(self.num_layers, self.other_layers)

    def fp16_bytes_per_token(self) -> int:
        """Bytes that keys and values of one token take in 16 bits, over all layers of full attention."""
        return self.num_layers * self.kv_width * 2

    def to_dict(self) -> dict[str, Any]:
        """The specification as plain JSON values; of models without latents as before there were any."""
        return {name: value for name, value in asdict(self).items() if name != "latent" or value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; ValueError, TypeError or KeyError: values that are no specification."""
        tuples = {name: tuple(values[name]) for name in ("layer_indices", "unrotated") if name in values}
        return cls(**{**values, **tuples, "rope": RopeSpec(**values["rope"])})

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """The specification in a transformers config; `kvcli.seam.probe` determines it from the model itself.

        UnsupportedModelError: a model without a layer of full attention, or shapes that no model has.
        """
        config = config.get_text_config(decoder=True)
        try:
            _check_size("num_layers", config.num_hidden_layers)
            kinds = layer_kinds(config)
            full = tuple(layer_idx for layer_idx, kind in enumerate(kinds) if kind == _FULL)
            if not full:
                places: dict[str, list[str]] = {}
                for layer_idx, kind in enumerate(kinds):
                    places.setdefault(kind, []).append(str(layer_idx))
                have = "; ".join(f"{kind} in layers {', '.join(layers)}" for kind, layers in places.items())
                raise UnsupportedModelError(f"no layer attends to the whole context with keys and values alone: {have}")
            latent = bool(rank := getattr(config, "kv_lora_rank", None))
            if shared := getattr(config, "num_kv_shared_layers", None):
                raise UnsupportedModelError(f"{shared} layers attend to what another one caches (num_kv_shared_layers)")
            by_layer = getattr(config, "per_layer_config", None)
            sizes = by_layer[full[0]] if by_layer else config
            num_heads = sizes.num_attention_heads
            head_dim = getattr(sizes, "head_dim", None) or config.hidden_size // num_heads
            value_head_dim = getattr(sizes, "v_head_dim", None) or head_dim
            if latent:
                head_dim, value_head_dim = config.qk_rope_head_dim, rank
            unrotated: tuple[int, ...] = ()  # indices among the layers of full attention
            declared = hasattr(type(config), "position_embedding_type")  # files of other types may say it in vain
            if declared and config.position_embedding_type != "rope":
                unrotated = tuple(range(len(full)))
            elif rotated := getattr(config, "no_rope_layers", None):  # 1 where a layer is rotated, against the name
                unrotated = tuple(i for i, layer_idx in enumerate(full) if not rotated[layer_idx])
            rotates = len(unrotated) < len(full)
            return cls(
                **general_fields(config),
                num_layers=len(full),
                num_heads=num_heads,
                num_kv_heads=1 if latent else getattr(sizes, "num_key_value_heads", None) or num_heads,
                head_dim=head_dim,
                rope=rope_spec(config, head_dim) if rotates else no_rope(head_dim),
                value_head_dim=None if value_head_dim == head_dim else value_head_dim,
                layer_indices=full if len(full) < len(kinds) else (),
                other_layers=len(kinds) - len(full),
                unrotated=unrotated if rotates else (),
                latent=latent,
            )
        except (ValueError, TypeError, AttributeError, IndexError, ZeroDivisionError) as error:
            raise UnsupportedModelError(f"the model's config cannot be used: {error}") from error


_FULL = "full_attention"


def _check_size(name: str, value: Any) -> None:
    if type(value) is not int or not 0 < value <= _LIMITS[name]:
        raise ValueError(f"{name} is {value!r}; it must be an integer between 1 and {_LIMITS[name]}")


def general_fields(config: Any) -> dict[str, Any]:
    """The fields of a `ModelSpec` that have nothing to do with attention."""
    positions = getattr(config, "max_position_embeddings", None)
    return {
        "family": config.model_type,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": _UNLIMITED_POSITIONS if positions is None else positions,
        "vocab_size": config.vocab_size,
    }


def coverage(layers: int, other_layers: int) -> str:
    """How many layers are compressed, those that attend to the whole context, in words."""
    return f"{layers} of {layers + other_layers} layers" if other_layers else f"all {layers} layers"


def layer_kinds(config: Any) -> list[str]:
    """The kind of attention of each layer in a config, `full_attention` where it sees the whole context."""
    kinds = list(getattr(config, "layer_types", None) or [])
    if kinds:
        return kinds
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kind, crossed = _FULL if window is None else "sliding_attention", getattr(config, "cross_attention_layers", ())
    return ["cross_attention" if i in crossed else kind for i in range(config.num_hidden_layers)]


def rope_spec(config: Any, head_dim: int) -> RopeSpec:
    """RoPE of the layers of full attention, as a config describes it.

    UnsupportedModelError: a combination that the families which it is for cannot run.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if isinstance(parameters.get(_FULL), Mapping):
        parameters = parameters[_FULL]
    rope_type, fraction = parameters.get("rope_type", "default"), parameters.get("partial_rotary_factor") or 1.0
    for name in ("short_factor", "long_factor"):
        if len(parameters.get(name) or ()) not in (0, int(head_dim * fraction) // 2):
            raise ValueError(f"{name} of RoPE has not a number for each pair of {head_dim * fraction:g} channels")
    if not parameters or rope_type not in ROPE_TYPES:
        return no_rope(head_dim)
    if config.model_type in _WHOLE_HEAD or rope_type == "proportional":
        if fraction != 1.0 and rope_type not in ("default", "proportional"):
            what = f"RoPE type '{rope_type}' with partial_rotary_factor {fraction}"
            raise UnsupportedModelError(f"{what} is not supported")
        fraction = 1.0
    rotary_dim = int(head_dim * fraction)
    return RopeSpec(rope_type, float(parameters.get("rope_theta", 10000.0)), rotary_dim + rotary_dim % 2)


def no_rope(head_dim: int) -> RopeSpec:
    """The RoPE of a model without RoPE, or with one that is not understood: keys are stored as they reach attention."""
    return RopeSpec(NO_ROPE, 1.0, head_dim - head_dim % 2)


def bits_per_value(nbytes: int, num_values: int) -> float:
    """Stored bits per key or value; 0 without any."""
    return 8 * nbytes / num_values if num_values else 0.0
