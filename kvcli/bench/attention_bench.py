"""Attention of one query token over the codes of one layer, compared with fp16 SDPA and a device copy in the same run.

Kernels that differ from the reference on the same codes are not timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.attention.reference import attend_codes as reference_attend
from kvcli.bench.check import choose_attend, compare
from kvcli.bench.layer import MethodCase, encoded_layer
from kvcli.bench.rows import Row, run_row
from kvcli.bench.shapes import shape_rope, shape_spec
from kvcli.bench.timing import Timing, copy_bandwidth, time_call
from kvcli.errors import UsageError
from kvcli.registry import BASELINE


@dataclass(frozen=True)
class AttentionRow(Row):
    """A row of `Row`'s fields and these; `fp16` is SDPA over uncompressed keys and values.

    Attributes:
        lse_error: largest absolute difference of a log-sum-exp.
        timing: times of the call.
        encoded: tokens per sequence that are codes, whole groups; all for `fp16`.
        sdpa_us: median of SDPA on the same shape.
        speedup: SDPA's median over this one's.
        stored_bytes: keys and values of this layer, as stored.
        true_bits: stored bits per value.
        stored_gb_s: stored bytes over the median.
        copy_gb_s: a device copy, bytes read plus bytes written.
    """

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
        """All figures as plain JSON values, those of the timing included."""
        values = super().to_dict()
        timing = values.pop("timing") or dict.fromkeys(Timing.__dataclass_fields__)
        note = "; ".join(text for text in (values["note"], timing.pop("note")) if text) or None
        return {**values, **timing, "note": note}


class AttentionBench:
    """Measures methods on one layer of a shape.

    Args:
        shape: one of `kvcli.bench.shapes.SHAPES`.
        cases: the methods.
        impl: attention over codes, as in `kvcli.attach`.
        repeats: calls timed at most.
        device: where.
        dtype: of the query, and of the keys and values of SDPA.
        seed: of codes and queries.
        layer_idx: the layer, for methods that treat layers differently; None: the last.

    Raises:
        UsageError: no such shape, layer or implementation.
    """

    def __init__(
        self,
        shape: str,
        cases: list[MethodCase],
        *,
        impl: str,
        repeats: int,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        layer_idx: int | None = None,
    ) -> None:
        self.spec = shape_spec(shape)
        self.layer_idx = self.spec.num_layers - 1 if layer_idx is None else layer_idx
        if not 0 <= self.layer_idx < self.spec.num_layers:
            raise UsageError(f"shape {shape} has layers 0 to {self.spec.num_layers - 1}, not {layer_idx}")
        self.cases, self.impl, self.repeats, self.seed = cases, impl, repeats, seed
        self.device, self.dtype = device, dtype
        self.impls = {case.name: choose_attend(case.method, [], impl, device)[0] for case in cases}
        self.rope = shape_rope(shape, device)

    def rows(self, contexts: list[int], batches: list[int]) -> Iterator[AttentionRow]:
        """Measures every method at every batch and context, SDPA first."""
        copy_gb_s = copy_bandwidth(self.device, min(self.repeats, 10))
        for batch in batches:
            for context in contexts:
                empty = AttentionRow(BASELINE, context, batch, "sdpa", copy_gb_s=copy_gb_s)
                baseline = run_row(partial(self._sdpa_row, empty), empty)
                yield baseline
                for case in self.cases:
                    empty = AttentionRow(
                        case.name, context, batch, self.impls[case.name], sdpa_us=baseline.sdpa_us, copy_gb_s=copy_gb_s
                    )
                    yield run_row(partial(self._method_row, case, empty), empty)

    def _sdpa_row(self, row: AttentionRow) -> AttentionRow:
        """fp16 SDPA, with which the methods are compared at this shape."""
        generator = torch.Generator(self.device).manual_seed(self.seed)

        def normal(heads: int, tokens: int) -> Tensor:
            shape = (row.batch, heads, tokens, self.spec.head_dim)
            return torch.randn(shape, device=self.device, dtype=self.dtype, generator=generator)

        query = normal(self.spec.num_heads, 1)
        key, value = (normal(self.spec.num_kv_heads, row.context) for _ in range(2))
        grouped = self.spec.num_kv_groups > 1
        timing = time_call(
            lambda: functional.scaled_dot_product_attention(query, key, value, enable_gqa=grouped),
            self.device,
            self.repeats,
        )
        return self._timed(replace(row, sdpa_us=timing.p50_us), timing, key.nbytes + value.nbytes, row.context)

    def _method_row(self, case: MethodCase, row: AttentionRow) -> AttentionRow:
        """Checks a method's kernels, and times them if they are right."""
        layer = encoded_layer(
            case,
            self.spec,
            self.rope,
            layer_idx=self.layer_idx,
            context=row.context,
            batch=row.batch,
            device=self.device,
            dtype=self.dtype,
            seed=self.seed,
        )
        impl, attend_codes = choose_attend(case.method, [layer.codec], self.impl, self.device)
        layer.codec.use_kernels(impl == "fused")
        row = replace(row, impl=impl)
        is_reference = attend_codes is reference_attend
        with torch.inference_mode():
            if not is_reference:
                row = row.checked(compare(layer, attend_codes))
                if row.status != "ok":
                    return row
            encoded = layer.encoded_tokens()
            timing = time_call(
                lambda: layer.attend(attend_codes, encoded), self.device, self.repeats, graph=not is_reference
            )
        return self._timed(row, timing, layer.stored_bytes, layer.num_tokens)

    def _timed(self, row: AttentionRow, timing: Timing, stored_bytes: int, tokens: int) -> AttentionRow:
        """A row with its times and the figures that follow from them."""
        return replace(
            row,
            encoded=tokens,
            timing=timing,
            speedup=None if row.sdpa_us is None else row.sdpa_us / timing.p50_us,
            stored_bytes=stored_bytes,
            true_bits=8 * stored_bytes / (row.batch * tokens * 2 * self.spec.kv_dim),
            stored_gb_s=stored_bytes / timing.p50_us / 1e3,
        )
