"""transformers' QuantizedCache, with each of its backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import QuantizedCache

from research.rivals.protocol import PASS, CacheSetting, Job

AXES = {"hqq": 1, "quanto": -1}
"""The axis along which a token's channels are grouped, so that groups do not shift as tokens come."""


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
        model, ids = job.model(), torch.tensor([job.tokens])
        kept = QuantizedCache("hqq", model.config, nbits=2, axis_key=self.axis, axis_value=self.axis)
        errors, first, flushed = [], [], 0
        for part in ids.split(PASS, 1):
            with torch.inference_mode():
                if not first:
                    hold(kept, first)
                model(part, past_key_values=kept, use_cache=True)
            ends = sum(x.keys.numel() == 0 for x in kept.layers) == len(kept.layers)
            if ends and kept.get_seq_length() > PASS:
                flushed += 1
                pairs = [
                    (x._dequantize(x._quantized_keys)[:, :, :PASS], y) for x, y in zip(kept.layers, first, strict=True)
                ]
                wrong, whole = (sum(float(z.square().sum()) for z in zs) for zs in ([a - b for a, b in pairs], first))
                errors.append((wrong / whole) ** 0.5)
        return {"flushes": flushed, "errors": errors}


def hold(kept: QuantizedCache, first: list[torch.Tensor]) -> None:
    """Copies the keys of the first update of each layer."""
    for layer in kept.layers:
        update = layer.update

        def recording(
            keys: torch.Tensor, values: torch.Tensor, *rest: Any, update: Any = update, layer: Any = layer, **named: Any
        ) -> Any:
            first.append(keys.clone())
            layer.update = update
            return update(keys, values, *rest, **named)

        layer.update = recording


SETTINGS = [
    CacheSetting("fp8", "8 bits", cache("fp8")),
    CacheSetting("fp8, first pass of one token", "8 bits", cache("fp8"), first=1),
    *(
        CacheSetting(
            f"{backend}, {bits} bits{'' if axis is None else ', groups within a token'}",
            f"{bits} bits",
            cache(backend, nbits=bits, **({} if axis is None else {"axis_key": axis, "axis_value": axis})),
        )
        for backend in AXES
        for bits in (4, 2)
        for axis in (None, AXES[backend])
    ),
    *(History(f"hqq, 2 bits, axis {axis}", "", axis) for axis in (0, 1)),
]
