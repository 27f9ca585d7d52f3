"""Memory and disk of a method on a model: caches, weights and files exactly, the rest as an upper bound.

Memory is what torch allocates on a GPU; on a CPU it is the resident set of the process, program included. Exact are
the bytes of weights, caches, artifacts and files. What a forward pass allocates beside them is bounded by `pass_bound`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

import torch
from torch import nn

from kvcli.artifact.choice import choose_offsets
from kvcli.cache.compressed import MemoryReport, own_bytes
from kvcli.calibrate.config import FISHER_SEQ_LEN, CollectConfig
from kvcli.calibrate.fisher import LOGIT_TOKENS, LOGITS
from kvcli.errors import UnsupportedModelError
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.methods.per_layer import build_codecs
from kvcli.methods.samples import LayerFisher
from kvcli.models.builtin_models import BUILTIN_MODELS, copy_folder
from kvcli.models.checkpoint import attention_implementation
from kvcli.models.load import LoadedModel, find_config
from kvcli.models.shapes import SHAPES, naming_shapes, shape_config
from kvcli.plan.budget import largest
from kvcli.plan.cache import CachePlan
from kvcli.seam.decoder import decoder_layers
from kvcli.seam.probe import probe
from kvcli.seam.recorder import FAILURES, one_line
from kvcli.seam.versions import with_cache
from kvcli.spec import ModelSpec

_BLOCK_TOKENS = 4608
"""Most tokens of a cache that a pass over a chunk of a prompt decodes at once."""

_DECODED_BYTES = 2**27
"""Keys, and values, that kernels decode at once for such a pass."""

_HEAP_TENSOR = 2**25
"""Largest tensors that the C library takes from its heap, where what is freed stays with the process, in bytes."""

_LOADING = 160 * 2**20
"""What loading a model and libraries' own buffers leave with a process on a CPU; measured: 60 to 140 MiB."""

_LONGEST = 2**27
"""Largest context and batch that are looked for."""


@dataclass(frozen=True)
class PlannedModel:
    """A model that is not loaded, with its config of transformers and the dtype that its weights will have."""

    name: str
    config: Any
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def spec(self) -> ModelSpec:
        """Shapes of its attention."""
        return ModelSpec.from_config(self.config)

    @cached_property
    def empty(self) -> nn.Module:
        """The model on the `meta` device, without numbers; UnsupportedModelError: transformers makes none of it."""
        from transformers import AutoModelForCausalLM

        try:
            with torch.device("meta"):
                model: nn.Module = AutoModelForCausalLM.from_config(
                    deepcopy(self.config), dtype=self.dtype, attn_implementation=attention_implementation(self.config)
                )
        except (*FAILURES, ImportError) as error:
            raise UnsupportedModelError(f"transformers makes no model of its config ({one_line(error)})") from error
        return model.eval()

    @cached_property
    def weights_bytes(self) -> int:
        """Bytes of all weights, one that two layers share counted once."""
        return sum(weight.nbytes for weight in self.empty.parameters())

    @property
    def quantized(self) -> str:
        """How the checkpoint's weights are quantized, which `weights_bytes` does not know; empty if they are not."""
        settings = getattr(self.config, "quantization_config", None) or {}
        settings = settings if isinstance(settings, Mapping) else settings.to_dict()
        return str(settings.get("quant_method", "in some way")) if settings else ""

    @cached_property
    def windows(self) -> list[tuple[int, int]]:
        """Most tokens that each layer with a sliding window keeps, and the numbers that it keeps per token."""
        from transformers.cache_utils import DynamicCache

        layers = DynamicCache(config=self.config.get_text_config(decoder=True)).layers
        widths = [
            sum(x.out_features for name, x in layer.named_modules() if name.endswith(("k_proj", "v_proj")))
            for layer in decoder_layers(self.empty)
        ]
        shared = self.spec.kv_width  # of projections in one
        return [
            (layer.sliding_window - 1, width or shared)
            for layer, width in zip(layers, widths, strict=False)
            if getattr(layer, "sliding_window", None)
        ]

    @cached_property
    def state_bytes(self) -> int | None:
        """Bytes that layers without full attention or a window keep of a sequence; None: not known."""
        from transformers.cache_utils import DynamicCache, DynamicLayer

        cache = DynamicCache(config=self.config.get_text_config(decoder=True))
        layers, full = enumerate(cache.layers), self.spec.layer_indices or range(self.spec.num_layers)
        others = [x for i, x in layers if i not in full and not getattr(x, "sliding_window", None)]
        if not others or any(isinstance(x, DynamicLayer) for x in others):
            return None if others else 0
        # other ways to run experts look at numbers, which are not there
        getattr(self.empty, "set_experts_implementation", lambda way: None)("batched_mm")
        try:
            with torch.device("meta"), torch.no_grad():
                self.empty(torch.zeros(1, 1, dtype=torch.int64), **with_cache(cache))
        except (RuntimeError, ValueError, TypeError):
            return None
        return own_bytes(others)

    def other_bytes(self, tokens: int) -> int:
        """Bytes that layers of other kinds keep of a sequence, without states of which nothing is known."""
        windows = sum(width * min(tokens, most) for most, width in self.windows)
        return windows * self.dtype.itemsize + (self.state_bytes or 0)

    @cached_property
    def token_bytes(self) -> int:
        """Upper bound of what a layer's pass allocates per token: its MLP or experts, or attention and encoding."""
        config, spec = self.config.get_text_config(decoder=True), self.spec
        hidden, size = config.hidden_size, self.dtype.itemsize
        widths = [getattr(config, name, None) for name in ("intermediate_size", "intermediate_size_mlp", "n_inner")]
        mlp = max((width for width in widths if isinstance(width, int)), default=4 * hidden)
        experts = getattr(config, "num_experts_per_tok", None) or 0
        mlp += experts * ((getattr(config, "moe_intermediate_size", None) or mlp) + hidden)
        heads = (spec.num_heads + 2 * spec.num_kv_heads) * (spec.head_dim + spec.value_dim)
        if spec.latent:  # keys and values of all heads
            heads += spec.num_heads * (2 * (spec.head_dim + config.qk_nope_head_dim) + config.v_head_dim)
        encoding = 12 * 4 * spec.kv_width
        return max(size * (3 * mlp + 4 * hidden), size * (2 * heads + 4 * hidden) + encoding, (2 * size + 12) * hidden)


def model_config(name: str, base_config: str | None = None, revision: str | None = None) -> Any:
    """The transformers config of a model: shapes of `kvcli bench` need no file, other models their config.json only.

    Arguments and errors are those of `kvcli.models.load.find_config`.
    """
    builtin = BUILTIN_MODELS.get(name)
    if name in SHAPES and not (builtin and (copy_folder(builtin) / "config.json").is_file()):
        return shape_config(name)
    with naming_shapes(name):
        return find_config(name, base_config=base_config, revision=revision)


def pass_bound(planned: PlannedModel, tokens: int, context: int, batch: int, *, fused: bool) -> int:
    """Upper bound of the bytes that a forward pass allocates beside weights and caches.

    The pass reads `tokens` of each sequence; its cache then has `context`. One layer's `token_bytes`, logits of one
    token, masks of layers with windows, and, after the first chunk, what attention decodes at once: kernels (`fused`)
    attend to codes, the reference keeps scores in float32. Layers of other kinds than attention are not counted.
    """
    spec, size, count = planned.spec, planned.dtype.itemsize, batch * tokens
    total = count * (planned.token_bytes + 8) + 3 * 4 * batch * spec.vocab_size
    if planned.windows:  # transformers makes a mask of all pairs of tokens, and cut windows keep their whole storage
        total += count * context * (2 + size) + count * size * sum(width for _, width in planned.windows)
    if any(name.endswith("sinks") for name, _ in planned.empty.named_parameters()):  # PyTorch keeps scores with these
        total += 4 * size * count * context * spec.num_heads
    if tokens < context:
        earlier = min(context, _BLOCK_TOKENS)
        total += 2 * _DECODED_BYTES if fused else 3 * 4 * batch * earlier * spec.kv_width
        total += 3 * 4 * count * spec.num_heads * (max(spec.head_dim, spec.value_dim) if fused else earlier)
        total += 3 * 4 * batch * context * spec.rope.rotary_dim  # cosines and sines of all codes, while they are made
    return total


def other_bytes_of(loaded: LoadedModel) -> Callable[[int], int] | None:
    """Bytes that layers of other kinds keep of so many tokens, in 16 bits; None: there are none, or it is not known."""
    planned = PlannedModel(loaded.name, loaded.model.config, torch.float16, torch.device("cpu"))
    return planned.other_bytes if loaded.spec.other_layers and planned.state_bytes is not None else None


@dataclass(frozen=True)
class MethodPlan:
    """Memory and disk of a method on a model."""

    planned: PlannedModel
    name: str  # the method with its bits
    method: Method
    config: CacheConfig  # its settings, resolved for the model's shapes
    fused: bool = False  # whether kernels attend to codes
    program_bytes: int = 0  # memory of the process before a model is loaded

    @cached_property
    def codecs(self) -> Sequence[LayerCodec]:
        """Codecs that are not fitted, whose bytes are those of fitted ones."""
        codecs = build_codecs(self.method, self.planned.spec, self.config)
        choose_offsets(lambda: probe(self.planned.empty), self.config, codecs)
        return codecs

    @cached_property
    def cache(self) -> CachePlan:
        """Its caches."""
        model, given = self.planned, (self.method, self.config, self.codecs)
        return CachePlan.of_codecs(model.spec, *given, model.dtype, fused=self.fused, other_bytes=model.other_bytes)

    @cached_property
    def artifact_bytes(self) -> int:
        """Bytes of an artifact's file with the fitted state of all layers, its header included; 0 without one."""
        if not self.method.needs_artifact:
            return 0
        header: dict[str, Any] = {}
        total = 0
        for layer_idx, codec in enumerate(build_codecs(self.method, self.planned.spec, self.config)):
            for name, x in codec.state_dict().items():
                record = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [total, total + x.nbytes]}
                header[f"layers.{layer_idx}.{name}"] = record
                total += x.nbytes
        return total + len(json.dumps(header, separators=(",", ":"))) + 8

    def memory(self, prompt_tokens: int, new_tokens: int, batch: int = 1, *, chunk: int | None = None) -> MemoryReport:
        """The cache after generating as `Session.generate` does; the last token is not in it.

        Tokens are per sequence; a forward pass reads `chunk` tokens of each prompt, or all.
        """
        steps = self.planned.device.type != "cpu" and self.fused
        return self.cache.memory(prompt_tokens, max(0, new_tokens - 1), batch, chunk=chunk, steps=steps)

    def peak_bytes(self, prompt_tokens: int, new_tokens: int, batch: int = 1, *, chunk: int | None = None) -> int:
        """Upper bound of the memory while generating: weights, artifact, cache, and what passes allocate.

        The arguments are those of `memory`. On a CPU, the program and files that are mapped to load count too.
        """
        planned, others = self.planned, self.bytes_beside_weights(prompt_tokens, new_tokens, batch, chunk=chunk)
        if planned.device.type != "cpu":
            return planned.weights_bytes + others
        stored = getattr(planned.config, "dtype", None)
        itemsize = stored.itemsize if isinstance(stored, torch.dtype) else 2
        mapped = planned.weights_bytes * itemsize // planned.dtype.itemsize
        return self.program_bytes + planned.weights_bytes + max(others + _LOADING, mapped)

    def bytes_beside_weights(
        self, prompt_tokens: int, new_tokens: int, batch: int = 1, *, chunk: int | None = None
    ) -> int:
        """Upper bound of what generating allocates with a model that is loaded; the arguments are those of `memory`."""
        planned, size = self.planned, min(chunk or prompt_tokens, prompt_tokens)
        memory = self.memory(prompt_tokens, new_tokens, batch, chunk=chunk)
        cache, windows = memory.allocated_bytes + memory.other_bytes, 0
        if planned.device.type == "cpu":
            window = size * batch * planned.spec.kv_width * planned.dtype.itemsize
            windows = window * planned.spec.num_layers * (window < 2 * _HEAP_TENSOR)
        passes = pass_bound(planned, size, prompt_tokens, batch, fused=self.fused)
        passes = max(passes, pass_bound(planned, 1, prompt_tokens + new_tokens, batch, fused=self.fused))
        return max(cache, windows) + memory.artifact_bytes + passes

    def context_bytes(self, tokens: int) -> int:
        """Bytes of a compressed context on disk: what is in use, positions, padding marks and token ids."""
        memory = self.cache.memory(tokens)
        held = memory.code_bytes + memory.window_bytes + memory.state_bytes + memory.other_bytes
        return held + tokens * (4 + 1 + 8)

    def limits(
        self, memory_bytes: int, prompt_tokens: int, new_tokens: int, *, chunk: int | None = None
    ) -> dict[str, int]:
        """The longest prompt of one sequence (`context`), and the largest `batch` of prompts, that surely fit.

        `memory_bytes` is for torch on a GPU, for the process on a CPU; the other arguments are those of `memory`.
        """

        def fits(tokens: int, batch: int) -> bool:
            return self.peak_bytes(tokens, new_tokens, batch, chunk=chunk) <= memory_bytes

        search: dict[str, Any] = {"most": _LONGEST, "resolution": 1 / 256}
        return {
            "context": largest(lambda tokens: fits(tokens, 1), start=max(1, prompt_tokens), **search),
            "batch": largest(lambda batch: fits(prompt_tokens, batch), start=1, **search),
        }

    def break_even(self, other: Self, tokens: int) -> dict[str, Any]:
        """From which number on this method, artifact included, takes less memory than another; None: never.

        `context` counts tokens of a single sequence, `contexts` sequences of `tokens`.
        """

        def pays(context: int, contexts: int = 1) -> bool:
            ours, theirs = (plan.cache.memory(context) for plan in (self, other))
            return ours.artifact_bytes - theirs.artifact_bytes < contexts * (theirs.cache_bytes - ours.cache_bytes)

        def first(holds: Callable[[int], bool]) -> int | None:
            number = largest(lambda count: not holds(count), start=1, most=_LONGEST) + 1
            return None if number > _LONGEST else number

        return {"against": other.name, "context": first(pays), "contexts": first(lambda count: pays(tokens, count))}


def calibration(planned: PlannedModel, config: CollectConfig, program_bytes: int = 0) -> dict[str, int]:
    """Tokens and exact bytes on disk of a recording, and an upper bound of the memory while it is made.

    `program_bytes` is the memory of the process before a model is loaded.
    """
    spec, sequences = planned.spec, config.sequences(None)
    fisher = any(row in sequences for row in config.fisher_rows)
    widths = (spec.value_dim if field.name.startswith("value") else spec.head_dim for field in fields(LayerFisher))
    matrices = spec.num_layers * spec.num_kv_heads * sum(width**2 for width in widths)
    count, (start, stop) = config.batch_size * config.seq_len, config.windows(spec)[0]
    recorded = 3 * 2 * (stop - start) * count * (spec.kv_width + spec.num_heads * spec.head_dim)
    peak = pass_bound(planned, config.seq_len, config.seq_len, config.batch_size, fused=False) + recorded
    if fisher:
        length = min(config.seq_len, FISHER_SEQ_LEN)
        layers = spec.num_layers + spec.other_layers
        scores = 4 * 4 * spec.num_heads * length**2
        saved = 5 * layers * length * planned.token_bytes // 4
        saved += 2 * len(planned.windows) * spec.num_heads * length**2 * planned.dtype.itemsize
        logits = 4 * 4 * max(spec.vocab_size, min(LOGITS, spec.vocab_size * min(length, LOGIT_TOKENS)))
        peak = max(peak, saved + scores + logits + 2 * 8 * matrices + 8 * length * spec.kv_width * layers)
    on_gpu = planned.device.type != "cpu"
    return {
        "tokens": len(sequences) * config.seq_len,
        "disk_bytes": config.disk_bytes(spec, None) + fisher * 4 * matrices,
        "peak_bytes": planned.weights_bytes + peak + (0 if on_gpu else program_bytes + _LOADING),
    }
