"""Kernels compiled side by side, before they are launched for the first time; those that Triton has compiled."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
import triton
from torch import Tensor

from kvcli.progress import Progress


@contextmanager
def compiled_not_launched(progress: Progress) -> Iterator[list[str]]:
    """Kernels of kvcli that this thread launches inside the block do not run; after it they are compiled and loaded.

    What they would have written keeps any value. Each variant is compiled once: with Triton 3.5 and newer on all cores,
    because its compiler runs without Python's lock; before that one after another.

    Yields:
        a list that has the name of each variant's kernel after the block.
    """
    variants: dict[Any, tuple[torch.device, Callable[[], Any]]] = {}
    names: list[str] = []
    thread, run = get_ident(), triton.JITFunction.run

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if get_ident() != thread or not kernel.fn.__module__.startswith("kvcli."):
            return run(kernel, *args, grid=grid, warmup=warmup, **options)
        device = next(x.device for x in args if isinstance(x, Tensor))
        key = kernel, device, *map(_specialized, kernel.params, args), *options.items()
        if key not in variants:
            names.append(kernel.fn.__name__)
            variants[key] = device, partial(run, kernel, *args, grid=grid, warmup=True, **options)
        return None

    triton.JITFunction.run = note
    try:
        yield names
    finally:
        triton.JITFunction.run = run
    if variants:
        _compile(list(variants.values()), progress)


def _specialized(parameter: Any, argument: Any) -> Any:
    """What of an argument a variant of a kernel is compiled for."""
    if isinstance(argument, Tensor):
        return argument.dtype, parameter.do_not_specialize_on_alignment or argument.data_ptr() % 16 == 0
    if parameter.is_constexpr or type(argument) is not int:
        return argument if parameter.is_constexpr else type(argument)
    narrow = -(2**31) <= argument < 2**31
    return narrow if parameter.do_not_specialize else (narrow, argument == 1, argument % 16 == 0)


def _compile(variants: list[tuple[torch.device, Callable[[], Any]]], progress: Progress) -> None:
    """Compiles what the functions return, then loads it, which raises for kernels that do not fit the GPU."""

    def build_launcher(variant: tuple[torch.device, Callable[[], Any]]) -> None:
        """Compiles the kernel's launcher in C onto the disk."""
        with torch.cuda.device(variant[0]), suppress(AttributeError, TypeError):  # a Triton with other launchers
            kernel = variant[1]()
            # not `kernel.run`, which would keep it: launchers are modules of one name, and Python gives two threads
            # that load two of them again the same module, with the functions of either
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        mode: Any = triton.AsyncCompileMode(pool) if hasattr(triton, "AsyncCompileMode") else None  # since 3.5
        with progress("compiling kernels", len(variants), "kernels") as advance, mode or nullcontext():
            for device, compile_one in variants:
                with torch.cuda.device(device):
                    compile_one()
                advance(mode is None)
            for _ in as_completed(mode.raw_futures if mode else ()):
                advance(1)
        with progress("loading kernels", len(variants), "kernels") as advance:
            list(pool.map(build_launcher, variants))
            for device, compile_one in variants:
                with torch.cuda.device(device):
                    compile_one().run  # noqa: B018  # a property that loads
                advance(1)


@dataclass(frozen=True)
class CompiledKernels:
    """Kernels on disk.

    Attributes:
        folder: Triton's cache.
        counts: variants by compute capability, such as 90.
        nbytes: their files.
    """

    folder: Path
    counts: dict[str, int]
    nbytes: int


def compiled_kernels(folder: Path | None = None) -> CompiledKernels:
    """Those in a folder, by default the one that `TRITON_CACHE_DIR` names, else Triton's own."""
    folder = folder or Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    sources = Path(__file__).parent.parent.rglob("*.py")
    ours = {name for path in sources for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    counts: dict[str, int] = {}
    nbytes = 0
    for path in folder.glob("*/*_kernel.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(path.read_text())
            if found["name"] in ours:
                capability = str(found["target"]["arch"])
                counts[capability] = counts.get(capability, 0) + 1
                nbytes += sum(file.stat().st_size for file in path.parent.iterdir())
    return CompiledKernels(folder, counts, nbytes)
