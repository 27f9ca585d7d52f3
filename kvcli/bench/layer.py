"""One encoded layer of a shape, filled with random codes, and kernels checked on it before anything is timed.

Speed does not depend on the values of codebooks and codes, so nothing is fitted and only a few blocks of tokens are
encoded, then repeated. Attention is compared with the reference on the same codes. Encoding kernels may break ties
differently from the reference, so encoding errors are compared instead of codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Self

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvcli.artifact.choice import MethodChoice
from kvcli.attention.backend import choose_backend
from kvcli.attention.reference import attend_codes as reference_attend
from kvcli.errors import ConfigError
from kvcli.methods.base import Codec, Codes, State
from kvcli.methods.layer_codec import AttendCodes, EncodedTokens, LayerCodec, PartialAttention
from kvcli.methods.pages import PageTable
from kvcli.methods.per_layer import make_codec
from kvcli.models.shapes import shape_config
from kvcli.rope import Rope, TokenRotations
from kvcli.seam.probe import probe
from kvcli.spec import ModelSpec

TOLERANCE, TOLERANCE_16 = 1e-4, 5e-3
"""Largest allowed `out_error` of queries in float32, and in 16 bits."""

LSE_TOLERANCE = 1e-2
ENCODING_TOLERANCE = 1e-2

_CHECKED_TOKENS = 256
"""Fewest tokens on which kernels are checked: a short context may have no codes."""

_ENCODED_TOKENS = 256
_BLOCK_TOKENS = 2048
_BLOCKS = 4
_OBSERVED_TOKENS = 64
_QUERY_SCALE = 2.0
"""Standard deviation of the scores: attention neither uniform nor on one token."""


def shape_rope(name: str, device: torch.device) -> Rope:
    """The rotary embedding that transformers gives a model of this shape."""
    return Rope(LlamaRotaryEmbedding(shape_config(name)).to(device))


def unfitted_codec(choice: MethodChoice, spec: ModelSpec, layer_idx: int) -> LayerCodec:
    """The codec of a layer, not fitted; ConfigError for settings that do not fit the shape."""
    try:
        return make_codec(choice.record, spec, choice.config, layer_idx).eval()
    except ValueError as error:
        raise ConfigError(f"{choice.label}: {error}") from error


def randomize_(codec: LayerCodec, generator: torch.Generator) -> None:
    """Fills what a fit would fill of a layer's codecs; other buffers, such as random projections, stay."""
    codec.key.randomize_(generator)
    codec.value.randomize_(generator)
    if codec.key.space == "tile" and codec.key_offset is not None:  # which every fit of these has
        codec.key_offset.normal_(generator=generator)


@dataclass(frozen=True)
class EncodedLayer:
    """Tokens of one layer as codes, and a query for them."""

    codec: LayerCodec
    query: Tensor  # rotated, [batch, num_heads, 1, head_dim] in the dtype of the model
    key_codes: Codes
    value_codes: Codes
    key_state: State | None  # state of the sequences, for codecs that have one
    spec: ModelSpec
    rope: Rope
    first: int  # position of the first encoded token, after the sinks
    pages: PageTable | None = None  # where the codes are, if they are in pages

    @property
    def num_tokens(self) -> int:
        """Encoded tokens of each sequence."""
        return self.value_codes.num_tokens if self.pages is None else self.pages.length

    def in_pages(self, page_size: int | None) -> Self:
        """The same tokens in pages, in random order, None: in rows; errors as `PageTable`, and for part of a page."""
        if page_size is None:
            return self
        if self.num_tokens % page_size:
            raise ConfigError(f"{self.num_tokens} tokens are no whole pages of {page_size}")
        if page_size % (group := max(self.codec.key.tokens_per_group, self.codec.value.tokens_per_group)):
            raise ConfigError(f"pages of {page_size} tokens do not hold whole groups of {group} tokens")
        batch, most, device = len(self.query), self.num_tokens // page_size, self.query.device
        order = torch.randperm(batch * most, generator=torch.Generator().manual_seed(0)).to(device)
        pages = PageTable(order.argsort().view(batch, most).int(), page_size)
        keys, values = (
            codes.map(lambda x: x.unflatten(2, (most, -1)).transpose(1, 2).flatten(0, 1)[order])
            for codes in (self.key_codes, self.value_codes)
        )
        return replace(self, key_codes=keys, value_codes=values, pages=pages)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the codes with their scales and norms."""
        return self.key_codes.nbytes + self.value_codes.nbytes

    def encoded_tokens(self) -> EncodedTokens:
        """The codes as attention takes them, with new tables of rotations for keys before RoPE."""
        rotations = None
        if self.codec.needs_rotations:
            positions = torch.arange(self.first, self.first + self.num_tokens, device=self.query.device)
            rotations = TokenRotations(self.rope, positions.int().repeat(self.query.shape[0], 1))
        return EncodedTokens(self.key_codes, self.key_state, self.value_codes, rotations, None, self.pages)

    def attend(self, attend_codes: AttendCodes, encoded: EncodedTokens) -> PartialAttention:
        """(out, lse) of the query over the codes."""
        return attend_codes(self.codec, self.query, encoded, self.query.shape[-1] ** -0.5)


def encoded_layer(
    case: MethodChoice,
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

    A few blocks of random keys and values are encoded; each sequence repeats them in a different order. The query is of
    `dtype`; the seed is of codebooks, codes and query. ConfigError: settings that do not fit the shape, or a context
    shorter than a group.
    """
    generator = torch.Generator(device).manual_seed(seed)
    codec = unfitted_codec(case, spec, layer_idx).to(device)
    randomize_(codec, generator)

    def normal(rows: int, heads: int, tokens: int) -> Tensor:
        return torch.randn(rows, heads, tokens, spec.head_dim, device=device, generator=generator)

    group = codec.tokens_per_group
    length = context // group * group
    if not length:
        raise ConfigError(f"{case.label}: a context of {context} tokens has no whole group of {group}")
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


def uncompressed_layer(
    spec: ModelSpec, batch: int, tokens: int, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A random query [batch, num_heads, 1, head_dim], keys and values [batch, num_kv_heads, tokens, head_dim]."""
    random = partial(torch.randn, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(seed))
    query = random(batch, spec.num_heads, 1, spec.head_dim)
    key, value = (random(batch, spec.num_kv_heads, tokens, spec.head_dim) for _ in range(2))
    return query, key, value


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


@dataclass(frozen=True)
class Agreement:
    """How kernels compare with the reference."""

    out_error: float  # |out - reference| / |reference| of attention over the same codes, at most `tolerance`
    lse_error: float | None  # largest absolute difference of a log-sum-exp; None where there is none
    tolerance: float
    encoding_gap: float | None = None  # relative difference of their encoding errors; None if no kernels encode

    @property
    def holds(self) -> bool:
        """Whether the kernels agree with the reference; NaN does not."""
        encodes = self.encoding_gap is None or self.encoding_gap <= ENCODING_TOLERANCE
        sums = self.lse_error is None or self.lse_error <= LSE_TOLERANCE
        return self.out_error <= self.tolerance and sums and encodes

    def describe(self) -> str:
        """The mismatch in words."""
        encoding = "" if self.encoding_gap is None else f", encoding error by a relative {self.encoding_gap:.1e}"
        sums = "" if self.lse_error is None else f", log-sum-exp by {self.lse_error:.1e} (allowed {LSE_TOLERANCE:.0e})"
        output = f"output by {self.out_error:.1e} (allowed {self.tolerance:.0e})"
        return f"differs from the reference: {output}{sums}{encoding}"


def compare_attention(layer: EncodedLayer, attend_codes: AttendCodes) -> Agreement:
    """Compares attention over the codes of a layer with the reference."""
    expected, expected_lse = layer.attend(reference_attend, layer.encoded_tokens())
    out, lse = layer.attend(attend_codes, layer.encoded_tokens())
    error = float((out.float() - expected).norm() / expected.norm())
    lse_error = float((lse.float() - expected_lse).abs().max())
    return Agreement(error, lse_error, TOLERANCE if layer.query.dtype == torch.float32 else TOLERANCE_16)


def encoding_gap(layer: EncodedLayer) -> float:
    """|error of the kernels - error of the reference| / error of the reference, the larger of keys and values."""
    generator = torch.Generator(layer.query.device).manual_seed(0)
    state = None if layer.key_state is None else layer.key_state.select([0])
    gaps = []
    for codec, codec_state in ((layer.codec.key, state), (layer.codec.value, None)):
        tokens = -(-_ENCODED_TOKENS // codec.tokens_per_group) * codec.tokens_per_group
        shape = (1, layer.spec.num_kv_heads, tokens, layer.spec.head_dim)
        x = torch.randn(shape, device=layer.query.device, generator=generator).to(layer.query.dtype)
        errors = []
        for fused in (False, True):
            codec.fused = fused
            errors.append((codec.decode(codec.encode(x, codec_state), codec_state) - x.float()).norm())
        codec.fused = False
        gaps.append((errors[1] - errors[0]).abs() / errors[0].clamp_min(1e-30))
    return float(torch.stack(gaps).amax())


class KernelCheck:
    """Kernels of several methods, those that encode included, against the reference on the last layer of a model.

    The model is detached; `impl` is that of `kvcli.attach`, UsageError if it does not exist.
    """

    def __init__(self, model: Any, cases: Sequence[MethodChoice], impl: str, seed: int) -> None:
        attention = probe(model)
        self.spec, device = attention.spec, model.device
        last = self.spec.num_layers - 1
        shared = {"layer_idx": last, "device": device, "dtype": model.dtype, "seed": seed}
        self._layer = partial(encoded_layer, spec=self.spec, rope=attention.rope, **shared)
        self._backends = {
            case.label: choose_backend(case.record, [unfitted_codec(case, self.spec, last)], impl, device)
            for case in cases
            if not case.is_baseline
        }
        self._agreements: dict[tuple[str, int, int], Agreement | None] = {}

    def impl(self, case: MethodChoice) -> str:
        """The attention that runs: `reference`, `fused`, or `sdpa` for the model as it is."""
        return "sdpa" if case.is_baseline else self._backends[case.label].impl

    def agreement(self, case: MethodChoice, context: int, batch: int) -> Agreement | None:
        """How a method's kernels compare with the reference, None where none runs; a shape is checked once."""
        key = case.label, max(_CHECKED_TOKENS, context), batch
        if key not in self._agreements:
            self._agreements[key] = self._compare(case, *key[1:])
        return self._agreements[key]

    def _compare(self, case: MethodChoice, context: int, batch: int) -> Agreement | None:
        backend = self._backends.get(case.label)
        if backend is None or backend.attend_codes is reference_attend:
            return None
        layer = self._layer(case=case, context=context, batch=batch)
        with torch.inference_mode():
            agreement = compare_attention(layer, backend.attend_codes)
            return replace(agreement, encoding_gap=encoding_gap(layer)) if backend.impl == "fused" else agreement
