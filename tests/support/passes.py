"""Passes over a cache, with padding on the left, and the comparison of what two caches hold."""

from typing import Any

import torch
from factories import WINDOW
from torch import Tensor

import kvcli
from kvcli.cache.snapshot import Snapshot
from kvcli.seam.versions import with_cache

ROUNDS = (1, 5, 1, 17, 1)
"""Tokens of the passes after a restored cache took over."""


def ids(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


def mask_of(*lengths: int) -> Tensor:
    width = max(lengths)
    return (torch.arange(width) >= width - torch.tensor(lengths).unsqueeze(1)).long()


def padded(*lengths: int, device: str = "cpu") -> dict[str, Tensor]:
    """Prompts of these lengths, as a model takes them."""
    return {"input_ids": ids(len(lengths), max(lengths)).to(device), "attention_mask": mask_of(*lengths).to(device)}


@torch.no_grad()
def go_on(model: Any, cache: Any, mask: Tensor, rounds: tuple[int, ...] = ROUNDS) -> list[Tensor]:
    """Logits of passes over a cache whose slots are marked by `mask`."""
    outputs = []
    for seed, count in enumerate(rounds):
        mask = torch.cat((mask, mask.new_ones(len(mask), count)), dim=1)
        position = (mask.cumsum(1) - 1).clamp(min=0)[:, -count:]
        tokens = ids(len(mask), count, seed + 100)
        outputs.append(model(tokens, attention_mask=mask, position_ids=position, **with_cache(cache)).logits)
    return outputs


@torch.no_grad()
def read(model: Any, cache: Any, mask: Tensor) -> None:
    position = (mask.cumsum(1) - 1).clamp(min=0)
    model(ids(*mask.shape), attention_mask=mask, position_ids=position, **with_cache(cache))


def filled(session: Any, *lengths: int) -> Any:
    """A cache that has read prompts of these lengths."""
    cache = session.new_cache()
    read(session.model, cache, mask_of(*lengths))
    return cache


def assert_equal(first: Snapshot, second: Snapshot) -> None:
    assert first.counts == second.counts
    assert first.tensors.keys() == second.tensors.keys()
    for name, x in first.tensors.items():
        y = second.tensors[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)), name


def greedy(model: Any, cache: Any = None, count: int = 12) -> Tensor:
    """A prompt of 30 tokens and more, by the model's own `generate`."""
    return model.generate(ids(1, 30), **with_cache(cache), max_new_tokens=count, do_sample=False)


def assert_same_tokens(model: Any, expected: Tensor) -> None:
    """A model attached with fp16 makes these tokens by `greedy`, with codes that take part."""
    with kvcli.attach(model, "fp16", **WINDOW) as session:
        cache = session.new_cache()
        assert torch.equal(greedy(model, cache), expected)
        assert cache.memory().num_encoded


@torch.no_grad()
def generated(model: Any, inputs: dict[str, Tensor], cache: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    """Twelve more tokens by the model's own `generate`, and the logits that they were chosen by."""
    usual = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    both = {"return_dict_in_generate": True, "output_logits": True}
    made = model.generate(**inputs, **with_cache(cache), **usual, **both, **settings)
    return made.sequences, torch.stack(made.logits)
