"""The artifact: fitted codecs of a whole model in one folder, bound to that model and verified.

    kvcli.json          what it is: format version, method, settings, model, provenance, held-out errors, sha256
    codec.safetensors   the state of every layer's codecs, `layers.L.key.*` and `layers.L.value.*`
    README.md           a model card

This module does not know how codecs are fitted.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvcli._version import __version__
from kvcli.errors import ArtifactError, ConfigError, UsageError, explain
from kvcli.methods.base import LayerCodec
from kvcli.methods.config import CacheConfig
from kvcli.models import same_model
from kvcli.registry import get_method
from kvcli.spec import ModelSpec

FORMAT_VERSION = 2
METADATA = "kvcli.json"
WEIGHTS = "codec.safetensors"
CARD = "README.md"
_TENSOR_NAME = re.compile(r"layers\.(?P<layer>\d+)\.(?P<buffer>.+)")


@dataclass(frozen=True)
class Artifact:
    """Fitted codecs with what is known about them.

    Attributes:
        metadata: the content of kvcli.json; `new_metadata` lists its fields.
        tensors: the codecs' buffers by name, `layers.L.key.*` and `layers.L.value.*`.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.metadata["method"])

    @property
    def spec(self) -> ModelSpec:
        """Shapes of the model it was made for."""
        return ModelSpec.from_dict(self.metadata["spec"])

    @property
    def config(self) -> CacheConfig:
        """The settings it was made with."""
        return get_method(self.method).config_cls(**self.metadata["config"])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors.values())

    def config_with(self, changes: Mapping[str, Any]) -> CacheConfig:
        """The settings with changes, which may concern the cache only.

        Raises:
            ConfigError: a change of something the codecs were fitted for, or an invalid value.
        """
        config_cls, fitted = get_method(self.method).config_cls, self.metadata["config"]
        fixed = [name for name in changes if name in fitted and name not in CacheConfig.model_fields]
        if changed := [f"{name} is {fitted[name]}" for name in fixed if changes[name] != fitted[name]]:
            raise ConfigError(f"settings of the fit cannot be changed: {', '.join(changed)}")
        try:
            return config_cls(**{**fitted, **changes})
        except ValidationError as error:
            raise ConfigError(explain(error, config_cls.model_fields)) from error

    def check_model(self, spec: ModelSpec, fingerprint: str, method: str) -> None:
        """Checks that the artifact is for a model and a method.

        Args:
            spec: shapes of the model.
            fingerprint: of its weights.
            method: name of the method.

        Raises:
            ArtifactError: it is not; the message names what differs.
        """
        if method != self.method:
            raise ArtifactError(f"the artifact is for method '{self.method}', not '{method}'")
        if spec != self.spec:
            ours, theirs = spec.to_dict(), self.spec.to_dict()
            differing = ", ".join(
                f"{name} {theirs[name]} instead of {ours[name]}" for name in ours if ours[name] != theirs[name]
            )
            raise ArtifactError(f"the artifact was made for {self.metadata['model']}, whose shapes differ: {differing}")
        if not same_model(fingerprint, self.metadata["fingerprint"]):
            raise ArtifactError(
                f"the artifact was made for {self.metadata['model']}, whose weights differ from this model's"
            )

    def same_content(self, other: Artifact) -> bool:
        """Whether another artifact holds the same fitted state, made the same way."""
        mine, theirs = ({name: x for name, x in a.metadata.items() if name != "files"} for a in (self, other))
        same = (
            json.loads(json.dumps(mine)) == json.loads(json.dumps(theirs))
            and self.tensors.keys() == other.tensors.keys()
        )
        return same and all(bool((x == other.tensors[name]).all()) for name, x in self.tensors.items())

    def build_codecs(self, config: CacheConfig) -> list[LayerCodec]:
        """The codecs of all layers, with their fitted state, which is checked here.

        Args:
            config: the settings, as `config_with` returns them.

        Returns:
            New codecs on the CPU, one per layer.

        Raises:
            ArtifactError: tensors that are missing, unknown or of the wrong shape.
        """
        spec, method = self.spec, get_method(self.method)
        states: list[dict[str, Tensor]] = [{} for _ in range(spec.num_layers)]
        for name, x in self.tensors.items():
            match = _TENSOR_NAME.fullmatch(name)
            if match is None or int(match["layer"]) >= spec.num_layers:
                raise ArtifactError(f"the artifact has a tensor '{name}', which belongs to no layer")
            states[int(match["layer"])][match["buffer"]] = x
        codecs = []
        for layer_idx, state in enumerate(states):
            codec = method.build(spec, config, layer_idx)
            try:
                codec.load_state_dict(state)
            except RuntimeError as error:
                reason = " ".join(str(error).split())
                raise ArtifactError(f"layer {layer_idx} of the artifact does not fit its settings: {reason}") from error
            codecs.append(codec)
        return codecs

    @classmethod
    def load(cls, folder: str | Path) -> Artifact:
        """Reads an artifact and verifies its files; `build_codecs` checks that the tensors are those of its method.

        Args:
            folder: where `save` wrote it.

        Returns:
            The artifact, its tensors on the CPU.

        Raises:
            ArtifactError: missing, of another format version, corrupt, truncated, empty or not finite.
        """
        folder = Path(folder)
        path = folder / METADATA
        if not path.is_file():
            raise ArtifactError(f"no artifact in {folder}: {METADATA} is missing; make one with 'kvcli export'")
        try:
            metadata = json.loads(path.read_text())
            version, weights = metadata["format_version"], metadata["files"][WEIGHTS]
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{path} is damaged ({error!r}); export the artifact again") from error
        if version != FORMAT_VERSION:
            raise ArtifactError(f"{path} has format version {version}; this kvcli reads version {FORMAT_VERSION}")
        artifact = cls(metadata, _read_weights(folder / WEIGHTS, weights["sha256"]))
        try:
            artifact.config.resolve(artifact.spec)
        except (UsageError, ValueError, TypeError, KeyError) as error:
            raise ArtifactError(f"{path} is damaged: {' '.join(str(error).split())}") from error
        return artifact

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Writes the artifact; the folder appears under its name only when everything in it was read back and verified.

        Args:
            folder: where to.
            overwrite: replace an artifact that is there.

        Raises:
            ArtifactError: the folder exists and is not an artifact, or `overwrite` is off; non-finite tensors.
        """
        folder = Path(folder)
        if folder.exists() and not (overwrite and (folder / METADATA).is_file()):
            advice = "use --overwrite to replace it" if (folder / METADATA).is_file() else "it is not an artifact"
            raise ArtifactError(f"{folder} exists already; {advice}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            scratch.chmod(0o755)
            save_file({name: x.contiguous() for name, x in self.tensors.items()}, scratch / WEIGHTS)
            (scratch / WEIGHTS).chmod(0o644)
            files = {WEIGHTS: {"sha256": _sha256(scratch / WEIGHTS), "bytes": (scratch / WEIGHTS).stat().st_size}}
            metadata = {**self.metadata, "files": files}
            (scratch / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
            (scratch / CARD).write_text(model_card(metadata))
            written = Artifact.load(scratch)
            written.build_codecs(written.config)
            if folder.exists():
                retired = scratch.with_name(scratch.name + "-old")
                folder.rename(retired)
                scratch.rename(folder)
                shutil.rmtree(retired)
            else:
                scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


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
    settings = config.model_dump()
    return {
        "format_version": FORMAT_VERSION,
        "kvcli_version": __version__,
        "method": method,
        "config": settings,
        "config_sha256": config_hash(settings),
        **identity,
        "provenance": dict(provenance),
        "layers": layers,
    }


def config_hash(values: Mapping[str, Any]) -> str:
    """sha256 of plain JSON values in a canonical order."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def metric_values(reports: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, str]]:
    """A metric of all layers, each value with its place.

    Args:
        reports: one per layer, what `FitReport.metrics` held, and optionally the index `layer`.
        name: of the metric: a number per layer, or a list with one per head or one for all heads.

    Returns:
        Value and place, such as `layer 3 head 1`; empty where no layer reports the metric.
    """
    placed = []
    for position, report in enumerate(reports):
        values, where = report.get(name, []), f"layer {report.get('layer', position)}"
        per_head = values if isinstance(values, Sequence) else [values]
        placed += [
            (float(value), f"{where} head {head}" if len(per_head) > 1 else where)
            for head, value in enumerate(per_head)
        ]
    return placed


def model_card(metadata: Mapping[str, Any]) -> str:
    """The README.md of an artifact."""
    config, provenance, method = metadata["config"], metadata["provenance"], get_method(metadata["method"])
    spec = ModelSpec.from_dict(metadata["spec"])
    key_bits, value_bits = method.nominal_bits(spec, method.config_cls(**config))
    measured = "".join(
        f"| {label} (mean) | {sum(value for value, _ in values) / len(values):.4g} |\n"
        for name, label in method.fit_metrics.items()
        if (values := metric_values(metadata["layers"], name))
    )
    corpus = provenance.get("corpus", {})
    origin = f"{corpus.get('source', '?')}" + (f" at {corpus['revision']}" if corpus.get("revision") else "")
    return f"""---
library_name: kvcli
base_model: {metadata["model"]}
tags: [kv-cache, quantization, {metadata["method"]}]
---
# {metadata["method"]} KV cache codec for {metadata["model"]}

Made by kvcli {metadata["kvcli_version"]}. It holds codebooks and encoders, no model weights; it works with this model
only (shapes and a sample of its weights are compared when the artifact is attached).

```bash
kvcli generate {metadata["model"]} --method {metadata["method"]} --artifact . --prompt "The water cycle is"
```

| | |
|---|---|
| nominal bits per value | keys {key_bits:.2f}, values {value_bits:.2f} |
| calibration text | {origin} |
| tokens | {provenance.get("num_tokens", "?")} |
| seed | {provenance.get("seed", "?")} |
{measured}| settings | `{json.dumps(config)}` |
"""


def _read_weights(path: Path, sha256: str) -> dict[str, Tensor]:
    """Reads a safetensors file whose digest is known."""
    if not path.is_file():
        raise ArtifactError(f"{path} is missing; export the artifact again")
    digest = _sha256(path)
    if digest != sha256:
        raise ArtifactError(
            f"{path} is corrupt or truncated: its sha256 is {digest[:16]}..., expected {sha256[:16]}..."
        )
    try:
        with safe_open(path, framework="pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path} is not a readable safetensors file: {error}") from error
    for name, x in tensors.items():
        if x.numel() == 0 or (x.is_floating_point() and not bool(x.isfinite().all())):
            raise ArtifactError(f"{path}: tensor {name} is empty or not finite; the artifact must not be used")
    return tensors


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
