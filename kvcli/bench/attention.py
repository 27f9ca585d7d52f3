"""Attention of one query token over the codes of one layer, against fp16 SDPA and a device copy in the same run.

No time is taken of a form that does not give what the reference gives on the same codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.attention.reference import reference_attend
from kvcli.bench.check import choose_form, compare
from kvcli.bench.layer import Subject, encoded_layer
from kvcli.bench.rows import Status, guarded
from kvcli.bench.shapes import shape_rope, shape_spec
from kvcli.bench.timing import Timing, copy_bandwidth, time_call
from kvcli.errors import UsageError
from kvcli.methods.encoded import AttendCodes
from kvcli.rope import Rope
from kvcli.spec import ModelSpec


@dataclass(frozen=True)
class AttentionConfig:
    """What is benched.

    Attributes:
        shape: one of `kvcli.bench.shapes.SHAPES`.
        subjects: the methods.
        contexts: encoded tokens of a sequence.
        batches: sequences.
        impl: form of attention, as in `kvcli.attach`.
        repeats: calls timed at most.
        device: where.
        dtype: of the query, and of the keys and values of SDPA.
        seed: of codes and queries.
        layer_idx: the layer that is benched, for methods that treat layers differently.
    """

    shape: str
    subjects: list[Subject]
    contexts: list[int]
    batches: list[int]
    impl: str
    repeats: int
    device: torch.device
    dtype: torch.dtype
    seed: int
    layer_idx: int


@dataclass(frozen=True)
class AttentionRow:
    """One line of the table; times are None where there is no honest one.

    Attributes:
        method: its name; `fp16` is SDPA over uncompressed keys and values.
        context: tokens of each sequence.
        encoded: those that are codes: whole groups; all for `fp16`.
        batch: sequences.
        impl: the form that ran.
        status: whether it agreed with the reference, and ran at all.
        note: what went wrong, or what the figures are of.
        out_error: |out - reference| / |reference|; None where the reference itself ran.
        lse_error: largest difference of a log-sum-exp.
        timing: times of the call.
        sdpa_us: median of SDPA on the same shape.
        speedup: SDPA's median over this one's.
        stored_bytes: keys and values as stored, of this layer.
        true_bits: stored bits a value.
        stored_gb_s: stored bytes over the median.
        copy_gb_s: a device copy, bytes read and written.
    """

    method: str
    context: int
    batch: int
    impl: str
    status: Status = "ok"
    note: str | None = None
    out_error: float | None = None
    lse_error: float | None = None
    timing: Timing | None = None
    encoded: int | None = None
    sdpa_us: float | None = None
    speedup: float | None = None
    stored_bytes: int | None = None
    true_bits: float | None = None
    stored_gb_s: float | None = None
    copy_gb_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values, the times beside the others."""
        values = asdict(self)
        timing = values.pop("timing") or dict.fromkeys(Timing.__dataclass_fields__)
        note = "; ".join(text for text in (values["note"], timing.pop("note")) if text) or None
        return {**values, **timing, "note": note}


def bench_attention(config: AttentionConfig) -> Iterator[AttentionRow]:
    """Benches every method at every batch and context, SDPA first.

    Raises:
        UsageError: no such shape, layer or form of attention.
    """
    spec = shape_spec(config.shape)
    if not 0 <= config.layer_idx < spec.num_layers:
        raise UsageError(f"shape {config.shape} has layers 0 to {spec.num_layers - 1}, not {config.layer_idx}")
    forms = [choose_form(subject.method, config.impl, config.device) for subject in config.subjects]
    rope = shape_rope(config.shape, config.device)
    copy_gb_s = copy_bandwidth(config.device, min(config.repeats, 10))
    for batch in config.batches:
        for context in config.contexts:
            baseline = _sdpa_row(config, spec, context, batch, copy_gb_s)
            yield baseline
            sdpa_us = None if baseline.timing is None else baseline.timing.p50_us
            for subject, (impl, form) in zip(config.subjects, forms, strict=True):
                empty = AttentionRow(subject.name, context, batch, impl, sdpa_us=sdpa_us, copy_gb_s=copy_gb_s)
                yield guarded(partial(_method_row, config, spec, rope, subject, form, empty), empty)


def _sdpa_row(config: AttentionConfig, spec: ModelSpec, context: int, batch: int, copy_gb_s: float) -> AttentionRow:
    """fp16 SDPA, the baseline of all methods at this shape."""
    empty = AttentionRow("fp16", context, batch, "sdpa", copy_gb_s=copy_gb_s)

    def measure() -> AttentionRow:
        generator = torch.Generator(config.device).manual_seed(config.seed)

        def normal(heads: int, tokens: int) -> Tensor:
            shape = (batch, heads, tokens, spec.head_dim)
            return torch.randn(shape, device=config.device, dtype=config.dtype, generator=generator)

        query = normal(spec.num_heads, 1)
        key, value = (normal(spec.num_kv_heads, context) for _ in range(2))
        grouped = spec.num_kv_groups > 1
        timing = time_call(
            lambda: functional.scaled_dot_product_attention(query, key, value, enable_gqa=grouped),
            config.device,
            config.repeats,
        )
        return _timed(empty, timing, key.nbytes + value.nbytes, spec, context, timing.p50_us)

    return guarded(measure, empty)


def _method_row(
    config: AttentionConfig, spec: ModelSpec, rope: Rope, subject: Subject, form: AttendCodes, empty: AttentionRow
) -> AttentionRow:
    """Checks a method's form, and times it if it is right."""
    layer = encoded_layer(
        subject,
        spec,
        rope,
        layer_idx=config.layer_idx,
        context=empty.context,
        batch=empty.batch,
        device=config.device,
        dtype=config.dtype,
        seed=config.seed,
    )
    with torch.inference_mode():
        if form is not reference_attend:
            agreement = compare(layer, form)
            empty = replace(empty, out_error=agreement.out_error, lse_error=agreement.lse_error)
            if not agreement.holds:
                return replace(empty, status="mismatch", note=agreement.describe())
        part = layer.part()
        timing = time_call(
            lambda: layer.attend(form, part), config.device, config.repeats, graph=form is not reference_attend
        )
    return _timed(empty, timing, layer.stored_bytes, spec, layer.num_tokens, empty.sdpa_us)


def _timed(
    empty: AttentionRow, timing: Timing, stored: int, spec: ModelSpec, tokens: int, sdpa_us: float | None
) -> AttentionRow:
    """A row with its times and what follows from them."""
    return replace(
        empty,
        encoded=tokens,
        timing=timing,
        sdpa_us=sdpa_us,
        speedup=None if sdpa_us is None else sdpa_us / timing.p50_us,
        stored_bytes=stored,
        true_bits=8 * stored / (empty.batch * tokens * 2 * spec.kv_dim),
        stored_gb_s=stored / timing.p50_us / 1e3,
    )
