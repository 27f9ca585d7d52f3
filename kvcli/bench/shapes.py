"""Models by their shapes alone, so that speed and memory can be measured without weights.

This module makes configurations; reading them is the business of `kvcli.spec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcli.errors import UsageError
from kvcli.rope import Rope
from kvcli.spec import ModelSpec

if TYPE_CHECKING:
    import torch

_LLAMA_3_1: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        **_LLAMA_3_1,
    },
    "llama-3.1-70b": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        **_LLAMA_3_1,
    },
    "llama-3.1-405b": {
        "vocab_size": 128256,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        **_LLAMA_3_1,
    },
    "qwen2.5-coder-1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
"""Settings of a transformers config, of a Llama model unless `model_type` says otherwise."""


def shape_config(name: str, num_layers: int | None = None) -> Any:
    """The transformers configuration of a shape.

    Args:
        name: one of `SHAPES`.
        num_layers: another depth than the model's own.

    Raises:
        UsageError: no such shape.
    """
    from transformers import AutoConfig

    if name not in SHAPES:
        raise UsageError(f"unknown shape '{name}'; choose one of {', '.join(SHAPES)}")
    values = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None, **SHAPES[name]}
    config = AutoConfig.for_model(**values)
    if num_layers is not None:
        config.num_hidden_layers = num_layers
    return config


def shape_spec(name: str) -> ModelSpec:
    """What kvcli needs to know of a shape."""
    return ModelSpec.from_config(shape_config(name))


def shape_rope(name: str, device: torch.device) -> Rope:
    """The rotary embedding that transformers gives a model of this shape."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return Rope(LlamaRotaryEmbedding(shape_config(name)).to(device))
