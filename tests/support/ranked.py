"""Ranks of a run, each in a forked process with a tiny model."""

import multiprocessing
import socket
from pathlib import Path
from typing import Any

import rank_worker

WAIT_S = 300
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["rank_worker"])  # imported once for all processes


def ranks_of(folder: Path, command: tuple[str, ...], count: int, **variables: str) -> list[tuple[Any, str, str]]:
    """Exit code, standard output and standard error of some ranks that nothing else watches."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"HOME": str(folder), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(count):
        said = folder / f"out-{rank}", folder / f"err-{rank}"
        own = {**shared, **variables, "RANK": str(rank)}
        process = FORKS.Process(target=rank_worker.in_folder, args=(folder, command, own, said))
        process.start()
        processes.append((process, said))
    for process, _ in processes:
        process.join(WAIT_S)
    return [(process.exitcode, *(path.read_text() for path in said)) for process, said in processes]
