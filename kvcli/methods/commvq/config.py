"""Settings of CommVQ (arXiv 2506.18879) and what follows from them."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from kvcli.methods.config import CacheConfig
from kvcli.spec import ModelSpec

_MOST_RESIDUALS = 256

_PAIRS_PER_GROUP = 32
"""Channel pairs per key code by default: fewer gathers than with a whole head of 128 channels, and the same KL."""


class CommVQConfig(CacheConfig):
    """Settings of CommVQ; those that are 0 follow from `bits` and the model's shapes (see `resolve`)."""

    needs_artifact: ClassVar[bool] = True
    run_name: ClassVar[str] = "{method}-{bits:g}bit"
    fit_us: ClassVar[float] = 4.0

    bits: float = Field(default=2.0, ge=0.25, le=4, description="bits per value of K and V, the mean of all layers")
    codebook_size: int = Field(default=64, ge=2, le=256, description="rows N of a key codebook")
    pairs_per_group: int = Field(
        default=0, ge=0, le=1024, description="channel pairs g that share a key code, at most a whole head; 0: 32"
    )
    num_residuals: int = Field(
        default=0, ge=0, le=_MOST_RESIDUALS, description="residual stages R of the keys; 0: from bits"
    )
    key_norm: Literal["joint", "per_head"] = Field(
        default="joint", description="one norm per token for all kv heads (of a value group), or one per head"
    )
    value_code_bits: int = Field(
        default=0, ge=0, le=2**16, description="code bits N_c per token for the values of all kv heads; 0: from bits"
    )

    value_groups: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="groups of consecutive kv heads, each with a value code and a key norm of its own; with tensor "
        "parallelism, a multiple of the ranks",
    )

    allocation: Literal["fisher", "uniform"] = Field(
        default="fisher", description="how layers share the bits: so that their errors cost least, or equally"
    )
    layer_residuals: tuple[int, ...] = Field(
        default=(), description="residual stages of each layer's keys, one number per layer; default: from allocation"
    )
    layer_value_bits: tuple[int, ...] = Field(
        default=(), description="code bits per token of each layer's values; default: from allocation"
    )

    key_assignment: Literal["hard", "annealed"] = Field(
        default="hard", description="EM with hard assignment, or the paper's annealed soft assignment"
    )
    key_iterations: int = Field(default=12, ge=1, le=1000, description="EM iterations per stage with hard assignment")
    key_full_iterations: int = Field(
        default=6, ge=1, le=1000, description="the last EM iterations, on all vectors; those before are on a subset"
    )
    key_offset: Literal["auto", "none", "bias", "mean"] = Field(
        default="auto",
        description="constant per channel that is not coded: none, the key projection's bias, the mean key, or the one "
        "of them with the smallest held-out score error",
    )
    key_weighting: Literal["fisher", "queries", "none"] = Field(
        default="fisher",
        description="weight of channel pairs: what their errors cost, the magnitude of their queries, or none",
    )
    value_trainer: Literal["fast", "paper"] = Field(
        default="fast", description="alternating least squares, or the paper's Gumbel-softmax training"
    )
    value_metric: Literal["fisher", "scale"] = Field(
        default="fisher", description="errors of values in terms of what they cost, or of each channel's magnitude"
    )
    value_iterations: int = Field(default=8, ge=1, le=1000, description="most rounds of the fast value trainer")
    value_steps: int = Field(default=2500, ge=1, le=10**7, description="optimizer steps of the paper's value trainer")
    value_hidden: int = Field(default=512, ge=1, le=2**16, description="hidden width of the paper's value encoder")
    value_sweeps: int = Field(
        default=2,
        ge=0,
        le=100,
        description="coordinate-descent sweeps over the bits after the fast trainer's encoder; 0 is far worse",
    )

    @model_validator(mode="after")
    def _power_of_two(self) -> Self:
        if self.codebook_size & (self.codebook_size - 1):
            raise ValueError(f"codebook_size must be a power of two, got {self.codebook_size}")
        return self

    @property
    def bits_per_code(self) -> int:
        """Bits of one code (a, b): 2 log2 N."""
        return 2 * int(math.log2(self.codebook_size))

    def for_layer(self, layer_idx: int) -> Self:
        """The settings of one layer, with its R and N_c."""
        if not self.layer_residuals:
            return self
        bits = {"num_residuals": self.layer_residuals[layer_idx], "value_code_bits": self.layer_value_bits[layer_idx]}
        return self.model_copy(update={**bits, "layer_residuals": (), "layer_value_bits": ()})

    def resolve(self, spec: ModelSpec) -> Self:
        """Fills in what is 0: g = 32, or head_dim/2 if that is no multiple, R the nearest to `bits` * g / log2 N
        (Eq. 21), N_c = `bits` * D (Eq. 10).

        N_c of broken `bits` is rounded to a multiple of 16 per value group.

        Raises:
            ValueError: g does not divide head_dim/2, N_c exceeds 16 bits per value, value groups do not divide kv heads
                and N_c, or per-layer settings are not one for each layer.
        """
        pairs = spec.head_dim // 2
        group = min(pairs, self.pairs_per_group or (pairs if pairs % _PAIRS_PER_GROUP else _PAIRS_PER_GROUP))
        if pairs % group:
            raise ValueError(f"pairs_per_group {group} does not divide the {pairs} channel pairs of a head")
        if self.value_code_bits > 16 * spec.kv_dim:
            raise ValueError(f"value_code_bits {self.value_code_bits} exceeds 16 bits for each of {spec.kv_dim} values")
        if spec.num_kv_heads % self.value_groups:
            raise ValueError(f"value_groups {self.value_groups} does not divide the {spec.num_kv_heads} kv heads")
        if any(bits % self.value_groups for bits in (self.value_code_bits, *self.layer_value_bits)):
            raise ValueError(f"value_groups {self.value_groups} does not divide the value bits of each token")
        counts = {len(self.layer_residuals), len(self.layer_value_bits)}
        if counts not in ({0}, {spec.num_layers}):
            layers = f"{spec.num_layers} layers"
            raise ValueError(f"layer_residuals and layer_value_bits take one number for each of {layers}")
        for name, most in (("layer_residuals", _MOST_RESIDUALS), ("layer_value_bits", 16 * spec.kv_dim)):
            if not all(1 <= count <= most for count in getattr(self, name)):
                raise ValueError(f"{name} are from 1 to {most}")
        nearest = round(self.bits * group / math.log2(self.codebook_size))
        value_bits, unit = self.bits * spec.kv_dim, 16 * self.value_groups
        return self.model_copy(
            update={
                "pairs_per_group": group,
                "num_residuals": self.num_residuals or max(1, nearest),
                "value_code_bits": self.value_code_bits
                or (int(value_bits) if float(self.bits).is_integer() else max(unit, unit * round(value_bits / unit))),
            }
        )
