"""Kernels compiled for a GPU that is not there: shared memory, registers and spills of the launches of a small model.

A model of one layer is attached to each method, and launches are recorded instead of made. What they leave unwritten
does not matter, because launches depend on shapes and dtypes alone. Then the recorded kernels are compiled.

    python tests/kernels/compiled_kernels.py 86                      all launches on compute capability 8.6, a line each
    python tests/kernels/compiled_kernels.py 80 --head-dim 64 --dtype float32 --methods kivi-2 qjl
    python tests/kernels/compiled_kernels.py 120 --heads 7 --kv-heads 1 --shared-only     not down to a binary: faster
    python tests/kernels/compiled_kernels.py 90 --page-size 16                   attention over codes in pages

Exit code 1 if a kernel does not compile or fit. Run it without TRITON_INTERPRET; it needs Triton's compiler only.
"""

import argparse
import hashlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir, llvm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, create_function_from_signature

from kvcli.artifact.choice import MethodChoice
from kvcli.kernels import launch as launches_of_kvcli
from kvcli.seam.versions import with_cache

SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that a block of threads may ask for, by compute capability."""

MAX_SPILLED = {80: 384, 86: 384, 89: 384, 120: 416}
"""Bytes that a thread may spill with models in 16 bits: CommVQ's sweep, tuned on 9.0, spills 224.

float32 products are made without tensor cores and spill more, on all GPUs.
"""

METHODS = (
    "rtn-4", "fp8", "kivi-2", "kivi-4", "squat-2", "squat-pre-2", "qjl", "turboquant-2", "turboquant-3", "oscar",
    "kvquant", "klt-2", "klt-tcq-2", "commvq-1", "commvq-2",
)  # fmt: skip

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

    @cached_property
    def fingerprint(self) -> str:
        """Equal for launches that compile to the same on one GPU."""
        what = (self.kernel.cache_key, self.signature, sorted(self.constants.items()), sorted(self.attributes.items()))
        return hashlib.sha256(repr((triton.__version__, *what, self.options.__dict__)).encode()).hexdigest()


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
def record(
    capability: int, methods: Iterable[str], head_dim: int, dtype: torch.dtype, heads: int = 32, kv_heads: int = 8,
    page_size: int = 0,
) -> tuple[list[Launch], dict[str, str]]:  # fmt: skip
    """The launches of prompts, chunks and steps of a layer, and the notes of methods at attach.

    With a page size, those of a step alone that reads codes from pages, and those of exact tokens in an engine.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvcli.attention import backend, chunk_kernels, decoded, session
    from kvcli.bench.layer import encoded_layer
    from kvcli.bench.model import open_session
    from kvcli.cache.ranges import Ranges
    from kvcli.seam.probe import probe

    def merged(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> None:
        """Launches what follows FlashAttention; where a GPU has none, the kernel that follows runs."""
        if dtype != torch.float32:
            state = torch.empty(query.shape), torch.empty(query.shape[:3])
            chunk_kernels.merge(state, (torch.empty_like(query), state[1]))

    global recording
    Ranges.check = lambda self: None  # type: ignore[method-assign]  # what is not written has any value
    decoded.fused_sdpa = merged  # type: ignore[assignment]
    choose = partial(backend.choose_backend, impl="auto", device=torch.device("cuda"))
    session.choose_backend = lambda method, codecs, impl, device: choose(method, codecs)  # type: ignore[assignment]
    config = LlamaConfig(
        vocab_size=97, hidden_size=2 * heads, intermediate_size=96, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=4096, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(dtype)
    notes = {}
    with recorded(capability) as found:
        for recording in methods:
            with open_session(model, MethodChoice(recording), "auto", 0) as attached:
                if attached.backend.note is not None:
                    notes[recording] = attached.backend.note
                if page_size:
                    seam, where = probe(model), {"device": torch.device("cpu"), "dtype": dtype, "seed": 0}
                    case, shape = MethodChoice(recording), {"layer_idx": 0, "context": 512, "batch": 2}
                    layer = encoded_layer(case, seam.spec, seam.rope, **shape, **where).in_pages(page_size)
                    layer.attend(attached.backend.attend_codes, layer.encoded_tokens())
                    launch_exact(page_size, seam.spec, dtype)
                    if attached.codecs[0].new_state(1, model.device) is None:  # others are not encoded in pages
                        launch_encoders(attached.codecs[0], attached.backend.unrotate, seam, dtype)
                    continue
                for padding, passes in ((0, UNIFORM), (3, RAGGED)):
                    mask = torch.ones(2, sum(passes), dtype=torch.int64)
                    mask[1, :padding] = 0
                    cache = attached.new_cache()
                    for part, total in zip(
                        torch.zeros_like(mask).split(passes, dim=1), accumulate(passes), strict=True
                    ):
                        model(part, attention_mask=mask[:, :total], **with_cache(cache))
                    # kernels of these add scores of a constant key
                    if recording.startswith(("qjl", "commvq", "rtn", "turboquant")):
                        attached.codecs[0].key_offset = torch.ones(kv_heads, head_dim)
    return list(found.values()), notes


def launch_exact(page_size: int, spec: Any, dtype: torch.dtype) -> None:
    """Launches the kernels of exact tokens of an engine, with few and many tokens of a request."""
    from kvcli.methods.pages import PageTable
    from kvcli.paged import batch_kernels
    from kvcli.paged import kernels as paged_kernels
    from kvcli.paged.batch import UniformBatch
    from kvcli.paged.pages import NewCodes
    from kvcli.rope import NoRope, TokenRotations

    query, key = (torch.empty(640, heads, spec.head_dim, dtype=dtype) for heads in (spec.num_heads, spec.num_kv_heads))
    stored = torch.empty(2, 63, 2, *key.shape[1:], dtype=dtype)
    row, table = torch.zeros(1, dtype=torch.int64), PageTable(torch.zeros(1, 2, dtype=torch.int32), page_size)
    rotations = TokenRotations.first(NoRope(spec.head_dim, row.device), 1, row.device)
    for count in (1, 640):
        part = UniformBatch(torch.arange(count)[None], 0, row, row.int(), row, table, rotations, has_codes=True)
        others = torch.empty(1, spec.num_heads, count, spec.head_dim), torch.empty(1, spec.num_heads, count)
        for new, state in ((True, None), (False, others)):
            paged_kernels.attend(query, key, key, stored[:, :4], stored, part, row, others, 1.0, None, new=new)
            paged_kernels.merge(part, others, state, None, query)
    for some in (row, row.expand(70)):
        batch_kernels.advance(some, table.table, some, page_size, row.expand(4, 3), row, row, 32, 32)
    batch_kernels.place(row, row, row, row, row, 0, page_size=page_size, group=32, sinks=4, ring_length=63)
    blank, index = torch.zeros(7, dtype=torch.bool), torch.zeros(7, dtype=torch.int64)
    batch: Any = SimpleNamespace(
        stored=index, is_blank=blank, sinks=index.expand(2, -1), ring_copies=index[:1].expand(4, 1)
    )
    paged_kernels.prepare(key, key, stored[:, :4], stored, batch)
    paged_kernels.gather(key, stored.flatten(0, 1), torch.ones(32, dtype=torch.bool), index[:1].expand(32))
    rows = (torch.empty(heads, 3, size, dtype=torch.uint8) for heads, size in ((1, 272), (8, 1)))
    fields = [SimpleNamespace(rows=x, place=torch.zeros(4, dtype=torch.int32)) for x in rows]
    layout: Any = SimpleNamespace(fields_of=lambda *codes: fields)
    new = NewCodes(index[:3], index[:3], layout, layout)
    paged_kernels.put(torch.empty(2, 20480, dtype=torch.uint8), new, new)


def launch_encoders(codec: Any, unrotate: Any, seam: Any, dtype: torch.dtype) -> None:
    """Launches the kernels that encode the tokens of a step in an engine, keys less an offset."""
    spec, count, peak = seam.spec, codec.key.tokens_per_group, torch.zeros(())
    x = torch.zeros(1, spec.num_kv_heads, count, spec.head_dim, dtype=dtype)
    codec.key_offset = torch.ones(spec.num_kv_heads, spec.head_dim) if codec.needs_rotations else None
    keys = codec.encoder_input(x, seam.rope.rotation(torch.arange(count)[None], torch.float32), unrotate)
    for part, tokens in ((codec.key, keys), (codec.value, x)):
        part.encode_noted(tokens, peak)


def shared_memory(capability: int, launch: Launch) -> int:
    """Bytes per block of a launch's kernel, compiled to LLVM's intermediate representation, not optimized."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    source, context = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, launch.options, source.language)
    generators, modules = backend.get_codegen_implementation(launch.options), backend.get_module_map()
    module = source.make_ir(target, launch.options, generators, modules, context)
    metadata = {"target": target, **launch.options.__dict__}
    with patch.object(llvm, "optimize_module", lambda *options: None):
        for stage in ("ttir", "ttgir", "llir"):
            module = stages[stage](module, metadata)
    return metadata["shared"]


def usage(capability: int, launch: Launch) -> tuple[int, int, int]:
    """Compiles a launch's kernel, and reads from the binary what it takes: bytes of shared memory per block, registers
    and spilled bytes per thread.
    """
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options.__dict__)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(found[1]) for name in ("REG", "STACK") if (found := re.search(rf"{name}:(\d+)", text)))
    return compiled.metadata.shared, registers, stack


def compile_launch(capability: int, shared_only: bool, number: int) -> tuple[tuple[int, int, int], str]:
    """`usage` of a recorded launch, the first number alone if `shared_only`; and why it does not compile, or ""."""
    launch = launches[number]
    try:
        return ((shared_memory(capability, launch), 0, 0) if shared_only else usage(capability, launch)), ""
    except Exception as error:
        return (0, 0, 0), f"does not compile: {error!r}"


launches: list[Launch] = []
"""What was recorded, for the processes that compile."""


def main() -> int:
    """Prints a line per launch; returns 1 if one of them does not fit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int, choices=SHARED_MEMORY)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--shared-only", action="store_true", help="no binary, so neither registers nor spills")
    parser.add_argument("--page-size", type=int, default=0, help="of codes in pages, which a step reads; 0: in rows")
    parser.add_argument("--kernels", default="", help="a regular expression that names of kernels match")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    capability = options.capability
    pretend(capability)
    found, notes = record(
        capability, options.methods, options.head_dim, getattr(torch, options.dtype), options.heads, options.kv_heads,
        options.page_size,
    )  # fmt: skip
    print("\n".join(f"{method}: {note}" for method, note in notes.items()))
    launches[:] = [launch for launch in found if re.search(options.kernels, launch.describe())]
    most_spilled = sys.maxsize if options.dtype == "float32" else MAX_SPILLED.get(capability, sys.maxsize)
    failed = 0
    print("shared registers spilled")
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        usages = pool.imap(partial(compile_launch, capability, options.shared_only), range(len(launches)))
        for launch, ((shared, registers, spilled), problem) in zip(launches, usages, strict=True):
            verdict = "spills" if spilled > most_spilled else problem
            verdict = "too much shared memory" if shared > SHARED_MEMORY[capability] else verdict
            failed += bool(verdict)
            numbers = f"{shared:6d} {registers:9d} {spilled:7d}"
            print(f"{numbers}  {launch.method}: {launch.describe()}  {verdict}".rstrip(), flush=True)
    print(f"{len(launches)} launches on {capability / 10}, {failed} do not fit")
    return 1 if failed or not launches else 0


if __name__ == "__main__":
    sys.exit(main())
