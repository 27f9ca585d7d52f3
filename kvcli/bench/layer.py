"""One encoded layer of a shape, filled with random codes.

Speed does not depend on what codebooks and codes say, so nothing is fitted and only a few blocks of tokens are really
encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.session import make_config
from kvcli.errors import ConfigError
from kvcli.methods.base import Codec, Codes, LayerCodec, State
from kvcli.methods.config import CacheConfig
from kvcli.methods.encoded import AttendCodes, EncodedTokens
from kvcli.methods.method import Method
from kvcli.registry import parse_method
from kvcli.rope import Rope, TokenRotations
from kvcli.spec import ModelSpec

_BLOCK_TOKENS = 2048
_BLOCKS = 4
_OBSERVED_TOKENS = 64
_QUERY_SCALE = 2.0
"""Scores of this standard deviation: attention neither uniform nor on one token."""


@dataclass(frozen=True)
class Subject:
    """A method with its settings, as benched.

    Attributes:
        name: as asked for, such as kivi-2.
        method: its record.
        config: its settings.
    """

    name: str
    method: Method
    config: CacheConfig

    @property
    def is_baseline(self) -> bool:
        """Whether this stands for the model without kvcli."""
        return self.name == "fp16"

    @classmethod
    def parse(cls, name: str, settings: dict[str, Any]) -> Subject:
        """A method by name; of the settings, those it has are used.

        Raises:
            UsageError: no such method.
            ConfigError: a value out of range.
        """
        method, from_bits = parse_method(name)
        known = {key: value for key, value in settings.items() if key in method.config_cls.model_fields}
        return cls(name, method, make_config(method, {**from_bits, **known}))

    def build(self, spec: ModelSpec, layer_idx: int) -> LayerCodec:
        """The codec of a layer with random buffers where a fit would fill them.

        Raises:
            ConfigError: settings that do not fit the shape.
        """
        try:
            codec = self.method.build(spec, self.config, layer_idx)
        except ValueError as error:
            raise ConfigError(f"{self.name}: {error}") from error
        return codec.eval()


def check_settings(subjects: list[Subject], settings: dict[str, Any]) -> None:
    """Raises ConfigError for a setting that no method has."""
    known = {name for subject in subjects for name in type(subject.config).model_fields}
    for name in settings:
        if name not in known:
            raise ConfigError(f"none of the methods has a setting '{name}'")


def randomise(codec: LayerCodec, generator: torch.Generator) -> None:
    """Fills the buffers that a fit would fill; others, such as random projections, stay.

    Args:
        codec: on the generator's device.
        generator: seeded.
    """
    for part in (codec.key, codec.value):
        for name, buffer in list(part.named_buffers()):
            if buffer.numel() == 0 or bool(buffer.count_nonzero()):
                continue
            if buffer.is_floating_point():
                buffer.normal_(generator=generator).mul_(max(buffer.shape) ** -0.5)
                continue
            limit = torch.iinfo(buffer.dtype).max
            buffer.random_(-limit, limit + 1, generator=generator)
            scale = getattr(part, f"{name}_scale", None)
            if isinstance(scale, Tensor):  # integers in units of a scale: sums of some of them shall be about 1
                scale.fill_(0.25 / limit)


@dataclass(frozen=True)
class EncodedLayer:
    """Tokens of one layer as codes, and a query for them.

    Attributes:
        codec: the layer's codecs.
        query: rotated, [batch, num_heads, 1, head_dim] in the dtype of the model.
        key_codes: random codes of the keys.
        value_codes: of the values.
        key_state: the sequences' state, for codecs that keep one.
        spec: shapes of the model.
        rope: its rotary embedding.
        first: index of the first encoded token, after the sinks.
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

    def part(self) -> EncodedTokens:
        """What an attention form sees; each call's rotations keep tables of their own."""
        rotations = None
        if self.codec.key.space == "pre_rope":
            positions = torch.arange(self.first, self.first + self.num_tokens, device=self.query.device)
            positions = positions.int().repeat(self.query.shape[0], 1)
            rotations = TokenRotations(self.rope, positions)
        return EncodedTokens(self.key_codes, self.key_state, self.value_codes, rotations, None)

    def attend(self, form: AttendCodes, part: EncodedTokens) -> tuple[Tensor, Tensor]:
        """(out, lse) of the query over the codes."""
        return form(self.codec, self.query, part, self.query.shape[-1] ** -0.5)


def encoded_layer(
    subject: Subject,
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
    """A layer that holds `context` tokens a sequence, all of them encoded, down to whole groups.

    A few blocks of random keys and values are encoded and laid out in another order in every sequence.

    Raises:
        ConfigError: settings that do not fit the shape, or a context shorter than a group.
    """
    generator = torch.Generator(device).manual_seed(seed)
    codec = subject.build(spec, layer_idx).to(device)
    randomise(codec, generator)

    def normal(rows: int, heads: int, tokens: int) -> Tensor:
        return torch.randn(rows, heads, tokens, spec.head_dim, device=device, generator=generator)

    group = codec.tokens_per_group
    length = context // group * group
    if not length:
        raise ConfigError(f"{subject.name}: a context of {context} tokens has no whole group of {group}")
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
    return EncodedLayer(codec, query, key_codes, value_codes, state, spec, rope, subject.config.sink_length)


def tile(blocks: list[Codes], batch: int, length: int) -> Codes:
    """Codes of `length` tokens in each of `batch` sequences, made of blocks of equal size of one sequence each."""
    places = -(-length // blocks[0].num_tokens)

    def tiled(name: str, like: Tensor) -> Tensor:
        # allocated first, so that what does not fit says so at once
        out = like.new_empty(batch, like.shape[1], places * like.shape[2], *like.shape[3:])
        for row, place in product(range(batch), range(places)):
            block = getattr(blocks[(row + place) % len(blocks)], name)
            out[row, :, place * like.shape[2] : (place + 1) * like.shape[2]] = block[0]
        return out

    return type(blocks[0])(**{name: tiled(name, like) for name, like in blocks[0].tensors().items()}).slice(0, length)
