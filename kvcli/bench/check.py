"""Kernels against the reference, on a layer of the shape that is benched: nothing is timed before.

Attention is compared on the same codes. Encoding kernels may break a tie between two codes in another way than the
reference, so there it is the errors that are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcli.attention.reference import reference_attend
from kvcli.attention.session import attend_forms, choose_impl
from kvcli.bench.layer import EncodedLayer, Subject, encoded_layer
from kvcli.methods.encoded import AttendCodes
from kvcli.methods.method import Method
from kvcli.seam import find_rope
from kvcli.spec import ModelSpec

TOLERANCE = {torch.float32: 1e-4}
"""Largest `out_error` by dtype of the query."""
TOLERANCE_16 = 5e-3
"""That of 16-bit queries."""
LSE_TOLERANCE = 1e-2
ENCODING_TOLERANCE = 1e-2
_ENCODED_TOKENS = 256


@dataclass(frozen=True)
class Agreement:
    """How kernels compare with the reference.

    Attributes:
        out_error: |out - reference| / |reference| of attention over the same codes.
        lse_error: largest difference of a log-sum-exp.
        tolerance: what `out_error` may be.
        encoding_gap: how far the kernels' encoding error is from the reference's, as a share of it; None if no kernels
            encode.
    """

    out_error: float
    lse_error: float
    tolerance: float
    encoding_gap: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the kernels compute what the reference does; not-a-number is a mismatch."""
        encodes = self.encoding_gap is None or self.encoding_gap <= ENCODING_TOLERANCE
        return self.out_error <= self.tolerance and self.lse_error <= LSE_TOLERANCE and encodes

    def describe(self) -> str:
        """The mismatch in words."""
        encoding = "" if self.encoding_gap is None else f", encoding error by {self.encoding_gap:.1e} of itself"
        return (
            f"differs from the reference: output by {self.out_error:.1e} (allowed {self.tolerance:.0e}), "
            f"log-sum-exp by {self.lse_error:.1e} (allowed {LSE_TOLERANCE:.0e}){encoding}"
        )


def choose_form(method: Method, impl: str, device: torch.device) -> tuple[str, AttendCodes]:
    """The form of attention over codes that a session would use, with its name.

    Raises:
        UsageError: a form that the method does not have, or kernels that cannot run on the device.
    """
    chosen = choose_impl(method, impl, device)
    return chosen, attend_forms(method, chosen).codes


def compare(layer: EncodedLayer, form: AttendCodes) -> Agreement:
    """Runs a form of attention and the reference on a layer."""
    expected, expected_lse = layer.attend(reference_attend, layer.part())
    out, lse = layer.attend(form, layer.part())
    error = float((out.float() - expected).norm() / expected.norm())
    lse_error = float((lse.float() - expected_lse).abs().max())
    return Agreement(error, lse_error, TOLERANCE.get(layer.query.dtype, TOLERANCE_16))


class ModelCheck:
    """Which form of attention each method runs in a model, and whether its kernels are right there.

    Args:
        model: a causal language model, detached.
        subjects: the methods.
        impl: as in `kvcli.attach`.
        seed: of codes and queries.

    Raises:
        UsageError: a form that a method does not have.
    """

    def __init__(self, model: Any, subjects: list[Subject], impl: str, seed: int) -> None:
        self.model, self.seed = model, seed
        self.spec, self.rope = ModelSpec.from_config(model.config), find_rope(model)
        self._forms = {
            subject.name: choose_form(subject.method, impl, model.device)
            for subject in subjects
            if not subject.is_baseline
        }

    def impl(self, subject: Subject) -> str:
        """The form's name."""
        return "sdpa" if subject.is_baseline else self._forms[subject.name][0]

    def agreement(self, subject: Subject, context: int, batch: int) -> Agreement | None:
        """How a method's kernels, those that encode included, compare with the reference on the last layer.

        Returns:
            None where no kernel runs.
        """
        if subject.is_baseline or self._forms[subject.name][1] is reference_attend:
            return None
        impl, form = self._forms[subject.name]
        layer = encoded_layer(
            subject,
            self.spec,
            self.rope,
            layer_idx=self.spec.num_layers - 1,
            context=context,
            batch=batch,
            device=self.model.device,
            dtype=self.model.dtype,
            seed=self.seed,
        )
        with torch.inference_mode():
            found = compare(layer, form)
            return replace(found, encoding_gap=encoding_gap(layer)) if impl == "fused" else found


def encoding_gap(layer: EncodedLayer, seed: int = 0) -> float:
    """The larger gap of keys and values: |error of the kernels - error of the reference| / error of the reference."""
    generator = torch.Generator(layer.query.device).manual_seed(seed)
    state = None if layer.key_state is None else layer.key_state.select([0])
    gaps = []
    for codec, held in ((layer.codec.key, state), (layer.codec.value, None)):
        tokens = -(-_ENCODED_TOKENS // codec.tokens_per_group) * codec.tokens_per_group
        shape = (1, layer.spec.num_kv_heads, tokens, layer.spec.head_dim)
        x = torch.randn(shape, device=layer.query.device, generator=generator).to(layer.query.dtype)
        errors = []
        for fused in (False, True):
            codec.fused = fused
            errors.append((codec.decode(codec.encode(x, held), held) - x.float()).norm())
        codec.fused = False
        gaps.append((errors[1] - errors[0]).abs() / errors[0].clamp_min(1e-30))
    return float(torch.stack(gaps).amax())
