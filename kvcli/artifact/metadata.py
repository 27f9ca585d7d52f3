"""The metadata of an artifact, kvcli.json: its fields, their types and ranges, and the names of the folder's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import model_validator

from kvcli._version import __version__
from kvcli.errors import ArtifactError, UsageError
from kvcli.methods.config import CacheConfig
from kvcli.registry import get_method
from kvcli.spec import ModelSpec
from kvcli.storage.manifest import Sealed

METADATA = "kvcli.json"
WEIGHTS = "codec.safetensors"
PREVIOUS = f"{WEIGHTS}.previous"
"""Second name of the weights that kvcli.json names, while their successor is written."""


class Metadata(Sealed):
    """The content of kvcli.json."""

    VERSION = 6
    ERROR = ArtifactError
    MISSING = f"no artifact in {{folder}}: {METADATA} is missing; make one with 'kvcli export'"
    REMEDY = "export it again with 'kvcli export --overwrite'"

    method: str
    config: dict[str, Any]
    model: str
    fingerprint: str
    spec: ModelSpec
    provenance: dict[str, Any]
    layers: list[dict[str, Any]]
    files: dict[str, dict[str, Any]]

    @model_validator(mode="after")
    def _agrees_with_its_method(self) -> Self:
        try:
            get_method(self.method).config_cls(**self.config).resolve(self.spec)
        except (UsageError, TypeError, OverflowError) as error:
            raise ValueError(str(error)) from error
        if len(self.layers) != self.spec.num_layers:
            raise ValueError(f"layers are not the reports of {self.spec.num_layers} layers")
        if WEIGHTS not in self.files:
            raise ValueError(f"files has no checksum of {WEIGHTS}")
        return self


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
        "format_version": Metadata.VERSION,
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
