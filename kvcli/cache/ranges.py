"""Whether keys and values are in the range that codes hold, looked at without a wait for the GPU in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcli.cache.counts import AnyEncoding
from kvcli.errors import CacheError
from kvcli.methods.base import Codec, Codes

_MIN_TOKENS = 64
"""Tokens encoded at once from which a pass on a GPU is looked at, also where it is not a row's first."""


@dataclass(frozen=True)
class Note:
    """Notes the numbers of a layer's keys or values: `what` they are is for the message."""

    ranges: Ranges
    what: str
    codec: Codec[Any]

    def __call__(self, encoding: AnyEncoding, tokens: Tensor, codes: Codes) -> None:
        """Notes tokens [rows, num_kv_heads, count, head_dim] that were encoded to `codes`."""
        if self._can_exceed(tokens.dtype):
            self.ranges.note(self, encoding, tokens, codes)

    def peak(self, dtype: torch.dtype) -> Tensor | None:
        """Where a kernel notes the largest magnitude of tokens, float32 []; None: nowhere, or all are in the range."""
        return self.ranges.peak(self) if self._can_exceed(dtype) else None

    def _can_exceed(self, dtype: torch.dtype) -> bool:
        codec = self.codec
        return codec.max_magnitude < float("inf") and (dtype != torch.float16 or codec.calibrated_range)


class Ranges:
    """The largest numbers of one forward pass, and the limits of what encodes them.

    On the CPU every pass is looked at. On a GPU, where reading a number waits for all work before it, it is a row's
    first encoded tokens and passes that encode 64 tokens or more: prompts and their chunks. Tensors in float16 are in
    the range of every format that is not relative to a calibration.
    """

    def __init__(self) -> None:
        self._peaks: list[tuple[Note, Tensor]] = []

    def note(self, note: Note, encoding: AnyEncoding, tokens: Tensor, codes: Codes) -> None:
        """Notes the largest of the tokens, where they are looked at."""
        if not tokens.is_cuda or encoding.is_first or encoding.count >= _MIN_TOKENS:
            self._peaks.append((note, note.codec.peak(tokens, codes)))

    def peak(self, note: Note) -> Tensor | None:
        """Where a kernel that encodes in place notes the largest magnitude, float32 []; None: nowhere."""
        return None

    def check(self) -> None:
        """Checks what was noted, once for all layers; CacheError names the first finite numbers beyond their limit."""
        if not self._peaks:
            return
        for (note, _), peak in zip(self._peaks, self._numbers(), strict=True):
            if note.codec.max_magnitude < peak < float("inf"):  # what is not finite shows in the logits
                relative = " relative to those calibrated" if note.codec.calibrated_range else ""
                raise CacheError(
                    f"{note.what}{relative} reach {peak:.3g}, but codes of this method hold numbers up to "
                    f"{note.codec.max_magnitude:.0f}; use method fp16 with this model"
                )

    def _numbers(self) -> list[float]:
        return torch.stack([peak.to(self._peaks[0][1].device) for _, peak in self._peaks]).tolist()


class StepRanges(Ranges):
    """The largest numbers since the last check, in a tensor on the device that captured steps go on writing to."""

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()
        self._slots = torch.zeros(count, dtype=torch.float32, device=device)

    @property
    def device(self) -> torch.device:
        """Where the numbers are noted."""
        return self._slots.device

    def note(self, note: Note, encoding: AnyEncoding, tokens: Tensor, codes: Codes) -> None:
        """Notes the largest of the tokens."""
        slot = self.peak(note)
        torch.maximum(slot, note.codec.peak(tokens, codes), out=slot)

    def peak(self, note: Note) -> Tensor:
        """Where the largest magnitude is noted, float32 []."""
        slot = next((slot for known, slot in self._peaks if known.what == note.what), None)
        if slot is None:
            slot = self._slots[len(self._peaks)]
            self._peaks.append((note, slot))
        return slot

    def _numbers(self) -> list[float]:
        numbers: list[float] = self._slots[: len(self._peaks)].tolist()
        self._slots.zero_()
        return numbers
