"""The fastest fp16 decoding to compare with: one step of transformers' model, captured as a CUDA graph at one length.

Eager decoding with `DynamicCache` waits for Python and copies the cache at every step; a `StaticCache` needs a mask,
with which SDPA is slower. Here nothing grows, so SDPA reads exactly the tokens that are there, without a mask: a bound
on what decoding with this model, an uncompressed cache and this SDPA can reach.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvcli.bench.model import ModelRun
from kvcli.bench.timing import percentiles, record_graph, synchronized_time
from kvcli.kernels.launch import has_triton
from kvcli.plan.budget import attempt
from kvcli.seam.versions import with_cache
from kvcli.spec import ModelSpec

FIXED_LENGTH = "graph of one length"
_WITHOUT_MASK = "sdpa_without_mask"


class FixedLengthLayer(DynamicLayer):
    """Keys and values [batch, num_kv_heads, tokens + 1, head_dim] whose last token is overwritten by every new one."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes one token [batch, num_kv_heads, 1, head_dim] to the last place; returns all keys and values."""
        self.keys[:, :, -1:] = key_states
        self.values[:, :, -1:] = value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens before the new one, always."""
        return int(self.keys.shape[2]) - 1


def with_fixed_length(model: Any, runs: list[ModelRun], batch: int, context: int, new_tokens: int) -> list[ModelRun]:
    """The runs of the fp16 baseline, their decoding replaced by replays of a captured step if those are faster.

    The runs are of a detached model with `DynamicCache`, each of `batch` prompts of `context` tokens; where no step can
    be captured, their note says why. The step is tried with the model's modules and with kernels in their place
    (`kvcli.attention.fused_modules`), which methods have, too; the fastest counts.
    """
    steps = new_tokens - 1
    if model.device.type != "cuda" or steps < 1:
        return runs
    for how, modules in ways_of_modules(model):
        replays = attempt(partial(replay_step, model, batch, context, steps, len(runs), modules))
        if replays is None:
            return [replace(run, note="a cache of fixed length does not fit beside the model") for run in runs]
        seconds, cache_bytes, note = replays
        if not seconds or percentiles([run.decode_s for run in runs])[1] <= percentiles(seconds)[1]:
            runs = [replace(run, note=note) for run in runs]
            continue
        runs = [
            replace(run, decode_s=decode_s, how=how, steady=(steps, decode_s), used_bytes=cache_bytes)
            for run, decode_s in zip(runs, seconds, strict=True)
        ]
    return runs


@torch.inference_mode()
def ways_of_modules(model: Any) -> list[tuple[str, Callable[[], AbstractContextManager[None]]]]:
    """How a step of fixed length can run the model's modules, by the name of a run."""
    if not has_triton() or torch.version.hip is not None:
        return [(FIXED_LENGTH, nullcontext)]
    from kvcli.attention.fused_modules import FusedModules

    return [(FIXED_LENGTH, nullcontext), (f"{FIXED_LENGTH}, fused modules", FusedModules(model).active)]


@torch.inference_mode()
def replay_step(
    model: Any,
    batch: int,
    context: int,
    steps: int,
    repeats: int,
    modules: Callable[[], AbstractContextManager[None]] = nullcontext,
    dtype: torch.dtype | None = None,
    plan: Callable[[Tensor, Tensor], Callable[..., Any]] | None = None,
    on_graph: Callable[[Any], object] = lambda graph: None,
) -> tuple[list[float], int, str | None]:
    """Captures a greedy step of a detached model after `context` random tokens; replays series of `steps` steps.

    Keys and values are in the dtype of the model, or another one. The step attends with SDPA, or with the function that
    `plan` makes for a query [batch, num_heads, 1, head_dim] and keys like these. `on_graph` is given the graph.
    Returns seconds of each series of steps, bytes of the cache, and why there are no series.
    """
    spec = ModelSpec.from_config(model.config)
    shape = (batch, spec.num_kv_heads, context + 1, spec.head_dim)
    random = partial(torch.randn, device=model.device, dtype=model.dtype)
    kept = [FixedLengthLayer(*(random(shape).to(dtype) for _ in range(2))) for _ in range(spec.num_layers)]
    cache, forward = Cache(layers=kept), sdpa_attention_forward
    if plan is not None:
        forward = plan(random(batch, spec.num_heads, 1, spec.head_dim), kept[0].keys)
    token = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
    positions = torch.full_like(token, context)
    graph: Any
    with without_mask(model, forward), modules():
        graph, note = record_graph(lambda: fixed_length_step(model, cache, token, positions))
    seconds = []
    if graph is not None:
        on_graph(graph)
    for _ in range(repeats if graph is not None else 0):
        started = synchronized_time(model.device)
        for _ in range(steps):
            graph.replay()
        seconds.append(synchronized_time(model.device) - started)
    return seconds, sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers), note


@contextmanager
def without_mask(model: Any, forward: Any = sdpa_attention_forward) -> Iterator[None]:
    """Lets a model attend with SDPA, or another attention function, and without a mask, inside the block.

    While a CUDA graph is captured, transformers 5.17 makes a mask even where SDPA needs none, and with a mask it
    repeats keys and values for every query head.
    """
    former = model.config._attn_implementation
    AttentionInterface.register(_WITHOUT_MASK, forward)
    AttentionMaskInterface.register(_WITHOUT_MASK, lambda *args, **kwargs: None)  # every token is seen
    model.set_attn_implementation(_WITHOUT_MASK)
    try:
        yield
    finally:
        model.set_attn_implementation(former)


def fixed_length_step(model: Any, cache: Cache, token: Tensor, positions: Tensor) -> None:
    """Overwrites `token` [batch, 1] by the most probable next one; `positions` [batch, 1] stay as they are."""
    output = model(input_ids=token, position_ids=positions, logits_to_keep=1, **with_cache(cache))
    token.copy_(output.logits.argmax(-1))
