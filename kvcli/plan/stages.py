"""The stages from text to tokens, each with its tokens, its disk, its peak memory and, where known, its time.

Memory is what torch allocates on a GPU; on a CPU it is the resident set of the process, program included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

from kvcli.attention.attach import build_codecs
from kvcli.cache.memory import MemoryReport
from kvcli.calibrate.config import CollectConfig, Shard
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.methods.samples import LayerFisher
from kvcli.methods.token_blocks import BLOCK_TOKENS
from kvcli.plan.cache import CachePlan
from kvcli.plan.model import PlannedModel
from kvcli.plan.other_layers import OtherLayers
from kvcli.plan.working import PromptBytes, chunk_bytes, earlier_tokens, gradient_bytes, recording_bytes
from kvcli.spec import ModelSpec

_HEAP_TENSOR = 2**25
"""Largest tensors that the C library takes from its heap, where what is freed stays with the process, in bytes."""

LEFT_OVER = 96 * 2**20
"""What loading a model and libraries' own buffers leave with a process, beside the program; measured: 60 to 140 MiB."""

_KEPT_SUMS = 2
"""Sequences whose sums are in memory at once: one is written, the next is computed."""

_ID_BYTES = 8


@dataclass(frozen=True)
class Stage:
    """What one stage needs.

    Attributes:
        name: `calibrate`, `fit`, `compress` or `generate`.
        tokens: that it reads, over all sequences.
        disk_bytes: that it writes.
        peak_bytes: of memory on the device; see the module.
        host_bytes: of the process beside a GPU, program not included; None on a CPU.
        seconds: about; None where nobody knows.
    """

    name: str
    tokens: int
    disk_bytes: int
    peak_bytes: int
    host_bytes: int | None = None
    seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values."""
        return asdict(self)


class MethodPlan:
    """What a method needs on a model.

    Args:
        planned: the model.
        name: the method as the user asked for it.
        method: its record.
        config: its settings; what follows from the model's shapes may be open.
        fitted: settings of an artifact, resolved, which know the bits of each layer; None: none is there.
        fused: whether kernels attend to codes.
        program_bytes: memory of the process before a model is loaded.

    Raises:
        ConfigError: settings that do not fit the model's shapes.
    """

    def __init__(
        self,
        planned: PlannedModel,
        name: str,
        method: Method,
        config: CacheConfig,
        *,
        fitted: CacheConfig | None = None,
        fused: bool = False,
        program_bytes: int = 0,
    ) -> None:
        self.planned, self.name, self.method = planned, name, method
        self.config, self.program_bytes = fitted or config.resolve(planned.spec), program_bytes
        self.on_cpu = planned.device.type == "cpu"
        codecs = build_codecs(method, planned.spec, self.config)
        self.cache = CachePlan.of_codecs(
            planned.spec,
            method,
            self.config,
            codecs,
            planned.dtype,
            key_bias=planned.key_bias,
            fused=fused,
            others=OtherLayers.of(planned),
        )
        self.artifact_bytes = artifact_bytes(codecs) if method.needs_artifact else 0
        self.prompt = PromptBytes(planned, method, config, window=self.cache.others.longest_window)
        self._chunk = cache(lambda *counts: chunk_bytes(self.prompt, *counts, fused=fused))

    def generate(self, prompt_tokens: int, new_tokens: int, batch: int = 1, *, chunk: int | None = None) -> Stage:
        """Generating after prompts, as `Session.generate` does.

        Args:
            prompt_tokens: per sequence.
            new_tokens: per sequence.
            batch: sequences.
            chunk: prompt tokens of a sequence per forward pass; None: all.
        """
        after = self._held(self.memory(prompt_tokens, new_tokens, batch, chunk=chunk))
        peak = self._with_weights(max(self._reading(prompt_tokens, batch, chunk), after))
        return Stage("generate", batch * (prompt_tokens + new_tokens), 0, peak, self._host())

    def compress(self, tokens: int, chunk: int | None = None, batch: int = 1) -> Stage:
        """Reading a context chunk by chunk into a file.

        Args:
            tokens: of a context.
            chunk: tokens per forward pass; None: all.
            batch: contexts at once.
        """
        disk = context_bytes(self.cache.memory(tokens, 0, batch))
        peak = self._with_weights(self._reading(tokens, batch, chunk))
        return Stage("compress", tokens * batch, disk, peak, self._host())

    def _reading(self, tokens: int, batch: int, chunk: int | None) -> int:
        """Bytes beside the weights while prompts are read, the cache included."""
        memory, size = self.cache.memory(tokens, 0, batch, chunk=chunk), min(chunk or tokens, tokens)
        working = self.prompt.of(size, batch)
        if size < tokens:
            working = max(working, self._chunk(size, earlier_tokens(tokens - size), batch))
        cut = batch * self.cache.others.held(tokens, size) - memory.other_bytes
        return self._held(memory, size * batch) + cut + working

    def memory(self, prompt_tokens: int, new_tokens: int, batch: int = 1, *, chunk: int | None = None) -> MemoryReport:
        """The cache after generating, see `generate`; the last token is not in it."""
        steps = not self.on_cpu and self.cache.fused
        return self.cache.memory(prompt_tokens, max(0, new_tokens - 1), batch, chunk=chunk, steps=steps)

    def _held(self, memory: MemoryReport, window_tokens: int = 0) -> int:
        """Bytes of a cache as the process holds them, after windows of so many tokens."""
        window = window_tokens * self.planned.spec.kv_dim * self.planned.dtype.itemsize
        stays = self.on_cpu and window < _HEAP_TENSOR
        held = max(memory.allocated_bytes, 2 * window * self.planned.spec.num_layers * stays)
        return held + memory.other_bytes + memory.artifact_bytes

    def _with_weights(self, others: int) -> int:
        """Peak of a stage that needs so many bytes beside the weights."""
        weights = self.planned.weights_bytes
        if not self.on_cpu:
            return weights + others
        return self.program_bytes + weights + max(others + LEFT_OVER, self.planned.checkpoint_bytes)

    def _host(self) -> int | None:
        return None if self.on_cpu else self.planned.weights_bytes + self.planned.checkpoint_bytes


def fit(
    spec: ModelSpec,
    method: Method,
    config: CacheConfig,
    *,
    tokens: int,
    query_tokens: int,
    block_tokens: int = BLOCK_TOKENS,
    program_bytes: int = 0,
) -> Stage:
    """Fitting layer by layer, and the artifact that is made of it.

    Args:
        spec: the model's shapes.
        method: one that is fitted.
        config: its settings, resolved.
        tokens: that were recorded.
        query_tokens: tokens of them whose queries were recorded.
        block_tokens: tokens of a layer in memory at once.
        program_bytes: memory of the process before, where fitting computes on the CPU.
    """
    queries = query_tokens * spec.num_heads * spec.head_dim
    keys = min(tokens, block_tokens) * spec.kv_dim
    drawn = min(tokens, block_tokens if method.fit_tokens is None else method.fit_tokens) * spec.kv_dim
    # float32, and what is converted to it in 16 bits; keys and values stay unless tokens are drawn from several blocks
    stays = 4 * 2 * keys if tokens <= block_tokens or method.fit_tokens is None else 0
    reading = 6 * queries + max(6 * keys, stays + 2 * keys)
    fitting = 4 * queries + stays + int(4 * method.fit_floats * drawn)
    artifact = artifact_bytes(build_codecs(method, spec, config))
    return Stage("fit", tokens, 2 * artifact, program_bytes + max(reading, fitting))


def calibrate(
    planned: PlannedModel, config: CollectConfig, program_bytes: int = 0, shard: Shard | None = None
) -> Stage:
    """Recording keys, values and queries, and what errors cost.

    Args:
        planned: the model.
        config: what is recorded.
        program_bytes: memory of the process before a model is loaded.
        shard: which share of it; None: all.

    Raises:
        UsageError: more shards than forward passes.
    """
    spec, weights, sequences = planned.spec, planned.weights_bytes, config.sequences(shard)
    recording = recording_bytes(planned, config)
    num_fisher = sum(row in sequences for row in config.fisher_rows)
    gradients = gradient_bytes(planned, config.seq_len) if num_fisher else 0
    # float64 sums of one sequence: two matrices of its keys and two of its values
    sums = 4 * 8 * spec.num_layers * spec.num_kv_heads * spec.head_dim**2
    fisher = _fisher_bytes(planned) * bool(num_fisher) if shard is None else num_fisher * sums
    disk, tokens = config.disk_bytes(spec, shard) + fisher, len(sequences) * config.seq_len
    kept = min(num_fisher, _KEPT_SUMS) * sums
    if planned.device.type != "cpu":
        host = weights + max(planned.checkpoint_bytes, recording.host, kept)
        return Stage("calibrate", tokens, disk, weights + max(recording.device, gradients), host)
    # copies that were written stay with the process: the C library takes tensors of this size from its heap
    others = max(recording.total, gradients + kept) + recording.host + LEFT_OVER
    others = max(others, planned.checkpoint_bytes)
    return Stage("calibrate", tokens, disk, program_bytes + weights + others)


def context_bytes(memory: MemoryReport) -> int:
    """Bytes of a cache in a file: what is in use, positions, marks of padding and token ids; no headroom."""
    held = memory.code_bytes + memory.window_bytes + memory.state_bytes
    return held + memory.num_tokens * (4 + 1 + _ID_BYTES)


def _fisher_bytes(planned: PlannedModel) -> int:
    """Bytes of what errors cost, on disk."""
    spec = planned.spec
    return len(fields(LayerFisher)) * 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim**2


def artifact_bytes(codecs: Sequence[LayerCodec]) -> int:
    """Bytes of an artifact's file with the fitted state of all layers, its header included."""
    header: dict[str, Any] = {}
    total = 0
    for layer_idx, codec in enumerate(codecs):
        for name, x in codec.state_dict().items():
            record = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [total, total + x.nbytes]}
            header[f"layers.{layer_idx}.{name}"] = record
            total += x.nbytes
    return total + len(json.dumps(header, separators=(",", ":"))) + 8
