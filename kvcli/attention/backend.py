"""How a session computes: PyTorch in float32, or Triton kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from kvcli.attention import reference
from kvcli.cache.window import WindowTokens
from kvcli.errors import UsageError
from kvcli.kernels.launch import check_device, has_triton
from kvcli.methods.layer_codec import AttendCodes, EncodedTokens, LayerCodec, PartialAttention
from kvcli.methods.method import Method
from kvcli.rope import Rotation, Unrotate, unrotate
from kvcli.spec import ModelSpec


@dataclass(frozen=True)
class AttentionBackend:
    """The functions of one implementation; their arguments are those of `kvcli.attention.reference`.

    Attributes:
        attend_codes: attention over codes, for at most `decode_threshold` queries per row.
        attend_dequantized: the same for more queries: blocks of tokens are decoded once for all of them.
        attend_prefill: `decoded.attend_prefill` of `prefill_threshold` or more new tokens over each other, so that the
            window is only what is older; None where `attend_window` takes it all.
        dequantize_all: decodes all keys and values for `attend_window`, where there are fewer queries; None where it
            takes attention over codes alone.
        unrotate: inverse RoPE of window keys, for codecs that work before RoPE.
        note: why `attend_codes` is not a kernel of the method's own, or encoding uses none; None for the reference.
    """

    impl: str
    attend_codes: AttendCodes
    attend_dequantized: Callable[..., PartialAttention]
    attend_window: Callable[..., Tensor]
    rotate_and_append: Callable[[Rotation, Tensor, Tensor, Tensor, Tensor, Tensor, WindowTokens], Tensor]
    unrotate: Unrotate
    attend_prefill: Callable[..., PartialAttention] | None = None
    dequantize_all: Callable[..., tuple[Tensor, Tensor] | None] | None = None
    decode_threshold: int = sys.maxsize
    prefill_threshold: int = sys.maxsize
    note: str | None = None

    def with_soft_cap(self, soft_cap: float | None) -> AttentionBackend:
        """The same for scores s that become soft_cap * tanh(s / soft_cap); blocks of codes are decoded for it."""
        if soft_cap is None:
            return self
        return replace(
            self,
            attend_codes=partial(self.attend_dequantized, soft_cap=soft_cap),
            attend_dequantized=partial(self.attend_dequantized, soft_cap=soft_cap),
            attend_window=partial(self.attend_window, soft_cap=soft_cap),
            attend_prefill=None if self.attend_prefill is None else partial(self.attend_prefill, soft_cap=soft_cap),
        )


REFERENCE = AttentionBackend(
    impl="reference",
    attend_codes=reference.attend_codes,
    attend_dequantized=reference.attend_codes,
    attend_window=reference.attend_window,
    rotate_and_append=reference.rotate_and_append,
    unrotate=unrotate,
)


def _attend_codes(
    fused: AttendCodes, codec: LayerCodec, query: Tensor, encoded: EncodedTokens, scaling: float
) -> PartialAttention:
    """Attention with kernels of the method, in layers whose keys and values are its codes; they take positions without
    gaps.
    """
    from kvcli.attention.decoded import attend_dequantized

    taken = not codec.plain and (encoded.rotations is None or encoded.rotations.consecutive)
    return (fused if taken else attend_dequantized)(codec, query, encoded, scaling)


def _unequal(spec: ModelSpec) -> str | None:
    """Why no attention kernel of a method can read codes of these shapes: they take values that are as wide as keys."""
    if spec.latent:
        return "latents (MLA)"
    unequal = spec.value_dim != spec.head_dim
    return f"values of {spec.value_dim} channels beside keys of {spec.head_dim}" if unequal else None


def choose_backend(method: Method, codecs: Sequence[LayerCodec], impl: str, device: torch.device) -> AttentionBackend:
    """The backend for a method's layers on a device.

    Args:
        method: may name attention kernels of its own; without them, or where they refuse a layer's shapes, the fused
            backend decodes blocks of codes and attends to them with the window kernels.
        impl: `reference`, `fused`, or `auto`: fused on a GPU with Triton, else reference.

    Raises:
        UsageError: no such implementation, kernels that cannot run on the device, or, with `fused`, shapes that the
            method's kernels refuse.
    """
    if impl not in ("auto", "reference", "fused"):
        raise UsageError(f"there is no implementation '{impl}'; choose one of auto, reference, fused")
    if impl == "reference" or (impl == "auto" and not (device.type == "cuda" and has_triton())):
        return REFERENCE
    check_device(device)
    from kvcli.attention import decoded, window_kernels

    attend_codes: AttendCodes = decoded.attend_dequantized
    note: str | None = f"{method.name} has no attention kernel: blocks of codes are decoded and attended to"
    if method.attend_kernels is not None:
        kernels = import_module(method.attend_kernels)
        coded = [codec for codec in codecs if not codec.plain]
        reason = next((r for x in coded if (r := _unequal(x.key.spec) or kernels.unsupported(x)) is not None), None)
        if reason is None:
            attend_codes, note = partial(_attend_codes, kernels.fused_attend), None
        elif impl == "fused":
            raise UsageError(f"the attention kernel of {method.name} does not support {reason}; use --impl auto")
        else:
            note = f"the attention kernel of {method.name} does not support {reason}: blocks of codes are decoded"
    encoding = (part.kernel_note(device) for codec in codecs for part in (codec.key, codec.value))
    note = "; ".join(filter(None, (note, next(filter(None, encoding), None)))) or None
    return AttentionBackend(
        impl="fused",
        attend_codes=attend_codes,
        attend_dequantized=decoded.attend_dequantized,
        attend_window=window_kernels.attend_window,
        rotate_and_append=window_kernels.rotate_and_append,
        unrotate=window_kernels.unrotate,
        attend_prefill=decoded.attend_prefill,
        dequantize_all=decoded.dequantize_all,
        decode_threshold=window_kernels.DECODE_THRESHOLD,
        prefill_threshold=reference.PREFILL_THRESHOLD,
        note=note,
    )
