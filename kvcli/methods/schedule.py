"""When tokens leave the full-precision window. This module does not know about tensors."""

from __future__ import annotations

from dataclasses import dataclass

from kvcli.methods.config import CacheConfig


@dataclass(frozen=True)
class Schedule:
    """When tokens leave full precision: `block` or more beyond the last `keep`, in multiples of `granule`."""

    keep: int
    block: int
    granule: int = 1

    def evict(self, window_length: int) -> int:
        """How many of the oldest of `window_length` full-precision tokens (sinks not counted) are encoded now."""
        surplus = window_length - self.keep
        return 0 if surplus < self.block else surplus - surplus % self.granule


def sliding_window(config: CacheConfig) -> tuple[Schedule, Schedule]:
    """The same window for keys and values; `flush_block` spares one encoding per token while decoding."""
    schedule = Schedule(config.residual_length, config.flush_block or max(1, config.residual_length // 4))
    return schedule, schedule
