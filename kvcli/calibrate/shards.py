"""Shares of a recording that several processes make, and how they become the recording that one process would make.

A share is a range of forward passes, so the files of a share are those that a single process writes, to the last bit.
What errors cost is kept as sums for each sequence and added in the order of the sequences, whoever computed them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import load_file

from kvcli.calibrate.fisher import Sums, layer_fisher
from kvcli.errors import SamplesError, UsageError
from kvcli.files import is_intact, locked, open_run, read_sealed, replacing, write_sealed
from kvcli.sample_parts import FISHER, PARTS, STALE, part_name, part_records, sums_name, write_fisher
from kvcli.samples import FORMAT_VERSION, MANIFEST, Recording

SHARD = "shard"
"""Field of a share's manifest: its index, counted from 1, and the number of shares."""

_OWN_FIELDS = (SHARD, "complete", "parts")
_REMEDY = "run the same 'kvcli calibrate --shard' again"


@dataclass(frozen=True)
class Shard:
    """One of several shares of a recording.

    Attributes:
        index: which one, counted from 1.
        count: how many there are.
    """

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `2/8`.

        Raises:
            UsageError: anything else than an index and the number of shares.
        """
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UsageError(f"--shard takes an index and the number of shards, such as 1/4 to 4/4, not '{text}'")
        return cls(int(match[1]), int(match[2]))

    def parts(self, num_parts: int) -> range:
        """The forward passes of this share.

        Raises:
            UsageError: fewer passes than shares.
        """
        if num_parts < self.count:
            raise UsageError(
                f"{num_parts} forward passes cannot be shared among {self.count}; lower --batch-size, or use fewer"
            )
        return range((self.index - 1) * num_parts // self.count, self.index * num_parts // self.count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def merge(
    folders: Sequence[Path],
    out: Path,
    *,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda parts: None,
) -> Recording:
    """Makes a recording of all its shares; the order in which they are given does not matter.

    Files are linked where the file system can do so, and copied elsewhere; the shares stay.

    Args:
        folders: of the shares.
        out: where the recording goes.
        overwrite: discard another recording in that folder.
        advance: called with the number of files after each.

    Raises:
        SamplesError: a folder without a finished share, shares of different recordings, one that is missing or given
            twice, or damaged files; the output folder holds another recording.
    """
    with locked(out, SamplesError):
        merge_into(folders, out, overwrite=overwrite, advance=advance)
    return Recording(out)


def merge_into(
    folders: Sequence[Path],
    out: Path,
    *,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda parts: None,
) -> None:
    """`merge` into a folder that the caller has locked."""
    shares = read_shards(folders)
    manifest = {name: value for name, value in shares[0][1].items() if name not in _OWN_FIELDS}
    open_run(out, MANIFEST, manifest, kind="recording", stale=STALE, error=SamplesError, overwrite=overwrite)
    records: dict[str, Any] = {}
    for folder, share in shares:
        for name, record in share["parts"].items():
            if not is_intact(folder / name, record):
                raise SamplesError(f"{folder / name} is missing or damaged; {_REMEDY}")
            if not name.startswith("fisher"):
                _link(folder / name, out / name)
                records[name] = record
            advance(1)
    windows, parts = range(len(manifest["windows"])), range(manifest["num_parts"])
    names = [part_name(window, part) for window in windows for part in parts]
    if manifest["fisher_sequences"]:
        write_fisher(out, layer_fisher(_sums(shares), manifest["spec"]["num_layers"]))
        records[FISHER] = part_records(out, {})[FISHER]
        names.append(FISHER)
    if missing := [name for name in names if name not in records]:
        raise SamplesError(f"the shards lack {missing[0]}; {_REMEDY}")
    finish(out, manifest, {name: records[name] for name in names})
    (out / PARTS).unlink(missing_ok=True)


def finish(folder: Path, manifest: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Writes the manifest of a complete recording or share; its files are now listed there and nowhere else."""
    write_sealed(folder / MANIFEST, {**manifest, "complete": True, "parts": dict(parts)})


def read_sums(path: Path) -> Sums:
    """The sums of one sequence.

    Raises:
        SamplesError: a file that cannot be read.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise SamplesError(f"{path} cannot be read ({error}); {_REMEDY}") from error


def read_shards(folders: Sequence[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """Folders and manifests of all shares of one recording, in their order.

    Args:
        folders: in any order.

    Raises:
        SamplesError: as `merge`, but for damaged files of samples, which are not read.
    """
    found: dict[int, tuple[Path, dict[str, Any]]] = {}
    for folder in folders:
        if not (folder / MANIFEST).exists():
            raise SamplesError(f"no shard of a recording in {folder}; run 'kvcli calibrate --shard' first")
        manifest = read_sealed(folder / MANIFEST, FORMAT_VERSION, _REMEDY, SamplesError)
        if SHARD not in manifest:
            raise SamplesError(f"{folder} holds a whole recording, not a shard of one")
        index, count = manifest[SHARD]
        if not manifest.get("complete"):
            raise SamplesError(
                f"shard {index}/{count} in {folder} is not finished; run the same 'kvcli calibrate' again"
            )
        if index in found:
            raise SamplesError(f"{folder} and {found[index][0]} both hold shard {index}/{count}")
        found[index] = folder, manifest
    if not found:
        raise SamplesError("no shards to merge; run 'kvcli calibrate --shard' first")
    shares = [found[index] for index in sorted(found)]
    first_folder, first = shares[0]
    for folder, manifest in shares[1:]:
        for name in first:
            same = manifest[SHARD][1] == first[SHARD][1] if name == SHARD else manifest.get(name) == first[name]
            if not same and name not in ("complete", "parts"):
                raise SamplesError(f"{folder} and {first_folder} are shards of different recordings: {name} differs")
    count = first[SHARD][1]
    if missing := [f"{index}/{count}" for index in range(1, count + 1) if index not in found]:
        raise SamplesError(f"shard {', '.join(missing)} is missing")
    return shares


def _sums(shares: Sequence[tuple[Path, Mapping[str, Any]]]) -> Iterator[Sums]:
    """The sums of all sequences in their order."""
    where = {name: folder for folder, manifest in shares for name in manifest["parts"]}
    for index in range(shares[0][1]["fisher_sequences"]):
        if (name := sums_name(index)) not in where:
            raise SamplesError(f"the shards lack {name}; {_REMEDY}")
        yield read_sums(where[name] / name)


def _link(source: Path, target: Path) -> None:
    """Gives a file a second name, or copies it where that cannot be done."""
    if target.exists() and target.samefile(source):
        return
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        with replacing(target) as temporary:
            shutil.copyfile(source, temporary)
