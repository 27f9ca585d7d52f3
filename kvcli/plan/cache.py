"""The bytes of a cache before there is one: what `CompressedCache.memory` will report, from counts and codecs alone.

Counts are those of `TokenCounts`, so the window, the schedules and the headroom of buffers are what a cache has. Rows
are taken to be equally long and without padding.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Self

import torch

from kvcli.artifact.choice import MethodChoice
from kvcli.attention.decoder import LEAST_STEPS
from kvcli.attention.steps import step_capacity
from kvcli.cache.compressed import MemoryReport
from kvcli.cache.counts import TokenCounts
from kvcli.cache.layer import grown_capacity
from kvcli.cache.record import Counts
from kvcli.cache.sequences import positions_capacity
from kvcli.commands.sizes import share
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.methods.per_layer import build_codecs
from kvcli.spec import ModelSpec, bits_per_value

_LONGEST = 2**20
"""Tokens of a sequence beyond which no cache is looked at."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer's codes, per group of tokens of a sequence that are encoded together, with their numbers."""

    key_group: int
    value_group: int
    key_tokens: int
    value_tokens: int
    state: int  # bytes that the key codec keeps of a sequence
    fitted: int  # bytes that a model holds once


@dataclass
class _Buffers:
    """Capacities, in tokens of a sequence, of the buffers that grow."""

    keys: int = 0
    values: int = 0
    positions: int = 0

    def reserve(self, counts: TokenCounts, keys: int, values: int) -> None:
        """Makes room for so many codes of keys and of values."""
        self.keys = grown_capacity(self.keys, keys, counts.keys.tokens_per_group)
        self.values = grown_capacity(self.values, values, counts.values.tokens_per_group)


@dataclass(frozen=True)
class CachePlan:
    """The caches of a method on a model's shapes."""

    spec: ModelSpec
    method: Method
    config: CacheConfig
    layers: tuple[LayerBytes, ...]
    dtype: torch.dtype  # of the model
    fused: bool = False  # whether kernels attend to codes; the reference keeps a rotation of each, where it needs them
    other_bytes: Callable[[int], int] | None = None  # of layers without codes, by tokens of a sequence; None: unknown

    @classmethod
    def of_codecs(
        cls,
        spec: ModelSpec,
        method: Method,
        config: CacheConfig,
        codecs: Iterable[LayerCodec],
        dtype: torch.dtype,
        *,
        fused: bool = False,
        other_bytes: Callable[[int], int] | None = None,
    ) -> Self:
        """From codecs, one per layer, fitted or not, with the offsets of keys."""
        known: dict[Any, LayerBytes] = {}
        layers = []
        for codec in codecs:
            buffers = tuple((name, x.shape, x.dtype) for name, x in codec.state_dict().items())
            same = buffers, codec.key.bits_per_token(), codec.value.bits_per_token()
            if same not in known:
                if fused:
                    codec.make_kernel_tables()
                sides = (codec.key, codec.value)
                keys, values = (torch.zeros(1, x.spec.num_kv_heads, 1, x.spec.head_dim, dtype=dtype) for x in sides)
                state = codec.new_state(1, keys.device)
                known[same] = LayerBytes(
                    key_group=codec.key.encoded_group(keys).nbytes,
                    value_group=codec.value.encoded_group(values).nbytes,
                    key_tokens=codec.key.tokens_per_group,
                    value_tokens=codec.value.tokens_per_group,
                    state=0 if state is None else state.nbytes,
                    fitted=codec.fitted_bytes(),
                )
            layers.append(known[same])
        return cls(spec, method, config, tuple(layers), dtype, fused, other_bytes)

    def memory(
        self, prompt_tokens: int, passes: int = 0, batch: int = 1, *, chunk: int | None = None, steps: bool = False
    ) -> MemoryReport:
        """The report of a cache of `batch` sequences after a prompt, read in chunks, and passes of one token each.

        `Session.generate` runs one pass less than it makes tokens; `steps` are passes whose counts are on the device.
        """
        groups = max(x.key_tokens for x in self.layers), max(x.value_tokens for x in self.layers)
        counts = TokenCounts(self.method.schedules(self.config), self.config.sink_length, groups)
        buffers, size = _Buffers(), chunk or max(1, prompt_tokens)
        ready = 0
        for count in [min(size, prompt_tokens - start) for start in range(0, prompt_tokens, size)] + [1] * passes:
            rest = prompt_tokens + passes - sum(counts.lengths)
            stepping = steps and rest <= passes and (ready or (rest >= LEAST_STEPS and counts.all_have_codes))
            if stepping and max(counts.attended) >= ready:
                ready = step_capacity(counts, rest)
                room = ready + counts.layout.ring
                buffers.reserve(counts, room, room)
                buffers.positions = sum(counts.lengths) + rest + counts.layout.ring
            plan = counts.append((count,))
            buffers.reserve(counts, *plan.room)
            buffers.positions = positions_capacity(buffers.positions, _only(plan.lengths))
        return self._report(counts, buffers, batch)

    def layer_bits(self) -> list[tuple[float, float]]:
        """Stored bits per key and per value of each layer's codes, scales and norms included."""
        key_dim, value_dim, bits = self.spec.kv_dim, self.spec.num_kv_heads * self.spec.value_dim, bits_per_value
        return [
            (bits(x.key_group, x.key_tokens * key_dim), bits(x.value_group, x.value_tokens * value_dim))
            for x in self.layers
        ]

    def coverage(self, tokens: int) -> str:
        """How many layers are compressed, and what the whole cache of a sequence shrinks by where that is known."""
        if self.spec.other_layers and self.other_bytes is None:
            return self.spec.coverage
        ratio = self.memory(tokens).whole_ratio
        return f"{self.spec.coverage}, whole cache {share(ratio)} of 16 bits at {tokens} tokens"

    def pays_from(self) -> int | None:
        """Tokens of a sequence from which on its cache is smaller than they are in 16 bits; None: it never is."""

        def larger(tokens: int) -> bool:
            memory = self.memory(tokens)
            return memory.cache_bytes >= memory.fp16_bytes

        reach = 64
        while larger(reach) or larger(2 * reach):  # a window that grows and shrinks makes it larger again
            reach *= 2
            if reach > _LONGEST:
                return None
        return next((tokens + 1 for tokens in range(reach, 0, -1) if larger(tokens)), 1)

    def _report(self, counts: TokenCounts, buffers: _Buffers, batch: int) -> MemoryReport:
        spec, size = self.spec, self.dtype.itemsize
        tokens, window = _only(counts.lengths), _only(counts.window)
        coded, coded_values = _only(counts.keys.coded), _only(counts.values.coded)
        keys, values = self._code_bytes(coded, coded_values)
        key_dim, value_dim = spec.kv_dim, spec.num_kv_heads * spec.value_dim
        token_bytes = (key_dim + value_dim) * size * len(self.layers)
        state = sum(x.state for x in self.layers) if tokens else 0
        positions = tokens + 4 * buffers.positions
        windows = counts.layout.capacity * token_bytes if tokens else 0
        return MemoryReport(
            num_tokens=batch * tokens,
            num_encoded=batch * coded,
            code_bytes=batch * (keys + values),
            window_bytes=batch * window * token_bytes,
            position_bytes=batch * positions,
            state_bytes=batch * state,
            allocated_bytes=batch * (sum(self._code_bytes(buffers.keys, buffers.values)) + windows + state + positions),
            artifact_bytes=sum(x.fitted for x in self.layers),
            fp16_bytes=batch * tokens * spec.fp16_bytes_per_token(),
            uncompressed_bytes=batch * tokens * spec.fp16_bytes_per_token() * size // 2,
            key_bits=bits_per_value(keys, coded * len(self.layers) * key_dim),
            value_bits=bits_per_value(values, coded_values * len(self.layers) * value_dim),
            nominal_bits=self.method.nominal_bits(spec, self.config),
            layers=spec.num_layers,
            other_layers=spec.other_layers,
            other_bytes=batch * self.other_bytes(tokens) if tokens and self.other_bytes else 0,
        )

    def _code_bytes(self, key_tokens: int, value_tokens: int) -> tuple[int, int]:
        """Bytes of the codes of so many keys and values of a sequence, in all layers."""
        return (
            sum(key_tokens * x.key_group // x.key_tokens for x in self.layers),
            sum(value_tokens * x.value_group // x.value_tokens for x in self.layers),
        )


def stored_bits(name: str, settings: dict[str, Any], spec: ModelSpec, contexts: list[int]) -> dict[str, Any]:
    """Bits per value of one sequence in a 16-bit model, without the artifact and per-sequence state.

    The method may have bits, such as `kivi-2`; `contexts` are lengths of the prompt, each a cache of its own. Returns
    nominal bits; stored bits of encoded keys and of values, scales and norms included; `effective` bits over all tokens
    at each context, window and positions included.
    """
    choice = MethodChoice(name, settings)
    method, config = choice.record, choice.config
    plan = CachePlan.of_codecs(spec, method, config, build_codecs(method, spec, config), torch.float16)
    key, value = (fmean(bits) for bits in zip(*plan.layer_bits(), strict=True))
    effective = []
    for context in contexts:
        memory = plan.memory(context)
        bits = 8 * (memory.code_bytes + memory.window_bytes) + context * (32 + 8)  # a position and a padding mark
        effective.append(bits / (context * spec.kv_width * spec.num_layers))
    return {
        "method": name,
        "settings": settings,
        "nominal": [float(bits) for bits in method.nominal_bits(spec, config)],
        "key_bits": key,
        "value_bits": value,
        "effective": effective,
    }


def _only(counts: Counts) -> int:
    return counts[0] if counts else 0
