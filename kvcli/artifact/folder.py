"""The folder of an artifact: it holds the old one or the new one at every instant, and nothing is used unverified.

Replacing an artifact is one rename, of kvcli.json: until then the weights it names stay in the folder as
codec.safetensors or, once that is the new file, as codec.safetensors.previous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvcli.artifact.card import model_card
from kvcli.artifact.metadata import METADATA, PREVIOUS, WEIGHTS, Metadata
from kvcli.errors import ArtifactError
from kvcli.storage.atomic import file_record, is_intact, link_or_copy, replacing
from kvcli.storage.locks import locked
from kvcli.storage.manifest import write_sealed

CARD = "README.md"
_UNFINISHED = (WEIGHTS, PREVIOUS, *(f"{name}.tmp" for name in (WEIGHTS, PREVIOUS, METADATA, CARD)))


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads an artifact's metadata and tensors and verifies both files.

    Args:
        folder: where an artifact was saved; another process may replace it meanwhile.

    Returns:
        The metadata, and the tensors by name on the CPU.

    Raises:
        ArtifactError: missing, of another format version, corrupt, truncated, empty or not finite.
    """
    while True:
        metadata = Metadata.read(folder / METADATA)
        try:
            for name in (WEIGHTS, PREVIOUS):  # an export that was killed may have left them under their second name
                if is_intact(folder / name, metadata.files[WEIGHTS]):
                    return metadata.values, _read_tensors(folder / name)
            there = (folder / WEIGHTS).exists()
            state = "is corrupt or truncated: its size or sha256 differs" if there else "is missing"
            raise ArtifactError(f"{folder / WEIGHTS} {state}; {Metadata.REMEDY}")
        except ArtifactError:  # unless another process replaced the artifact in the meantime
            if Metadata.read(folder / METADATA).values == metadata.values:
                raise


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file.

    Raises:
        ArtifactError: it is none, or a tensor is empty or not finite.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            # copies: a mapped file that somebody truncates would end the process
            tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
        for name, x in tensors.items():
            narrow = x.is_floating_point() and x.element_size() == 1  # float8 has no isfinite
            if x.numel() == 0 or not bool((x.float() if narrow else x).isfinite().all()):
                raise ArtifactError(f"{path}: tensor {name} is empty or not finite; the artifact must not be used")
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        wrong = f"{path} is not a safetensors file that can be read ({reason})"
        raise ArtifactError(f"{wrong}; {Metadata.REMEDY}") from error
    return tensors


def write_folder(
    folder: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    check: Callable[[Mapping[str, Any], Mapping[str, Tensor]], None],
    *,
    overwrite: bool,
) -> None:
    """Writes an artifact; kvcli.json, which makes it one, appears when the rest was read back and checked.

    Args:
        folder: where to; if this call makes it and leaves it empty, it is removed.
        metadata: without the record of the weights' file, which is added here.
        tensors: by name.
        check: given the metadata and the tensors that were read back; raises where they are not what they should be.
        overwrite: whether an artifact may be there.

    Raises:
        ArtifactError: the folder has files but is not an artifact, is one while `overwrite` is off, or is used by
            another process.
    """
    created = not folder.exists()
    with locked(folder, ArtifactError):
        try:
            if (folder / METADATA).exists():
                if not overwrite:
                    raise ArtifactError(f"{folder} exists already; use --overwrite to replace it")
            elif others := sorted({path.name for path in folder.iterdir()} - set(_UNFINISHED)):
                wrong = f"{folder} exists already; it is not an artifact: it holds {others[0]}"
                raise ArtifactError(f"{wrong}; choose another --out")
            for name in _UNFINISHED:
                if name.endswith(".tmp"):
                    (folder / name).unlink(missing_ok=True)
            with replacing(folder / WEIGHTS) as temporary:
                save_file({name: x.contiguous() for name, x in tensors.items()}, temporary)
                metadata = {**metadata, "files": {WEIGHTS: file_record(temporary)}}
                check(metadata, _read_tensors(temporary))
                card = model_card(metadata)
                try:
                    record = Metadata.read(folder / METADATA).files[WEIGHTS]
                except ArtifactError:
                    record = None  # no artifact there that could be read
                if is_intact(folder / WEIGHTS, record) and not is_intact(folder / PREVIOUS, record):
                    link_or_copy(folder / WEIGHTS, folder / PREVIOUS)
            write_sealed(folder / METADATA, metadata)
            (folder / PREVIOUS).unlink(missing_ok=True)
            with replacing(folder / CARD) as temporary:
                temporary.write_text(card)
            check(*read_folder(folder))
        finally:
            if created:
                with suppress(OSError):  # what is not empty stays
                    folder.rmdir()
