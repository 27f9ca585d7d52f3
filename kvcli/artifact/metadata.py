"""The metadata of an artifact, kvcli.json: its fields, their types and ranges, and the names of the folder's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcli._version import __version__
from kvcli.errors import ArtifactError, UsageError
from kvcli.files import read_sealed
from kvcli.methods.config import CacheConfig
from kvcli.registry import get_method
from kvcli.samples import checked_spec

FORMAT_VERSION = 6
METADATA = "kvcli.json"
WEIGHTS = "codec.safetensors"
PREVIOUS = f"{WEIGHTS}.previous"
"""Second name of the weights that kvcli.json names, while their successor is written."""

REMEDY = "export it again with 'kvcli export --overwrite'"


def new_metadata(
    *,
    method: str,
    config: CacheConfig,
    identity: Mapping[str, Any],
    provenance: Mapping[str, Any],
    layers: list[Mapping[str, Any]],
) -> dict[str, Any]:
    """The metadata of an artifact, without the list of its files.

    Args:
        method: name of the method.
        config: its settings, resolved.
        identity: which model it is for, as `LoadedModel.identity` says.
        provenance: corpus, revision, tokens, seed.
        layers: what fitting reported for each layer, held-out errors above all.

    Returns:
        Plain JSON values; `save` adds `files`.
    """
    return {
        "format_version": FORMAT_VERSION,
        "kvcli_version": __version__,
        "method": method,
        "config": config.model_dump(),
        **identity,
        "provenance": dict(provenance),
        "layers": layers,
    }


def metric_values(reports: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, str]]:
    """A metric of all layers, each value with its place.

    Args:
        reports: one per layer, what `FitReport.metrics` held, and optionally the index `layer`.
        name: of the metric: a number per layer, or a list with one per head or one for all heads.

    Returns:
        Value and place, such as `layer 3 head 1`; empty where no layer reports the metric as a number.
    """
    placed = []
    for position, report in enumerate(reports):
        values, where = report.get(name, []), f"layer {report.get('layer', position)}"
        per_head = values if isinstance(values, Sequence) else [values]
        placed += [
            (float(value), f"{where} head {head}" if len(per_head) > 1 else where)
            for head, value in enumerate(per_head)
            if isinstance(value, (int, float))
        ]
    return placed


def read_metadata(folder: Path) -> dict[str, Any]:
    """Reads kvcli.json of an artifact and compares its checksum; `check_metadata` looks at what it says.

    Raises:
        ArtifactError: it is missing, cannot be read, or is of another format version, or damaged.
    """
    if not (folder / METADATA).exists():
        raise ArtifactError(f"no artifact in {folder}: {METADATA} is missing; make one with 'kvcli export'")
    return read_sealed(folder / METADATA, FORMAT_VERSION, REMEDY, ArtifactError)


def check_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    """Checks types and ranges of what kvcli.json says.

    Raises:
        ArtifactError: they are wrong.
    """
    types = {"method": str, "model": str, "fingerprint": str, "config": dict, "provenance": dict, "layers": list}
    try:
        for name, kind in types.items():
            if not isinstance(metadata.get(name), kind):
                raise TypeError(f"{name} is missing or of the wrong type")
        spec = checked_spec(metadata.get("spec"))
        get_method(metadata["method"]).config_cls(**metadata["config"]).resolve(spec)
        layers = metadata["layers"]
        if len(layers) != spec.num_layers or not all(isinstance(layer, dict) for layer in layers):
            raise ValueError(f"layers are not the reports of {spec.num_layers} layers")
        if not isinstance(metadata.get("files"), dict) or not isinstance(metadata["files"].get(WEIGHTS), dict):
            raise ValueError(f"files has no checksum of {WEIGHTS}")
    except (UsageError, ValueError, TypeError, OverflowError) as error:
        raise ArtifactError(f"{path} is damaged ({' '.join(str(error).split())}); {REMEDY}") from error
