"""Codecs of groups of consecutive kv heads as one codec of all of them: each group has codes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvcli.methods.base import Codec, CodesT, KeyCodec, ValueCodec
from kvcli.rope import Rotation


class _HeadGroups(Codec[CodesT, None]):
    """Axis 1 of every field of the codes has the codes of one group after the other.

    Args:
        parts: the codecs of the groups, alike but for their fitted state; each has the heads of its group alone.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        super().__init__()
        first, count = parts[0], len(parts)
        heads = {name: getattr(first.spec, name) * count for name in ("num_heads", "num_kv_heads")}
        self.spec, self.parts = replace(first.spec, **heads), cast("Any", nn.ModuleList(parts))
        self.max_magnitude, self.calibrated_range = first.max_magnitude, first.calibrated_range

    @property
    def fused(self) -> bool:
        return bool(self.parts[0].fused)

    @fused.setter
    def fused(self, fused: bool) -> None:
        for part in self.parts:
            part.fused = fused

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each group has of heads, or of groups, on axis 1: views."""
        return x.chunk(len(self.parts), dim=1)

    def split_codes(self, codes: CodesT) -> list[CodesT]:
        """The codes of each group: views."""
        return [type(codes)(*x) for x in zip(*map(self.split, vars(codes).values()), strict=True)]

    def of_rank(self, rank: int, ranks: int) -> Any:
        if len(self.parts) % ranks:
            return self.parts[0].of_rank(rank, ranks)
        count = len(self.parts) // ranks
        mine = self.parts[rank * count : (rank + 1) * count]
        return mine[0] if count == 1 else type(self)(mine)

    def encode(self, x: Tensor, state: None = None) -> CodesT:
        return self.join_codes([part.encode(y, None) for part, y in zip(self.parts, self.split(x), strict=True)])

    def encode_noted(self, x: Tensor, peak: Tensor) -> CodesT:
        groups = zip(self.parts, self.split(x), strict=True)
        return self.join_codes([part.encode_noted(y, peak) for part, y in groups])

    def encoded_group(self, like: Tensor) -> CodesT:
        return self.join_codes([part.encoded_group(x) for part, x in zip(self.parts, self.split(like), strict=True)])

    def join_codes(self, codes: Sequence[CodesT]) -> CodesT:
        """The inverse of `split_codes`."""
        fields = zip(*(vars(x).values() for x in codes), strict=True)
        return type(codes[0])(*[torch.cat(x, dim=1) for x in fields])

    def peak(self, x: Tensor, codes: CodesT) -> Tensor:
        groups = zip(self.parts, self.split(x), self.split_codes(codes), strict=True)
        return torch.stack([part.peak(*group) for part, *group in groups]).amax()

    def decode(self, codes: CodesT, state: None = None) -> Tensor:
        return self._on_codes("decode", codes, None)

    def decode_to(self, codes: CodesT, state: None, dtype: torch.dtype) -> Tensor:
        return self._on_codes("decode_to", codes, None, dtype)

    def _on_codes(self, method: str, codes: CodesT, *rest: Any) -> Tensor:
        groups = zip(self.parts, self.split_codes(codes), strict=True)
        return torch.cat([getattr(part, method)(x, *rest) for part, x in groups], dim=1)

    def kernel_note(self, device: torch.device) -> str | None:
        return cast("str | None", self.parts[0].kernel_note(device))

    def make_kernel_tables(self) -> None:
        for part in self.parts:
            part.make_kernel_tables()

    def randomize_(self, generator: torch.Generator) -> None:
        for part in self.parts:
            part.randomize_(generator)

    def bits_per_token(self) -> float:
        return float(sum(part.bits_per_token() for part in self.parts))

    def codebook_bytes(self) -> int:
        return sum(part.codebook_bytes() for part in self.parts)


class KeyGroups(_HeadGroups[CodesT], KeyCodec[CodesT, None]):
    """Keys."""

    def __init__(self, parts: Sequence[KeyCodec[CodesT, None]]) -> None:
        super().__init__(parts)
        self.space = parts[0].space

    def scores(self, query: Tensor, codes: CodesT, state: None, rotation: Rotation | None) -> Tensor:
        groups = zip(self.parts, self.split(query), self.split_codes(codes), strict=True)
        return torch.cat([part.scores(*group, None, rotation) for part, *group in groups], dim=1)

    def decode_rotated(
        self, codes: CodesT, state: None, rotation: Rotation, offset: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        offsets = [None] * len(self.parts) if offset is None else self.split(offset)
        groups = zip(self.parts, self.split_codes(codes), offsets, strict=True)
        return torch.cat([part.decode_rotated(x, None, rotation, y, dtype) for part, x, y in groups], dim=1)


class ValueGroups(_HeadGroups[CodesT], ValueCodec[CodesT]):
    """Values."""

    def weighted_sum(self, weights: Tensor, codes: CodesT) -> Tensor:
        groups = zip(self.parts, self.split(weights), self.split_codes(codes), strict=True)
        return torch.cat([part.weighted_sum(*group) for part, *group in groups], dim=1)
