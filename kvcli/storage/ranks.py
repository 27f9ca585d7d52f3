"""Processes that share one run, as torchrun starts them: which of them this is, and where they wait for each other.

Large results go through files in the folder of the run, so ranks have a file system in common; small ones, and that
each has come so far, pass through gloo. A rank that ended ends the others where they wait.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from kvcli.errors import RankError, Terminated, UsageError, error_text

_LONGEST_WAIT = timedelta(days=30)
_REMEDY = "its own message says why; run the same command again"

ItemT = TypeVar("ItemT")
MadeT = TypeVar("MadeT")


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

    def each(self, items: Sequence[ItemT], work: Callable[[ItemT], MadeT]) -> list[MadeT]:
        """What `work` makes of every item, in order, on every rank; a rank works on each `count`-th of them.

        What is made is pickled, with tensors on the CPU. RankError: a rank has ended.
        """
        made = [work(item) for item in items[self.rank :: self.count]]
        if self.count == 1:
            return made
        import torch.distributed as dist

        self.wait()
        parts: list[Any] = [None] * self.count
        dist.all_gather_object(parts, made)
        return [parts[index % self.count][index // self.count] for index in range(len(items))]


ALONE = Ranks()
"""A process that shares its run with no other."""

_joined = ContextVar("joined", default=ALONE)


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


def joined_ranks() -> Ranks:
    """The ranks that this process has joined, or itself alone."""
    return _joined.get()


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
    token = _joined.set(ranks)
    try:
        ranks.wait()
        yield ranks
    finally:
        _joined.reset(token)
        dist.destroy_process_group()


def start_ranks(devices: str | None, device: str | None) -> None:
    """Runs this very command line in a process on each of so many `devices` and ends as they do, unless it is of one.

    UsageError: devices that make no sense.
    """
    if devices in (None, "1") or environment().count > 1:
        return
    import torch

    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--devices {devices} gives each process a GPU of its own; leave out --device {device}")
    there = torch.cuda.device_count() if device != "cpu" else 0
    if not there and (devices == "all" or device == "cuda"):
        raise UsageError(f"--devices {devices}: no GPU is used here; say how many processes are to share the work")
    count = there if devices == "all" else int(str(devices))
    if there and count > there:
        raise UsageError(f"--devices {devices}: this machine has {there} GPU{'s' * (there > 1)}")
    if count > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // count)))
        _launch(count)


def _launch(count: int) -> NoReturn:
    """As torchrun does."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # ranks speak for themselves
    shared: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    config = LaunchConfig(1, 1, count, DefaultLogsSpecs(log_dir=os.devnull), "kvcli", max_restarts=0, **shared)
    try:
        elastic_launch(config, sys.executable)(*sys.orig_argv[1:])
    except ChildFailedError as error:
        code = next(failure.exitcode for failure in error.failures.values())
        raise SystemExit(code if code > 0 else 128 - code) from None
    except SignalException as error:
        raise SystemExit(130 if error.sigval == signal.SIGINT else Terminated.exit_code) from None
    raise SystemExit(0)


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
