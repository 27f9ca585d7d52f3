"""Shares of a recording that several processes make, and how they become the recording that one process would make.

A share is a range of forward passes, so the files of a share are those that a single process writes, to the last bit.
Fisher information is kept as sums for each sequence and added in the order of the sequences, whoever computed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from kvcli.calibrate.fisher import Sums, layer_fisher
from kvcli.calibrate.parts import FISHER, PARTS, SamplesManifest, part_name, part_records, sums_name, write_part
from kvcli.calibrate.recording import Recording
from kvcli.errors import SamplesError
from kvcli.progress import Advance
from kvcli.storage.atomic import is_intact, link_or_copy
from kvcli.storage.locks import locked

_REMEDY = "run the same 'kvcli calibrate --shard' again"


def merge(
    folders: Sequence[Path], out: Path, *, overwrite: bool = False, advance: Advance = lambda files: None
) -> Recording:
    """Makes a recording of all its shares, in any order.

    Files are linked where the file system can do so, and copied elsewhere; the shares stay. `overwrite` discards
    another recording in `out`; `advance` is called with the number of files after each. SamplesError: a folder without
    a finished share, shares of different recordings, one that is missing or given twice, or damaged files; the output
    folder holds another recording.
    """
    with locked(out, SamplesError):
        merge_into(folders, out, overwrite=overwrite, advance=advance)
    return Recording(out)


def merge_into(
    folders: Sequence[Path], out: Path, *, overwrite: bool = False, advance: Advance = lambda files: None
) -> None:
    """`merge` into a folder that the caller has locked."""
    shares = read_shards(folders)
    first = shares[0][1]
    description = {name: x for name, x in first.values.items() if name not in ("shard", "complete", "parts")}
    manifest = SamplesManifest.open(out, description, overwrite=overwrite)
    records: dict[str, Any] = {}
    for folder, share in shares:
        for name, record in share.parts.items():
            if not is_intact(folder / name, record):
                raise SamplesError(f"{folder / name} is missing or damaged; {_REMEDY}")
            if not name.startswith("fisher"):
                link_or_copy(folder / name, out / name)
                records[name] = record
            advance(1)
    names = [part_name(window, part) for window in range(len(first.windows)) for part in range(first.num_parts)]
    if first.fisher_sequences:
        where = {name: folder for folder, share in shares for name in share.parts}
        sums = [sums_name(index) for index in range(first.fisher_sequences)]
        if missing := [name for name in sums if name not in where]:
            raise SamplesError(f"the shards lack {missing[0]}; {_REMEDY}")
        write_fisher(out, [where[name] / name for name in sums], first.spec.num_layers)
        records[FISHER] = part_records(out)[FISHER]
        names.append(FISHER)
    if missing := [name for name in names if name not in records]:
        raise SamplesError(f"the shards lack {missing[0]}; {_REMEDY}")
    manifest.finish(out, {name: records[name] for name in names})
    (out / PARTS).unlink(missing_ok=True)


def write_fisher(folder: Path, paths: Sequence[Path], num_layers: int) -> None:
    """Writes the Fisher information of all layers from files with the sums of sequences, which are added in order.

    SamplesError: a file that cannot be read.
    """

    def sums() -> Iterator[Sums]:
        for path in paths:
            try:
                yield load_file(path)
            except (OSError, SafetensorError) as error:
                raise SamplesError(f"{path} cannot be read ({error}); {_REMEDY}") from error

    layers = enumerate(layer_fisher(sums(), num_layers))
    write_part(folder, FISHER, {f"layers.{i}.{name}": x for i, layer in layers for name, x in vars(layer).items()})


def read_shards(folders: Sequence[Path]) -> list[tuple[Path, SamplesManifest]]:
    """Folders and manifests of all shares of one recording, in their order; SamplesError as `merge`, samples unread."""
    shares: dict[int, tuple[Path, SamplesManifest]] = {}
    for folder in folders:
        if not (folder / SamplesManifest.FILE).exists():
            raise SamplesError(f"no shard of a recording in {folder}; run 'kvcli calibrate --shard' first")
        manifest = SamplesManifest.read(folder / SamplesManifest.FILE)
        if manifest.shard is None:
            raise SamplesError(f"{folder} holds a whole recording, not a shard of one")
        index, count = manifest.shard
        if not manifest.complete:
            raise SamplesError(f"shard {index}/{count} in {folder} is unfinished; run the same 'kvcli calibrate' again")
        if index in shares:
            raise SamplesError(f"{folder} and {shares[index][0]} both hold shard {index}/{count}")
        shares[index] = folder, manifest
    if not shares:
        raise SamplesError("no shards to merge; run 'kvcli calibrate --shard' first")
    ordered = [shares[index] for index in sorted(shares)]
    first_folder, first = ordered[0]
    for folder, manifest in ordered[1:]:
        ours, theirs = ({**m.values, "shard": m.values["shard"][1:], "parts": 0} for m in (first, manifest))
        if differing := [name for name in ours if theirs.get(name) != ours[name]]:
            raise SamplesError(f"{folder} and {first_folder} are of different recordings: {differing[0]} differs")
    count = first.values["shard"][1]
    if missing := [f"{index}/{count}" for index in range(1, count + 1) if index not in shares]:
        raise SamplesError(f"shard {', '.join(missing)} is missing")
    return ordered
