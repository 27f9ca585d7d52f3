"""The artifact: fitted codecs of a whole model in one folder, bound to that model and verified.

    kvcli.json          what it is: format version, method, settings, model, provenance, held-out errors, sha256
    codec.safetensors   the state of every layer's codecs, `layers.L.key.*` and `layers.L.value.*`
    README.md           a model card

This module does not know how codecs are fitted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvcli._version import __version__
from kvcli.errors import ArtifactError, ConfigError, UsageError
from kvcli.methods.base import LayerCodec
from kvcli.methods.config import CacheConfig, first_error
from kvcli.models import same_model
from kvcli.registry import get_method
from kvcli.spec import ModelSpec

FORMAT_VERSION = 2
METADATA = "kvcli.json"
WEIGHTS = "codec.safetensors"
CARD = "README.md"


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
        known = {**self.metadata["config"]}
        fixed = [name for name in changes if name not in CacheConfig.model_fields and known.get(name) != changes[name]]
        if fixed:
            raise ConfigError(f"{', '.join(fixed)} cannot be changed: the artifact was fitted with other values")
        try:
            return get_method(self.method).config_cls(**{**known, **changes})
        except ValidationError as error:
            raise ConfigError(first_error(error)) from error

    def check_model(self, spec: ModelSpec, fingerprint: str, method: str) -> None:
        """Raises ArtifactError unless the artifact fits this model and method."""
        if method != self.method:
            raise ArtifactError(f"the artifact is for method '{self.method}', not '{method}'")
        if spec != self.spec:
            ours, theirs = spec.to_dict(), self.spec.to_dict()
            odd = ", ".join(
                f"{name} {theirs[name]} instead of {ours[name]}" for name in ours if ours[name] != theirs[name]
            )
            raise ArtifactError(f"the artifact was made for {self.metadata['model']}, whose shapes differ: {odd}")
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
        """The codecs of all layers, with their fitted state.

        Raises:
            ArtifactError: tensors that are missing or of the wrong shape.
        """
        spec, method = self.spec, get_method(self.method)
        codecs = []
        for layer_idx in range(spec.num_layers):
            codec = method.build(spec, config, layer_idx)
            prefix = f"layers.{layer_idx}."
            state = {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}
            try:
                codec.load_state_dict(state)
            except RuntimeError as error:
                reason = " ".join(str(error).split())
                raise ArtifactError(f"layer {layer_idx} of the artifact does not fit its settings: {reason}") from error
            codecs.append(codec)
        return codecs

    @classmethod
    def load(cls, folder: str | Path) -> Artifact:
        """Reads and verifies an artifact.

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
            artifact.build_codecs(artifact.config)
        except (UsageError, ValidationError, ValueError, TypeError, KeyError) as error:
            raise ArtifactError(f"{path} is damaged: {' '.join(str(error).split())}") from error
        return artifact

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Writes the artifact; the folder appears under its name only when everything in it was read back and verified.

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
            Artifact.load(scratch)
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
    spec: ModelSpec,
    model: str,
    fingerprint: str,
    provenance: Mapping[str, Any],
    layers: list[Mapping[str, Any]],
) -> dict[str, Any]:
    """The metadata of an artifact, without the list of its files.

    Args:
        method: name of the method.
        config: its settings, resolved.
        spec: shapes of the model.
        model: the model's name as the user gave it.
        fingerprint: of its weights.
        provenance: corpus, revision, tokens, seed.
        layers: what fitting reported for each layer, held-out errors above all.
    """
    settings = config.model_dump()
    return {
        "format_version": FORMAT_VERSION,
        "kvcli_version": __version__,
        "method": method,
        "config": settings,
        "config_sha256": config_hash(settings),
        "model": model,
        "fingerprint": fingerprint,
        "spec": spec.to_dict(),
        "provenance": dict(provenance),
        "layers": layers,
    }


def config_hash(values: Mapping[str, Any]) -> str:
    """sha256 of plain JSON values in a canonical order."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def model_card(metadata: Mapping[str, Any]) -> str:
    """The README.md of an artifact."""
    config, provenance = metadata["config"], metadata["provenance"]

    def mean(name: str) -> float:
        values = [x for layer in metadata["layers"] for x in layer.get(name, [])]
        return sum(values) / max(1, len(values))

    bits = config.get("bits", "")
    corpus = provenance.get("corpus", {})
    origin = f"{corpus.get('source', '?')}" + (f" at {corpus['revision']}" if corpus.get("revision") else "")
    return f"""---
library_name: kvcli
base_model: {metadata["model"]}
tags: [kv-cache, quantization, {metadata["method"]}]
---
# {metadata["method"]} {bits}-bit KV cache codec for {metadata["model"]}

Made by kvcli {metadata["kvcli_version"]}. It holds codebooks and encoders, no model weights; it works with this model
only (its weights are checked when the artifact is loaded).

```bash
kvcli generate {metadata["model"]} --method {metadata["method"]} --artifact . --prompt "The water cycle is"
```

| | |
|---|---|
| calibration text | {origin} |
| tokens | {provenance.get("num_tokens", "?")} |
| seed | {provenance.get("seed", "?")} |
| held-out error of keys (share of the squared norm) | {mean("key_nmse"):.4f} |
| held-out error of values | {mean("value_nmse"):.4f} |
| settings | `{json.dumps(config)}` |
"""


def _read_weights(path: Path, sha256: str) -> dict[str, Tensor]:
    """Reads a safetensors file whose digest is known."""
    if not path.is_file():
        raise ArtifactError(f"{path} is missing; export the artifact again")
    found = _sha256(path)
    if found != sha256:
        raise ArtifactError(f"{path} is corrupt or truncated: its sha256 is {found[:16]}..., expected {sha256[:16]}...")
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
