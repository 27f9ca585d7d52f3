"""Settings of QJL."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcli.methods.config import BiasOffsetConfig, ScalarBits
from kvcli.spec import ModelSpec


class QJLConfig(BiasOffsetConfig):
    """Settings of QJL; dimensions that are 0 follow from the model's head_dim."""

    sketch_dim: int = Field(default=0, ge=0, le=16384, description="sign bits m per key; 0: 2 * head_dim")
    initial_sketch_dim: int = Field(
        default=0, ge=0, le=16384, description="sign bits m per key in the first layers; 0: 4 * head_dim"
    )
    initial_layers: int = Field(
        default=-1, ge=-1, le=4096, description="number of first layers that use initial_sketch_dim; -1: 15/32 of all"
    )
    sketch: Literal["orthogonal", "gaussian"] = Field(default="orthogonal", description="kind of random projection")
    num_outliers: int = Field(
        default=4,
        ge=0,
        le=1024,
        description="channels of largest energy in the prompt, which get a sketch of their own",
    )
    outlier_sketch_dim: int = Field(
        default=0, ge=0, le=16384, description="sign bits per key for the outlier channels; 0: head_dim"
    )
    v_bits: ScalarBits = Field(default=2, description="bits of a value code")
    group_size: int = Field(default=32, ge=1, le=1024, description="channels of a value that share a scale")
    sketch_seed: int = Field(default=0, ge=0, lt=2**32, description="seed of the projections")

    def sketch_dims(self, spec: ModelSpec, layer_idx: int) -> tuple[int, int]:
        """Sign bits of the inliers and of the outliers in a layer."""
        initial = self.initial_layers if self.initial_layers >= 0 else round(spec.num_layers * 15 / 32)
        if layer_idx < initial:
            inliers = self.initial_sketch_dim or 4 * spec.head_dim
        else:
            inliers = self.sketch_dim or 2 * spec.head_dim
        return inliers, (self.outlier_sketch_dim or spec.head_dim) if self.num_outliers else 0
