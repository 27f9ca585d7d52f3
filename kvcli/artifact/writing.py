"""Writing the folder of an artifact, so that it holds the old one or the new one at every instant.

Replacing an artifact is one rename, of kvcli.json: until then the weights it names stay in the folder as
codec.safetensors or, once that is the new file, as codec.safetensors.previous.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from kvcli.artifact.card import model_card
from kvcli.artifact.metadata import METADATA, PREVIOUS, WEIGHTS, read_metadata
from kvcli.artifact.reading import read_tensors
from kvcli.errors import ArtifactError
from kvcli.files import file_record, is_intact, locked, replacing, write_sealed

CARD = "README.md"
_UNFINISHED = (WEIGHTS, PREVIOUS, *(f"{name}.tmp" for name in (WEIGHTS, PREVIOUS, METADATA, CARD)))


@contextmanager
def folder_of_its_own(folder: Path, *, overwrite: bool) -> Iterator[None]:
    """Makes a folder and keeps other processes out of it; one that was made here goes again if it stays empty.

    Args:
        folder: of an artifact; it may be empty.
        overwrite: whether an artifact may be there.

    Raises:
        ArtifactError: the folder has files but is not an artifact, is one while `overwrite` is off, or is used by
            another process.
    """
    made = not folder.exists()
    with locked(folder, ArtifactError):
        try:
            _check_replaceable(folder, overwrite)
            yield
        finally:
            if made:
                with suppress(OSError):  # what is not empty stays
                    folder.rmdir()


def write_folder(
    folder: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    check: Callable[[Mapping[str, Any], Mapping[str, Tensor]], None],
) -> None:
    """Writes an artifact; kvcli.json, which makes it one, appears when the rest was read back and checked.

    Args:
        folder: where to, as `folder_of_its_own` gives it.
        metadata: without the record of the weights' file, which is added here.
        tensors: by name.
        check: given the metadata and the tensors that were read back; raises where they are not what they should be.
    """
    with replacing(folder / WEIGHTS) as temporary:
        save_file({name: x.contiguous() for name, x in tensors.items()}, temporary)
        metadata = {**metadata, "files": {WEIGHTS: file_record(temporary)}}
        check(metadata, read_tensors(temporary))
        card = model_card(metadata)
        _keep_previous(folder)
    write_sealed(folder / METADATA, metadata)
    (folder / PREVIOUS).unlink(missing_ok=True)
    with replacing(folder / CARD) as temporary:
        temporary.write_text(card)


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    """Raises when a folder is neither empty nor what an unfinished export left nor an artifact to be replaced."""
    if (folder / METADATA).exists():
        if not overwrite:
            raise ArtifactError(f"{folder} exists already; use --overwrite to replace it")
    elif others := sorted({path.name for path in folder.iterdir()} - set(_UNFINISHED)):
        raise ArtifactError(
            f"{folder} exists already; it is not an artifact: it holds {others[0]}; choose another --out"
        )
    for name in _UNFINISHED:
        if name.endswith(".tmp"):
            (folder / name).unlink(missing_ok=True)


def _keep_previous(folder: Path) -> None:
    """Gives the weights that kvcli.json names a second name, before the first one goes to their successor."""
    try:
        record = read_metadata(folder)["files"][WEIGHTS]
    except (ArtifactError, KeyError, TypeError):
        return  # no artifact there that could be read
    if is_intact(folder / PREVIOUS, record) or not is_intact(folder / WEIGHTS, record):
        return  # they have it from an export that was killed, or are damaged
    temporary = folder / f"{PREVIOUS}.tmp"
    try:
        os.link(folder / WEIGHTS, temporary)
    except OSError:  # a file system without hard links
        shutil.copyfile(folder / WEIGHTS, temporary)
    temporary.replace(folder / PREVIOUS)
