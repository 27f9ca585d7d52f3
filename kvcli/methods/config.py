"""Settings that every method has, and those of all methods but CommVQ. Imports no torch: the command line reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, WrapValidator, model_validator

from kvcli.spec import ModelSpec

EXACT = 16
"""Bits of keys, or values, that are kept as they are."""


def _for_each_layer(value: Any, check: Callable[[Any], Any]) -> Any:
    several = isinstance(value, (list, tuple))
    checked = tuple(EXACT if bits == EXACT else check(bits) for bits in (value if several else (value,)))
    return checked if several else checked[0]


BitsT = TypeVar("BitsT")
PerLayer = Annotated[BitsT, WrapValidator(_for_each_layer), PlainSerializer(lambda value: value)]
"""Bits that `CacheConfig.in_layer` gives, which is what codecs are built from: the setting itself may be `EXACT` or a
sequence, a number for each layer."""

ScalarBits = Literal[1, 2, 4, 8]
"""Bits per code of the scalar format: widths that divide a byte."""


class CacheConfig(BaseModel):
    """Settings of the tokens in full precision; the config of a method adds its own.

    Attributes:
        needs_artifact: whether the method does nothing without fitting.
        fit_settings: settings whose default differs when the method is fitted.
        run_name: template of a fit's folder, from `method` and the settings; default: the method as it was asked for.
        fisher_tokens: tokens with gradients that `--fit` records.
        fit_us: processor time of a fit per recorded key or value, in microseconds, on a CPU.
    """

    needs_artifact: ClassVar[bool] = False
    fit_settings: ClassVar[Mapping[str, Any]] = {}
    run_name: ClassVar[str] = ""
    fisher_tokens: ClassVar[int] = 4096
    fit_us: ClassVar[float] = 0.05

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

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

    def widths(self, name: str, num_layers: int = 0) -> tuple[int, ...]:
        """The bits of keys (`k_bits`) or values in each layer; ValueError: settings for another number of layers.

        Without `num_layers`, a single number for all of them, if they have the same.
        """
        bits = getattr(self, name)
        if not isinstance(bits, tuple):
            return (bits,) * max(1, num_layers)
        if num_layers and len(bits) != num_layers:
            raise ValueError(f"{name} has {len(bits)} numbers, but {num_layers} layers are compressed")
        return bits

    def in_layer(self, layer_idx: int, num_layers: int) -> Self:
        """The settings of one layer, whose bits are single numbers; ValueError as `widths`."""
        bits = {name: self.widths(name, num_layers)[layer_idx] for name in ("k_bits", "v_bits") if hasattr(self, name)}
        return self.model_copy(update=bits)

    def resolve(self, spec: ModelSpec) -> Self:
        """Settings with all values filled in that follow from the model's shapes.

        Raises:
            ValueError: settings that do not fit the shapes.
        """
        return self


class BiasOffsetConfig(CacheConfig):
    """Settings of methods that are not fitted and code keys less a constant; and some in `KeyCodec.use_units`."""

    key_units: ClassVar[bool] = False

    key_offset: Literal["bias", "none"] = Field(
        default="bias",
        description="constant that is not coded: the bias of the model's key projection where it has one, or none",
    )


class SequenceOffsetConfig(BiasOffsetConfig):
    """And of those that can take the constant from the sequence itself."""

    sequence_offset: Literal["auto", "mean", "none"] = Field(
        default="auto",
        description="whether the mean of a sequence's first keys is not coded, in place of a bias; auto: where the "
        "model normalizes its keys",
    )


class TurboQuantConfig(SequenceOffsetConfig):
    """Settings of TurboQuant."""

    key_units: ClassVar[bool] = True

    k_bits: PerLayer[Literal[1, 2, 3, 4]] = Field(
        default=3, description="bits per key coordinate, the residual's sign included"
    )
    v_bits: PerLayer[Literal[1, 2, 3, 4]] = Field(default=3, description="bits per value coordinate")
    key_variant: Literal["mse", "prod"] = Field(
        default="mse",
        description="mse: all bits code the key (Algorithm 1); prod: the last bit is the sign of a projection of the "
        "residual, so that scores have no bias (Algorithm 2)",
    )
    rotation_seed: int = Field(default=0, ge=0, lt=2**32, description="seed of the rotations and projections")

    @model_validator(mode="after")
    def _bits_for_both_stages(self) -> Self:
        if self.key_variant == "prod" and min(self.widths("k_bits"), default=2) < 2:
            raise ValueError("key_variant prod needs k_bits 2 or more: one of them is the residual's sign")
        return self


class BlockGTQConfig(BiasOffsetConfig):
    """Settings of Block-GTQ."""

    needs_artifact: ClassVar[bool] = True

    k_bits: PerLayer[Literal[2, 3, 4]] = Field(
        default=2, description="bits per key coordinate, on average over a head's pairs"
    )
    v_bits: PerLayer[Literal[2, 3, 4]] = Field(default=2, description="bits per value coordinate, the same for all")
    rate_groups: int = Field(
        default=4,
        ge=1,
        le=8,
        description="neighbouring bit widths that a head's pairs can have, each with a norm per token; 8: all (paper)",
    )
    rotation_seed: int = Field(default=0, ge=0, lt=2**32, description="seed of the rotations")


class OSCARConfig(BiasOffsetConfig):
    """Settings of OSCAR; the paper keeps 64 sinks and the last 256 tokens in full precision."""

    needs_artifact: ClassVar[bool] = True

    k_bits: PerLayer[ScalarBits] = Field(default=2, description="bits of a key code")
    v_bits: PerLayer[ScalarBits] = Field(default=2, description="bits of a value code")
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


class KLTConfig(CacheConfig):
    """Settings of KLT."""

    needs_artifact: ClassVar[bool] = True
    run_name: ClassVar[str] = "{method}-{bits:g}bit"
    fisher_tokens: ClassVar[int] = 32768

    bits: float = Field(
        default=2.0, ge=1, le=4, description="bits per value of K and of V, the mean of all heads, gains not counted"
    )
    key_fields: tuple[tuple[tuple[int, ...], ...], ...] = Field(
        default=(),
        description="bits of the bands of each layer's kv heads, most first; default: where errors cost most",
    )
    value_fields: tuple[tuple[tuple[int, ...], ...], ...] = Field(default=(), description="the same of values")
    joint_heads: int = Field(
        default=0,
        ge=0,
        le=16,
        description="consecutive kv heads that share a transform; 0: as many as a product of queries takes at once",
    )
    head_groups: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="groups of consecutive kv heads whose codes have equally many bytes in each layer; with tensor "
        "parallelism, a multiple of the ranks",
    )

    @model_validator(mode="after")
    def _fields_of_both(self) -> Self:
        if bool(self.key_fields) != bool(self.value_fields):
            raise ValueError("key_fields and value_fields are given together")
        return self

    def resolve(self, spec: ModelSpec) -> Self:
        """The same settings.

        Raises:
            ValueError: fields that are not those of each layer and kv head, or groups that do not divide the heads.
        """
        if spec.num_kv_heads % self.head_groups:
            raise ValueError(f"head_groups {self.head_groups} does not divide the {spec.num_kv_heads} kv heads")
        if spec.num_kv_heads // self.head_groups % max(1, self.joint_heads):
            each = f"{spec.num_kv_heads // self.head_groups} kv heads of a group"
            raise ValueError(f"joint_heads {self.joint_heads} does not divide the {each}")
        if (channels := self.joint_heads * max(spec.head_dim, spec.value_dim)) > 512 and self.joint_heads > 1:
            raise ValueError(f"joint_heads {self.joint_heads} makes transforms of {channels} channels; 512 is the most")
        for fields in (self.key_fields, self.value_fields):
            if fields and [*map(len, fields)] != [spec.num_kv_heads] * spec.num_layers:
                raise ValueError(f"fields take {spec.num_kv_heads} kv heads for each of {spec.num_layers} layers")
        return self


class KVQuantConfig(CacheConfig):
    """Settings of KVQuant; the paper keeps the first token in full precision."""

    needs_artifact: ClassVar[bool] = True

    k_bits: PerLayer[Literal[2, 3, 4]] = Field(default=2, description="bits per key code, outliers not counted")
    v_bits: PerLayer[Literal[2, 3, 4]] = Field(default=2, description="bits per value code, outliers not counted")
    outlier_fraction: float = Field(
        default=0.01, ge=0, le=0.1, description="share of a token's keys, and of its values, kept in 16 bits"
    )


class ScalarConfig(CacheConfig):
    """Bits of the codes, and how many of them share a scale and a zero."""

    k_bits: PerLayer[ScalarBits] = Field(default=2, description="bits of a key code")
    v_bits: PerLayer[ScalarBits] = Field(default=2, description="bits of a value code")
    group_size: int = Field(
        default=32, ge=1, le=1024, description="tokens (keys) or channels (values) that share a scale"
    )


class RTNConfig(ScalarConfig, SequenceOffsetConfig):
    """Settings of round-to-nearest."""

    k_bits: PerLayer[ScalarBits] = Field(default=4, description="bits of a key code")
    v_bits: PerLayer[ScalarBits] = Field(default=4, description="bits of a value code")
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


class KVarNConfig(KIVIConfig):
    """Settings of KVarN; keys and values leave full precision in blocks of `residual_length` tokens."""

    group_size: int = Field(default=128, ge=1, le=1024, description="tokens of a tile, which is normalized as a whole")
    iterations: int = Field(
        default=16, ge=0, le=1000, description="rounds of variance normalization; 0: rotated and rounded only"
    )


class SQuatConfig(KIVIConfig):
    """Settings of SQuat on top of KIVI's; the paper uses squat_lambda 1e-3, lambda_scaling none, residual_length 32."""

    fit_settings: ClassVar[Mapping[str, Any]] = {"subspace_source": "calibration"}
    run_name: ClassVar[str] = "{method}-subspace"

    residual_length: int = Field(
        default=32, ge=0, le=2**20, description="last tokens in full precision; keys are encoded in blocks of as many"
    )
    subspace_dim: int = Field(default=5, ge=1, le=1024, description="dimensions r of the query subspace")
    squat_lambda: float = Field(
        default=0.1, ge=0, le=1e9, description="weight lambda of errors inside the subspace; 0 gives KIVI's codes"
    )
    lambda_scaling: Literal["per_token", "none"] = Field(
        default="per_token",
        description="per_token divides lambda by the number of queries, because singular values grow with the prompt",
    )
    block_size: int = Field(default=0, ge=0, le=4096, description="channels g quantized at a time; 0: head_dim / 2")
    subspace_solver: Literal["svd", "power"] = Field(
        default="svd", description="full eigendecomposition, or block power iteration"
    )
    query_space: Literal["auto", "pre_rope", "post_rope"] = Field(
        default="auto", description="queries that span the subspace; auto: those of the keys' own space"
    )
    share_batch: bool = Field(default=False, description="one subspace per batch, from its first sequence (paper)")
    subspace_source: Literal["prompt", "calibration"] = Field(
        default="prompt", description="queries of the prompt, or a subspace fitted offline with 'kvcli fit-subspace'"
    )


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
    v_bits: PerLayer[ScalarBits] = Field(default=2, description="bits of a value code")
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
