"""Arguments and results of attention over codes: the interface between codecs, kernels and attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import TokenRotations


@dataclass(frozen=True)
class EncodedTokens:
    """The encoded tokens of one layer as attention over codes sees them.

    Attributes:
        key_codes: codes of the keys of `length` tokens, in the key codec's own type of `Codes`.
        key_state: the sequences' state in the key codec's own type of `State`; None for codecs without one.
        value_codes: codes of the values of the same tokens.
        rotations: rotations of these tokens, if `LayerCodec.needs_rotations`; else None.
        lengths: tokens of each sequence, int32 [batch]; None when all have `length`.
    """

    key_codes: Any
    key_state: Any
    value_codes: Any
    rotations: TokenRotations | None
    lengths: Tensor | None

    @cached_property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.value_codes.num_tokens)

    def visible(self, start: int, stop: int) -> Tensor | None:
        """Boolean [batch, stop - start], False beyond the end of a shorter sequence; None when nothing is hidden."""
        if self.lengths is None:
            return None
        return torch.arange(start, stop, device=self.lengths.device) < self.lengths.unsqueeze(1)


PartialAttention = tuple[Tensor, Tensor]
"""(out, lse): float32 [batch, num_heads, query_len, head_dim], normalized, and [batch, num_heads, query_len], natural
log; out is 0 and lse -inf where a sequence has no encoded token."""

AttendCodes = Callable[[LayerCodec, Tensor, EncodedTokens, float], PartialAttention]
"""Attention over encoded tokens: (codec, rotated query [batch, num_heads, query_len, head_dim], encoded, scaling)."""
