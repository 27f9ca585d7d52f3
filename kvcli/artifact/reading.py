"""Reading the folder of an artifact: nothing of it is believed before its size and sha256 were compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvcli.artifact.metadata import METADATA, PREVIOUS, REMEDY, WEIGHTS, check_metadata, read_metadata
from kvcli.errors import ArtifactError
from kvcli.files import is_intact


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
        metadata = read_metadata(folder)
        check_metadata(folder / METADATA, metadata)
        try:
            return metadata, _read_weights(folder, metadata["files"][WEIGHTS])
        except ArtifactError:  # unless another process replaced the artifact in the meantime
            if read_metadata(folder) == metadata:
                raise


def _read_weights(folder: Path, record: Mapping[str, Any]) -> dict[str, Tensor]:
    """Reads the weights with a size and sha256, which an export that was killed may have left under their second name.

    Raises:
        ArtifactError: missing, damaged or not finite.
    """
    for name in (WEIGHTS, PREVIOUS):
        if is_intact(folder / name, record):
            return read_tensors(folder / name)
    if not (folder / WEIGHTS).exists():
        raise ArtifactError(f"{folder / WEIGHTS} is missing; {REMEDY}")
    raise ArtifactError(f"{folder / WEIGHTS} is corrupt or truncated: its size or sha256 differs; {REMEDY}")


def read_tensors(path: Path) -> dict[str, Tensor]:
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
        raise ArtifactError(f"{path} is not a safetensors file that can be read ({reason}); {REMEDY}") from error
    return tensors
