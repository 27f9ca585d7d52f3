"""An artifact: metadata and tensors, whether they fit a model, and the folder that they are read from and saved to.

The folder holds the old artifact or the new one at every instant, and nothing is used unverified. Replacing an artifact
is one rename, of kvcli.json: until then the weights it names stay in the folder as codec.safetensors or, once that is
the new file, as codec.safetensors.previous.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvcli.artifact.metadata import METADATA, PREVIOUS, WEIGHTS, Metadata, is_edited, model_card
from kvcli.errors import ArtifactError, ConfigError, error_text, explain
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.methods.per_layer import make_codec
from kvcli.models.fingerprint import differs
from kvcli.registry import get_method
from kvcli.spec import ModelSpec
from kvcli.storage.atomic import file_record, is_intact, link_or_copy, replacing
from kvcli.storage.locks import locked
from kvcli.storage.manifest import json_sha256, write_sealed

CARD = "README.md"
_TEMPORARY = [f"{name}.tmp" for name in (WEIGHTS, PREVIOUS, METADATA, CARD)]
_TENSOR_NAME = re.compile(r"layers\.(?P<layer>0|[1-9][0-9]{0,3})\.(?P<buffer>.+)")


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

    def check_model(self, spec: ModelSpec, fingerprint: str) -> None:
        """Raises ArtifactError if it is not of a model of these shapes and this fingerprint; it names what differs."""
        if spec != self.spec:
            ours, theirs = spec.to_dict(), self.spec.to_dict()
            differing = ", ".join(
                f"{name} {theirs[name]} instead of {ours[name]}" for name in ours if ours[name] != theirs[name]
            )
            raise ArtifactError(f"the artifact was made for {self.metadata['model']}, whose shapes differ: {differing}")
        try:
            reason = differs(fingerprint, self.metadata["fingerprint"])
        except ValueError as error:
            raise ArtifactError(f"the artifact's fingerprint of its model cannot be read; {Metadata.REMEDY}") from error
        if reason is not None:
            raise ArtifactError(
                f"the artifact was made for {self.metadata['model']}, whose weights differ from this model's: {reason}"
            )

    def same_content(self, other: Artifact) -> bool:
        """Whether another artifact holds the same fitted state, made the same way."""
        mine, theirs = ({name: x for name, x in a.metadata.items() if name != "files"} for a in (self, other))
        if json_sha256(mine) != json_sha256(theirs) or self.tensors.keys() != other.tensors.keys():
            return False
        return all(bool((x == other.tensors[name]).all()) for name, x in self.tensors.items())

    def build_codecs(self, config: CacheConfig) -> list[LayerCodec]:
        """New codecs of all layers on the CPU, with their fitted state, which is checked here.

        Args:
            config: the settings, as `config_with` returns them.

        Raises:
            ArtifactError: tensors that are missing, unknown or of the wrong shape.
        """
        spec = self.spec
        states: list[dict[str, Tensor]] = [{} for _ in range(spec.num_layers)]
        for name, x in self.tensors.items():
            match = _TENSOR_NAME.fullmatch(name)
            if match is None or int(match["layer"]) >= spec.num_layers:
                raise ArtifactError(f"the artifact has a tensor '{name}', which belongs to no layer")
            states[int(match["layer"])][match["buffer"]] = x
        method = get_method(self.method)
        return [_fitted_codec(method, spec, config, layer_idx, state) for layer_idx, state in enumerate(states)]

    @classmethod
    def load(cls, folder: str | Path) -> Artifact:
        """Reads an artifact, its tensors on the CPU; `build_codecs` checks that they are those of its method.

        Raises:
            ArtifactError: missing, of another format version, corrupt, truncated, empty or not finite.
        """
        folder = Path(folder)
        while True:
            metadata = Metadata.read(folder / METADATA)
            try:
                for name in (WEIGHTS, PREVIOUS):  # an export that was killed may have left them under their second name
                    if is_intact(folder / name, metadata.files[WEIGHTS]):
                        return cls(metadata.values, _read_tensors(folder / name))
                there = (folder / WEIGHTS).exists()
                state = "is corrupt or truncated: its size or sha256 differs" if there else "is missing"
                raise ArtifactError(f"{folder / WEIGHTS} {state}; {Metadata.REMEDY}")
            except ArtifactError:  # unless another process replaced the artifact in the meantime
                if Metadata.read(folder / METADATA).values == metadata.values:
                    raise

    def save(self, folder: str | Path, *, overwrite: bool = False, about: Mapping[str, Any] | None = None) -> None:
        """Writes the artifact; kvcli.json, which makes it one, appears when the rest was read back and verified.

        Whenever the process ends, the folder holds the artifact that was there or the new one. Files of other names
        stay, and an edited model card. A link to a folder is followed. `about` is for the model card, see `model_card`.

        Raises:
            ArtifactError: the folder has files but is not an artifact, is one while `overwrite` is off, or is used by
                another process; tensors that are not finite or not those of the method.
        """
        folder = Path(folder)
        created = not folder.exists()
        with locked(folder, ArtifactError):
            try:
                if (folder / METADATA).exists():
                    if not overwrite:
                        raise ArtifactError(f"{folder} exists already; use --overwrite to replace it")
                elif others := sorted({path.name for path in folder.iterdir()} - {WEIGHTS, PREVIOUS, *_TEMPORARY}):
                    wrong = f"{folder} exists already; it is not an artifact: it holds {others[0]}"
                    raise ArtifactError(f"{wrong}; choose another --out")
                for name in _TEMPORARY:
                    (folder / name).unlink(missing_ok=True)
                self._write(folder, about or {})
            finally:
                if created:
                    with suppress(OSError):  # what is not empty stays
                        folder.rmdir()

    def _write(self, folder: Path, about: Mapping[str, Any]) -> None:
        with replacing(folder / WEIGHTS) as temporary:
            save_file({name: x.contiguous() for name, x in self.tensors.items()}, temporary)
            metadata = {**self.metadata, "files": {WEIGHTS: file_record(temporary)}}
            self._check_written(folder, Artifact(metadata, _read_tensors(temporary)))
            card = model_card(metadata, about)
            try:
                record = Metadata.read(folder / METADATA).files[WEIGHTS]
            except ArtifactError:
                record = None  # no artifact there that could be read
            if is_intact(folder / WEIGHTS, record) and not is_intact(folder / PREVIOUS, record):
                link_or_copy(folder / WEIGHTS, folder / PREVIOUS)
        write_sealed(folder / METADATA, metadata)
        (folder / PREVIOUS).unlink(missing_ok=True)
        if not is_edited(folder / CARD):
            with replacing(folder / CARD) as temporary:
                temporary.write_text(card)
        self._check_written(folder, Artifact.load(folder))

    def _check_written(self, folder: Path, written: Artifact) -> None:
        written.build_codecs(written.config)
        if not written.same_content(self):
            raise ArtifactError(f"{folder} was not written as it should be; check the disk")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file; refuses tensors that are empty or not finite."""
    try:
        with safe_open(path, framework="pt") as handle:
            # copies: a mapped file that somebody truncates would end the process
            tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
        for name, x in tensors.items():
            narrow = x.is_floating_point() and x.element_size() == 1  # float8 has no isfinite
            if x.numel() == 0 or not bool((x.float() if narrow else x).isfinite().all()):
                raise ArtifactError(f"{path}: tensor {name} is empty or not finite; the artifact must not be used")
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        wrong = f"{path} is not a safetensors file that can be read ({error_text(error)})"
        raise ArtifactError(f"{wrong}; {Metadata.REMEDY}") from error
    return tensors


def _fitted_codec(
    method: Method, spec: ModelSpec, config: CacheConfig, layer_idx: int, state: dict[str, Tensor]
) -> LayerCodec[Any, Any]:
    """A layer's codec with its state; shapes are compared before anything of their size is allocated."""
    wrong = f"layer {layer_idx} of the artifact does not fit its settings"
    try:
        with torch.device("meta"):
            expected = make_codec(method, spec, config, layer_idx).state_dict()
        for name in sorted(expected.keys() | state.keys()):
            if name not in state or name not in expected:
                raise ArtifactError(f"{wrong}: tensor {name} is {'missing' if name in expected else 'unknown'}")
            ours, theirs = ((list(x.shape), x.dtype) for x in (expected[name], state[name]))
            if ours != theirs:
                raise ArtifactError(f"{wrong}: tensor {name} is {theirs[1]} {theirs[0]} instead of {ours[1]} {ours[0]}")
        codec = make_codec(method, spec, config, layer_idx)
        codec.load_state_dict(state)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise ArtifactError(f"{wrong}: {error_text(error)}") from error
    return codec
