"""transformers' QuantizedCache, with each of its backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, QuantizedCache

from research.rivals.protocol import PASS, CacheSetting, Job

AXES = {"hqq": 1, "quanto": -1}
"""The axis that is not the default."""


def cache(backend: str, **options: Any) -> Callable[[Any], QuantizedCache]:
    """A cache of that backend for a model."""
    return lambda model: QuantizedCache(backend, model.config, **options)


@dataclass(frozen=True)
class History:
    """The first keys of hqq at 2 bits, as they are read after each flush."""

    name: str
    claim: str
    axis: int
    ways: tuple[str, ...] = ("history",)

    def history(self, job: Job) -> dict[str, Any]:
        """Norm of the error of the first PASS keys of all layers over the keys' norm, after each flush."""
        model, parts = job.model(), torch.tensor([job.tokens]).split(PASS, 1)
        kept = QuantizedCache("hqq", model.config, nbits=2, axis_key=self.axis, axis_value=self.axis)
        stock, errors = DynamicCache(), []
        with torch.no_grad():
            model(parts[0], past_key_values=stock)
            first = [x.keys for x in stock.layers]
            for part in parts:
                model(part, past_key_values=kept)
                if kept.get_seq_length() > PASS and not any(x.keys.numel() for x in kept.layers):
                    read = [x._dequantize(x._quantized_keys)[:, :, :PASS] for x in kept.layers]
                    errors.append(norm(map(torch.sub, read, first)) / norm(first))
        return {"errors": errors}


def norm(tensors: Iterable[torch.Tensor]) -> float:
    """Of all numbers of some tensors."""
    return sum(float(x.square().sum()) for x in tensors) ** 0.5


SETTINGS = [
    CacheSetting("fp8", "8 bits", cache("fp8")),
    CacheSetting("fp8, first pass of one token", "8 bits", cache("fp8"), first=1),
    *(
        CacheSetting(
            f"{backend}, {bits} bits{'' if axis is None else f', axis {axis}'}",
            f"{bits} bits",
            cache(backend, nbits=bits, **({} if axis is None else {"axis_key": axis, "axis_value": axis})),
        )
        for backend in AXES
        for bits in (4, 2)
        for axis in (None, AXES[backend])
    ),
    *(History(f"hqq, 2 bits, axis {axis}; first keys", "", axis) for axis in (0, 1)),
]
