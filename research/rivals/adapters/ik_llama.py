"""ik-llama-cpp-python: types of llama.cpp's cache, with Hadamard rotations of keys and values and without.

Bytes are those of `llama_state_seq_get_size`: what the program would write to save the sequence.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from ik_llama_cpp import _ctypes_api as api
from ik_llama_cpp._internals import IkModel, make_batch_range

from research.rivals.engines import EngineSetting
from research.rivals.protocol import Job

TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}
_SIZE = api._lib.llama_state_seq_get_size
_SIZE.argtypes, _SIZE.restype = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32], ctypes.c_size_t


@functools.cache
def load(path: str) -> IkModel:
    """The model of a GGUF file."""
    return IkModel(path)


class Context:
    """A context of llama.cpp, with flash attention, which quantized values ask for."""

    def __init__(self, job: Job, name: str, rotated: bool) -> None:
        self.model = load(str(job.folder / "model.gguf"))
        options = api.llama_context_default_params()
        options.n_ctx = options.n_batch = 2048
        options.n_threads = options.n_threads_batch = 1
        options.flash_attn = True
        options.type_k = options.type_v = TYPES[name]
        options.k_cache_hadamard = options.v_cache_hadamard = rotated
        self.place, self.context = 0, api.llama_init_from_model(self.model.model, options)
        if not self.context:
            raise RuntimeError("the context is not made")

    def read(self, tokens: list[int]) -> Any:
        """Logits of all tokens."""
        batch = make_batch_range(tokens, pos_start=self.place)
        for at in range(len(tokens)):
            batch.logits[at] = 1
        status = api.llama_decode(self.context, batch)
        api.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode ended with {status}")
        self.place += len(tokens)
        rows = (api.llama_get_logits_ith(self.context, at) for at in range(len(tokens)))
        return np.stack([np.ctypeslib.as_array(row, (self.model.n_vocab,)).copy() for row in rows])

    def held(self) -> int:
        """Bytes of the state of the sequence."""
        return int(_SIZE(self.context, 0, 0))

    def __del__(self) -> None:
        if self.context:
            api.llama_free(self.context)


def stock(job: Job) -> Context:
    """The default cache."""
    return Context(job, "f16", rotated=False)


CLAIMS = {"f16": "16 bits", "q8_0": "8.5 bits", "q4_0": "4.5 bits"}
SETTINGS = [
    EngineSetting(
        f"{name}{', Hadamard' if rotated else ''}",
        CLAIMS[name],
        functools.partial(Context, name=name, rotated=rotated),
        stock,
    )
    for name, rotated in (("f16", False), ("q8_0", False), ("q8_0", True), ("q4_0", False), ("q4_0", True))
]
