"""Processes that share one run, as torchrun starts them: which of them this is, and where they wait for each other.

Ranks exchange what they computed through files in the folder of the run, so they have a file system in common. Between
the processes passes only that each has come so far, through gloo; a rank that ended ends the others where they wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from kvcli.errors import RankError, UsageError, error_text

_LONGEST_WAIT = timedelta(days=30)
_REMEDY = "its own message says why; run the same command again to resume"


@dataclass(frozen=True)
class Ranks:
    """This process, `rank` among `count` that share the run; 0 talks and writes what is common to all."""

    rank: int = 0
    count: int = 1

    def wait(self) -> None:
        """Returns when all ranks have come here; RankError: a rank has ended."""
        if self.count == 1:
            return
        import torch
        import torch.distributed as dist

        token = torch.zeros(1, dtype=torch.uint8)
        others = [0] if self.rank else range(1, self.count)
        for send in (self.rank > 0, self.rank == 0):
            for other in others:  # unlike a collective operation, this tells which rank ended
                try:
                    dist.send(token, other) if send else dist.recv(token, other)
                except RuntimeError as error:
                    raise RankError(f"rank {other} has ended before this one; {_REMEDY}") from error


ALONE = Ranks()
"""A process that shares its run with no other."""


def environment() -> Ranks:
    """This process as the variables `RANK` and `WORLD_SIZE` say, which torchrun sets; alone without them."""
    try:
        count = int(os.environ.get("WORLD_SIZE", "1"))
        rank = int(os.environ["RANK"]) if count != 1 else 0
        if not 0 <= rank < count:
            raise ValueError
    except (ValueError, KeyError):
        values = ", ".join(f"{name}={os.environ.get(name)}" for name in ("RANK", "WORLD_SIZE"))
        raise UsageError(f"{values}: RANK must be from 0 to WORLD_SIZE - 1; start processes with torchrun") from None
    return Ranks(rank, count)


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Joins the processes of a run for a block; a process that runs alone joins nobody.

    UsageError: variables that make no sense; RankError: the other processes cannot be reached.
    """
    ranks = environment()
    if ranks.count == 1:
        yield ranks
        return
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(local_device())
    try:
        dist.init_process_group("gloo", timeout=_LONGEST_WAIT)
    except (RuntimeError, ValueError) as error:
        raise RankError(f"rank {ranks.rank} cannot reach the others ({error_text(error)}); use torchrun") from error
    try:
        ranks.wait()
        yield ranks
    finally:
        dist.destroy_process_group()


def local_device() -> int:
    """The GPU of this process: each process of a machine has its own, as far as there are enough."""
    import torch

    index = os.environ.get("LOCAL_RANK", "0")
    return int(index) % max(1, torch.cuda.device_count()) if index.isdecimal() else 0


def packed(costs: Sequence[float], count: int) -> list[list[int]]:
    """Indices of the pieces of work of each of `count` ranks, ascending; the same in every process.

    The dearest piece is given out first, each to the rank with the least work, so that all have about the same.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        least = min(range(count), key=lambda share: (loads[share], share))
        shares[least].append(index)
        loads[least] += costs[index]
    return [sorted(share) for share in shares]
