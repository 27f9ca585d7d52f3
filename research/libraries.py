"""Suites `attention` and `generate` with `--baseline`: attention of other libraries over uncompressed keys and values.

No library is a dependency: one that is asked for is imported. It is planned for a shape outside of CUDA graphs, then
called for one query token of each sequence, with keys and values as a cache of transformers has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from kvcli.bench import attention, generate
from kvcli.bench.suite import BenchRows, Row, parse_batches, run_row
from kvcli.commands.suite import Records, SideBySide
from kvcli.commands.tables import DataTable
from kvcli.errors import UsageError, error_text
from kvcli.progress import Reporter
from kvcli.registry import BASELINE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvcli.bench.layer import Agreement

BaselineName = Literal["fa3", "fa3-e4m3", "flashinfer", "flashinfer-e4m3"]
"""Libraries; with `-e4m3`, keys and values are of fp8, without scales, and FlashAttention's query too."""

FP16_ROWS = (BASELINE, "fa3", "flashinfer")
"""Rows whose keys and values are in the dtype of the model."""

BASELINE_HELP = (
    "rows of another library's attention over uncompressed keys and values: fa3, fa3-e4m3, flashinfer or "
    "flashinfer-e4m3; repeatable; default: none"
)

Attend = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""(query, key, value) to the output, of the query's shape; scores are scaled by head_dim ** -0.5."""

_PACKAGES = {
    "fa3": (
        ("flash_attn_interface", "vllm.vllm_flash_attn.flash_attn_interface"),
        "build the folder `hopper` of flash-attention, or pip install a vllm for this torch",
    ),
    "flashinfer": (("flashinfer",), "pip install flashinfer-python"),
}
"""Modules with a library's attention, the first choice first, and how to install one."""

_TOLERANCE_8 = 5e-2
"""Largest allowed `out_error` where the weights of the values are rounded to 8 bits, too."""


@dataclass(frozen=True)
class Baseline:
    """Attention of an imported library."""

    name: BaselineName
    library: Any

    @property
    def dtype(self) -> torch.dtype | None:
        """Of keys and values; None: that of the model."""
        import torch

        return torch.float8_e4m3fn if self.name.endswith("-e4m3") else None

    def keep(self, x: Tensor) -> Tensor:
        """Keys or values as the library takes them."""
        return x.to(self.dtype)

    def ask(self, query: Tensor) -> Tensor:
        """A query as the library takes it."""
        return self.keep(query) if self.name == "fa3-e4m3" else query

    def plan(self, query: Tensor, key: Tensor) -> Attend:
        """Attention for one shape, which CUDA graphs can capture.

        Args:
            query: [batch, num_heads, 1, head_dim], from `ask`.
            key: contiguous, [batch, num_kv_heads, tokens, head_dim], from `keep`; values are like it.
        """
        return (_flashinfer if self.name.startswith("flashinfer") else _flash_attention)(self.library, query, key)

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Agreement, partial[Tensor]]:
        """How attention compares with the reference on the tensors as the library takes them, and its call."""
        from kvcli.attention.reference import partial_attention
        from kvcli.bench.layer import TOLERANCE_16, Agreement

        query, key, value = self.ask(query), self.keep(key), self.keep(value)
        attend = partial(self.plan(query, key), query, key, value)
        expected, _ = partial_attention(query, key, value, None, query.shape[-1] ** -0.5)
        error = float((attend().float() - expected).norm() / expected.norm())
        return Agreement(error, None, _TOLERANCE_8 if self.name == "fa3-e4m3" else TOLERANCE_16), attend


def load_baselines(names: Sequence[BaselineName]) -> list[Baseline]:
    """The libraries, imported; UsageError: one cannot be, with the reason and how to install it."""
    return [Baseline(name, _library(name)) for name in dict.fromkeys(names)]


def _library(name: BaselineName) -> Any:
    modules, install = _PACKAGES[name.removesuffix("-e4m3")]
    reasons = []
    for module in modules:
        try:
            library = import_module(module)
            if getattr(library, "FA3_AVAILABLE", True):  # vllm says so where its extension cannot be loaded
                return library
            reasons.append(f"{module}: {library.FA3_UNAVAILABLE_REASON}")
        except (ImportError, OSError, RuntimeError) as error:  # of a build for another torch, too
            reasons.append(f"{module}: {error_text(error)}")
    raise UsageError(f"--baseline {name} cannot be imported ({'; '.join(reasons)}): {install}")


def _flash_attention(library: Any, query: Tensor, key: Tensor) -> Attend:
    """FlashAttention-3, of its own package or of vllm, whose build has kernels for sequences of any lengths only."""
    import torch

    if not hasattr(library, "FA3_AVAILABLE"):
        attend = library.flash_attn_with_kvcache
        return lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    (batch, num_heads, _, head_dim), (num_kv_heads, tokens) = query.shape, key.shape[1:3]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=key.device)
    lengths = torch.full_like(starts[1:], tokens)
    sizes = (batch, 1, tokens, num_heads, num_kv_heads, head_dim)
    attend = partial(
        library.flash_attn_varlen_func,
        **{"max_seqlen_q": 1, "cu_seqlens_q": starts, "max_seqlen_k": tokens, "seqused_k": lengths, "fa_version": 3},
        # else a kernel makes it in every call
        scheduler_metadata=library.get_scheduler_metadata(*sizes, lengths, key.dtype, cu_seqlens_q=starts),
    )
    return lambda q, k, v: attend(q.squeeze(2), k.transpose(1, 2), v.transpose(1, 2)).unsqueeze(2)


def _flashinfer(library: Any, query: Tensor, key: Tensor) -> Attend:
    """FlashInfer's decoding over pages, each of one token of a cache that stays as it is.

    Its backend `fa2` is the one that shares a sequence among all multiprocessors.
    """
    import torch

    (batch, num_heads, _, head_dim), (num_kv_heads, tokens) = query.shape, key.shape[1:3]
    rows = torch.arange(batch + 1, dtype=torch.int32)
    workspace = torch.zeros(128 * 2**20, dtype=torch.uint8, device=key.device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True, backend="fa2")
    pages = (rows[:-1, None] * num_kv_heads * tokens + torch.arange(tokens)).flatten().int().to(key.device)
    heads = {"num_qo_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": 1}
    dtypes = {"q_data_type": query.dtype, "kv_data_type": key.dtype}
    wrapper.plan(rows * tokens, pages, torch.ones_like(rows[1:]), **heads, **dtypes)
    size = (((batch - 1) * num_kv_heads + 1) * tokens, num_kv_heads, 1, head_dim)
    stride = (head_dim, tokens * head_dim, head_dim, 1)  # from page to page, head to head, token to token
    return lambda q, k, v: wrapper.run(q.squeeze(2), tuple(x.as_strided(size, stride) for x in (k, v))).unsqueeze(2)


class AttentionOptions(attention.AttentionOptions):
    """Options of `python -m research bench attention`."""

    baseline: list[BaselineName] = Field(default=[], description=BASELINE_HELP)


class GenerateOptions(generate.GenerateBenchOptions):
    """Options of `python -m research bench generate`."""

    baseline: list[BaselineName] = Field(default=[], description=BASELINE_HELP)

    def check(self) -> None:
        super().check()
        if parse_batches(self.batches) is None and self.baseline:
            raise UsageError("--baseline goes with numbers of --batches, not with auto")


def prepare_attention(options: AttentionOptions, reporter: Reporter) -> BenchRows:
    """Rows of SDPA, of other libraries and of methods."""
    import torch

    from kvcli.bench.layer import uncompressed_layer
    from kvcli.bench.timing import time_call
    from kvcli.models.shapes import shape_spec

    libraries, prepared = load_baselines(options.baseline), attention.prepare(options, reporter)
    spec, device = shape_spec(options.shape), torch.device(options.torch_device())
    dtype: torch.dtype = getattr(torch, prepared.shared["dtype"])

    def measure(library: Baseline, row: Row) -> Row:
        layer = uncompressed_layer(spec, row.batch, row.context, device, dtype, options.seed)
        agreement, attend = library.check(*layer)
        row, stored_bytes = row.checked(agreement), 2 * attend.args[1].nbytes
        return attention.timed(row, time_call(attend, device, options.repeats), stored_bytes, row.context, spec.kv_dim)

    def rows() -> Iterator[Row]:
        for row in prepared.rows:
            yield row
            for library in libraries if row.method == BASELINE else ():
                figures = {"sdpa_us": row.figures.get("sdpa_us")}
                empty = Row(library.name, row.context, row.batch, library.name, figures=figures)
                yield run_row(partial(measure, library), empty)

    return replace(prepared, rows=rows(), total=prepared.total * (1 + len(libraries)))  # at most


def prepare_generate(options: GenerateOptions, reporter: Reporter) -> BenchRows:
    """Rows of fp16, of other libraries and of methods, timed."""
    from research.library_bench import LibraryBench

    libraries = load_baselines(options.baseline)
    prepared = generate.prepare_generate(options, reporter, partial(LibraryBench, libraries=libraries))
    return replace(prepared, total=prepared.total * (1 + len(libraries)))  # at most


def over_fastest(
    record: Mapping[str, Any], records: Sequence[Mapping[str, Any]], rate: Callable[[Mapping[str, Any]], float | None]
) -> str:
    """The rate of a record over that of the fastest of `FP16_ROWS` with its context and batch, as text."""
    place = record["context"], record["batch"]
    alike = [x for x in records if x["method"] in FP16_ROWS and (x["context"], x["batch"]) == place]
    own, fastest = rate(record), max((rate(x) or 0.0 for x in alike if x["status"] == "ok"), default=0.0)
    return f"{own / fastest:.2f}" if own and fastest else "-"


def with_fastest(made: DataTable, records: Records, rate: Callable[[Mapping[str, Any]], float | None]) -> DataTable:
    """The table of the records with the column `x fastest`, after the one that compares with fp16."""
    after = 1 + next(at for at, column in enumerate(made.columns) if column in ("x SDPA", "x tok/s"))

    def wider(cells: Sequence[str], cell: str) -> list[str]:
        return [*cells[:after], cell, *cells[after:]]

    found = [over_fastest(x, records, rate) if x["status"] == "ok" else "-" for x in records]
    rows = [wider(cells, cell) for cells, cell in zip(made.rows, found, strict=True)]
    title = f"{made.title}; x fastest: over the fastest row of 16 bits"
    return replace(made, title=title, columns=wider(made.columns, "x fastest"), rows=rows)


def attention_table(records: Records, options: AttentionOptions) -> DataTable:
    """Times of one layer, compared with SDPA and the fastest."""
    made = attention.table(records, options)
    return with_fastest(made, records, lambda x: 1 / x["p50_us"]) if options.baseline else made


def generate_table(records: Records, options: GenerateOptions) -> DataTable:
    """Rates and memory of whole models, compared with fp16 and the fastest."""
    made = generate.generate_table(records, options)
    return (
        with_fastest(made, records, lambda x: x["tokens_per_s"] and x["tokens_per_s"][1]) if options.baseline else made
    )


ATTENTION = replace(
    attention.SUITE,
    options=AttentionOptions,
    example="python -m research bench attention --shape smollm2-135m --contexts 256 --baseline fa3",
    prepare=prepare_attention,
    tabulate=attention_table,
    side_by_side=SideBySide("context", ("p50 us",), ("bits", "x SDPA", "x fastest", "GB/s")),
)
GENERATE = replace(
    generate.SUITE,
    options=GenerateOptions,
    example="python -m research bench generate --prompt-tokens 1024 --baseline fa3",
    prepare=prepare_generate,
    tabulate=generate_table,
)
