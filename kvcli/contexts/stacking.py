"""Tensors of many layers as a few: those of equal shape and dtype lie in one, `layers.0-3,7.key_codes.codes`.

A block of a long context has a hundred small tensors; their names would take a noticeable part of its file, and copying
them to a GPU one by one would take longer than their bytes do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_NAME = re.compile(r"layers\.(?P<layers>\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*)\.(?P<rest>.+)", re.ASCII)


def stack_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacks tensors `layers.L.*` [...] of equal shape and dtype to [layers, ...]; others keep their names."""
    groups: dict[tuple[str, torch.Size, torch.dtype], dict[int, Tensor]] = {}
    made = {}
    for name, x in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            made[name] = x
        else:
            groups.setdefault((match["rest"], x.shape, x.dtype), {})[int(match["layers"])] = x
    for (rest, *_), layers in groups.items():
        made[f"layers.{_shown(sorted(layers))}.{rest}"] = _stacked([layers[i] for i in sorted(layers)])
    return made


def unstack_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of `stack_layers`; views.

    Raises:
        ValueError: a name that `stack_layers` does not give.
    """
    made = {}
    for name, x in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            made[name] = x
            continue
        layers = _layers(match["layers"])
        made |= {f"layers.{i}.{match['rest']}": part for i, part in zip(layers, x.unbind(0), strict=True)}
    return made


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """`torch.stack` by bytes, which also takes 8-bit floats of every kind."""
    dtype = tensors[0].dtype
    if tensors[0].element_size() == 1:
        return torch.stack([x.view(torch.uint8) for x in tensors]).view(dtype)
    return torch.stack(list(tensors))


def _shown(layers: Sequence[int]) -> str:
    """Ascending numbers as ranges, such as 0-3,7."""
    ranges: list[list[int]] = []
    for i in layers:
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _layers(shown: str) -> list[int]:
    layers: list[int] = []
    for part in shown.split(","):
        first, _, last = part.partition("-")
        layers += range(int(first), int(last or first) + 1)
    return layers
