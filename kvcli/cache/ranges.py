"""Whether keys and values are in the range that codes hold, looked at without a wait for the GPU in every step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcli.cache.counts import Encoding
from kvcli.errors import CacheError
from kvcli.methods.base import Codec, Codes

_MIN_TOKENS = 64
"""Tokens encoded at once from which a pass on a GPU is looked at, also where it is not a row's first."""

Note = Callable[[Encoding, Tensor, Codes], None]
"""Given which tokens were encoded, the tokens [rows, num_kv_heads, count, head_dim] and their codes."""


class Ranges:
    """The largest numbers of one forward pass, and the limits of what encodes them.

    On the CPU every pass is looked at. On a GPU, where reading a number waits for all work before it, it is a row's
    first encoded tokens and passes that encode 64 tokens or more: prompts and their chunks. Steps whose counts are on
    the device (`kvcli.cache.step`) are not looked at. Tensors in float16 are in the range of every format that is not
    relative to a calibration.
    """

    def __init__(self) -> None:
        self._peaks: list[tuple[str, float, Tensor]] = []

    def of(self, what: str, codec: Codec[Any]) -> Note:
        """What notes the numbers of a layer's keys or values.

        Args:
            what: which they are, for the message.
            codec: what encodes them.
        """
        return partial(self._note, what, codec)

    def _note(self, what: str, codec: Codec[Any], encoding: Encoding, tokens: Tensor, codes: Codes) -> None:
        limit = codec.max_magnitude
        if (
            isinstance(encoding.start, Tensor)
            or limit == float("inf")
            or (tokens.dtype == torch.float16 and not codec.calibrated_range)
        ):
            return
        if tokens.is_cuda and encoding.start and encoding.count < _MIN_TOKENS:
            return
        what += " relative to those calibrated" if codec.calibrated_range else ""
        self._peaks.append((what, limit, codec.peak(tokens, codes)))

    def check(self) -> None:
        """Checks what was noted, once for all layers.

        Raises:
            CacheError: finite keys or values beyond their limit; the message names the first.
        """
        if not self._peaks:
            return
        for (what, limit, _), peak in zip(self._peaks, torch.stack([x for *_, x in self._peaks]).tolist(), strict=True):
            if limit < peak < float("inf"):  # what is not finite shows in the logits
                raise CacheError(
                    f"{what} reach {peak:.3g}, but codes of this method hold numbers up to {limit:.0f}; "
                    "use method fp16 with this model"
                )
