"""A served model as its config describes it: how it attends and rotates, without its weights."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from kvcli.errors import UnsupportedModelError, error_text
from kvcli.rope import Rope
from kvcli.seam.decoder import find_decoder
from kvcli.seam.rotary import RotaryCall
from kvcli.spec import ModelSpec

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss")
"""Model types whose keys after RoPE reach an engine with their channels in the order of `kvcli.rope`."""


def skeleton(config: Any) -> nn.Module:
    """The model of a transformers config on the device `meta`.

    UnsupportedModelError: it is none of transformers' causal language models, or lacks what its RoPE needs.
    """
    from transformers import AutoModelForCausalLM

    config = deepcopy(config)  # it may be an engine's, and name kernels of its own
    config._attn_implementation = "eager"
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise UnsupportedModelError(f"model type '{config.model_type}': {error_text(error)[:200]}") from error
    return model


def rope_of(model: nn.Module) -> Rope:
    """The rotary embedding of a skeleton, on the CPU; UnsupportedModelError: a family whose keys are not known."""
    config: Any = model.config
    if config.model_type not in _FAMILIES:
        # an engine has keys after RoPE in the model's own order of channels, and there is no model here to ask for it
        raise UnsupportedModelError(
            f"keys of model type '{config.model_type}' cannot be rotated back; those of {', '.join(_FAMILIES)} can"
        )
    kind, rotary = ModelSpec.from_config(config).rope.rope_type, find_decoder(model).rotary_emb
    if kind in ("dynamic", "longrope"):
        raise UnsupportedModelError(f"RoPE of type '{kind}' depends on the length of a text, which pages do not know")
    rope = RotaryCall.by(type(rotary)(config)).rope()
    if rope is None:
        raise UnsupportedModelError(f"RoPE of type '{kind}' does not rotate by angles in proportion to positions")
    return rope
