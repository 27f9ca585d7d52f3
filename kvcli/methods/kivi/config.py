"""Settings of KIVI."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from kvcli.methods.config import CacheConfig


class KIVIConfig(CacheConfig):
    """Settings of KIVI; `residual_length` is the paper's R, and keys leave full precision in blocks of R."""

    k_bits: Literal[1, 2, 4, 8] = Field(default=2, description="bits of a key code")
    v_bits: Literal[1, 2, 4, 8] = Field(default=2, description="bits of a value code")
    group_size: int = Field(default=32, ge=1, description="tokens (keys) or channels (values) that share a scale")

    @model_validator(mode="after")
    def _whole_groups(self) -> KIVIConfig:
        if self.residual_length % self.group_size or not self.residual_length:
            raise ValueError(
                f"residual_length {self.residual_length} must be a positive multiple of group_size {self.group_size}"
            )
        return self
