"""Models by their shapes alone, so that speed and memory can be measured without weights.

This module makes configurations; reading them is the business of `kvcli.spec`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcli.errors import ModelError, UsageError, suggestion
from kvcli.spec import ModelSpec


def _rope(theta: float, kind: str = "default", **others: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **others}}


_LLAMA_3_1: dict[str, Any] = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    **_rope(
        500000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_COLUMNS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)
_ROWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "llama-3.1-8b": ((32, 4096, 14336, 32, 8, 128256, 131072), _LLAMA_3_1),
    "llama-3.1-70b": ((80, 8192, 28672, 64, 8, 128256, 131072), _LLAMA_3_1),
    "llama-3.1-405b": ((126, 16384, 53248, 128, 8, 128256, 131072), _LLAMA_3_1),
    "qwen2.5-coder-1.5b": (
        (28, 1536, 8960, 12, 2, 151936, 32768),
        {"model_type": "qwen2", "rms_norm_eps": 1e-6, **_rope(1000000.0), **_TIED},
    ),
    "smollm2-135m": (
        (30, 576, 1536, 9, 3, 49152, 8192),
        {"head_dim": 64, "rms_norm_eps": 1e-5, **_rope(100000.0), **_TIED},
    ),
    "tiny": ((3, 64, 96, 4, 2, 97, 4096), {"head_dim": 16, **_rope(10000.0)}),
}

SHAPES = {name: {**dict(zip(_COLUMNS, row, strict=True)), **others} for name, (row, others) in _ROWS.items()}
"""Settings of a transformers config, of a Llama model unless `model_type` says otherwise."""


def check_shape(name: str) -> None:
    """Raises UsageError unless a shape has this name."""
    if name not in SHAPES:
        hint = suggestion(name, SHAPES) or f"; choose one of {', '.join(SHAPES)}"
        raise UsageError(f"unknown shape '{name}'{hint}")


@contextmanager
def naming_shapes(name: str) -> Iterator[None]:
    """A ModelError in the block, of a model of this name, also says what needs none."""
    try:
        yield
    except ModelError as error:
        hint = f"shapes that need no model: {', '.join(SHAPES)}{suggestion(name, SHAPES)}"
        raise type(error)(f"{error}; {hint}") from error


def shape_config(name: str, num_layers: int | None = None) -> Any:
    """The transformers configuration of one of `SHAPES`, with another depth if one is named; UsageError for others."""
    from transformers import AutoConfig

    check_shape(name)
    values = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None, **SHAPES[name]}
    config = AutoConfig.for_model(**values)
    if num_layers is not None:
        config.num_hidden_layers = num_layers
    return config


def shape_spec(name: str) -> ModelSpec:
    """What kvcli needs to know of a shape."""
    return ModelSpec.from_config(shape_config(name))
