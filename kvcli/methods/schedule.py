"""When tokens become codes. This module does not know about tensors."""

from __future__ import annotations

from dataclasses import dataclass

from kvcli.methods.config import CacheConfig


@dataclass(frozen=True)
class Schedule:
    """When tokens are encoded: once `block` or more exceed the last `keep`, in multiples of `multiple_of`.

    Attributes:
        keep: tokens that stay in full precision.
        block: tokens beyond those that are encoded together at the least.
        multiple_of: the number encoded is a multiple of this.
    """

    keep: int
    block: int
    multiple_of: int = 1

    @property
    def longest(self) -> int:
        """Tokens that are not encoded (without sinks), at most, where each forward pass brings one."""
        return self.keep + max(self.block, self.multiple_of)

    def encoded_now(self, num_tokens: int) -> int:
        """The number of tokens to encode now, the oldest of `num_tokens` that are not encoded (without sinks)."""
        surplus = num_tokens - self.keep
        return 0 if surplus < self.block else surplus - surplus % self.multiple_of


def sliding_window(config: CacheConfig) -> tuple[Schedule, Schedule]:
    """The same schedule for keys and values: encoding `flush_block` tokens at once is cheaper than one per step."""
    schedule = Schedule(config.residual_length, config.flush_block or max(1, config.residual_length // 4))
    return schedule, schedule
