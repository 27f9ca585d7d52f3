"""A tier of codes below the CPU tier of vLLM's offloading: `KvcliTier`, named in `--kv-transfer-config`.

vLLM keeps its own cache and attention; pages that leave the CPU tier are stored as codes, and come back as pages.
vLLM's scheduler calls all methods of a tier, which must not wait: coding and files are for threads.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from kvcli.errors import UsageError
from kvcli.integrations.chunks.served import Served, StoreSettings
from kvcli.integrations.chunks.stored import get_chunks, put_chunks
from kvcli.integrations.vllm.groups import GroupChunks, OpaqueChunks
from kvcli.integrations.vllm.slots import Slots

try:
    from vllm.logger import init_logger
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
except ImportError as error:
    raise UsageError(f"a tier of codes needs vLLM 0.32 or 0.33: {error}") from error

logger = init_logger("vllm.kvcli.tier")

_BATCH_BYTES = 512 << 20
"""Of the chunks that are coded at once, in the engine's dtype."""


class TierSettings(StoreSettings):
    """The fields of a tier in `secondary_tiers`, beside `type` and `module_path`."""

    locality: Literal["LOCAL", "REMOTE"] | None = Field(None, description="what vLLM's filters of tiers ask for")


class Item(NamedTuple):
    """A chunk of a job: its key, its name in the store, its slot, and its first token's position if known.

    A chunk that is not `whole` ends with tokens that are not there yet. It is `used` when its request begins, the last
    ones of a text first, so that what does not fit is a text's end, though it is stored over many steps.
    """

    key: Any
    name: str
    slot: int
    start: int | None
    whole: bool
    used: float


class Finished(NamedTuple):
    """What a job came to, and the keys of a load that were not found after all."""

    result: JobResult
    missing: list[Any]


class KvcliTier(SecondaryTierManager):
    """Stores chunks of full-attention layers as codes, those of other layers as they are.

    Args:
        offloading_spec, primary_kv_view, tier_type, backpressure_detector: of vLLM.
        settings: fields of `TierSettings`.

    KvcliError: a model, method or artifact that cannot be used, pages that hold something else, a store that cannot be
    written.
    """

    medium: ClassVar[base.Medium] = base.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config, chosen = offloading_spec.config, TierSettings.read(settings)
        served = Served.load(chosen, config.model.name, _model_of_engine())
        slots = Slots(config, served.spec, extract_layer_index)
        self.groups = {
            i: (OpaqueChunks if group.layers is None else GroupChunks)(served, slots, group, config)
            for i, group in slots.groups.items()
        }
        self.store, self.locality = chosen.store(), chosen.locality and base.Locality(chosen.locality)
        self._rows = torch.from_numpy(np.asarray(primary_kv_view).view(np.uint8))[:, : slots.slot_bytes]
        length = self._rows.untyped_storage().nbytes()
        self._pinned = served.device.type == "cuda" and host_register(self._rows.data_ptr(), length)
        self._lookups = _Lookups(tier_type, lambda key: self.store.has(self._name(key)))
        self._loads, self._stores, self._touches = (
            ThreadPoolExecutor(count, f"kvcli-{what}")
            for what, count in (("load", chosen.max_workers), ("store", chosen.max_workers), ("touch", 1))
        )
        self._running, self._finished = set[Future[None]](), deque[Finished]()
        self._begun = dict[str, float]()

    def lookup(self, key: Any, req_context: base.ReqContext) -> base.LookupResult:
        found = {None: base.LookupResult.RETRY, True: base.LookupResult.HIT, False: base.LookupResult.MISS}
        return found[self._lookups.lookup(key, req_context)]

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._stores, self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._loads, self._load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while self._finished:
            result, missing = self._finished.popleft()
            self._lookups.mark_miss(missing)
            results.append(result)
        return results

    def touch(self, keys: Collection[Any], req_context: base.ReqContext) -> None:
        ends, now = enumerate(map(req_context.get_offload_key_position, keys)), time.time()
        self._touch({key: now - 1e-6 * (end or i) for key, (i, end) in zip(keys, ends, strict=True)})

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        return base.RequestOffloadingContext()

    def on_request_finished(self, req_context: base.ReqContext) -> None:
        """All chunks of its text were used, also those that vLLM had and did not look for."""
        self._lookups.cleanup(req_context.req_id)
        self._begun.pop(req_context.req_id, None)
        self.touch([*getattr(req_context, "_offload_key_positions", ())], req_context)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        wait(self._running)
        self._touches.submit(bool).result()

    def shutdown(self) -> None:
        """Ends when the jobs that are running have ended; others are not begun."""
        self._lookups.shutdown()
        for pool in (self._loads, self._stores, self._touches):
            pool.shutdown(cancel_futures=pool is not self._touches)
        if self._pinned:
            host_unregister(self._rows.data_ptr())
            self._pinned = False
        self._rows = torch.empty(0)  # vLLM closes the memory

    def _submit(self, pool: ThreadPoolExecutor, run: Callable[[Any, list[Item]], Finished], job: Any) -> None:
        """Runs a job in a thread; what it needs of vLLM's own objects is read here, in vLLM's."""
        items, begun = list[Item](), self._begun.setdefault(job.req_context.req_id, time.time())
        for key, slot in zip(job.keys, job.chunk_ids, strict=True):
            end, tokens = job.req_context.get_offload_key_position(key), self._group(key).tokens
            start = None if end is None or end < tokens else end - tokens
            whole, used = end is None or end % tokens == 0, begun - 1e-6 * (end or len(items))
            items.append(Item(key, self._name(key), int(slot), start, whole, used))

        def work() -> None:
            try:
                self._finished.append(run(job, items))
            except Exception:  # vLLM waits for every job that it submitted
                logger.exception("a job of the tier of codes failed")
                missing = [x.key for x in items] if job.is_promotion else []
                self._finished.append(Finished(JobResult(job.job_id, success=False), missing))

        self._running = {x for x in self._running if not x.done()}
        self._running.add(pool.submit(work))

    def _store(self, job: Any, items: list[Item]) -> Finished:
        begun, written, success = time.monotonic(), 0, True
        new = [item for item in items if not self.store.has(item.name)]
        self.store.touch({x.name: x.used for x in items if x not in new})  # before others are put
        for group, every in self._by_group(new):
            those = [x for x in every if x.whole or isinstance(group, OpaqueChunks)]
            for batch in _batches(group, those):
                rows = torch.stack([self._rows[x.slot].to(group.device, non_blocking=True) for x in batch])
                starts = [x.start for x in batch if x.start is not None]
                known = starts if len(starts) == len(batch) else None
                chunks = group.encode(rows, known, [x.name for x in batch], logger.warning)
                used = {x.name: x.used for x in batch}
                success &= put_chunks(self.store, chunks, used, logger.warning) and len(chunks) == len(batch)
                written += sum(len(x.data) for x in chunks)
        seconds = time.monotonic() - begun
        return Finished(JobResult(job.job_id, success=success, transfer_time=seconds, transfer_bytes=written), [])

    def _load(self, job: Any, items: list[Item]) -> Finished:
        begun, read, loaded = time.monotonic(), 0, list[Item]()
        for group, those in self._by_group(items):
            found = get_chunks(self.store, [x.name for x in those], group.check, logger.warning)
            for batch in _batches(group, those):
                good = [
                    (item, data)
                    for item, data in zip(batch, islice(found, len(batch)), strict=True)
                    if data is not None
                ]
                if good:
                    rows = group.decode([data for _, data in good])
                    for (item, _), row in zip(good, rows, strict=True):
                        self._rows[item.slot].copy_(row, non_blocking=True)
                    if group.device.type == "cuda":
                        torch.cuda.current_stream(group.device).synchronize()
                    loaded += [item for item, _ in good]
                    read += sum(len(data) for _, data in good)
        self._touch({x.key: x.used for x in loaded})
        keys = {x.key for x in loaded}
        missing = [x.key for x in items if x.key not in keys]
        rest: dict[str, Any] = {"successful_keys": tuple(keys) or None} if missing else {}
        rest |= {"transfer_time": time.monotonic() - begun, "transfer_bytes": read}
        return Finished(JobResult(job.job_id, success=not missing, **rest), missing)

    def _by_group(self, items: Iterable[Item]) -> Iterator[tuple[GroupChunks | OpaqueChunks, list[Item]]]:
        of_group: dict[int, list[Item]] = {}
        for item in items:
            of_group.setdefault(base.get_offload_group_idx(item.key), []).append(item)
        for index, those in of_group.items():
            yield self.groups[index], those

    def _touch(self, used: Mapping[Any, float]) -> None:
        self._touches.submit(lambda: self.store.touch({self._name(key): at for key, at in used.items()}))

    def _group(self, key: Any) -> GroupChunks | OpaqueChunks:
        return self.groups[base.get_offload_group_idx(key)]

    def _name(self, key: Any) -> str:
        return self._group(key).name(key)


def _model_of_engine() -> Any:
    """What flags say of the model; vLLM hands it to no tier, but its connector, which makes them, has it."""
    frame = inspect.currentframe()
    while frame is not None:
        if model := getattr(frame.f_locals.get("vllm_config"), "model_config", None):
            return model
        frame = frame.f_back
    logger.warning("the engine's config is not found: what --hf-overrides and --revision change is not seen")
    return None


def _batches(group: GroupChunks | OpaqueChunks, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Items of a group that are coded together."""
    count = max(1, _BATCH_BYTES // group.plain_bytes)
    for first in range(0, len(items), count):
        yield items[first : first + count]


class _Lookups(AsyncLookupManager):
    """Looks for chunks in a thread of its own."""

    def __init__(self, tier_type: str, has: Callable[[Any], bool]) -> None:
        self._has = has
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[Any], req_context: base.ReqContext) -> Iterable[bool]:
        return [self._has(key) for key in keys]
