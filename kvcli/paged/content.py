"""Whole pages of a prompt as a `Snapshot`, which a store keeps, and back: a block of the store is a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvcli.cache.record import CODES, POSITIONS, VALID, WINDOWS, SnapshotCounts
from kvcli.cache.snapshot import Snapshot
from kvcli.errors import CacheError
from kvcli.paged.model import PagedModel

_SINKS = "sinks"
"""Name of a layer's exact first tokens, [1, sinks, 2, num_kv_heads, head_dim], whose codes nobody reads."""


@torch.inference_mode()
def take(model: PagedModel, pages: Sequence[int]) -> Snapshot:
    """A copy, on the CPU, of a prompt's first pages, all of whose tokens are written.

    All tokens are codes, without a window; sinks are tensors `layers.L.sinks` beside them.
    """
    index, count = torch.tensor(pages, device=model.device), len(pages) * model.page_size
    tensors, per_entry = dict[str, Tensor](), dict[str, int]()
    for layer, fields, sinks in _views(model):
        for name, x in fields.items():
            tensors[layer + name] = x[index].transpose(0, 1).flatten(1, 2).unsqueeze(0).cpu()
            per_entry[layer + name] = model.page_size // x.shape[2]
        tensors[layer + _SINKS] = sinks[index[:1]].cpu()
        tensors |= {layer + name: sinks.new_zeros(1, sinks.shape[3], 0, sinks.shape[4]).cpu() for name in WINDOWS}
    tensors[VALID] = torch.ones(1, count, dtype=torch.bool)
    tensors[POSITIONS] = torch.arange(count, dtype=torch.int32).unsqueeze(0)
    group = max(codec.key.tokens_per_group for codec in model.session.codecs)
    coded = (count,), (count,), (count,)
    return Snapshot(SnapshotCounts(*coded, (0,), 0, 1, group, 1, per_entry), tensors)


@torch.inference_mode()
def put(model: PagedModel, snapshot: Snapshot, pages: Sequence[int], first: int) -> None:
    """Fills pages but the `first` ones, which are there; CacheError: the snapshot is not of such pages."""
    index = torch.tensor(pages[first:], device=model.device)
    for layer, fields, sinks in _views(model):
        expected = {name: (1, x.shape[1], len(pages) * x.shape[2], x.shape[3]) for name, x in fields.items()}
        views = {**fields, _SINKS: sinks}
        for name, x in views.items():
            found, shape = snapshot.tensors.get(layer + name), expected.get(name, (1, *sinks.shape[1:]))
            if found is None or found.shape != shape or found.dtype != x.dtype:
                raise CacheError(f"its {layer}{name} is not of pages of this model and method")
            if name == _SINKS:
                x[pages[0]] = found[0].to(model.device)
            else:
                x[index] = found[0].unflatten(1, (len(pages), -1)).transpose(0, 1)[first:].to(model.device)


def _views(model: PagedModel) -> Iterator[tuple[str, dict[str, Tensor], Tensor]]:
    """Of each layer the beginning of its tensors' names, codes [pages, heads, entries, width], and sinks."""
    for layer_idx, (page, pages) in enumerate(zip(model.layout, model.pages, strict=True)):
        keys, values, sinks = page.views(pages)
        records = zip(CODES, (keys, values), strict=True)
        fields = {f"{kind}.{field}": x for kind, codes in records for field, x in codes.tensors().items()}
        yield f"layers.{layer_idx}.", fields, sinks
