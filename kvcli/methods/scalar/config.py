"""Settings of methods that store the scalar format. This module does not import torch: the command line reads it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from kvcli.methods.config import BiasOffsetConfig, CacheConfig, ScalarBits


class ScalarConfig(CacheConfig):
    """Bits of the codes, and how many of them share a scale and a zero."""

    k_bits: ScalarBits = Field(default=2, description="bits of a key code")
    v_bits: ScalarBits = Field(default=2, description="bits of a value code")
    group_size: int = Field(
        default=32, ge=1, le=1024, description="tokens (keys) or channels (values) that share a scale"
    )


class RTNConfig(ScalarConfig, BiasOffsetConfig):
    """Settings of round-to-nearest."""

    k_bits: ScalarBits = Field(default=4, description="bits of a key code")
    v_bits: ScalarBits = Field(default=4, description="bits of a value code")
    group_size: int = Field(default=32, ge=1, le=1024, description="channels that share a scale")


class KIVIConfig(ScalarConfig):
    """Settings of KIVI; `residual_length` is the paper's R, and keys leave full precision in blocks of R tokens."""

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.flush_block:
            raise ValueError("flush_block has no effect here: keys are encoded in blocks of residual_length tokens")
        if self.residual_length % self.group_size or not self.residual_length:
            raise ValueError(
                f"residual_length {self.residual_length} must be a positive multiple of group_size {self.group_size}"
            )
        return self
