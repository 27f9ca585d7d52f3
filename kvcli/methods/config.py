"""Settings that every method has. This module does not import torch: the command line reads it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class CacheConfig(BaseModel):
    """What stays in full precision; a method's own config adds to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sink_length: int = Field(default=4, ge=0, description="first tokens of each sequence kept in full precision")
    residual_length: int = Field(default=128, ge=0, description="last tokens kept in full precision")
    flush_block: int = Field(
        default=0,
        ge=0,
        description="tokens beyond the residual window that gather before they are encoded; 0: a quarter of the window",
    )


def fault(error: ValidationError) -> str:
    """Which setting is wrong first, and why."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'settings'}: {first['msg'].removeprefix('Value error, ')}"
