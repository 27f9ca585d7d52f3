"""A model whose layers are on two GPUs, as `device_map="auto"` puts them there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factories import WINDOW, make_model
from torch import nn
from transformers import DynamicCache

import kvcli
from kvcli.errors import CacheError
from kvcli.registry import METHODS, get_method

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def moved(x: Any, device: str) -> Any:
    if isinstance(x, torch.Tensor):
        return x.to(device)
    return tuple(moved(part, device) for part in x) if isinstance(x, tuple) else x


def split_model() -> Any:
    """The last two of four layers on the second device; inputs follow, as accelerate's hooks move them."""
    model = make_model("llama", num_hidden_layers=4).to("cuda:0")

    def follow(module: nn.Module, args: Any, kwargs: Any) -> Any:
        device = str(next(module.parameters()).device)
        return moved(args, device), {name: moved(x, device) for name, x in kwargs.items()}

    for layer in model.model.layers[2:]:
        layer.to("cuda:1")
    for module in (*model.model.layers[2:], model.model.norm):
        module.register_forward_pre_hook(follow, with_kwargs=True)
    return model


def prompts(*lengths: int) -> dict[str, torch.Tensor]:
    generator, longest = torch.Generator().manual_seed(0), max(lengths)
    ids = torch.randint(3, 97, (len(lengths), longest), generator=generator).cuda()
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long().cuda()
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_tokens_equal_stock(impl: str) -> None:
    model, inputs = split_model(), prompts(40, 23)
    settings = {"max_new_tokens": 30, "do_sample": False}
    expected = model.generate(**inputs, past_key_values=DynamicCache(config=model.config), **settings)
    with kvcli.attach(model, "fp16", impl=impl, **WINDOW) as session:
        cache = session.new_cache()
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **settings), expected)
        assert cache.memory().num_encoded
        assert {layer.store.keys.device.index for layer in cache.compressed} == {0, 1}
        with pytest.raises(CacheError, match=r"several devices \(cuda:0, cuda:1\)"):
            cache.snapshot()


@pytest.mark.parametrize("name", [name for name in METHODS if not get_method(name).needs_artifact])
def test_methods_make_the_tokens_that_they_make_on_one_device(name: str) -> None:
    whole, split, inputs = make_model("llama", num_hidden_layers=4).cuda(), split_model(), prompts(40, 23)
    made = []
    for model in (whole, split):
        with kvcli.attach(model, name, impl="reference") as session:
            made.append(session.generate(**inputs, mode="passes").sequences.cpu())
    assert torch.equal(*made)
