"""An artifact in memory: metadata and tensors, what they say, and whether they fit a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from kvcli.artifact.codecs import fitted_codecs
from kvcli.artifact.metadata import REMEDY, WEIGHTS
from kvcli.artifact.reading import read_folder
from kvcli.artifact.writing import folder_of_its_own, write_folder
from kvcli.errors import ArtifactError, ConfigError, explain
from kvcli.fingerprint import differs
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.registry import get_method
from kvcli.spec import ModelSpec


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
            raise ArtifactError(f"the artifact's fingerprint of its model cannot be read; {REMEDY}") from error
        if reason is not None:
            raise ArtifactError(
                f"the artifact was made for {self.metadata['model']}, whose weights differ from this model's: {reason}"
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
        return fitted_codecs(get_method(self.method), self.spec, config, self.tensors)

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
                raise ArtifactError(f"{folder / WEIGHTS} was not written as it should be; check the disk")

        with folder_of_its_own(folder, overwrite=overwrite):
            write_folder(folder, self.metadata, self.tensors, check)
            if not Artifact.load(folder).same_content(self):
                raise ArtifactError(f"{folder} was not written as it should be; check the disk")
