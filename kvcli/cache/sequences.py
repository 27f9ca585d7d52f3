"""The sequences of a batch, shared by all layers of a cache: lengths, padding, RoPE positions, counts of codes.

Slots are columns of the batch as transformers sees it, padding included. Tokens are counted per sequence without
padding: token i of a row is its i-th real token, wherever padding stands. Everything kvcli stores is by token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvcli.cache.counts import HostCounts, TokenCounts, row_values
from kvcli.cache.record import Counts
from kvcli.cache.window import ordinary_tensors
from kvcli.errors import CacheError
from kvcli.rope import NoRope, Rope


class Sequences:
    """Lengths, padding and RoPE positions of a batch, and how many of its tokens are codes.

    Args:
        stateful: whether the key codec keeps a state, computed from all tokens up to a row's first encoded one.

    Attributes:
        valid: boolean [batch, slots], False at padding.
        positions: RoPE positions of the tokens of each row, int32 [batch, capacity].
        observed: tokens of each row that the key codec's state was computed from.
        gap: by how much the next position exceeds the number of tokens, where documents stand side by side.
        ahead: by how much it exceeds the slots, int64 [batch], as `follow` has seen it; None: it has seen none.
    """

    ahead: Tensor | None = None

    def __init__(self, rope: Rope, counts: TokenCounts, stateful: bool = False) -> None:
        self.rope, self.counts, self.stateful = rope, counts, stateful
        self.observed: list[int] = []
        self.valid = torch.ones(0, 0, dtype=torch.bool)
        self.positions = torch.zeros(0, 0, dtype=torch.int32)
        self.gap, self._starts = 0, (0,)

    @property
    def lengths(self) -> Counts:
        """Tokens of each row; empty before the first token."""
        return self.counts.lengths

    @property
    def slots(self) -> int:
        """Columns seen so far, padding included."""
        return self.valid.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of positions and padding marks."""
        return self.valid.nbytes + self.positions.nbytes

    def note_gaps(self) -> None:
        """Notes where the positions of documents side by side leave some out, which all rows have alike.

        CacheError: rows that leave out different ones, or are of different lengths.
        """
        self.gap, self._starts = 0, (0,)
        first, length = self.positions[:1], min(self.lengths, default=0)
        jumps = self.positions[:, : max(self.lengths, default=0)].diff() > 1
        if not length or not bool(self.valid.all()) or not bool(jumps.any()) or int(first[0, 0]):
            return
        if length < max(self.lengths) or not bool((self.positions == first)[:, :length].all()):
            raise CacheError("rows of documents side by side are of different lengths or positions")
        starts = (first[0, :length].diff() != 1).nonzero()[:, 0] + 1 - self.counts.sink_length
        self._starts = (0, *(start for start in starts.tolist() if start > 0))
        self.gap = int(first[0, length - 1]) + 1 - length

    def runs(self, codes: int) -> list[tuple[int, int]]:
        """Ranges [start, stop) of the first tokens after the sinks, so many, each of consecutive positions."""
        starts = [start for start in self._starts if not start or start < codes]
        return [*zip(starts, [*starts[1:], codes], strict=True)]

    def begin(self, length: int, query_len: int = 0) -> None:
        """Takes the rotation of a text of so many tokens, which will be read, or now goes on by `query_len` tokens.

        CacheError: the tokens so far were rotated as those of a shorter text. Where each length has a rotation of its
        own (dynamic NTK scaling), texts are read in one pass, and tokens made with the newest.
        """
        if not query_len and isinstance(self.rope, NoRope):
            return
        if self.rope.length is None or (self.rope.changes(length) and not any(self.lengths)):
            self.rope = self.rope.for_length(length)
        elif self.rope.changes(length) and (query_len > 1 or not isinstance(self.rope, NoRope)):
            raise CacheError(
                f"the model rotates texts of more than {self.rope.switch} tokens differently, and the cache holds a "
                "shorter one: read the whole text into a new cache, as session.generate does"
            )

    def one_pass(self, length: int) -> bool:
        """Whether a text of so many tokens is read in one pass: each length has its own rotation."""
        return isinstance(self.rope, NoRope) and self.rope.switch is not None and length > self.rope.switch

    def changes_within(self, count: int) -> bool:
        """Whether `count` more tokens make a text that is rotated differently, and so has to be read anew."""
        return not isinstance(self.rope, NoRope) and self.rope.changes(max(self.lengths) + count)

    def rope_of(self, rotated: bool) -> Rope:
        """The rotary embedding of layers that rotate, or of those that do not."""
        if rotated:
            return self.rope
        inv_freq = self.rope.inv_freq
        return NoRope(2 * len(inv_freq), inv_freq.device)

    @ordinary_tensors
    def follow(self, positions: Tensor) -> Tensor:
        """M-RoPE positions [3 or 4, batch, time] of new tokens, moved to where those of this text end.

        An image takes fewer positions than tokens. How many fewer, models keep for the text that they read last, of
        whichever cache.
        """
        of_image, slots = positions[-3:], self.slots
        if slots:
            end = row_values(self.lengths, positions.device) if self.ahead is None else slots + self.ahead
            of_image = of_image + (end.to(of_image) - of_image[..., 0].amax(0)).unsqueeze(1)
        self.ahead = of_image.amax((0, 2)) + 1 - slots - positions.shape[-1]
        return torch.cat((positions[:-3], of_image))

    @property
    def is_text(self) -> bool:
        """Whether positions count tokens, as they do without images."""
        return self.ahead is None or bool((self.slots + self.ahead.cpu() == torch.tensor(self.lengths)).all())

    @ordinary_tensors
    def extend(self, count: int) -> None:
        """Keeps positions for `count` tokens to come: each row's positions go on from its last one."""
        lengths = row_values(self.lengths, self.valid.device).unsqueeze(1)
        offset = self.positions.gather(1, lengths - 1).long() + 1 - lengths
        index = torch.arange(max(self.lengths) + count, device=lengths.device)
        former = nn.functional.pad(self.positions, (0, max(0, len(index) - self.positions.shape[1])))[:, : len(index)]
        self.positions = torch.where(index < lengths, former, (index + offset).int())

    @ordinary_tensors
    def append_slots(self, count: int) -> None:
        """Adds columns of real tokens that `counts` knows of, and whose positions `extend` has kept."""
        self.valid = nn.functional.pad(self.valid, (0, count), value=True)

    @ordinary_tensors
    def select(self, rows: Tensor) -> None:
        """Keeps, repeats or reorders rows, [count] indices."""
        if not self.lengths:
            return
        rows = rows.to(self.valid.device)
        self.valid, self.positions = self.valid[rows], self.positions[rows]
        self.ahead = None if self.ahead is None else self.ahead[rows.to(self.ahead.device)]
        order = rows.tolist()
        self.observed = [self.observed[row] for row in order]
        self.counts.select(order)

    def check_rollback(self) -> None:
        """Raises CacheError where `crop` could not remove tokens of the passes to come."""
        group = self.counts.tokens_per_group
        if group > 1:
            raise CacheError(
                f"speculative decoding needs a method that encodes each token by itself, not {group} tokens together"
            )
        if self.stateful:
            raise CacheError(
                "speculative decoding needs a method without per-sequence state; this one computes its state from all "
                "tokens up to the first encoded ones, rejected drafts among them"
            )

    def crop(self, slots: int) -> list[int]:
        """Removes the last slots, and returns the rows that hold no token any more.

        Raises:
            CacheError: tokens that were encoded together would be cut apart, or a codec's state was computed from some
                of them; nothing has changed then.
        """
        removed: list[int] = self.valid[:, self.slots - slots :].sum(1).tolist()
        lengths = [length - count for length, count in zip(self.lengths, removed, strict=True)]
        into_documents = bool(self.gap) and min(lengths) <= self.counts.sink_length + self._starts[-1]
        if into_documents and len({*lengths}) > 1:
            raise CacheError("rows of documents side by side cannot be cut to different lengths")
        self.counts.coded_without(removed)
        if any(0 < length < observed for length, observed in zip(lengths, self.observed, strict=True)):
            raise CacheError(
                f"cannot remove {max(removed)} tokens: the method's per-sequence state was computed from some of them; "
                "remove all tokens, or make a new cache"
            )
        self.counts.truncate(removed)
        self.valid = self.valid[:, : self.slots - slots].clone()
        self.observed = [min(pair) for pair in zip(lengths, self.observed, strict=True)]
        if into_documents:
            self.note_gaps()
        return [row for row, length in enumerate(lengths) if not length]

    def append(self, new: Counts, valid: Tensor, everything: bool = False) -> HostCounts:
        """Adds new slots, of which `new` of each row are tokens; `valid` [batch, slots] is with the new ones.

        With `everything`, all whole groups are encoded, whatever the schedules keep.
        """
        self.valid = valid
        counts = self.counts.append(new, everything)
        if not self.observed:
            self.observed = [0] * len(new)
        if self.stateful and not counts.all_coded:
            rows = zip(self.lengths, self.observed, counts.coded_keys, strict=True)
            self.observed = [observed if coded else length for length, observed, coded in rows]
        return counts

    @ordinary_tensors
    def keep_positions(self, positions: Tensor, index: int | Tensor) -> None:
        """Keeps the positions [batch, query_len] of new slots, whose token `index` is as in `WindowTokens`."""
        buffer, needed = self.positions, max(self.lengths)
        if buffer.shape[0] != positions.shape[0]:
            buffer = positions.new_zeros(positions.shape[0], 0, dtype=torch.int32)
        if needed > buffer.shape[1]:
            buffer = nn.functional.pad(buffer, (0, positions_capacity(buffer.shape[1], needed) - buffer.shape[1]))
        self.positions = buffer
        if isinstance(index, int):
            buffer[:, index : index + positions.shape[1]] = positions
        else:
            real = (index >= 0).nonzero(as_tuple=True)
            buffer[real[0], index[real]] = positions[real].int()


def positions_capacity(capacity: int, num_tokens: int) -> int:
    """Tokens that the buffer of positions has room for once it has to hold `num_tokens`."""
    return capacity if num_tokens <= capacity else max(num_tokens, capacity + capacity // 2, 256)
