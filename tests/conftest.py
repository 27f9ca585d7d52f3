"""Shared fixtures: tiny random models of every family, on the CPU in float32."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)  # the models are tiny: threads only cost time

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def make_model(family: str, **changes: Any) -> Any:
    """A random causal language model with 4 query heads over 2 kv heads of 16 channels."""
    import transformers

    prefix = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    values = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        **({"sliding_window": None} if family == "mistral" else {}),
        **changes,
    }
    torch.manual_seed(1)
    config = getattr(transformers, f"{prefix}Config")(**values)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    # random weights of the usual scale give nearly uniform attention; larger ones make every error visible
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.data *= 4
    return model


@pytest.fixture(params=FAMILIES)
def any_model(request: pytest.FixtureRequest) -> Any:
    """One tiny model of each family."""
    return make_model(request.param)


@pytest.fixture
def tiny_model() -> Any:
    """A tiny Llama."""
    return make_model("llama")


@pytest.fixture
def prompt() -> Callable[..., dict[str, torch.Tensor]]:
    """Makes a batch of random prompts of given lengths, padded on the left."""

    def make(*lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        width = max(lengths)
        ids = torch.zeros(len(lengths), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, length in enumerate(lengths):
            ids[row, width - length :] = torch.randint(3, 97, (length,), generator=generator)
            mask[row, width - length :] = 1
        return {"input_ids": ids, "attention_mask": mask}

    return make


@pytest.fixture
def repo_root() -> Path:
    """The source checkout."""
    return Path(__file__).resolve().parent.parent
