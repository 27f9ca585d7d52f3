"""How long a look-up takes among many contexts of 32K tokens: `python -m research.lookups [COUNT]`.

The index is filled with rows as `ContextStore.put` makes them; of the blocks, only those with token ids are there.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from kvcli.cache.blocks import encode
from kvcli.cache.context import INPUT_IDS
from kvcli.cache.identity import CacheIdentity
from kvcli.cache.record import Block, ContextRecord, SnapshotCounts, num_coded
from kvcli.contexts import ContextStore
from kvcli.contexts.store import _insert

LENGTH, SHARED, SINKS, WINDOW = 32_768, 2_052, 4, 128
IDENTITY = CacheIdentity(
    model="llama-3.1-8b",
    fingerprint="llama 32 8 128:" + "3c00" * 128,
    weights="0" * 32,
    dtype="bfloat16",
    rope={"inv_freq": [1 / 10_000 ** (i / 64) for i in range(64)], "scaling": 1.0},
    method="kivi",
    config={"k_bits": 2, "v_bits": 2, "residual_length": WINDOW, "sink_length": SINKS, "group_size": 32},
    layers=[*range(32)],
    codecs={"sample": []},
)


def text(number: int, length: int = LENGTH) -> np.ndarray[Any, Any]:
    """Token ids, int32; the first `SHARED` are those of every text, as of a system prompt."""
    ids = np.random.default_rng(number + 1).integers(0, 128_256, length, dtype=np.int32)
    ids[:SHARED] = np.random.default_rng(0).integers(0, 128_256, SHARED, dtype=np.int32)[:length]
    return ids


def filled(folder: Path, count: int, block_tokens: int = 256) -> ContextStore:
    """A store with the rows of many contexts."""
    store = ContextStore(folder, block_tokens)
    store.check_writable()
    with store._index.writing() as db:
        for number in range(count):
            ids = text(number)
            (tokens, data), length = encode({INPUT_IDS: torch.from_numpy(ids)[None]}), len(ids)
            coded = (length - SINKS - WINDOW) // 128 * 128 - 128 * (number % 8)
            counts = SnapshotCounts((length,), (coded,), (coded,), (0,), SINKS, 256, 32, 1, {})
            blocks = [Block(f"{number:032x}{j:032x}", 2**20) for j in range(2 + num_coded(counts, block_tokens))]
            record = ContextRecord(
                kvcli_version="0",
                identity=IDENTITY.to_dict(),
                notes={},
                counts=counts,
                part_tokens=block_tokens,
                bytes_of={},
                values_per_token=1,
                tokens=tokens,
                first=blocks[0],
                coded=tuple(blocks[2:]),
                last=blocks[1],
            )
            _insert(db, f"text-{number}", record, torch.from_numpy(ids))
            if number % 1000 == 0:
                store._path(tokens.digest).write_bytes(data)
        db.execute("UPDATE contexts SET used = used + 1e6 * (id % 1000 = 1)")  # those whose token ids are there
    return store


def measure(store: ContextStore, count: int, repeats: int = 20) -> dict[str, tuple[int, float]]:
    """Tokens found, and the median time of a look-up in milliseconds, by what the prompt begins with."""
    some, other = text(0), text(count + 7)
    prompts = {
        "all of a context": np.concatenate((some, other[:100])),
        "20,000 tokens of one": np.concatenate((some[:20_000], other[20_000:])),
        "what all begin with": other,
        "nothing": text(count)[::-1].copy(),
    }
    measured = {}
    for name, ids in prompts.items():
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            match = store.find(torch.from_numpy(ids), IDENTITY)
            times.append(1e3 * (time.perf_counter() - started))
        measured[name] = (match.num_tokens if match else 0, median(times))
    return measured


def main(count: int = 10_000) -> None:
    """Prints the times."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        store = filled(Path(folder), count)
        size, seconds = store._index.path.stat().st_size / 2**20, time.perf_counter() - started
        print(f"{count} contexts, blocks of 256 tokens: index of {size:.0f} MiB, made in {seconds:.0f} s")
        for name, (num_tokens, ms) in measure(store, count).items():
            print(f"  the prompt begins with {name}: {num_tokens} tokens, {ms:.1f} ms")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:]))
