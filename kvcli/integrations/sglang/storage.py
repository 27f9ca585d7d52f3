"""SGLang's storage backend: pages that leave host memory are stored as codes, and come back as pages.

SGLang keeps its own cache and attention, and calls a backend in threads of its own, one for reading, one for writing.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.runtime_context import get_server_args, process_model_config
from torch import Tensor

from kvcli.contexts.chunks import used_now
from kvcli.errors import UnsupportedModelError, UsageError
from kvcli.integrations.chunks.codec import ChunkCodec
from kvcli.integrations.chunks.format import DTYPES, ChunkLayout
from kvcli.integrations.chunks.served import Served, StoreSettings
from kvcli.integrations.chunks.stored import encode_each, get_chunks, put_chunks

logger = logging.getLogger(__name__)

_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")
"""Fields that SGLang reads."""

_AXES = {
    "layer_first": (0, 1, 3, 2, 4),  # of pages [2, layers, tokens, heads, head_dim]
    "page_first": (0, 2, 3, 1, 4),  # [2, tokens, layers, heads, head_dim]
    "page_first_direct": (0, 1, 3, 2, 4),  # [2, layers, tokens, heads, head_dim]
    "page_head": (0, 3, 1, 2, 4),  # [2, heads, tokens, layers, head_dim]
}
"""Layouts of SGLang's host pool, and the axes that make them [2, layers, heads, tokens, head_dim]."""


class KvcliStorage(HiCacheStorage):
    """Pages of a rank as codes.

    Args:
        storage_config: SGLang's HiCacheStorageConfig, with fields of `StoreSettings` in its `extra_config`.

    KvcliError: a model, method or artifact that cannot be used, an engine that was not tried, or a store that cannot be
    written; from `register_mem_pool_host`, pages that hold something else.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = dict(storage_config.extra_config or {})
        chosen = StoreSettings.read({name: x for name, x in extra.items() if name not in _SGLANG})
        for what, on in {
            'an interface without positions (say "interface_v1": 1)': not extra.get("interface_v1"),
            "latents (MLA)": storage_config.is_mla_model,
            "pipeline parallelism": storage_config.pp_size > 1,
            "context parallelism": storage_config.attn_cp_size > 1 or storage_config.dcp_size > 1,
            "heads of several ranks in a page (tp_lcm_size)": storage_config.should_split_heads,
        }.items():
            if on:
                raise UsageError(f"{what} and a store of codes do not go together")
        try:  # what SGLang hands over is the name that it serves the model by, if any
            engines, of_flags = get_server_args().model_path, process_model_config()
        except ValueError:  # not in an engine's process
            engines, of_flags = storage_config.model_name, None
        if not (name := chosen.model or engines):
            raise UsageError('SGLang does not say which model it serves: say "model"')
        self.served = Served.load(chosen, engines, of_flags)
        self.kind = f"{name} {self.served.label}"
        self._ranks = [storage_config.tp_rank, storage_config.tp_size]
        self.store = chosen.store()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        pool, spec = mem_pool_host, self.served.spec
        found = f"{pool.layer_num} layers of {pool.head_num} heads of {pool.head_dim} channels in {pool.dtype}"
        if pool.layout not in _AXES:
            known = ", ".join(_AXES)
            raise UsageError(f"pages of the layout {pool.layout} cannot be stored as codes; those of {known} can")
        narrow = getattr(pool, "v_head_dim", pool.head_dim) != pool.head_dim or pool.head_dim != spec.head_dim
        if pool.layer_num != spec.num_layers or spec.other_layers or narrow or pool.dtype not in DTYPES:
            raise UnsupportedModelError(
                f"pages of {found} are not of {spec.num_layers} layers of full attention of {spec.head_dim} channels"
            )
        self._layout = ChunkLayout(pool.layer_num, pool.page_size, pool.head_num, pool.head_dim, pool.dtype)
        self._codec = ChunkCodec(self.served)
        self._codec.stored_bytes(self._layout)  # refuses what cannot be stored
        self._namer = self.served.namer(ranks=self._ranks, page=pool.page_size, dtype=str(pool.dtype))

    def exists(self, key: str) -> bool:
        return self.store.has(self._name(key))

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Stores pages; whether each one is in the store now."""
        pages, starts = self._pages(keys, host_indices), self._starts(keys, extra_info)
        used, new = self._touch(keys, extra_info), [i for i, key in enumerate(keys) if not self.exists(key)]
        if new:

            def layer(layer_idx: int) -> tuple[Tensor, Tensor]:
                both = torch.stack([pages[i][:, layer_idx] for i in new])
                return both[:, 0], both[:, 1]

            names, known = [self._name(keys[i]) for i in new], None if starts is None else [starts[i] for i in new]
            put_chunks(
                self.store,
                encode_each(self._codec, self._layout, layer, known, names, self.kind, logger.warning),
                used,
                logger.warning,
            )
        return [self.exists(key) for key in keys]

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Fills pages; whether each one was found."""
        pages, names = self._pages(keys, host_indices), [self._name(key) for key in keys]
        found = list(get_chunks(self.store, names, partial(self._codec.check, layout=self._layout), logger.warning))
        good = [(page, data) for page, data in zip(pages, found, strict=True) if data is not None]
        if good:
            for layer_idx, both in enumerate(self._codec.decode([data for _, data in good], self._layout)):
                keys_of, values_of = (x.to(pages[0].device) for x in both)
                for (page, _), k, v in zip(good, keys_of, values_of, strict=True):
                    page[0, layer_idx], page[1, layer_idx] = k, v
        self._touch(keys, extra_info)
        return [data is not None for data in found]

    def clear(self) -> None:
        """Removes the chunks of this model and method, of all engines that share the store."""
        self.store.clear(self.kind)

    def _without_positions(self, *arguments: Any, **more: Any) -> NoReturn:
        raise UsageError('a store of codes needs "interface_v1": 1')

    get = set = batch_get = batch_set = _without_positions

    def _pages(self, keys: Sequence[str], host_indices: Tensor) -> list[Tensor]:
        """Views of pages, [2, layers, heads, tokens, head_dim]; writing to them writes to the pool."""
        pool = self.mem_pool_host
        pages = [pool.get_data_page(int(host_indices[i * pool.page_size]), flat=False) for i in range(len(keys))]
        return [(x[:, 0] if x.ndim == 6 else x).permute(_AXES[pool.layout]) for x in pages]

    def _touch(self, keys: Sequence[str], extra_info: Any) -> dict[str, float]:
        """Notes that pages and those before them are used, and returns when."""
        text = [*(getattr(extra_info, "prefix_keys", None) or ()), *keys]
        used = used_now(self._name(key) for key in text)
        self.store.touch(used)
        return used

    def _starts(self, keys: Sequence[str], extra_info: Any) -> list[int] | None:
        """Positions of the pages' first tokens, if SGLang passes the keys of the pages before."""
        before = getattr(extra_info, "prefix_keys", None)
        if before is None:
            return None
        return [(len(before) + i) * self._layout.num_tokens for i in range(len(keys))]

    def _name(self, key: str) -> str:
        return self._namer(key.encode())
