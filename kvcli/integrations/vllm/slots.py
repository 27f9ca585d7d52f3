"""Where keys and values lie in the slots of vLLM's CPU tier."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcli.errors import UnsupportedModelError, UsageError
from kvcli.spec import ModelSpec

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_LAYOUTS = {"LBNHC": False, "LBHNC": True}
"""vLLM's names of layouts, and whether the heads of a page come before its tokens."""

_WHOLE_PAGES = (16, 32, 64)
"""Tokens of pages that backends take whole; they split others, whose heads then come apart."""


@dataclass(frozen=True)
class Group:
    """A group of layers that share pages.

    `layers` are indices among the model's layers of full attention; None: of other layers, whose slots are opaque.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...] | None
    page_tokens: int


class Slots:
    """The geometry of a slot: [ranks, tensors, pages of a chunk, bytes of a page], and bytes that nobody uses.

    A page of attention is [tokens, heads of the rank, 2 * head_dim] in vLLM's layout LBNHC, [heads, tokens, 2 *
    head_dim] in LBHNC: keys, then values. The i-th layer of each group has the i-th tensor.

    Args:
        config: vLLM's OffloadingConfig.

    UsageError, UnsupportedModelError: pages that hold something else; the message names it.
    """

    def __init__(self, config: Any, spec: ModelSpec, layer_index: Callable[[str], int]) -> None:
        parallel, self.spec = config.parallel, spec
        for what, on in {
            "pipeline parallelism": parallel.pp_size > 1,
            "context parallelism": parallel.dcp_size > 1 or parallel.pcp_size > 1,
            "canonical_layout": config.canonical_layout,
            "one copy for all ranks (replicated_layout)": config.replicated_layout,
            f"a cache of {config.model.dtype}": config.model.dtype not in _DTYPES,
            f"the page layout {config.kv_cache_layout}": config.kv_cache_layout not in _LAYOUTS,
        }.items():
            if on:
                raise UsageError(f"{what} and a tier of codes do not go together")
        if spec.latent or spec.value_dim != spec.head_dim:
            raise UnsupportedModelError("pages of latents, or of values narrower than keys, have no codes in the tier")
        self.dtype, self.heads_first = _DTYPES[config.model.dtype], _LAYOUTS[config.kv_cache_layout]
        self.ranks, self.pages = parallel.tp_size, config.cache.blocks_per_chunk
        self.rank_heads = max(1, spec.num_kv_heads // self.ranks)
        self.copies = self.rank_heads * self.ranks // spec.num_kv_heads
        if self.rank_heads * self.ranks != self.copies * spec.num_kv_heads:
            raise UsageError(f"{self.ranks} ranks cannot share {spec.num_kv_heads} kv heads evenly")
        own = {spec.in_model(i): i for i in range(spec.num_layers)}
        self.groups: dict[int, Group] = {}
        for group in config.groups:
            layers = [own.get(self._index(name, layer_index)) for name in group.layer_names]
            known = tuple(x for x in layers if x is not None)
            if known and len(known) < len(layers):
                raise UnsupportedModelError("layers with and without full attention share pages in this model")
            self.groups[group.group_id] = Group(tuple(group.layer_names), known or None, group.tokens_per_block)
            if known and self.heads_first and group.tokens_per_block not in _WHOLE_PAGES:
                raise UsageError(f"pages of {group.tokens_per_block} tokens in the layout LBHNC: say --block-size 64")
        if len({re.split(r"\.\d+", name, maxsplit=1)[0] for x in self.groups.values() for name in x.names}) > 1:
            raise UsageError(
                "layers of several models, as of speculative decoding, and a tier of codes do not go together"
            )
        groups = self.groups.values()
        self.tensors = max(len(group.names) for group in groups)
        self.page_bytes, rest = divmod(config.worker_kv_bytes_per_block, self.tensors)
        used = {self._page_numbers(x) * self.dtype.itemsize for x in groups if x.layers}
        padded = any(x.layers is None for x in groups)  # to pages of states
        fits = used == {self.page_bytes} or (padded and bool(used) and max(used) <= self.page_bytes)
        if rest or self.page_bytes % self.dtype.itemsize or not fits:
            raise UnsupportedModelError(
                f"{config.worker_kv_bytes_per_block} bytes per block of {self.tensors} layers are no pages of "
                f"{self.rank_heads} heads of {spec.head_dim} channels"
            )

    def _index(self, name: str, layer_index: Callable[[str], int]) -> int:
        """The layer of the model that vLLM calls so; UsageError: it is none of the model's."""
        try:
            found = layer_index(name)
        except AssertionError as error:
            raise UnsupportedModelError(f"which layer is '{name}'? {error}") from error
        if found >= self.spec.model_layers:
            raise UsageError(f"'{name}' (speculative decoding) and a tier of codes do not go together")
        return found

    def chunk_tokens(self, group: Group) -> int:
        """Tokens of a chunk."""
        return group.page_tokens * self.pages

    def plain_bytes(self, group: Group) -> int:
        """Bytes of a chunk of this group in a slot."""
        return self.ranks * len(group.names) * self.pages * self.page_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that chunks can have."""
        return self.ranks * self.tensors * self.pages * self.page_bytes

    def raw(self, rows: Tensor, group: Group) -> Tensor:
        """A view of a chunk of this group in slots uint8 [n, bytes]: [n, ranks, layers, pages, page bytes]."""
        x = rows[:, : self.slot_bytes].unflatten(1, (self.ranks, self.tensors, self.pages, self.page_bytes))
        return x[:, :, : len(group.names)]

    def read(self, rows: Tensor, group: Group, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the group's i-th layer, [n, num_kv_heads, tokens, head_dim], of slots uint8 [n, bytes]."""
        x = self._attention(rows, group)[:, :: self.copies, layer_idx]
        keys, values = x.transpose(2, 3).flatten(3, 4).flatten(1, 2).split(self.spec.head_dim, dim=-1)
        return keys, values

    def write(self, rows: Tensor, group: Group, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """The opposite of `read`."""
        target = self._attention(rows, group)[:, :, layer_idx]
        for first, x in ((0, keys), (self.spec.head_dim, values)):
            pages = x.unflatten(2, (self.pages, group.page_tokens)).unflatten(1, (-1, self.rank_heads)).transpose(2, 3)
            of_ranks = pages if self.copies == 1 else pages.repeat_interleave(self.copies, dim=1)
            target[..., first : first + self.spec.head_dim] = of_ranks

    def _attention(self, rows: Tensor, group: Group) -> Tensor:
        """A view of slots as [n, ranks, layers, pages, heads of a rank, tokens of a page, 2 * head_dim]."""
        x = self.raw(rows, group)[..., : self._page_numbers(group) * self.dtype.itemsize].view(self.dtype)
        shape: Sequence[int] = (self.rank_heads, group.page_tokens, 2 * self.spec.head_dim)
        if self.heads_first:
            return x.unflatten(-1, shape)
        return x.unflatten(-1, (shape[1], shape[0], shape[2])).transpose(4, 5)

    def _page_numbers(self, group: Group) -> int:
        return 2 * self.rank_heads * group.page_tokens * self.spec.head_dim
