"""Blocks: tensors as the bytes of a safetensors file, which have their BLAKE3 as a name, wherever they lie.

Tensors of layers that have the same shape and dtype lie in one, `layers.0-3,7.key_codes.codes`: a block of a long
context has a hundred small tensors, whose names would take a noticeable part of it, and copying them to a GPU one by
one would take longer than their bytes do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from blake3 import blake3
from pydantic import Field, PositiveInt
from safetensors.torch import save
from torch import Tensor

from kvcli.errors import CacheError
from kvcli.storage.reads import Part, memory_for, read_parts
from kvcli.storage.tensors import SafetensorsHeader

Tensors = dict[str, Tensor]

_LAYERS = re.compile(r"layers\.(?P<layers>\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*)\.(?P<rest>.+)", re.ASCII)


@dataclass(frozen=True)
class Block:
    """A block by its content.

    Attributes:
        digest: BLAKE3 of its bytes.
        bytes: how many.
    """

    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: PositiveInt


@dataclass(frozen=True)
class Place:
    """Where a block lies.

    Attributes:
        block: which one.
        path: of the file.
        start: of its first byte in the file.
        file_bytes: of the whole file.
    """

    block: Block
    path: Path
    start: int
    file_bytes: int


def encode(tensors: Mapping[str, Tensor]) -> tuple[Block, bytes]:
    """A block of tensors, on any device, by name; those of equal tensors are equal."""
    data = save({name: x.detach().cpu().contiguous() for name, x in stack_layers(tensors).items()})
    return Block(blake3(data).hexdigest(), len(data)), data


def read_blocks(places: Sequence[Place], device: torch.device | str = "cpu") -> list[Tensors]:
    """Reads and verifies blocks, several at once.

    Args:
        places: of the blocks.
        device: of the tensors.

    Returns:
        The tensors of each block. On the CPU they are the mapped file itself: copy them before they are kept.

    Raises:
        CacheError: a file is missing, truncated or damaged, or it is none of tensors.
    """
    memory = _verified(places, torch.device(device))
    try:
        return [_tensors_in(data) for data in memory]
    except ValueError as error:
        raise CacheError(f"a block in {places[0].path.parent} does not hold tensors ({error})") from error


def verify_blocks(places: Sequence[Place]) -> None:
    """Compares size and BLAKE3 of blocks, several at once.

    Raises:
        CacheError: the first that is missing, truncated or damaged.
    """
    _verified(places, torch.device("cpu"))


def _verified(places: Sequence[Place], device: torch.device) -> list[Tensor]:
    """The bytes of blocks, uint8 [bytes] each."""
    for place in places:
        if not place.path.is_file():
            raise CacheError(f"{place.path} is missing")
        if place.path.stat().st_size != place.file_bytes:
            raise CacheError(f"{place.path} is truncated or damaged (its size differs)")
    try:
        files = {place.path: place.file_bytes for place in places}
        memory = {path: memory_for(path, size, device) for path, size in files.items()}
        parts = [Part(x.path, x.start, memory[x.path][x.start : x.start + x.block.bytes]) for x in places]
        digests = read_parts(parts)
    except OSError as error:
        raise CacheError(f"{places[0].path} cannot be read ({' '.join(str(error).split())})") from error
    for place, digest in zip(places, digests, strict=True):
        if digest != place.block.digest:
            raise CacheError(f"{place.path} is damaged (its BLAKE3 differs)")
    return [part.memory for part in parts]


def _tensors_in(data: Tensor) -> Tensors:
    """The tensors of a block, as views of its bytes, uint8 [bytes] on any device.

    Raises:
        ValueError: it is none.
    """
    length = int.from_bytes(bytes(data[:8].tolist()), "little")
    header = SafetensorsHeader.parse(bytes(data[8 : 8 + min(length, len(data))].cpu().numpy()))
    rest = data[header.nbytes :]
    if len(rest) != header.data_bytes:
        raise ValueError("its size differs from what its header says")
    return unstack_layers(header.views(rest))


def stack_layers(tensors: Mapping[str, Tensor]) -> Tensors:
    """Stacks tensors `layers.L.*` [...] of equal shape and dtype to [layers, ...]; others keep their names."""
    groups: dict[tuple[str, torch.Size, torch.dtype], dict[int, Tensor]] = {}
    stacked = {}
    for name, x in tensors.items():
        match = _LAYERS.fullmatch(name)
        if match is None:
            stacked[name] = x
        else:
            groups.setdefault((match["rest"], x.shape, x.dtype), {})[int(match["layers"])] = x
    for (rest, _, dtype), group in groups.items():
        layers = sorted(group)
        ranges: list[list[int]] = []
        for i in layers:
            if ranges and ranges[-1][1] == i - 1:
                ranges[-1][1] = i
            else:
                ranges.append([i, i])
        shown = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
        # by bytes, which also takes 8-bit floats of every kind
        by_bytes = torch.uint8 if dtype.itemsize == 1 else dtype
        stacked[f"layers.{shown}.{rest}"] = torch.stack([group[i].view(by_bytes) for i in layers]).view(dtype)
    return stacked


def unstack_layers(tensors: Mapping[str, Tensor]) -> Tensors:
    """Inverse of `stack_layers`; views.

    Raises:
        ValueError: a name that `stack_layers` does not give.
    """
    unstacked = {}
    for name, x in tensors.items():
        match = _LAYERS.fullmatch(name)
        if match is None:
            unstacked[name] = x
            continue
        borders = [part.partition("-") for part in match["layers"].split(",")]
        layers = [i for first, _, last in borders for i in range(int(first), int(last or first) + 1)]
        unstacked |= {f"layers.{i}.{match['rest']}": y for i, y in zip(layers, x.unbind(0), strict=True)}
    return unstacked
