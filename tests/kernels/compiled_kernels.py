"""Kernels compiled for a GPU that is not there: shared memory, registers and spills of the launches of a small model.

A model of one layer is attached to each method, and launches are recorded instead of made. What they leave unwritten
does not matter, because launches depend on shapes and dtypes alone. Then the recorded kernels are compiled.

    python tests/kernels/compiled_kernels.py 86                      all launches on compute capability 8.6, a line each
    python tests/kernels/compiled_kernels.py 80 --head-dim 64 --dtype float32 --methods kivi-2 qjl

Exit code 1 if a kernel does not fit. Run it without TRITON_INTERPRET; it needs Triton's compiler, and no GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, create_function_from_signature

from kvcli.kernels import launch as launches_of_kvcli

SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a block of threads may ask for, by compute capability."""

MAX_SPILLED = {80: 384, 86: 384, 89: 384}
"""Bytes that a thread may spill with models in 16 bits: CommVQ's sweep, tuned on 9.0, spills 224 there.

float32 products are made without tensor cores and spill more, on all GPUs.
"""

METHODS = ("rtn-4", "kivi-2", "kivi-4", "squat-2", "squat-pre-2", "qjl", "turboquant-2", "commvq-1", "commvq-2")

UNIFORM, RAGGED = (640, 200, 20, 8, *[1] * 33), (640, 200, 20, 8, 1)
"""Tokens of forward passes: a prompt, a long and a short chunk, queries that read codes, and steps."""


@dataclass(frozen=True)
class Launch:
    """A kernel as it was launched."""

    method: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: Any

    def describe(self) -> str:
        """Its module, name, constexprs that are numbers, warps and stages."""
        module = self.kernel.fn.__module__.removeprefix("kvcli.").removeprefix("methods.")
        sizes = [f"{self.kernel.arg_names[at]}={x}" for (at,), x in self.constants.items() if type(x) is int and x > 1]
        sizes += [f"warps={self.options.num_warps}", f"stages={self.options.num_stages}"]
        return f"{module}.{self.kernel.fn.__name__} {' '.join(sizes)}"


def pretend(capability: int) -> None:
    """Makes kernels launch as on a GPU of a compute capability; to be called before their modules are imported."""
    launches_of_kvcli.check_device = lambda device: None
    launches_of_kvcli.shared_memory_limit = lambda device: SHARED_MEMORY[capability]
    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", capability, 32)))
    from kvcli.kernels import pdl, words

    pdl.PDL_SUPPORTED = words.PACKED_MINIMUM = tl.constexpr(capability >= 90)


@contextmanager
def recorded(capability: int) -> Iterator[dict[str, Launch]]:
    """Launches inside the block, each kind once."""
    backend = make_backend(GPUTarget("cuda", capability, 32))
    found: dict[str, Launch] = {}
    binders: dict[Any, Any] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kwargs["debug"] = False
        if self not in binders:
            binders[self] = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = binders[self](*args, **kwargs)
        options, signature, constants, attributes = self._pack_args(backend, kwargs, bound, specialization, options)
        key = repr((self.fn, signature, sorted(constants.items()), options.__dict__))
        found.setdefault(key, Launch(recording, self, signature, constants, attributes, options))

    original, JITFunction.run = JITFunction.run, run
    try:
        yield found
    finally:
        JITFunction.run = original


recording = ""
"""The method that is being recorded."""


@torch.inference_mode()
def record(capability: int, methods: list[str], head_dim: int, dtype: torch.dtype) -> list[Launch]:
    """The launches of prompts, chunks and steps of a layer with 32 query heads over 8 kv heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvcli.bench.layer import MethodCase
    from kvcli.bench.model import attached
    from kvcli.cache.ranges import Ranges

    global recording
    Ranges.check = lambda self: None  # type: ignore[method-assign]  # what is not written has any value
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=32,
        num_key_value_heads=8, head_dim=head_dim, max_position_embeddings=4096, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(dtype)
    with recorded(capability) as found:
        for recording in methods:
            with attached(model, MethodCase.parse(recording, {}), "fused", 0) as session:
                for padding, passes in ((0, UNIFORM), (3, RAGGED)):
                    mask = torch.ones(2, sum(passes), dtype=torch.int64)
                    mask[1, :padding] = 0
                    cache = session.new_cache()
                    for part, total in zip(
                        torch.zeros_like(mask).split(passes, dim=1), accumulate(passes), strict=True
                    ):
                        model(part, attention_mask=mask[:, :total], past_key_values=cache, use_cache=True)
    return list(found.values())


def compile_launch(capability: int, number: int) -> tuple[int, int, int]:
    """Compiles a launch's kernel, and reads from the binary what it takes: bytes of shared memory per block, registers
    and spilled bytes per thread.
    """
    launch = launches[number]
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options.__dict__)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(found[1]) for name in ("REG", "STACK") if (found := re.search(rf"{name}:(\d+)", text)))
    return compiled.metadata.shared, registers, stack


launches: list[Launch] = []
"""What was recorded, for the processes that compile."""


def main() -> int:
    """Prints a line per launch; returns 1 if one of them does not fit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int, choices=SHARED_MEMORY)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", default="", help="a regular expression that names of kernels match")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    capability = options.capability
    pretend(capability)
    found = record(capability, options.methods, options.head_dim, getattr(torch, options.dtype))
    launches[:] = [launch for launch in found if re.search(options.kernels, launch.describe())]
    most_spilled = sys.maxsize if options.dtype == "float32" else MAX_SPILLED.get(capability, sys.maxsize)
    failed = 0
    print("shared registers spilled")
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        usages = pool.imap(partial(compile_launch, capability), range(len(launches)))
        for launch, (shared, registers, spilled) in zip(launches, usages, strict=True):
            verdict = "spills" if spilled > most_spilled else ""
            verdict = "too much shared memory" if shared > SHARED_MEMORY[capability] else verdict
            failed += bool(verdict)
            numbers = f"{shared:6d} {registers:9d} {spilled:7d}"
            print(f"{numbers}  {launch.method}: {launch.describe()}  {verdict}".rstrip(), flush=True)
    print(f"{len(launches)} launches on {capability / 10}, {failed} do not fit")
    return 1 if failed or not launches else 0


if __name__ == "__main__":
    sys.exit(main())
