"""The content of a cache apart from how it lies in memory, as files hold it: tokens in order, no ring, no headroom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.cache.record import POSITIONS, VALID, WINDOWS, SnapshotCounts
from kvcli.errors import CacheError


@dataclass(frozen=True)
class Snapshot:
    """The tokens of a cache. What a row does not use is 0, so that equal content has equal bytes.

    Attributes:
        tensors: by name, for each layer L:
            layers.L.keys, layers.L.values: window, [batch, num_kv_heads, longest window, head_dim], in order: the
                sinks, then the tokens after `counts.attended` others; keys after RoPE.
            layers.L.key_codes.FIELD, layers.L.value_codes.FIELD: [batch, heads, entries, ...], in the field's dtype.
            layers.L.state.FIELD: what the key codec keeps of each row, if anything, [batch, ...].
          And for all layers: `valid`, boolean [batch, slots], False at padding; `positions`, int32
          [batch, tokens of the longest row], RoPE positions.
    """

    counts: SnapshotCounts
    tensors: dict[str, Tensor]

    def check(self, dtype: torch.dtype) -> None:
        """Checks what checksums cannot tell: that the tensors can be those of a cache of a model in this dtype.

        Raises:
            CacheError: window tokens of more bits than 16 and the model's, or as `check_positions`.
        """
        for name, x in self.tensors.items():
            if name.rpartition(".")[2] in WINDOWS and ".state." not in name and x.itemsize > max(2, dtype.itemsize):
                raise CacheError(f"{name} is {x.dtype}, but the model is {dtype}")
        self.check_positions()

    def check_positions(self) -> None:
        """CacheError: positions that are negative or fall, with which no cache can be written or read."""
        positions = self.tensors.get(POSITIONS)
        if positions is None or positions.shape[0] != len(self.counts.lengths):
            return  # `CompressedCache.restore` refuses tensors that are missing or of other shapes
        for row, length in enumerate(self.counts.lengths):
            steps = positions[row, :length].diff()
            if bool((positions[row, :length] < 0).any()) or bool((steps < 0).any()):
                raise CacheError(f"the positions of row {row} are negative or not in order")

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.counts.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors.values())

    def prefix(self, num_tokens: int) -> Snapshot:
        """The first 1 or more tokens of the only row, as `CompressedCache.crop` to this length leaves them; views.

        What is cut off in the middle of the codes stays codes: such a prefix has no window but the sinks. A state of
        the key codec is kept, because it was computed from tokens of the prefix only.

        Raises:
            CacheError: more than one row, no such length, or as `SnapshotCounts.without`.
        """
        if len(self.counts.lengths) != 1:
            raise CacheError(f"a prefix is of one sequence; this snapshot has {len(self.counts.lengths)}")
        removed = self.counts.lengths[0] - num_tokens
        if num_tokens < 1 or removed < 0:
            raise CacheError(f"a snapshot of {self.counts.lengths[0]} tokens has no prefix of {num_tokens}")
        counts = self.counts.without(removed)
        cut = {name: x if (n := counts.used(name)) is None else x[:, :, : n[0]] for name, x in self.tensors.items()}
        seen = self.tensors[VALID].cumsum(1)
        slots = int((seen < num_tokens).sum()) + 1 if removed else seen.shape[1]
        cut[VALID], cut[POSITIONS] = self.tensors[VALID][:, :slots], self.tensors[POSITIONS][:, :num_tokens]
        return Snapshot(counts, cut)
