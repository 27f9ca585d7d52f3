"""Kernels against the reference on a layer of the measured shape, before anything is timed.

Attention is compared on the same codes. Encoding kernels may break ties differently from the reference, so encoding
errors are compared instead of codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcli.attention.backend import choose_backend
from kvcli.attention.reference import attend_codes as reference_attend
from kvcli.bench.layer import EncodedLayer, MethodCase, encoded_layer
from kvcli.methods.layer_codec import AttendCodes, LayerCodec
from kvcli.methods.method import Method
from kvcli.seam.probe import probe

TOLERANCE = {torch.float32: 1e-4}
"""Largest allowed `out_error` by dtype of the query."""
TOLERANCE_16 = 5e-3
"""Largest allowed `out_error` of 16-bit queries."""
LSE_TOLERANCE = 1e-2
ENCODING_TOLERANCE = 1e-2
_ENCODED_TOKENS = 256


@dataclass(frozen=True)
class Agreement:
    """How kernels compare with the reference.

    Attributes:
        out_error: |out - reference| / |reference| of attention over the same codes.
        lse_error: largest absolute difference of a log-sum-exp.
        tolerance: largest allowed `out_error`.
        encoding_gap: relative difference of the encoding errors of kernels and reference; None if no kernels encode.
    """

    out_error: float
    lse_error: float
    tolerance: float
    encoding_gap: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the kernels agree with the reference; NaN does not."""
        encodes = self.encoding_gap is None or self.encoding_gap <= ENCODING_TOLERANCE
        return self.out_error <= self.tolerance and self.lse_error <= LSE_TOLERANCE and encodes

    def describe(self) -> str:
        """The mismatch in words."""
        encoding = "" if self.encoding_gap is None else f", encoding error by a relative {self.encoding_gap:.1e}"
        return (
            f"differs from the reference: output by {self.out_error:.1e} (allowed {self.tolerance:.0e}), "
            f"log-sum-exp by {self.lse_error:.1e} (allowed {LSE_TOLERANCE:.0e}){encoding}"
        )


def choose_attend(
    method: Method, codecs: Sequence[LayerCodec], impl: str, device: torch.device
) -> tuple[str, AttendCodes]:
    """Attention over codes as a session would choose it.

    Args:
        method: whose codes.
        codecs: of the layers that it is for; none to check `impl` alone.
        impl: as in `kvcli.attach`.
        device: where it runs.

    Returns:
        `reference` or `fused`, and the function.

    Raises:
        UsageError: no such implementation, or kernels that cannot run on the device.
    """
    backend = choose_backend(method, codecs, impl, device)
    return backend.impl, backend.attend_codes


def compare(layer: EncodedLayer, attend_codes: AttendCodes) -> Agreement:
    """Compares attention over the codes of a layer with the reference."""
    expected, expected_lse = layer.attend(reference_attend, layer.encoded_tokens())
    out, lse = layer.attend(attend_codes, layer.encoded_tokens())
    error = float((out.float() - expected).norm() / expected.norm())
    lse_error = float((lse.float() - expected_lse).abs().max())
    return Agreement(error, lse_error, TOLERANCE.get(layer.query.dtype, TOLERANCE_16))


def encoding_gap(layer: EncodedLayer, seed: int = 0) -> float:
    """|error of the kernels - error of the reference| / error of the reference, the larger of keys and values."""
    generator = torch.Generator(layer.query.device).manual_seed(seed)
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

    Args:
        model: a causal language model, detached; only the shapes, the position encoding, dtype and device matter.
        cases: the methods.
        impl: attention over codes, as in `kvcli.attach`.
        seed: of codes and queries.

    Raises:
        UsageError: no such implementation.
    """

    def __init__(self, model: Any, cases: Sequence[MethodCase], impl: str, seed: int) -> None:
        attention = probe(model)
        self.spec, self.rope, self.seed = attention.spec, attention.rope, seed
        self.device, self.dtype = model.device, model.dtype
        self.attends: dict[str, tuple[str, AttendCodes]] = {
            case.name: ("sdpa", reference_attend)
            if case.is_baseline
            else choose_attend(case.method, [case.build(self.spec, self.spec.num_layers - 1)], impl, self.device)
            for case in cases
        }
        self._agreements: dict[tuple[str, int, int], Agreement | None] = {}

    def agreement(self, case: MethodCase, context: int, batch: int) -> Agreement | None:
        """How a method's kernels compare with the reference; every shape is checked once.

        Returns:
            None where no kernel runs.
        """
        key = case.name, context, batch
        if key not in self._agreements:
            self._agreements[key] = self._compare(case, context, batch)
        return self._agreements[key]

    def _compare(self, case: MethodCase, context: int, batch: int) -> Agreement | None:
        impl, attend_codes = self.attends[case.name]
        if attend_codes is reference_attend:
            return None
        layer = encoded_layer(
            case,
            self.spec,
            self.rope,
            layer_idx=self.spec.num_layers - 1,
            context=context,
            batch=batch,
            device=self.device,
            dtype=self.dtype,
            seed=self.seed,
        )
        with torch.inference_mode():
            agreement = compare(layer, attend_codes)
            return replace(agreement, encoding_gap=encoding_gap(layer)) if impl == "fused" else agreement
