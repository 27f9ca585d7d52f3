"""Settings that every method has, and those of methods of one file. Imports no torch: the command line reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvcli.spec import ModelSpec

ScalarBits = Literal[1, 2, 4, 8]
"""Bits per code of the scalar format: widths that divide a byte."""


class CacheConfig(BaseModel):
    """Settings of the tokens in full precision; the config of a method adds its own.

    Attributes:
        needs_artifact: whether the method does nothing without fitting.
        fit_settings: settings whose default differs when the method is fitted.
        run_name: template of a fit's folder, from `method` and the settings; default: the method as it was asked for.
    """

    needs_artifact: ClassVar[bool] = False
    fit_settings: ClassVar[Mapping[str, Any]] = {}
    run_name: ClassVar[str] = ""

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

    @classmethod
    def bit_settings(cls) -> tuple[str, ...]:
        """The settings that the bits of a name such as `kivi-2` stand for; none: the method takes no bits."""
        names = (("bits",), ("k_bits", "v_bits"))
        return next((pair for pair in names if cls.model_fields.keys() >= {*pair}), ())

    def resolve(self, spec: ModelSpec) -> Self:
        """Settings with all values filled in that follow from the model's shapes.

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


class TurboQuantConfig(BiasOffsetConfig):
    """Settings of TurboQuant."""

    k_bits: Literal[1, 2, 3, 4] = Field(default=3, description="bits per key coordinate, the residual's sign included")
    v_bits: Literal[1, 2, 3, 4] = Field(default=3, description="bits per value coordinate")
    key_variant: Literal["mse", "prod"] = Field(
        default="mse",
        description="mse: all bits code the key (Algorithm 1); prod: the last bit is the sign of a projection of the "
        "residual, so that scores have no bias (Algorithm 2)",
    )
    rotation_seed: int = Field(default=0, ge=0, lt=2**32, description="seed of the rotations and projections")

    @model_validator(mode="after")
    def _bits_for_both_stages(self) -> Self:
        if self.key_variant == "prod" and self.k_bits < 2:
            raise ValueError("key_variant prod needs k_bits 2 or more: one of them is the residual's sign")
        return self


class OSCARConfig(BiasOffsetConfig):
    """Settings of OSCAR; the paper keeps 64 sinks and the last 256 tokens in full precision."""

    needs_artifact: ClassVar[bool] = True

    k_bits: ScalarBits = Field(default=2, description="bits of a key code")
    v_bits: ScalarBits = Field(default=2, description="bits of a value code")
    group_size: int = Field(default=128, ge=1, le=1024, description="channels that share a scale, a head at most")
    k_clip: float = Field(
        default=0, ge=0, le=1, description="share of a token's key channels that is not clipped; 0: fitted per head"
    )
    v_clip: float = Field(
        default=0, ge=0, le=1, description="share of a token's value channels that is not clipped; 0: fitted per head"
    )
    rotation_scope: Literal["head", "layer"] = Field(
        default="head", description="a rotation per kv head, or one per layer from averaged covariances (paper)"
    )


class KVQuantConfig(CacheConfig):
    """Settings of KVQuant; the paper keeps the first token in full precision."""

    needs_artifact: ClassVar[bool] = True

    k_bits: Literal[2, 3, 4] = Field(default=2, description="bits per key code, outliers not counted")
    v_bits: Literal[2, 3, 4] = Field(default=2, description="bits per value code, outliers not counted")
    outlier_fraction: float = Field(
        default=0.01, ge=0, le=0.1, description="share of a token's keys, and of its values, kept in 16 bits"
    )
