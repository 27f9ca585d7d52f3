"""Codes of the reference codecs and of the encode kernels, compared: on a GPU if there is one, else interpreted."""

from typing import Any

import torch
from torch import Tensor

from kvcli.methods.base import Codes

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def many(tokens: int) -> int:
    """A number of tokens: larger on a GPU, with the same remainder."""
    return tokens + 960 if GPU else tokens


def both(codec: Any, x: Tensor, state: Any = None) -> tuple[Codes, Codes]:
    """Codes of the reference and of the kernels."""
    codec.to(DEVICE)
    codec.fused = False
    reference = codec.encode(x, state)
    codec.fused = True
    return reference, codec.encode(x, state)


def assert_same(reference: Codes, ours: Codes) -> None:
    """All stored tensors equal, bit for bit."""
    for name, expected in reference.tensors().items():
        stored = getattr(ours, name)
        assert stored.dtype == expected.dtype, name
        assert torch.equal(stored, expected), name


def relative_error(x: Tensor, expected: Tensor) -> float:
    """Normalised squared error."""
    return float((x.float() - expected.float()).square().sum() / expected.float().square().sum())
