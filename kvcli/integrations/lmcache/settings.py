"""What the JSON of an adapter says about the serde."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvcli.errors import ConfigError, explain


class SerdeSettings(BaseModel):
    """The fields of `"serde": {"type": "kvcli", ...}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="served model, for its config: a folder, a built-in name or OWNER/MODEL on the hub")
    method: str = Field(default="", description="method that needs no artifact, with its bits")
    artifact: str = Field(default="", description="folder of an artifact, which says its method")
    settings: dict[str, Any] = Field(default_factory=dict, description="settings of a method without an artifact")
    exact_tokens: int = Field(
        default=1, ge=0, le=64, description="first tokens of every chunk that are kept as they are"
    )
    device: str = Field(default="cpu", description="torch device that encodes and decodes")
    max_workers: int = Field(default=1, ge=1, le=64, description="threads that encode and decode")

    @model_validator(mode="after")
    def _method_or_artifact(self) -> Self:
        if bool(self.method) == bool(self.artifact):
            raise ValueError("name either a method that needs no artifact, or the folder of an artifact")
        if self.artifact and self.settings:
            raise ValueError("an artifact has its own settings; settings belong to a method")
        return self

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """The settings from plain values.

        Raises:
            ConfigError: unknown names, missing ones, or values out of range.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(f"serde 'kvcli': {explain(error, cls.model_fields)}") from error
