"""What kvcli needs to know about a model, read once from its config.

Only this module derives shapes from a transformers config. It does not load weights and does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvcli.errors import UnsupportedModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` values whose attention kvcli knows."""

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE types whose angles depend on the position alone, so that a key's rotation can be recomputed."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of a model: type, base and the number of rotated channels."""

    rope_type: str
    theta: float
    rotary_dim: int


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of a decoder-only transformer's attention, as far as its KV cache is concerned."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    vocab_size: int
    rope: RopeSpec

    @property
    def num_kv_groups(self) -> int:
        """Query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_dim(self) -> int:
        """Channels of all kv heads together, D = num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    def fp16_bytes_per_token(self) -> int:
        """Bytes that keys and values of one token take in 16 bits, over all layers."""
        return self.num_layers * 2 * self.kv_dim * 2

    def to_dict(self) -> dict[str, Any]:
        """The specification as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelSpec:
        """Inverse of `to_dict`."""
        return cls(**{**values, "rope": RopeSpec(**values["rope"])})

    @classmethod
    def from_config(cls, config: Any) -> ModelSpec:
        """Reads a transformers config.

        Args:
            config: a `PreTrainedConfig` of one of `FAMILIES`.

        Raises:
            UnsupportedModelError: another family, a layer that is not full attention, or a RoPE type whose
                angles change with the context length; the message names them.
        """
        family = config.model_type
        if family not in FAMILIES:
            raise UnsupportedModelError(
                f"model type '{family}' is not supported; kvcli compresses {', '.join(FAMILIES)}"
            )
        _refuse_partial_attention(config)
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        return cls(
            family=family,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=head_dim,
            max_position_embeddings=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            rope=_rope_spec(config, head_dim),
        )


def _refuse_partial_attention(config: Any) -> None:
    """Raises when some layer attends to a part of the context only."""
    kinds = list(getattr(config, "layer_types", None) or [])
    if not kinds and getattr(config, "sliding_window", None) is not None:
        kinds = ["sliding_attention"] * config.num_hidden_layers
    unsupported: dict[str, list[int]] = {}
    for layer_idx, kind in enumerate(kinds):
        if kind != "full_attention":
            unsupported.setdefault(kind, []).append(layer_idx)
    if unsupported:
        listed = "; ".join(f"{kind} in layers {', '.join(map(str, where))}" for kind, where in unsupported.items())
        raise UnsupportedModelError(f"only full-attention layers can be compressed, but this model has {listed}")


def _rope_spec(config: Any, head_dim: int) -> RopeSpec:
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in STATIC_ROPE_TYPES:
        raise UnsupportedModelError(
            f"RoPE type '{rope_type}' is not supported: its angles change with the context length, so the rotation "
            f"of a cached key is not a function of its position; supported are {', '.join(STATIC_ROPE_TYPES)}"
        )
    fraction = parameters.get("partial_rotary_factor") or 1.0
    return RopeSpec(rope_type, float(parameters.get("rope_theta", 10000.0)), int(head_dim * fraction))
