"""Memory that passes of a model take while they run: the model's own code on tensors without numbers.

Nothing here is a formula of activations: transformers' layers, the cache and the codecs run as they do later, on the
`meta` device, where only shapes are computed. Attention of PyTorch keeps no scores. Triton's kernels need no more than
the reference, which is traced for both; where they need less, a layer's MLP needs most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.attention.backend import REFERENCE
from kvcli.attention.layer import attend_layer
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.memory import own_tensors
from kvcli.calibrate.config import FISHER_SEQ_LEN, CollectConfig
from kvcli.calibrate.fisher import backward
from kvcli.methods.base import Codec
from kvcli.methods.config import CacheConfig
from kvcli.methods.method import Method
from kvcli.plan.live_bytes import META, Peak
from kvcli.plan.model import PlannedModel
from kvcli.registry import BASELINE, get_method
from kvcli.seam.decoder import backbone
from kvcli.seam.layer import AttentionCall
from kvcli.seam.patch import Seam

_TRACED_TOKENS = 512
"""Longer prompts than twice that are not traced: memory grows by as much per token."""

_TRACED_PAIRS = 1024
"""The same where memory grows with pairs of tokens, for prompts that are longer than a window."""

_ROUNDED_TOKENS = 256
"""Lengths of prompts that are traced are multiples of this."""

_DECODED_BYTES = 2**27
"""Keys, and values, that the kernels decode at once for chunks of prompts."""

_EARLIER_TOKENS = 4608
"""Most tokens before a chunk that is traced: more than the reference attends to at once."""

_TRACED_LAYERS = 2
"""Layers of the model whose gradients are traced; with each one more, as much is kept again."""


class PromptBytes:
    """Bytes beside weights and caches that a forward pass over prompts takes, one layer's window included.

    The model is traced with the baseline's codecs, which take as much while they encode as the method's do: those are
    traced alone, with one kv head, because their memory grows by as much with each.

    Args:
        planned: the model.
        method: attached to it.
        config: its settings; what follows from the model's shapes may be open.
        window: most tokens that a layer's sliding window holds; for longer prompts, transformers makes a mask of all
            pairs of tokens. None: there is no such layer.
    """

    def __init__(
        self, planned: PlannedModel, method: Method, config: CacheConfig, *, window: int | None = None
    ) -> None:
        self.planned, self.method, self.config, self.window = planned, method, config, window
        self._traced: dict[int, int] = {}

    def of(self, tokens: int, batch: int = 1) -> int:
        """Bytes for so many tokens of each sequence."""
        if self.window is not None:
            start = (2 + self.window // _TRACED_PAIRS) * _TRACED_PAIRS
            return batch * _extrapolated_twice(self._trace, max(1, tokens), start, _TRACED_PAIRS)
        return _extrapolated(self._trace, max(1, batch * tokens), _TRACED_TOKENS)

    def _trace(self, tokens: int) -> int:
        """`of`, rounded up to the next of few numbers of tokens, of a model with one layer."""
        tokens = -(-tokens // _ROUNDED_TOKENS) * _ROUNDED_TOKENS
        if tokens not in self._traced:
            planned, baseline = self.planned, get_method(BASELINE)
            config = baseline.config_cls()
            model: Any = planned.empty(1)
            codec = baseline.build(planned.spec, config, 0)
            one_head = replace(planned.spec, num_heads=planned.spec.num_kv_groups, num_kv_heads=1)
            real = self.method.build(one_head, self.config.resolve(one_head), planned.spec.num_layers - 1).to(META)
            codec.key.space = real.key.space
            for coder, theirs in ((codec.key, real.key), (codec.value, real.value)):
                _take_as_much(coder, self._encoding(theirs, tokens) * planned.spec.num_kv_heads)
            ids = torch.zeros(1, tokens, dtype=torch.int64, device=META)
            with torch.no_grad(), Seam(model, _attend) as seam:
                cache = CompressedCache(seam.attention.spec, baseline, config, [codec], seam)
                run = partial(model, input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                self._traced[tokens] = planned.peak_bytes(run).total - _held(cache)
        return self._traced[tokens]

    def _encoding(self, codec: Codec[Any], tokens: int) -> int:
        """Bytes that encoding so many tokens of one head takes."""
        dtype = torch.float32 if getattr(codec, "space", "") == "pre_rope" else self.planned.dtype
        x = torch.zeros(1, 1, tokens // codec.tokens_per_group * codec.tokens_per_group, codec.spec.head_dim)
        with torch.no_grad():
            return self.planned.peak_bytes(partial(codec.encode, x.to(META, dtype), codec.new_state(1, META))).total


def _take_as_much(codec: Codec[Any], count: int) -> None:
    """Lets a codec allocate so many bytes while it encodes."""
    encode = codec.encode

    def wrapped(x: Tensor, state: Any = None) -> Any:
        torch.empty(count, dtype=torch.uint8, device=x.device)
        return encode(x, state)

    codec.encode = wrapped  # type: ignore[method-assign]


def _attend(call: AttentionCall) -> Tensor:
    return attend_layer(call, REFERENCE)


def _extrapolated(trace: Callable[[int], int], count: int, unit: int) -> int:
    """What a trace finds, beyond two units by the growth of the second one."""
    if count <= 2 * unit:
        return trace(count)
    short, longer = trace(unit), trace(2 * unit)
    return longer + (longer - short) * (count - 2 * unit) // unit


def _extrapolated_twice(trace: Callable[[int], int], count: int, start: int, unit: int) -> int:
    """What a trace finds, beyond `start` and two units by the growth of the second one and by how this grows."""
    beyond = count - start - 2 * unit
    if beyond <= 0:
        return trace(count)
    first, second, third = (trace(start + times * unit) for times in range(3))
    growth, change = third - second, third - 2 * second + first
    return third + growth * beyond // unit + change * beyond * (beyond + unit) // (2 * unit**2)


def earlier_tokens(tokens: int) -> int:
    """Tokens before a chunk for which to trace it: one of few numbers, at least as many as there are, or enough."""
    return min(_EARLIER_TOKENS, -(-tokens // _TRACED_TOKENS) * _TRACED_TOKENS)


def chunk_bytes(prompt: PromptBytes, tokens: int, earlier: int, batch: int, *, fused: bool) -> int:
    """Bytes beside weights and caches of a pass over later chunks of prompts, which attends to codes.

    Args:
        prompt: of the model and the method.
        tokens: of a chunk of one sequence.
        earlier: tokens before it; see `earlier_tokens`.
        batch: sequences.
        fused: whether kernels attend to codes: they keep no scores.
    """
    planned = prompt.planned
    if fused:
        query = batch * tokens * planned.spec.num_heads * planned.spec.head_dim
        return prompt.of(tokens, batch) + 2 * _DECODED_BYTES + 3 * 4 * query
    method = get_method(BASELINE)
    config = method.config_cls()
    model: Any = planned.empty(1)
    ids = [torch.zeros(batch, count, dtype=torch.int64, device=META) for count in (earlier, tokens)]
    with torch.no_grad(), Seam(model, _attend) as seam:
        codec = method.build(planned.spec, config, 0)
        cache = CompressedCache(seam.attention.spec, method, config, [codec], seam)
        run = partial(model, past_key_values=cache, use_cache=True, logits_to_keep=1)
        planned.peak_bytes(partial(run, input_ids=ids[0]))
        held = _held(cache)
        peak = planned.peak_bytes(partial(run, input_ids=ids[1]))
        return max(0, peak.total - (_held(cache) - held))


def _held(cache: CompressedCache) -> int:
    """Bytes of a cache, with all that the windows of transformers' own layers were cut from."""
    others = sum(x.untyped_storage().nbytes() for x in own_tensors(cache.other_layers))
    return cache.memory().allocated_bytes + others


def recording_bytes(planned: PlannedModel, config: CollectConfig) -> Peak:
    """Bytes beside weights that recording keys, values and queries of a window of layers takes.

    Args:
        planned: the model.
        config: what is recorded.
    """
    start, stop = config.windows(planned.spec)[0]
    model: Any = planned.empty(stop - start)
    dtype = torch.bfloat16 if planned.dtype == torch.bfloat16 else torch.float16
    kept: list[Tensor] = []

    def record(call: AttentionCall) -> Tensor:
        kept.extend(x.transpose(0, 1).flatten(1, 2).to("cpu", dtype) for x in (call.key, call.value, call.query))
        return call.exact()

    batch = min(config.batch_size, config.num_sequences)
    ids = torch.zeros(batch, config.seq_len, dtype=torch.int64, device=META)
    with torch.no_grad(), Seam(model, record):
        return planned.peak_bytes(lambda: backbone(model)(input_ids=ids, use_cache=False))


def gradient_bytes(planned: PlannedModel, seq_len: int) -> int:
    """Bytes beside weights that gradients of one sequence take, those of keys and values of all layers included.

    Args:
        planned: the model.
        seq_len: tokens of the recording's sequences.
    """
    ids = torch.zeros(min(seq_len, FISHER_SEQ_LEN), dtype=torch.int64, device=META)

    def trace(num_layers: int) -> int:
        model: nn.Module = planned.empty(num_layers).requires_grad_(False)
        return planned.peak_bytes(lambda: backward(model, ids, torch.Generator())).total

    return _extrapolated(trace, planned.spec.num_layers, _TRACED_LAYERS // 2)
