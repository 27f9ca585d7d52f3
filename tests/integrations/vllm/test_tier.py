"""The tier of codes under vLLM's own tiering manager and memory, which stands in for a GPU's worker."""

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from chunks_made import cached_chunks, coded, equal
from factories import make_model
from families import tiny_config
from torch import Tensor

from kvcli.contexts.chunks import ChunkStore, chunks_of
from kvcli.errors import KvcliError
from kvcli.integrations.chunks.codec import ChunkCodec
from kvcli.integrations.chunks.format import ChunkHeader, ChunkLayout
from kvcli.integrations.chunks.served import ChunkSettings, Served

pytestmark = pytest.mark.filterwarnings("default")  # of vLLM and of what it imports
pytest.importorskip("vllm", reason="needs vLLM, see docs/tiers.md", exc_type=ImportError)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from offloading import DIM, HEADS, LAYERS, PAGE, PAGES, TOKENS, Engine, context, keys_of, names, restored
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.kv_offload.base import LookupResult, make_offload_key


@pytest.fixture
def engines(model_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made = list[Engine]()

    def make(model: Path = model_folder, folder: str = "store", **changes: Any) -> Engine:
        coding = {} if {"artifact", "method"} & changes.keys() else {"method": "kivi-2"}
        name = f"kvcli-test-{tmp_path.name}-{len(made)}"
        made.append(Engine(model, tmp_path / folder, name, **coding, **changes))
        return made[-1]

    yield make
    for engine in made:
        del engine.memory
        engine.manager.shutdown()


@pytest.fixture
def chunks(tiny_model: Any) -> list[tuple[Tensor, Tensor]]:
    """Three chunks of the model's own cache."""
    return cached_chunks(tiny_model, TOKENS, 3 * TOKENS)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_engine_finds_after_a_restart_what_another_stored(
    engines: Any, chunks: Any, model_folder: Path, layout: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks code chunks in several batches."""
    monkeypatch.setattr("kvcli.integrations.vllm.tier._BATCH_BYTES", 1 if ranks == 2 else 2**20)
    first = engines(layout=layout, ranks=ranks, locality="REMOTE")
    first.write(chunks)
    assert first.tier.locality.name == "REMOTE"
    served = Served.load(ChunkSettings(model=str(model_folder), method="kivi-2"))
    for engine in (engines(layout=layout, ranks=ranks), engines(layout="LBHNC", ranks=1)):
        assert equal(restored(engine), coded(served, chunks))


@pytest.mark.parametrize("known", [True, False])
def test_an_artifact_codes_all_heads_of_all_ranks(
    engines: Any, chunks: Any, artifact: Path, known: bool, tiny_model: Any
) -> None:
    engines(artifact=str(artifact), ranks=2).write(chunks, known=known)
    (kind,) = chunks_of(engines(artifact=str(artifact)).tier.store.folder)
    ours = restored(engines(artifact=str(artifact), ranks=1))
    assert len(ours) == 3
    for side, average in ((0, kind.key_error), (1, kind.value_error)):
        lost = [
            float((mine[side] - true[side])[:, :, 1:].square().sum() / true[side][:, :, 1:].square().sum())
            for mine, true in zip(ours, chunks, strict=True)
        ]
        assert 0 < max(lost) < 0.6
        assert average == pytest.approx(sum(lost) / 3, rel=0.2)


def test_damaged_chunks_are_computed_anew_and_the_others_are_loaded(engines: Any, chunks: Any) -> None:
    first = engines()
    first.write(chunks)
    files = [first.tier.store._path(first.tier._name(key)) for key in keys_of(3)]
    data = files[1].read_bytes()
    for content in (data[:-5] + bytes([data[-5] ^ 1]) + data[-4:], b"", data[:500]):
        files[1].write_bytes(content)
        second = engines()
        assert [slot is None for slot in second.read(3)] == [False, True, False]
        assert [path.exists() for path in files] == [True, False, True]
        assert sum(x.chunks for x in chunks_of(first.tier.store.folder)) == 2
        second.write(chunks)
        assert None not in engines().read(3)


def test_what_codes_cannot_hold_is_not_stored_and_the_others_are(engines: Any, chunks: Any) -> None:
    keys = chunks[1][0].clone()
    keys[0, 0, 40, 3] = float("inf")
    engines().write([chunks[0], (keys, chunks[1][1]), chunks[2]])
    assert [slot is None for slot in engines().read(3)] == [False, True, False]


def test_a_full_disk_ends_no_engine(engines: Any, chunks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines()
    with monkeypatch.context() as patched:
        patched.setattr(ChunkStore, "put", Mock(side_effect=OSError(28, "No space left on device")))
        engine.write(chunks)
    assert engines().read(3) == [None] * 3
    assert None not in engine.read(3)  # of the CPU tier


def test_other_methods_models_dtypes_and_chunk_lengths_find_nothing(engines: Any, chunks: Any, tmp_path: Path) -> None:
    engines().write(chunks)
    other_dtype = {"config": {"dtype": "bfloat16"}, "page_bytes": 2 * HEADS * PAGE * DIM * 2}
    for changes in ({"method": "kivi-4"}, {"exact_tokens": 2}, {"settings": {"group_size": 16}}, other_dtype):
        assert engines(**changes).read(3) == [None] * 3
    other = make_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 7e4})
    other.config.save_pretrained(tmp_path / "b")
    assert engines(tmp_path / "b").read(3) == [None] * 3
    assert None not in engines().read(3)


@pytest.fixture
def connector(model_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """What makes vLLM's own connector, as its scheduler does, with overrides of the model's config."""

    def make(overrides: dict[str, Any], revision: str | None = None, **coding: str) -> Any:
        tier = {"type": "KvcliTier", "module_path": "kvcli.integrations.vllm.tier", "folder": str(tmp_path / "store")}
        extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 20, "block_size": TOKENS}
        extra["secondary_tiers"] = [{**tier, **(coding or {"method": "kivi-2"})}]
        transfer = KVTransferConfig("OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)
        flags: dict[str, Any] = {"hf_overrides": overrides, "revision": revision, "skip_tokenizer_init": True}
        model = ModelConfig(str(model_folder), dtype="float32", **flags)
        config = VllmConfig(model_config=model, cache_config=CacheConfig(block_size=PAGE), kv_transfer_config=transfer)
        config.cache_config.kv_cache_layout = "LBNHC"
        pages = FullAttentionSpec(block_size=PAGE, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)
        groups = [KVCacheGroupSpec(names(range(LAYERS)), pages)]
        cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
        return OffloadingConnector(config, KVConnectorRole.SCHEDULER, cache)

    return make


def test_the_model_is_as_flags_of_the_engine_changed_it(connector: Any, model_folder: Path, artifact: Path) -> None:
    scaled = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
    for coding in ({"method": "kivi-2"}, {"artifact": str(artifact)}):
        plain = Served.load(ChunkSettings(model=str(model_folder), **coding))
        for overrides in ({}, scaled) if "method" in coding else ({},):
            made = connector(overrides, **coding)
            served = made.scheduler.manager.secondary_tiers[0].groups[0]._codec.served
            assert (served.identity == plain.identity) == (not overrides)
            assert served.spec.rope.rope_type == ("linear" if overrides else "default")
            made.shutdown()
    with pytest.raises(KvcliError, match="rope"):
        connector(scaled, artifact=str(artifact))


def test_a_tier_takes_the_engines_commit_and_says_where_it_finds_no_flags(
    engines: Any, connector: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, load = list[Any](), Served.load
    monkeypatch.setattr(Served, "load", lambda *rest: asked.append(rest[2]) or load(*rest))
    connector({}, revision="c0ffee").shutdown()
    assert "--hf-overrides" not in caplog.text
    engines()
    assert [x and x.revision for x in asked] == ["c0ffee", None]
    assert "--hf-overrides and --revision" in caplog.text


def test_layers_of_other_kinds_are_stored_as_they_are(engines: Any, chunks: Any, tmp_path: Path) -> None:
    """Pages of three sliding layers, and of one of full attention in the first of three tensors, padded."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = tiny_config("gemma3_text", num_hidden_layers=4, layer_types=kinds, head_dim=DIM, num_key_value_heads=HEADS)
    config.save_pretrained(tmp_path / "hybrid")
    shapes: dict[str, Any] = {"model": tmp_path / "hybrid", "groups": [range(3), range(3, 4)]}
    shapes |= {"page_bytes": 2 * HEADS * PAGE * DIM * 4 + 64, "first_group": 1}
    first = engines(**shapes)
    assert [type(x).__name__ for x in first.tier.groups.values()] == ["OpaqueChunks", "GroupChunks"]
    request = context(3, True, 1)
    first.manager.on_new_request(request)
    made = first.manager.prepare_store(keys_of(3, 1), request)
    states = torch.randint(0, 256, (3, first.memory.shape[1]), dtype=torch.uint8).numpy()
    for slot, state in zip(made.store_spec.block_ids, states, strict=True):
        first.memory[slot] = state
    first.manager.complete_store(keys_of(3, 1), request)
    first.finish(request)
    second, used = engines(**shapes), PAGES * 3 * shapes["page_bytes"]
    assert second.read(3, 2) == [None] * 3
    for slot, state in zip(second.read(3, 1), states, strict=True):
        assert (second.memory[slot, :used] == state[:used]).all()
    (kind,) = chunks_of(first.tier.store.folder)
    path = first.tier.store._path(first.tier._name(keys_of(1, 1)[0]))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert [slot is None for slot in engines(**shapes).read(3, 1)] == [True, False, False]
    assert kind.kind.endswith("states and windows")
    assert kind.key_error is None
    assert engines(**shapes, layout="LBHNC").read(3, 1) == [None] * 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parallel": {"pp_size": 2}}, "pipeline parallelism"),
        ({"parallel": {"dcp_size": 2}}, "context parallelism"),
        ({"config": {"canonical_layout": True}}, "canonical_layout"),
        ({"config": {"replicated_layout": True}}, "replicated_layout"),
        ({"config": {"dtype": "fp8_e4m3"}}, "fp8_e4m3"),
        ({"layout": "BLNHC"}, "BLNHC"),
        ({"page_bytes": 2048}, "no pages of 2 heads of 16 channels"),
        ({"page_bytes": 8192}, "no pages of 2 heads of 16 channels"),
        ({"groups": [range(2), range(2, 3)], "page_bytes": 8192}, "no pages of 2 heads of 16 channels"),
        ({"ranks": 3}, "3 ranks cannot share 2 kv heads"),
        ({"layout": "LBHNC", "page": 48}, "48 tokens in the layout LBHNC"),
        ({"groups": [[0, 1, 2, 3]]}, r"model.layers.3.self_attn.attn' \(speculative decoding"),
        ({"groups": [[0, 1, 2, "mtp.layers.0.self_attn.attn"]]}, "several models"),
        ({"groups": [[0, 1, 2, "mtp.h.0.attn"]]}, "several models"),
        ({"locality": "local"}, "locality"),
        ({"groups": [[0, 1, "model.layers.2.block.3.attn"]]}, "which layer is"),
        ({"method": "squat-2"}, "state"),
        ({"method": "commvq-2"}, "artifact"),
        ({"metod": "kivi-2"}, "did you mean 'method'"),
        ({"max_bytes": "lots"}, "not a size"),
        ({"settings": {"group_size": 48}}, "group_size|multiple"),
    ],
)
def test_what_the_tier_cannot_hold_ends_the_start_by_name(engines: Any, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(KvcliError, match=named):
        engines(**changes)


def test_the_store_is_bounded_and_keeps_the_beginning_of_a_text(engines: Any, chunks: Any, model_folder: Path) -> None:
    layout = ChunkLayout(LAYERS, TOKENS, HEADS, DIM, torch.float32)
    one = ChunkCodec(Served.load(ChunkSettings(model=str(model_folder), method="kivi-2"))).stored_bytes(layout)
    for steps in (True, False):
        engine = engines(max_bytes=f"{2 * one / 1024 + 0.01}KiB", folder=f"store-{steps}")
        told = results_of(engine)
        engine.write(chunks, steps=steps)
        assert [slot is None for slot in engines(folder=f"store-{steps}").read(3)] == [False, False, True]
        assert told == ([True, True, False] if steps else [False])
        (kind,) = chunks_of(engine.tier.store.folder)
        assert (kind.chunks, kind.bytes) == (2, 2 * one)


def results_of(engine: Engine) -> list[bool]:
    """Whether each job of a tier succeeded, while they end."""
    told, finished = list[bool](), engine.tier.get_finished_jobs
    engine.tier.get_finished_jobs = lambda: [told.append(x.success) or x for x in finished()]
    return told


def test_positions_that_vllm_knows_are_those_of_the_codes(
    engines: Any, chunks: Any, artifact: Path, model_folder: Path
) -> None:
    first = engines(artifact=str(artifact))
    first.write(chunks)
    served = Served.load(ChunkSettings(model=str(model_folder), artifact=str(artifact)))
    data: list[Any] = [first.tier.store.get(first.tier._name(key)) for key in keys_of(3)]
    assert [ChunkHeader.unpack(memoryview(x)).start for x in data] == [0, TOKENS, 2 * TOKENS]
    assert equal(restored(engines(artifact=str(artifact))), coded(served, chunks))


def test_a_chunk_that_is_not_full_yet_is_not_coded(engines: Any, chunks: Any) -> None:
    engine = engines()
    request, keys = context(3, True), keys_of(3)
    request.set_offload_key_position(keys[2], 2 * TOKENS + 5)
    engine.manager.on_new_request(request)
    made = engine.manager.prepare_store(keys, request)
    for slot in made.store_spec.block_ids:
        engine.pages(slot)[:] = 1
    engine.manager.complete_store(keys, request)
    engine.finish(request)
    assert [slot is None for slot in engines().read(3)] == [False, False, True]


def test_a_job_that_fails_is_told_and_ends_no_engine(engines: Any, chunks: Any, monkeypatch: Any) -> None:
    """Also while another request looks for the same chunks."""
    engine, asked = engines(), context(3, True)
    monkeypatch.setattr(type(engine.tier.groups[0]), "encode", None)
    engine.manager.on_new_request(asked)
    job = SimpleNamespace(job_id=7, keys=keys_of(3), chunk_ids=[0, 1, 2], req_context=asked, is_promotion=False)
    assert engine.tier.lookup(keys_of(1)[0], asked) is LookupResult.RETRY
    engine.tier._lookups.flush()
    engine.tier.submit_store(job)
    engine.tier.drain_jobs()
    assert [(x.job_id, x.success) for x in engine.tier.get_finished_jobs()] == [(7, False)]
    engine.tier._lookups.flush()
    time.sleep(0.1)
    assert engine.tier.lookup(keys_of(1)[0], asked) in (LookupResult.RETRY, LookupResult.MISS)
    engine.tier._lookups.flush()
    assert not list(engine.tier.get_finished_jobs())


def test_chunks_of_a_load_that_fails_are_computed(engines: Any, chunks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engines().write(chunks)
    engine = engines()
    monkeypatch.setattr(type(engine.tier.groups[0]), "decode", None)
    assert engine.read(3) == [None] * 3


def test_chunks_that_are_used_stay(engines: Any, chunks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a request that vLLM had itself, and those that are touched last; noted slowly."""
    engine, touch, asked = engines(), ChunkStore.touch, context(3, True)
    engine.write(chunks)
    monkeypatch.setattr(ChunkStore, "touch", lambda *arguments: time.sleep(0.1) or touch(*arguments))
    engine.tier.store._index.at_once("UPDATE chunks SET used = ?", [(1.0,)])
    engine.manager.on_new_request(asked)
    engine.manager.on_request_finished(asked)
    engine.tier.drain_jobs()
    assert (begun := time.time()) > min(times_of(engine)) > 1
    for key in keys_of(3):
        engine.tier.touch([key], asked)
    engine.tier.shutdown()
    assert min(times_of(engine)) > begun - 0.01


@pytest.mark.parametrize(("what", "order"), [("load", (0, 2, 1)), ("load", (2, 1, 0)), ("store", (0, 2, 1))])
def test_times_are_in_the_order_of_a_text_whichever_job_ends_first(
    engines: Any, chunks: Any, what: str, order: tuple[int, ...]
) -> None:
    engine, asked = engines(), context(3, True)
    engine.write(chunks)
    engine.tier.store._index.at_once("UPDATE chunks SET used = ?", [(1.0,)])
    for i in order:
        job = {"job_id": i, "keys": keys_of(3)[i : i + 1], "chunk_ids": [i], "req_context": asked}
        getattr(engine.tier, f"submit_{what}")(SimpleNamespace(**job, is_promotion=what == "load"))
        engine.tier.drain_jobs()
    times = times_of(engine)
    assert times == sorted({1, *times}, reverse=True)[:3]


def times_of(engine: Engine) -> list[float]:
    """When the chunks of the text were used."""
    with engine.tier.store._index.reading() as db:
        used = dict(db.execute("SELECT key, used FROM chunks").fetchall())
    return [used[engine.tier._name(key)] for key in keys_of(3)]


def test_vllm_is_told_which_stores_failed(engines: Any, chunks: Any) -> None:
    keys = chunks[0][0].clone()
    keys[0, 0, 40, 3] = float("nan")
    for stored, success in (([(keys, chunks[0][1]), chunks[1]], False), (chunks, True)):
        told = results_of(engine := engines())
        engine.write(stored)
        assert told == [success]


def test_jobs_that_were_not_begun_are_given_up_at_the_end(engines: Any, chunks: Any, monkeypatch: Any) -> None:
    engine, begun = engines(), list[int]()
    monkeypatch.setattr(type(engine.tier.groups[0]), "encode", lambda *_: begun.append(1) or time.sleep(0.3) or [])
    for number in range(5):
        keys = [make_offload_key(bytes([100 + number] * 32), 0)]
        job = SimpleNamespace(job_id=number, keys=keys, chunk_ids=[0], req_context=context(3, True), is_promotion=False)
        engine.tier.submit_store(job)
    engine.tier.shutdown()
    assert len(begun) == 1
    engine.tier.shutdown()


@pytest.mark.parametrize("name", ["transformer.h.{}.attn", "model.decoder.layers.{}.self_attn.attn"])
def test_layers_are_known_by_the_number_in_their_names(engines: Any, chunks: Any, name: str) -> None:
    engines(groups=[[name.format(layer) for layer in range(LAYERS)]]).write(chunks)
    assert None not in engines(groups=[[name.format(layer) for layer in range(LAYERS)]]).read(3)
