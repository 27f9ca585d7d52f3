"""How a snapshot is cut into parts, and each part made a block: bytes of a safetensors file, named by their BLAKE3.

    first     what precedes the codes: the sinks of the windows in full precision, and the key codec's state
    coded j   the codes of tokens [j * size, (j + 1) * size) after the sinks, keys and values of all layers
    last      the window after the sinks, and the codes after the last of those

A prefix that ends where a part of codes ends is `first` and these parts up to there: nothing of it is in full precision
but the sinks, as after `CompressedCache.crop`. A snapshot of several rows, or with padding, is one part.

In a block, tensors of layers that have the same shape and dtype lie in one, `layers.0-3,7.key_codes.codes`: a hundred
names would take a noticeable part of it, and copying as many tensors to a GPU longer than their bytes do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain, groupby

import torch
from blake3 import blake3
from safetensors.torch import save
from torch import Tensor

from kvcli.cache.record import POSITIONS, VALID, Block, Place, SnapshotCounts, num_coded
from kvcli.cache.snapshot import Snapshot
from kvcli.errors import CacheError, error_text
from kvcli.storage.reads import FilePart, memory_for, read_parts
from kvcli.storage.tensors import SafetensorsHeader

Tensors = dict[str, Tensor]

_LAYERS = re.compile(
    r"(?P<kind>layers|others)\.(?P<layers>\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*)\.(?P<rest>.+)", re.ASCII
)


def encode(tensors: Mapping[str, Tensor]) -> tuple[Block, bytes]:
    """A block of tensors, on any device, by name; those of equal tensors are equal."""
    data = save({name: x.detach().cpu().contiguous() for name, x in stack_layers(tensors).items()})
    return Block(blake3(data).hexdigest(), len(data)), data


def read_blocks(places: Sequence[Place], device: torch.device | str = "cpu") -> list[Tensors]:
    """The tensors of blocks on a device, verified; on the CPU the mapped files, to be copied before they are kept.

    Raises:
        CacheError: a file is missing, truncated or damaged, or it is none of tensors.
    """
    blocks = []
    try:
        for data in verify_blocks(places, device):
            length = int.from_bytes(bytes(data[:8].tolist()), "little")
            header = SafetensorsHeader.parse(bytes(data[8 : 8 + min(length, len(data))].cpu().numpy()))
            rest = data[header.nbytes :]
            if len(rest) != header.data_bytes:
                raise ValueError("its size differs from what its header says")
            blocks.append(unstack_layers(header.views(rest)))
    except ValueError as error:
        raise CacheError(f"a block in {places[0].path.parent} does not hold tensors ({error})") from error
    return blocks


def verify_blocks(places: Sequence[Place], device: torch.device | str = "cpu") -> list[Tensor]:
    """The bytes of blocks, uint8 [bytes] each; CacheError for the first that is missing, truncated or damaged."""
    try:
        for place in places:  # each of which another process may remove at any moment
            if not place.path.is_file():
                raise CacheError(f"{place.path} is missing")
            if place.path.stat().st_size != place.file_bytes:
                raise CacheError(f"{place.path} is truncated or damaged (its size differs)")
        files = {place.path: place.file_bytes for place in places}
        memory = {path: memory_for(path, size, torch.device(device)) for path, size in files.items()}
        parts = [FilePart(x.path, x.start, memory[x.path][x.start : x.start + x.block.bytes]) for x in places]
        digests = read_parts(parts)
    except OSError as error:
        raise CacheError(f"{places[0].path} cannot be read ({error_text(error)})") from error
    for place, digest in zip(places, digests, strict=True):
        if digest != place.block.digest:
            raise CacheError(f"{place.path} is damaged (its BLAKE3 differs)")
    return [part.memory for part in parts]


def stack_layers(tensors: Mapping[str, Tensor]) -> Tensors:
    """Stacks tensors `layers.L.*` [...] of equal shape and dtype to [layers, ...]; others keep their names."""
    groups: dict[tuple[str, str, torch.Size, torch.dtype], dict[int, Tensor]] = {}
    stacked = {}
    for name, x in tensors.items():
        match = _LAYERS.fullmatch(name)
        if match is None:
            stacked[name] = x
        else:
            groups.setdefault((match["kind"], match["rest"], x.shape, x.dtype), {})[int(match["layers"])] = x
    for (kind, rest, _, dtype), group in groups.items():
        layers = sorted(group)
        runs = [[i for _, i in run] for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0])]
        shown = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
        # by bytes, which also takes 8-bit floats of every kind
        by_bytes = torch.uint8 if dtype.itemsize == 1 else dtype
        stacked[f"{kind}.{shown}.{rest}"] = torch.stack([group[i].view(by_bytes) for i in layers]).view(dtype)
    return stacked


def unstack_layers(tensors: Mapping[str, Tensor]) -> Tensors:
    """Inverse of `stack_layers`, as views; ValueError for a name that that does not give."""
    unstacked = {}
    for name, x in tensors.items():
        if (match := _LAYERS.fullmatch(name)) is None:
            unstacked[name] = x
        else:
            borders = [part.partition("-") for part in match["layers"].split(",")]
            layers = [i for first, _, last in borders for i in range(int(first), int(last or first) + 1)]
            unstacked |= {f"{match['kind']}.{i}.{match['rest']}": y for i, y in zip(layers, x.unbind(0), strict=True)}
    return unstacked


def is_plain(snapshot: Snapshot) -> bool:
    """Whether a snapshot is of one sequence without padding, at positions 0, 1, 2 and so on."""
    positions, valid = snapshot.tensors[POSITIONS], snapshot.tensors[VALID]
    in_order = torch.arange(positions.shape[-1], device=positions.device)
    return len(snapshot.counts.lengths) == 1 and bool(valid.all()) and bool((positions == in_order).all())


def split(snapshot: Snapshot, size: int) -> tuple[Tensors, list[Tensors], Tensors]:
    """Cuts a plain snapshot into `first`, parts of `size` tokens of codes and `last`; views."""
    counts = snapshot.counts
    first: Tensors = {}
    coded: list[Tensors] = [{} for _ in range(num_coded(counts, size))]
    last: Tensors = {}
    for name, x in snapshot.tensors.items():
        if name in counts.tokens_per_entry:
            entries = size // counts.tokens_per_entry[name]
            for j, part in enumerate(coded):
                part[name] = x[:, :, j * entries : (j + 1) * entries]
            last[name] = x[:, :, len(coded) * entries :]
        elif counts.used(name) is not None:
            first[name], last[name] = x[:, :, : counts.sinks], x[:, :, counts.sinks :]
        elif name not in (VALID, POSITIONS):
            first[name] = x
    return first, coded, last


def join(counts: SnapshotCounts, parts: Sequence[Tensors]) -> Snapshot:
    """A snapshot from what `split` gave, or from its first parts without `last`; CacheError if they do not fit."""
    pieces: dict[str, list[Tensor]] = {}
    for name, x in chain.from_iterable(part.items() for part in parts):
        pieces.setdefault(name, []).append(x)
    try:
        # a tensor that is not cut by time is in `first` alone
        tensors = {
            name: x[0].clone() if counts.used(name) is None else torch.cat(x, dim=2) for name, x in pieces.items()
        }
    except (RuntimeError, IndexError) as error:
        raise CacheError(f"its blocks do not belong together ({error_text(error)})") from error
    length, device = counts.lengths[0], next(iter(tensors.values())).device
    tensors[VALID] = torch.ones(1, length, dtype=torch.bool, device=device)
    tensors[POSITIONS] = torch.arange(length, dtype=torch.int32, device=device).unsqueeze(0)
    return Snapshot(counts, tensors)
