"""An artifact in memory: metadata and tensors, what they say, and whether they fit a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from kvcli.artifact.folder import read_folder, write_folder
from kvcli.artifact.metadata import Metadata
from kvcli.errors import ArtifactError, ConfigError, explain
from kvcli.fingerprint import differs
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.registry import get_method
from kvcli.spec import ModelSpec
from kvcli.storage.manifest import json_sha256

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
        """The codecs of all layers, with their fitted state, which is checked here.

        Args:
            config: the settings, as `config_with` returns them.

        Returns:
            New codecs on the CPU, one per layer.

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
        """Reads an artifact and verifies its files; `build_codecs` checks that the tensors are those of its method.

        Args:
            folder: where `save` wrote it.

        Returns:
            The artifact, its tensors on the CPU.

        Raises:
            ArtifactError: missing, of another format version, corrupt, truncated, empty or not finite.
        """
        return cls(*read_folder(Path(folder)))

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

        def check(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
            written = Artifact(metadata, tensors)
            written.build_codecs(written.config)
            if not written.same_content(self):
                raise ArtifactError(f"{folder} was not written as it should be; check the disk")

        write_folder(folder, self.metadata, self.tensors, check, overwrite=overwrite)


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
