"""A scheduler's side of vLLM's offloading, with a tier of codes: vLLM's own manager and memory, without a worker."""

import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from kvcli.integrations.vllm.tier import KvcliTier

LAYERS, HEADS, DIM, PAGE, PAGES = 3, 2, 16, 16, 4
TOKENS = PAGE * PAGES
"""Of a chunk."""


class Engine:
    """A scheduler's side of vLLM's offloading of the tiny model, with a tier of codes; slots are written by hand."""

    def __init__(self, model: Path, folder: Path, name: str, **changes: Any) -> None:
        self.layout, self.ranks = changes.pop("layout", "LBNHC"), changes.pop("ranks", 1)
        groups, first_group = changes.pop("groups", [range(LAYERS)]), changes.pop("first_group", 0)
        parallel, extra = changes.pop("parallel", {}), changes.pop("config", {})
        page = changes.pop("page", PAGE)
        page_bytes = changes.pop("page_bytes", 2 * max(1, HEADS // self.ranks) * page * DIM * 4)
        tier = {"type": "KvcliTier", "module_path": "kvcli.integrations.vllm.tier", "folder": str(folder), **changes}
        config = OffloadingConfig(
            groups=tuple(
                OffloadingGroupConfig(page, tuple(names(group)), number)
                for number, group in enumerate(groups, first_group)
            ),
            worker_kv_bytes_per_block=page_bytes * max(len(group) for group in groups),
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier]},
            engine_id=name,
            model=OffloadingModelConfig(str(model), extra.pop("dtype", "float32")),
            cache=OffloadingCacheConfig(PAGE, PAGES),
            parallel=OffloadingParallelConfig(
                **{
                    **{"rank": 0, "world_size": self.ranks, "tp_size": self.ranks, "pp_size": 1, "pcp_size": 1},
                    **{"dcp_size": 1, "data_parallel_index": 0, "data_parallel_size": 1},
                    **{"data_parallel_rank_local": None, "is_parallelism_agnostic": True},
                    **parallel,
                }
            ),
            **{"kv_cache_layout": self.layout, **extra},
        )
        self.manager: Any = TieringOffloadingSpec(config).get_manager()
        self.memory = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.tier: KvcliTier = self.manager.secondary_tiers[0]

    def pages(self, slot: int, shape: tuple[int, ...] = (LAYERS, PAGES)) -> np.ndarray:
        """Numbers of a slot, [ranks, layers, pages, tokens, heads of a rank, 2 * DIM]."""
        heads = max(1, HEADS // self.ranks)
        count = self.ranks * shape[0] * shape[1] * PAGE * heads * 2 * DIM
        x = self.memory[slot, : 4 * count].view(np.float32)
        if self.layout == "LBNHC":
            return x.reshape(self.ranks, *shape, PAGE, heads, 2 * DIM)
        return x.reshape(self.ranks, *shape, heads, PAGE, 2 * DIM).swapaxes(3, 4)

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=set(), preempted_req_ids=set()))
        time.sleep(0.01)

    def write(self, chunks: list[tuple[Tensor, Tensor]], known: bool = True, steps: bool = False) -> None:
        """Offloads chunks of keys and values [layers, heads, tokens, DIM], a text's first ones, in one step or many."""
        request, text = context(len(chunks), known), keys_of(len(chunks))
        self.manager.on_new_request(request)
        for some in [[key] for key in text] if steps else [text]:
            made = self.manager.prepare_store(some, request)
            for slot, key in zip(made.store_spec.block_ids, made.keys_to_store, strict=True):
                both, pages = torch.cat(chunks[text.index(key)], dim=-1).unflatten(2, (PAGES, PAGE)), self.pages(slot)
                for rank in range(self.ranks):
                    own = rank * HEADS // self.ranks
                    pages[rank] = both[:, own : own + pages.shape[4]].permute(0, 2, 3, 1, 4).numpy()
            self.manager.complete_store(some, request)
            self.finish()
        self.manager.on_request_finished(request)
        self.tier.drain_jobs()

    def finish(self, request: ReqContext | None = None) -> None:
        for _ in range(3):
            self.step()
        self.tier.drain_jobs()
        self.step()
        if request is not None:
            self.manager.on_request_finished(request)

    def read(self, count: int, group: int = 0) -> list[int | None]:
        """The slots of chunks after a lookup; None for those that are not found."""
        request, keys = context(count, True, group), keys_of(count, group)
        self.manager.on_new_request(request)
        slots = list[int | None]()
        for key in keys:
            for _ in range(500):
                found = self.manager.lookup(key, request)
                if found in (LookupResult.HIT, LookupResult.MISS):
                    break
                self.step()
            if found is LookupResult.MISS:
                slots.append(None)
                continue
            slots.append(int(self.manager.prepare_load([key], request).block_ids[0]))
            self.manager.complete_load([key], request)
        self.finish(request)
        return slots

    def numbers(self, slot: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a slot, [layers, heads, tokens, DIM]."""
        pages = torch.from_numpy(self.pages(slot).copy())
        x = pages.flatten(2, 3).transpose(2, 3)  # ranks, layers, heads, tokens
        if self.ranks > HEADS:
            x = x[:: self.ranks // HEADS]
        x = x.transpose(0, 1).flatten(1, 2)
        return x[..., :DIM], x[..., DIM:]


def names(group: Iterable[int | str]) -> list[str]:
    """What vLLM calls layers."""
    return [x if isinstance(x, str) else f"model.layers.{x}.self_attn.attn" for x in group]


def keys_of(count: int, group: int = 0) -> list[Any]:
    return [make_offload_key(bytes([7 + i] * 32), group) for i in range(count)]


def context(count: int, known: bool, group: int = 0) -> ReqContext:
    request = ReqContext("r")
    for i, key in enumerate(keys_of(count, group) if known else []):
        request.set_offload_key_position(key, (i + 1) * TOKENS)
    return request


def restored(engine: Engine, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the chunks that are found."""
    return [engine.numbers(slot) for slot in engine.read(count) if slot is not None]
