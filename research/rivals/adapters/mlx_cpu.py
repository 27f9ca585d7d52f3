"""mlx on Linux's CPU: QuantizedKVCache of mlx-lm; bytes are those of its `nbytes`."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from research.rivals.engines import EngineSetting
from research.rivals.protocol import Job

TOKENS = 256


@functools.cache
def loaded(path: str) -> Any:
    """The model of a folder of transformers, in float32: on a CPU, products in 16 bits take minutes."""
    model = load(path)[0]
    model.set_dtype(mx.float32)
    return model


class Reader:
    """The model and a cache per layer; bits: None is the ordinary cache."""

    def __init__(self, job: Job, bits: int | None) -> None:
        self.model = loaded(str(job.folder / "model"))
        self.caches = [KVCache() if bits is None else QuantizedKVCache(64, bits) for _ in self.model.layers]

    def read(self, tokens: list[int]) -> Any:
        """Logits of all tokens."""
        return np.array(self.model(mx.array([tokens]), cache=self.caches)[0].astype(mx.float32))

    def held(self) -> int:
        """Bytes of all layers, with what is allocated ahead."""
        return sum(x.nbytes for x in self.caches)


def stock(job: Job) -> Reader:
    """The ordinary cache."""
    return Reader(job, None)


SETTINGS = [
    EngineSetting(f"{bits} bits", f"{bits}.5 bits", functools.partial(Reader, bits=bits), stock, TOKENS, "float32")
    for bits in (8, 4)
]
