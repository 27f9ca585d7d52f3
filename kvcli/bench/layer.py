"""One encoded layer of a shape, filled with random codes.

Speed does not depend on the values of codebooks and codes, so nothing is fitted and only a few blocks of tokens are
encoded, then repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.attach import make_config
from kvcli.errors import ConfigError
from kvcli.methods.base import Codec, Codes, State
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import AttendCodes, EncodedTokens, LayerCodec, PartialAttention
from kvcli.methods.method import Method
from kvcli.registry import BASELINE, parse_method
from kvcli.rope import Rope, TokenRotations
from kvcli.spec import ModelSpec

_BLOCK_TOKENS = 2048
_BLOCKS = 4
_OBSERVED_TOKENS = 64
_QUERY_SCALE = 2.0
"""Standard deviation of the scores: attention neither uniform nor on one token."""


@dataclass(frozen=True)
class MethodCase:
    """A method with its settings, as measured.

    Attributes:
        name: with bits, such as kivi-2.
        method: its record.
        config: its settings.
    """

    name: str
    method: Method
    config: CacheConfig

    @property
    def is_baseline(self) -> bool:
        """Whether this is the model without kvcli."""
        return self.name == BASELINE

    @classmethod
    def parse(cls, name: str, settings: dict[str, Any]) -> MethodCase:
        """A method by name, with those of the settings that it has.

        Raises:
            UsageError: no such method.
            ConfigError: a value out of range.
        """
        method, from_bits = parse_method(name)
        known = {key: value for key, value in settings.items() if key in method.config_cls.model_fields}
        return cls(name, method, make_config(method, {**from_bits, **known}))

    def build(self, spec: ModelSpec, layer_idx: int) -> LayerCodec:
        """The unfitted codec of a layer.

        Raises:
            ConfigError: settings that do not fit the shape.
        """
        try:
            codec = self.method.build(spec, self.config, layer_idx)
        except ValueError as error:
            raise ConfigError(f"{self.name}: {error}") from error
        return codec.eval()


def check_settings(cases: list[MethodCase], settings: dict[str, Any]) -> None:
    """Raises ConfigError for a setting that no method has."""
    known = {name for case in cases for name in type(case.config).model_fields}
    for name in settings:
        if name not in known:
            raise ConfigError(f"none of the methods has a setting '{name}'")


def randomize_(codec: LayerCodec, generator: torch.Generator) -> None:
    """Fills what a fit would fill of a layer's codecs; other buffers, such as random projections, stay."""
    codec.key.randomize_(generator)
    codec.value.randomize_(generator)


@dataclass(frozen=True)
class EncodedLayer:
    """Tokens of one layer as codes, and a query for them.

    Attributes:
        codec: the layer's codecs.
        query: rotated, [batch, num_heads, 1, head_dim] in the dtype of the model.
        key_codes: codes of random keys.
        value_codes: codes of random values.
        key_state: state of the sequences, for codecs that have one.
        spec: shapes of the model.
        rope: its rotary embedding.
        first: position of the first encoded token, after the sinks.
    """

    codec: LayerCodec
    query: Tensor
    key_codes: Codes
    value_codes: Codes
    key_state: State | None
    spec: ModelSpec
    rope: Rope
    first: int

    @property
    def num_tokens(self) -> int:
        """Encoded tokens of each sequence."""
        return self.value_codes.num_tokens

    @property
    def stored_bytes(self) -> int:
        """Bytes of the codes with their scales and norms."""
        return self.key_codes.nbytes + self.value_codes.nbytes

    def encoded_tokens(self) -> EncodedTokens:
        """The codes as attention takes them, with new tables of rotations for keys before RoPE."""
        rotations = None
        if self.codec.key.space == "pre_rope":
            positions = torch.arange(self.first, self.first + self.num_tokens, device=self.query.device)
            positions = positions.int().repeat(self.query.shape[0], 1)
            rotations = TokenRotations(self.rope, positions)
        return EncodedTokens(self.key_codes, self.key_state, self.value_codes, rotations, None)

    def attend(self, attend_codes: AttendCodes, encoded: EncodedTokens) -> PartialAttention:
        """(out, lse) of the query over the codes."""
        return attend_codes(self.codec, self.query, encoded, self.query.shape[-1] ** -0.5)


def encoded_layer(
    case: MethodCase,
    spec: ModelSpec,
    rope: Rope,
    *,
    layer_idx: int,
    context: int,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> EncodedLayer:
    """A layer that holds `context` tokens per sequence, rounded down to whole groups, all of them encoded.

    A few blocks of random keys and values are encoded; each sequence repeats them in a different order.

    Args:
        case: the method.
        spec: shapes of the model.
        rope: its rotary embedding.
        layer_idx: the layer, for methods that treat layers differently.
        context: tokens per sequence.
        batch: sequences.
        device: where.
        dtype: of the query.
        seed: of codebooks, codes and query.

    Returns:
        The layer and a query.

    Raises:
        ConfigError: settings that do not fit the shape, or a context shorter than a group.
    """
    generator = torch.Generator(device).manual_seed(seed)
    codec = case.build(spec, layer_idx).to(device)
    randomize_(codec, generator)

    def normal(rows: int, heads: int, tokens: int) -> Tensor:
        return torch.randn(rows, heads, tokens, spec.head_dim, device=device, generator=generator)

    group = codec.tokens_per_group
    length = context // group * group
    if not length:
        raise ConfigError(f"{case.name}: a context of {context} tokens has no whole group of {group}")
    state = codec.key.new_state(batch, device)
    if state is not None:
        queries, keys = (normal(batch, heads, _OBSERVED_TOKENS) for heads in (spec.num_heads, spec.num_kv_heads))
        codec.key.observe(state, queries, keys, torch.full((batch,), float(_OBSERVED_TOKENS), device=device))
        codec.key.finalize_state(state, list(range(batch)))
    block = max(group, min(_BLOCK_TOKENS, length) // group * group)
    first_row = None if state is None else state.select([0])

    def codes(codec: Codec[Any], state: State | None) -> Codes:
        count = min(_BLOCKS, -(-length // block) + batch - 1)
        return tile([codec.encode(normal(1, spec.num_kv_heads, block), state) for _ in range(count)], batch, length)

    with torch.no_grad():
        key_codes, value_codes = codes(codec.key, first_row), codes(codec.value, None)
    query = (normal(batch, spec.num_heads, 1) * _QUERY_SCALE).to(dtype)
    return EncodedLayer(codec, query, key_codes, value_codes, state, spec, rope, case.config.sink_length)


def tile(blocks: list[Codes], batch: int, length: int) -> Codes:
    """Codes of `length` tokens in each of `batch` sequences, repeated from blocks of equal size [1, ...]."""
    places = -(-length // blocks[0].num_tokens)

    def tiled(name: str, like: Tensor) -> Tensor:
        # allocated first: out of memory is raised before any copy
        out = like.new_empty(batch, like.shape[1], places * like.shape[2], *like.shape[3:])
        for row, place in product(range(batch), range(places)):
            block = getattr(blocks[(row + place) % len(blocks)], name)
            out[row, :, place * like.shape[2] : (place + 1) * like.shape[2]] = block[0]
        return out

    return type(blocks[0])(**{name: tiled(name, like) for name, like in blocks[0].tensors().items()}).slice(0, length)
