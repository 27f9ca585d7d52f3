"""Attention of other libraries over uncompressed keys and values, beside torch's SDPA: `--baseline`.

No library is a dependency: one that is asked for is imported. It is planned for a shape outside of CUDA graphs, then
called for one query token of each sequence, with keys and values as a cache of transformers has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from kvcli.errors import UsageError, error_text
from kvcli.registry import BASELINE

if TYPE_CHECKING:
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

    def keep(self, x: Tensor) -> Tensor:
        """Keys or values as the library takes them."""
        import torch

        return x.to(torch.float8_e4m3fn) if self.name.endswith("-e4m3") else x

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


def over_fastest(
    record: Mapping[str, Any], records: Sequence[Mapping[str, Any]], rate: Callable[[Mapping[str, Any]], float | None]
) -> str:
    """The rate of a record over that of the fastest of `FP16_ROWS` with its context and batch, as text."""
    place = record["context"], record["batch"]
    alike = [x for x in records if x["method"] in FP16_ROWS and (x["context"], x["batch"]) == place]
    own, fastest = rate(record), max((rate(x) or 0.0 for x in alike if x["status"] == "ok"), default=0.0)
    return f"{own / fastest:.2f}" if own and fastest else "-"
