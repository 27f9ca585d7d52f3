"""One run of a whole model with a method's cache: prompt in chunks, greedy decoding, times and memory.

The fp16 baseline is the model as transformers runs it: SDPA and `DynamicCache`, nothing attached;
`kvcli.bench.fixed_length` has a faster way of decoding with it. Methods are timed in `Session.generate`.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from kvcli.artifact.choice import MethodChoice
from kvcli.attention.generation import Mode, SamplingConfig
from kvcli.attention.layer import attend_layer
from kvcli.attention.session import Session
from kvcli.bench.layer import randomize_, unfitted_codec
from kvcli.bench.timing import synchronized_time
from kvcli.cache.compressed import CompressedCache, own_bytes
from kvcli.cache.layer import NewTokens
from kvcli.errors import UnsupportedModelError
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, PartialAttention
from kvcli.models.shapes import shape_config
from kvcli.models.weights import plain_tensors
from kvcli.seam.layer import AttentionCall, RotaryOutput
from kvcli.seam.probe import probe
from kvcli.seam.versions import with_cache

_SHORTEST_CHUNK = 16
_WARM_ROUNDS = 2
"""Rounds of encoding after which every graph was captured: each occurs in the first one."""

Mark = tuple[int, float]
"""Number of tokens generated, and the time at which they were known."""


@dataclass(frozen=True)
class ModelRun:
    """One run of a model; peaks are None on a CPU."""

    prefill_s: float  # of the prompt, encoding included
    ttft_s: float  # until the first token was chosen
    decode_s: float  # of all tokens after the first, capturing CUDA graphs included
    cache_bytes: int  # allocated by the cache at the end
    peak_bytes: int | None  # of what torch allocated, weights included
    reserved_bytes: int | None  # peak of what torch reserved, which is what a limit counts
    # of the keys and values at the end, which a step reads: no headroom, nor positions, which all layers share
    used_bytes: int = 0
    other_bytes: int = 0  # of them in layers that do not attend to the whole context, which no method compresses
    how: str = "eager"  # how the tokens after the first were generated
    steady: tuple[int, float] | None = None  # number and seconds of steady steps; None: the rate is that of `decode_s`
    note: str | None = None  # why the tokens were not generated faster


def random_model(shape: str, num_layers: int | None, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """A transformers causal language model of a shape with random weights; UsageError if there is no such shape."""
    config = shape_config(shape, num_layers)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    # the rotary buffers were created on the meta device, without values
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 0.02, generator=generator)
    return model.eval()


def attached(model: Any, case: MethodChoice, impl: str, seed: int) -> AbstractContextManager[Session | None]:
    """`open_session`, inside a block; the baseline leaves the model as it is, without a session."""
    return nullcontext() if case.is_baseline else open_session(model, case, impl, seed)


def open_session(model: Any, case: MethodChoice, impl: str, seed: int) -> Session:
    """Attaches a method with random codebooks to a model, the baseline too; see `kvcli.attach`.

    UsageError: an implementation that cannot run; ConfigError: settings that do not fit the model.
    """
    spec = probe(model).spec
    generator = torch.Generator(model.device).manual_seed(seed)
    codecs = [unfitted_codec(case, spec, layer_idx).to(model.device) for layer_idx in range(spec.num_layers)]
    for codec in codecs:
        randomize_(codec, generator)
    return Session(model, spec, case.record, case.config, codecs, impl)


@torch.inference_mode()
def run_model(
    model: Any,
    session: Session | None,
    ids: Tensor,
    new_tokens: int,
    chunk: int | None,
    *,
    fill_middle: bool = False,
    mode: Mode | None = None,
) -> ModelRun:
    """Reads a prompt and continues it greedily: `Session.generate`, or transformers' own passes.

    Args:
        session: of the method that is attached to the model; None: the model with `DynamicCache`.
        ids: prompt, int64 [batch, time].
        new_tokens: 0 reads the prompt only.
        chunk: tokens of the whole batch per forward pass of the prompt; None: all.
        fill_middle: whether the model computes only the first and the last chunk of the prompt, where the peak is, and
            the cache is filled with random keys and values between them; the times of the prompt and of the first
            token then mean nothing.
        mode: of `Session.generate`, with a compressed cache.
    """
    device = ids.device
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    total = ids.shape[1] + new_tokens
    cache = DynamicCache(config=model.config) if session is None else session.new_cache(total)
    started = synchronized_time(device)
    length = chunk_length(chunk, *ids.shape)
    middle = max(0, ids.shape[1] - 2 * length) if fill_middle else 0
    if middle:
        prefill_logits(model, cache, ids[:, :length], chunk)
        fill(model, cache, session, ids.shape[0], middle, chunk)
    how = "eager"
    steady: tuple[int, float] | None = None
    note: str | None = None
    if session is None or not new_tokens:
        logits = prefill_logits(model, cache, ids[:, cache.get_seq_length() :], chunk)
        prefilled = synchronized_time(device)
        token = logits.argmax(-1)
        first = synchronized_time(device)
        for _ in range(new_tokens - 1):
            token = prefill_logits(model, cache, token, None).argmax(-1)
        ended = synchronized_time(device)
    else:
        clock, read = StepClock(cache, round_tokens(session)), [0.0]
        generated = session.generate(
            ids,
            sampling=SamplingConfig(new_tokens),
            cache=cache,
            eos_token_id=[],
            prefill_chunk=length,
            on_prefill=lambda count: read.append(synchronized_time(device)),
            on_tokens=clock,
            mode=mode,
        )
        ended, prefilled, first = synchronized_time(device), read[-1], clock.first
        how, note = generated.mode, generated.note
        steady = clock.steady(generated.mode != "passes")
    return ModelRun(
        prefill_s=prefilled - started,
        ttft_s=first - started,
        decode_s=ended - first,
        peak_bytes=torch.cuda.max_memory_allocated(device) if gpu else None,
        reserved_bytes=torch.cuda.max_memory_reserved(device) if gpu else None,
        **cache_sizes(cache),
        how=how,
        steady=steady,
        note=note,
    )


def prefill_logits(model: Any, cache: Any, ids: Tensor, chunk: int | None) -> Tensor:
    """Reads tokens [batch, time] in chunks; returns the logits of the last one, [batch, 1, vocab_size]."""
    for part in ids.split(chunk_length(chunk, *ids.shape), dim=1):
        logits: Tensor = model(input_ids=part, logits_to_keep=1, **with_cache(cache)).logits
    return logits


def chunk_length(chunk: int | None, batch: int, length: int) -> int:
    """Tokens per sequence in a forward pass of the prompt."""
    return length if chunk is None else min(length, max(_SHORTEST_CHUNK, chunk // batch))


def cache_sizes(cache: Any) -> dict[str, int]:
    """`cache_bytes`, `used_bytes` and `other_bytes` of a `ModelRun`."""
    if isinstance(cache, CompressedCache):
        memory = cache.memory()
        used, other = memory.code_bytes + memory.window_bytes + memory.state_bytes, memory.other_bytes
        return {"cache_bytes": memory.allocated_bytes + other, "used_bytes": used + other, "other_bytes": other}
    total = own_bytes(cache.layers)
    other = own_bytes(layer for layer in cache.layers if type(layer) is not DynamicLayer)
    return {"cache_bytes": total, "used_bytes": total, "other_bytes": other}


def step_weights_bytes(model: Any) -> int:
    """Bytes of the weights that a decode step reads: all but the input embedding, unless it is the output layer too."""
    read = sum(map(held_bytes, model.parameters()))
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return read if output is embedding else read - held_bytes(embedding)


def held_bytes(weight: Any) -> int:
    """Bytes that a weight holds; torchao's, which are tensors in one, say that they are of 16 bits."""
    return sum(int(x.nbytes) for x in plain_tensors(weight.data))


def random_prompt(model: Any, batch: int, length: int, seed: int) -> Tensor:
    """Random token ids, int64 [batch, length]."""
    generator, vocab = torch.Generator(model.device).manual_seed(seed), model.get_input_embeddings().num_embeddings
    return torch.randint(3, vocab, (batch, length), device=model.device, generator=generator)


def round_tokens(of: Session | MethodChoice) -> int:
    """Tokens per row between two passes that encode the same: the longer interval of keys and values."""
    method = of.record if isinstance(of, MethodChoice) else of.method
    return max(max(schedule.block, schedule.multiple_of) for schedule in method.schedules(of.config))


class StepClock:
    """Notes when tokens were known, as `on_tokens` of `Session.generate`; `first` is the time of the first one.

    Capturing CUDA graphs takes as long as tens of steps, once in a generation. It is part of the whole time, but not of
    the rate, which is of steady steps: tokens that only replay graphs, over whole rounds of encoding, each of
    `interval` tokens.
    """

    def __init__(self, cache: CompressedCache, interval: int) -> None:
        self._cache, self._interval = cache, interval
        self.first = 0.0
        self._step: Any = None
        self._last: Mark = (0, 0.0)
        self._stretches: list[dict[bool, list[Mark]]] = []

    def __call__(self, tokens: Tensor) -> None:
        """Notes the time of new tokens [batch, count], which are on the host."""
        mark = (self._last[0] + tokens.shape[1], time.perf_counter())
        step = self._cache.passes.step
        if not self._last[0]:
            self.first = mark[1]
            self._stretches.append({True: [], False: []})
        elif step is not self._step:
            # codes had outgrown the graphs, which were captured again after the mark before
            self._stretches.append({True: [self._last], False: [self._last]})
        self._step, self._last = step, mark
        self._stretches[-1][step is not None].append(mark)

    def steady(self, steps: bool) -> tuple[int, float] | None:
        """Number and seconds of the steady steps, or passes, in complete rounds; None if there are none."""
        spans = [steady_span(marks[steps], self._interval) for marks in self._stretches]
        tokens = sum(span[0] for span in spans)
        return (tokens, sum(span[1] for span in spans)) if tokens else None


def steady_span(marks: list[Mark], interval: int) -> Mark:
    """Number and seconds of the tokens in complete rounds after the first two; (0, 0.0): none.

    A round has `interval` tokens; where no mark is at its end, it ends with the next mark.
    """
    after = [mark for mark in marks if mark[0] - marks[0][0] >= _WARM_ROUNDS * interval]
    ends = after[:1]
    for mark in after[1:]:
        if mark[0] - ends[-1][0] >= interval:
            ends.append(mark)
    return (ends[-1][0] - ends[0][0], ends[-1][1] - ends[0][1]) if ends else (0, 0.0)


def fill(model: Any, cache: Any, session: Session | None, batch: int, count: int, chunk: int | None) -> None:
    """Appends `count` random tokens per sequence to a cache, of `session` or of transformers, without its model.

    The cache appends, encodes and allocates as in a prefill by chunks of `chunk` tokens of the whole batch.
    UnsupportedModelError: layers of other kinds, whose own caches cannot be filled.
    """
    spec = probe(model).spec
    if spec.other_layers:
        raise UnsupportedModelError(
            f"{spec.other_layers} of {spec.model_layers} layers keep transformers' own cache, which cannot be "
            "filled with random keys and values; let the prompt be computed"
        )

    def no_codes(codec: LayerCodec, query: Tensor, encoded: EncodedTokens, scaling: float) -> PartialAttention:
        return query, query[..., 0]

    length = chunk_length(chunk, batch, count)
    for start in range(0, count, length):
        new = min(length, count - start)
        key, value = (
            torch.randn(batch, spec.num_kv_heads, new, width, device=model.device, dtype=model.dtype)
            for width in (spec.head_dim, spec.value_dim)
        )
        if session is None:
            for layer_idx in range(spec.num_layers):
                cache.update(key, value, layer_idx)
            continue
        sequences = cache.sequences
        positions = torch.arange(sequences.slots, sequences.slots + new, device=key.device).unsqueeze(0)
        rotary = RotaryOutput(positions, sequences.rope.rotation(positions, key.dtype))
        query = key.new_zeros(batch, spec.num_heads, new, spec.head_dim)
        backend = replace(
            session.backend,
            attend_codes=no_codes,
            attend_dequantized=no_codes,
            attend_window=lambda query, *window: query.transpose(1, 2),
            attend_prefill=None,
        )
        for layer in cache.compressed:
            new_tokens = NewTokens(layer, key, value)
            attend_layer(AttentionCall(layer.attention, query, new_tokens, value, None, 1.0, rotary), backend)
