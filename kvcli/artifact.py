"""The artifact: fitted codecs of a whole model in one folder, bound to that model and verified.

    kvcli.json          what it is: format version, method, settings, model, provenance, held-out errors; size and
                        sha256 of codec.safetensors, and the sha256 of its own fields
    codec.safetensors   the state of every layer's codecs, `layers.L.key.*` and `layers.L.value.*`
    README.md           a model card, for people only

Replacing an artifact is one rename, of kvcli.json: until then the weights it names stay in the folder as
codec.safetensors or, once that is the new file, as codec.safetensors.previous. This module does not know how codecs are
fitted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvcli._version import __version__
from kvcli.errors import ArtifactError, ConfigError, UsageError, explain
from kvcli.files import file_record, is_intact, locked, read_sealed, replacing, write_sealed
from kvcli.methods.base import LayerCodec
from kvcli.methods.config import CacheConfig
from kvcli.methods.method import Method
from kvcli.models import same_model
from kvcli.registry import get_method
from kvcli.samples import checked_spec
from kvcli.spec import ModelSpec

FORMAT_VERSION = 3
METADATA = "kvcli.json"
WEIGHTS = "codec.safetensors"
CARD = "README.md"
_PREVIOUS = f"{WEIGHTS}.previous"
_UNFINISHED = (WEIGHTS, _PREVIOUS, *(f"{name}.tmp" for name in (WEIGHTS, _PREVIOUS, METADATA, CARD)))
_TENSOR_NAME = re.compile(r"layers\.(?P<layer>0|[1-9][0-9]{0,3})\.(?P<buffer>.+)")
_REMEDY = "export it again with 'kvcli export --overwrite'"


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
        try:
            same = same_model(fingerprint, self.metadata["fingerprint"])
        except ValueError as error:
            raise ArtifactError(f"the artifact's fingerprint of its model cannot be read; {_REMEDY}") from error
        if not same:
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
        return [_fitted_codec(method, spec, config, layer_idx, state) for layer_idx, state in enumerate(states)]

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
        if not path.exists():
            raise ArtifactError(f"no artifact in {folder}: {METADATA} is missing; make one with 'kvcli export'")
        while True:
            metadata = read_sealed(path, FORMAT_VERSION, _REMEDY, ArtifactError)
            _check_metadata(path, metadata)
            try:
                return cls(metadata, _read_weights(folder, metadata["files"][WEIGHTS]))
            except ArtifactError:  # unless another process replaced the artifact in the meantime
                if read_sealed(path, FORMAT_VERSION, _REMEDY, ArtifactError) == metadata:
                    raise

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Writes the artifact; kvcli.json, which makes it one, appears when the rest was read back and verified.

        Whenever the process ends, the folder holds the artifact that was there or the new one. Files of other names
        stay. A link to a folder is followed.

        Args:
            folder: where to; it may be empty.
            overwrite: replace an artifact that is there.

        Raises:
            ArtifactError: the folder has files but is not an artifact, is one while `overwrite` is off, or is used by
                another process; tensors that are not finite or not those of the method.
        """
        folder = Path(folder)
        made = not folder.exists()
        with locked(folder, ArtifactError):
            try:
                _check_replaceable(folder, overwrite)
                self._write(folder)
            finally:
                if made:
                    with suppress(OSError):  # what is not empty stays
                        folder.rmdir()

    def _write(self, folder: Path) -> None:
        with replacing(folder / WEIGHTS) as temporary:
            save_file({name: x.contiguous() for name, x in self.tensors.items()}, temporary)
            metadata = {**self.metadata, "files": {WEIGHTS: file_record(temporary)}}
            written = Artifact(metadata, _read_tensors(temporary))
            written.build_codecs(written.config)
            card = model_card(metadata)
            if not written.same_content(self):
                raise ArtifactError(f"{folder / WEIGHTS} was not written as it should be; check the disk")
            _keep_previous(folder)
        write_sealed(folder / METADATA, metadata)
        (folder / _PREVIOUS).unlink(missing_ok=True)
        with replacing(folder / CARD) as temporary:
            temporary.write_text(card)
        if not Artifact.load(folder).same_content(self):
            raise ArtifactError(f"{folder} was not written as it should be; check the disk")


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
    doubtful = [i for i, layer in enumerate(metadata["layers"]) if layer.get("warnings")]
    if doubtful:
        measured += f"| layers with warnings of the fit, which {METADATA} lists | {', '.join(map(str, doubtful))} |\n"
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


def _fitted_codec(
    method: Method, spec: ModelSpec, config: CacheConfig, layer_idx: int, state: dict[str, Tensor]
) -> LayerCodec[Any, Any]:
    """A layer's codec with its state; shapes are compared before anything of their size is allocated.

    Raises:
        ArtifactError: tensors that are not those of the codec.
    """
    wrong = f"layer {layer_idx} of the artifact does not fit its settings"
    try:
        with torch.device("meta"):
            expected = method.build(spec, config, layer_idx).state_dict()
        for name in sorted(expected.keys() | state.keys()):
            if name not in state or name not in expected:
                raise ArtifactError(f"{wrong}: tensor {name} is {'missing' if name in expected else 'unknown'}")
            ours, theirs = ((list(x.shape), x.dtype) for x in (expected[name], state[name]))
            if ours != theirs:
                raise ArtifactError(f"{wrong}: tensor {name} is {theirs[1]} {theirs[0]} instead of {ours[1]} {ours[0]}")
        codec = method.build(spec, config, layer_idx)
        codec.load_state_dict(state)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise ArtifactError(f"{wrong}: {' '.join(str(error).split())}") from error
    return codec


def _check_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
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
        raise ArtifactError(f"{path} is damaged ({' '.join(str(error).split())}); {_REMEDY}") from error


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
        record = read_sealed(folder / METADATA, FORMAT_VERSION, _REMEDY, ArtifactError)["files"][WEIGHTS]
    except (ArtifactError, KeyError, TypeError):
        return  # no artifact there that could be read
    if is_intact(folder / _PREVIOUS, record) or not is_intact(folder / WEIGHTS, record):
        return  # they have it from an export that was killed, or are damaged
    temporary = folder / f"{_PREVIOUS}.tmp"
    try:
        os.link(folder / WEIGHTS, temporary)
    except OSError:  # a file system without hard links
        shutil.copyfile(folder / WEIGHTS, temporary)
    temporary.replace(folder / _PREVIOUS)


def _read_weights(folder: Path, record: Mapping[str, Any]) -> dict[str, Tensor]:
    """Reads the weights with a size and sha256, which an export that was killed may have left under their second name.

    Raises:
        ArtifactError: missing, damaged or not finite.
    """
    for name in (WEIGHTS, _PREVIOUS):
        if is_intact(folder / name, record):
            return _read_tensors(folder / name)
    if not (folder / WEIGHTS).exists():
        raise ArtifactError(f"{folder / WEIGHTS} is missing; {_REMEDY}")
    raise ArtifactError(f"{folder / WEIGHTS} is corrupt or truncated: its size or sha256 differs; {_REMEDY}")


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
        raise ArtifactError(f"{path} is not a safetensors file that can be read ({reason}); {_REMEDY}") from error
    return tensors
