"""Settings that every method has. This module does not import torch: the command line reads it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from kvcli.spec import ModelSpec

ScalarBits = Literal[1, 2, 4, 8]
"""Bits per code of the scalar format: widths that divide a byte."""


class CacheConfig(BaseModel):
    """What stays in full precision; a method's own config adds to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sink_length: int = Field(
        default=4, ge=0, le=2**16, description="first tokens of each sequence kept in full precision"
    )
    residual_length: int = Field(default=128, ge=0, le=2**20, description="last tokens kept in full precision")
    flush_block: int = Field(
        default=0,
        ge=0,
        le=2**20,
        description="tokens beyond the residual window that gather before they are encoded; 0: a quarter of the window",
    )

    def resolve(self, spec: ModelSpec) -> Self:
        """Settings with everything filled in that follows from the model's shapes.

        Raises:
            ValueError: settings that do not fit the shapes.
        """
        return self


class BiasOffsetConfig(CacheConfig):
    """Settings of methods that are not fitted and code keys less a constant."""

    key_offset: Literal["bias", "none"] = Field(
        default="bias",
        description="constant that is not coded: the bias of the model's key projection where it has one, or none",
    )
