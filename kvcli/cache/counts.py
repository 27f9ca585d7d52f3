"""How many tokens each row holds, how many of its keys and of its values are codes, and which tokens are in the window.

All layers encode the same tokens at the same time, so this is counted once per forward pass. The window holds the sinks
and all tokens that attention does not read as codes: those from the first group on of which a key or a value is not
encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import add

import torch
from torch import Tensor

from kvcli.cache.record import Counts, attended_tokens, coded_within, subtracted
from kvcli.cache.window import ALL_ROWS, Rows, WindowLayout, WindowTokens
from kvcli.methods.method import Schedule


@dataclass(frozen=True)
class Encoding:
    """Rows that encode the keys, or the values, of their tokens [start, start + count), counted after the sinks.

    Attributes:
        whole: whether these are all rows.
        kept: the last of them that stay in the window, as what their codes decode to.
    """

    rows: list[int]
    whole: bool
    start: int
    count: int
    kept: int

    @property
    def is_first(self) -> bool:
        """Whether the rows held no codes before."""
        return not self.start

    @cached_property
    def index(self) -> Rows:
        """The rows, as an index that gives views where it can."""
        return ALL_ROWS if self.whole else self.rows

    def positions(self, positions: Tensor, sinks: int) -> Tensor:
        """Positions of the tokens, [rows, count], of those of all tokens of a row [batch, capacity]."""
        first = sinks + self.start
        return positions[self.index, first : first + self.count]

    def slots(self, layout: WindowLayout, skip: int = 0) -> list[slice]:
        """The tokens' slots in the window, without the first `skip` tokens."""
        first = layout.sinks + self.start
        return layout.runs(first + skip, first + self.count)


@dataclass(frozen=True)
class DeviceEncoding:
    """As `Encoding`, of as many tokens in every row, from `start` on, int32 [batch, 1] on the device."""

    start: Tensor
    count: int
    kept: int
    whole = True
    is_first = False
    index = ALL_ROWS

    def positions(self, positions: Tensor, sinks: int) -> Tensor:
        """As `Encoding.positions`, [batch, count]."""
        tokens = self.start + torch.arange(sinks, sinks + self.count, device=positions.device)
        return positions.gather(1, tokens.long())

    def slots(self, layout: WindowLayout, skip: int = 0) -> Tensor:
        """As `Encoding.slots`, int64 [batch, count - skip]."""
        tokens = self.start.long() + torch.arange(skip, self.count, device=self.start.device)
        return layout.slots(layout.sinks + tokens)


AnyEncoding = Encoding | DeviceEncoding


@dataclass(frozen=True)
class HostCounts:
    """What one forward pass does in all layers: append, attend, then encode the oldest tokens; counted on the host.

    Attributes:
        before, lengths: tokens of each row, before the new ones and with them.
        coded_keys, coded_values: encoded keys and values of each row, before the flush.
        attended: tokens of each row, after its sinks, that are attended to as codes: not those that are encoded now.
        layout: of the window buffers from the append to the flush.
        attended_after: of the next pass.
    """

    before: Counts
    lengths: Counts
    coded_keys: Counts
    coded_values: Counts
    attended: Counts
    layout: WindowLayout
    keys: tuple[Encoding, ...]
    values: tuple[Encoding, ...]
    attended_after: Counts
    layout_after: WindowLayout

    @cached_property
    def is_first(self) -> bool:
        """Whether no row held a token before."""
        return not any(self.before)

    @cached_property
    def all_coded(self) -> bool:
        """Whether every row held encoded keys before the flush."""
        return all(self.coded_keys)

    @cached_property
    def longest(self) -> int:
        """Window tokens of the row that has most, with the new ones."""
        return max(subtracted(self.lengths, self.attended))

    @cached_property
    def max_codes(self) -> int:
        """Tokens that are attended to as codes, of the row that has most."""
        return max(self.attended)

    @cached_property
    def room(self) -> tuple[int, int]:
        """Encoded keys, and values, after the flush, of the row among those that encode that has most; 0 if none do."""
        keys, values = (max((x.start + x.count for x in part), default=0) for part in (self.keys, self.values))
        return keys, values

    @cached_property
    def flushes(self) -> bool:
        """Whether any token is encoded, or the window buffers change."""
        return bool(self.keys or self.values) or self.layout_after != self.layout

    def code_lengths(self, device: torch.device) -> Tensor | None:
        """Tokens of each row that are attended to as codes, int32 [batch]; None when all have as many."""
        attended = self.attended
        return None if min(attended) == max(attended) else row_values(attended, device, torch.int32)

    def window(self, real: Tensor | None, device: torch.device) -> WindowTokens:
        """The tokens of the windows, from the append to the flush; `real` as in `Forward`."""
        if real is None and len(set(self.before)) == len(set(self.attended)) == 1:
            return WindowTokens(self.layout, self.longest, self.attended[0], self.before[0])
        start = row_values(self.before, device).unsqueeze(1)
        if real is None:
            index = start + torch.arange(self.lengths[0] - self.before[0], device=device)
        else:
            index = (start + real.cumsum(1) - 1).masked_fill(~real, -1)
        return WindowTokens(self.layout, self.longest, row_values(self.attended, device, torch.int32), index.int())


class CodedCounts:
    """Of the keys, or of the values: how many tokens of each row, after its sinks, are encoded (`coded`)."""

    def __init__(self, schedule: Schedule, tokens_per_group: int) -> None:
        self.schedule, self.tokens_per_group = schedule, tokens_per_group
        self.coded: Counts = ()

    def encode(self, tokens: Counts, everything: bool) -> Counts:
        """Encodes what the schedule says of rows of so many `tokens` after their sinks; returns how many of each.

        With `everything`, nothing but a part of a group is kept.
        """
        schedule = Schedule(0, self.tokens_per_group, self.tokens_per_group) if everything else self.schedule
        counts = tuple(map(schedule.encoded_now, subtracted(tokens, self.coded)))
        self.coded = tuple(map(add, self.coded, counts))
        return counts


class TokenCounts:
    """The counts of a batch, and the layout of its windows.

    Args:
        schedules: when keys and when values are encoded.
        sink_length: first tokens of a row, which are never encoded.
        groups: keys, and values, that are encoded together.

    Attributes:
        lengths: tokens of each row; empty before the first.
        tokens_per_group: tokens that are attended to together as codes.
        attended: tokens of each row, after its sinks, whose keys and values are both codes, in whole groups.
    """

    def __init__(
        self, schedules: tuple[Schedule, Schedule], sink_length: int, groups: tuple[int, int] = (1, 1)
    ) -> None:
        self.sink_length, self.tokens_per_group = sink_length, max(groups)
        self.keys, self.values = (CodedCounts(*pair) for pair in zip(schedules, groups, strict=True))
        self.lengths: Counts = ()
        self.attended: Counts = ()
        pairs = zip(schedules, groups, strict=True)
        self._ring_of_one = max(schedule.longest + self.tokens_per_group - group for schedule, group in pairs)
        self.make_room(1)
        self.layout = WindowLayout(sink_length, self._min_ring)

    def make_room(self, width: int) -> None:
        """From the next pass on, no pass of up to `width` tokens per row changes the layout of the windows."""
        self._min_ring = self._ring_of_one + width - 1

    @property
    def window(self) -> Counts:
        """Window tokens of each row, sinks included."""
        return subtracted(self.lengths, self.attended)

    def append(self, counts: Counts, everything: bool = False) -> HostCounts:
        """Adds `counts` new tokens to each row and encodes what the schedules say, or all whole groups."""
        if not self.lengths:
            self.lengths = self.attended = self.keys.coded = self.values.coded = (0,) * len(counts)
        before, attended, coded = self.lengths, self.attended, (self.keys.coded, self.values.coded)
        self.lengths = tuple(map(add, before, counts))
        tokens = self._after_sinks(self.lengths)
        layout = WindowLayout(self.sink_length, max(self.layout.ring, self._min_ring, *subtracted(tokens, attended)))
        encoded = self.keys.encode(tokens, everything), self.values.encode(tokens, everything)
        self.attended = attended_tokens(self.keys.coded, self.values.coded, self.tokens_per_group)
        needed = WindowLayout(self.sink_length, max(self._min_ring, *subtracted(tokens, self.attended)))
        # gives back what a long prompt needed
        self.layout = needed if layout.capacity > 2 * needed.capacity else layout
        keys, values = (_encodings(*pair, self.attended) for pair in zip(coded, encoded, strict=True))
        return HostCounts(before, self.lengths, *coded, attended, layout, keys, values, self.attended, self.layout)

    @property
    def all_have_codes(self) -> bool:
        """Whether every row holds codes, so that passes can be steps (`kvcli.cache.step`)."""
        return min(*self.attended, *self.keys.coded) > 0

    @property
    def state(self) -> tuple[Counts, Counts, Counts, Counts]:
        """All counts, to return to if passes are taken back that moved no codes."""
        return self.lengths, self.keys.coded, self.values.coded, self.attended

    @state.setter
    def state(self, counts: tuple[Counts, Counts, Counts, Counts]) -> None:
        self.lengths, self.keys.coded, self.values.coded, self.attended = counts

    def select(self, rows: list[int]) -> None:
        """Keeps, repeats or reorders rows."""
        lengths, keys, values, attended = (tuple(counts[row] for row in rows) for counts in self.state)
        self.state = lengths, keys, values, attended

    def truncate(self, removed: list[int]) -> None:
        """Removes the last `removed` tokens of each row, after `coded_without` accepted them."""
        self.keys.coded, self.values.coded = self.coded_without(removed)
        self.lengths = subtracted(self.lengths, removed)
        self.attended = attended_tokens(self.keys.coded, self.values.coded, self.tokens_per_group)

    def coded_without(self, removed: list[int]) -> tuple[Counts, Counts]:
        """Encoded keys and values of rows without their last `removed` tokens; raises as `coded_within`."""
        tokens = self._after_sinks(subtracted(self.lengths, removed))
        keys, values = (coded_within(x.coded, tokens, removed, x.tokens_per_group) for x in (self.keys, self.values))
        return keys, values

    def _after_sinks(self, lengths: Counts) -> Counts:
        return tuple(max(0, length - self.sink_length) for length in lengths)


def row_values(values: Counts, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """One number per row as a tensor [batch]; where all are equal, without a copy from the host."""
    if min(values) == max(values):
        return torch.full((len(values),), values[0], device=device, dtype=dtype)
    return torch.tensor(values, device=device, dtype=dtype)


def _encodings(starts: Counts, counts: Counts, attended: Counts) -> tuple[Encoding, ...]:
    """One encoding per set of rows that encode the same tokens and keep as many of them in the window."""
    rows: dict[tuple[int, int, int], list[int]] = {}
    for row, (start, count, left) in enumerate(zip(starts, counts, attended, strict=True)):
        if count:
            rows.setdefault((start, count, min(count, start + count - left)), []).append(row)
    return tuple(Encoding(members, len(members) == len(starts), *tokens) for tokens, members in rows.items())
