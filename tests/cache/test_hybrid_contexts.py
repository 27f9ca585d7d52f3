"""Contexts of models of which some layers keep a window, a convolution or a recurrence: stored and used whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import make
from torch import Tensor

import kvcli
from kvcli.attention.generation import prefill
from kvcli.cache.snapshot import Snapshot
from kvcli.contexts import ContextStore
from kvcli.errors import CacheError
from kvcli.seam.versions import with_cache

SETTINGS = {"sink_length": 2, "residual_length": 8}


def some_tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 97, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
@torch.inference_mode()
def test_a_store_gives_the_whole_of_a_context_and_no_part(family: str, tmp_path: Path) -> None:
    ids, store = some_tokens(60), ContextStore(tmp_path)
    with kvcli.attach(make(family), "rtn-4", **SETTINGS) as session:
        cache = session.new_cache()
        prefill(session.model, cache, ids[:, :40], None, None)
        store.put(cache.context(ids[:, :40], {"source": "test"}), name="a")
        match = store.find(ids[0], session.identity())
        assert match is not None
        assert (match.num_tokens, match.is_whole) == (40, True)
        states = [x for name, x in cache.snapshot().tensors.items() if name.startswith("others.")]
        assert sum(x.nbytes for x in states if x.dim()) == cache.memory().other_bytes
        uncompressed = cache.memory().fp16_bytes + sum(x.nbytes for x in states)
        assert match.context.record.fp16_bytes == uncompressed
        other = torch.cat((ids[:, :36], some_tokens(20, seed=2)), dim=1)
        assert store.find(other[0], session.identity()) is None
        with pytest.raises(CacheError, match="keep a state of the whole text"):
            cache.crop(-4)
        cache.save(tmp_path / "cache", ids[:, :40])
        both = session.load_cache(tmp_path / "cache"), cache
        assert torch.equal(*(session.model(ids[:, 40:], **with_cache(x)).logits for x in both))


@torch.inference_mode()
def test_states_of_another_kind_are_refused() -> None:
    ids = some_tokens(40)
    with kvcli.attach(make("qwen3_5_text"), "rtn-4", **SETTINGS) as session:
        cache = session.new_cache()
        prefill(session.model, cache, ids, None, None)
        taken = cache.snapshot()
        name = next(x for x in taken.tensors if x.endswith("conv_states.0"))
        for tensors, said in (
            ({name: taken.tensors[name].int()}, "which is not of 1 rows"),
            ({name.replace("conv_states.0", "record_past.0"): taken.tensors[name]}, "has no place"),
            ({"others.3.state.keys": taken.tensors[name]}, "there are states of layers"),
        ):
            with pytest.raises(CacheError, match=said):
                session.new_cache().restore(Snapshot(taken.counts, taken.tensors | tensors))
