"""The store of codes behind SGLang's factory and its host pool of pages."""

import json
import sys
import types
import warnings
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks_made import cached_chunks, coded, equal
from torch import Tensor
from transformers import image_utils
from transformers.utils import is_torchvision_available

from kvcli.contexts.chunks import chunks_of
from kvcli.errors import KvcliError
from kvcli.integrations.chunks.served import ChunkSettings, Served

pytestmark = pytest.mark.filterwarnings("default")  # of SGLang and of what it imports

LAYERS, HEADS, DIM, PAGE = 3, 2, 16, 32


class Empty(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def without_torchvision() -> None:
    """Gives SGLang, which imports it for images, an empty one; transformers has looked for it before."""
    assert image_utils is not None
    if is_torchvision_available() or find_spec("torchvision") is not None:
        return
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        module: Any = Empty(f"torchvision{name}")
        module.__path__, module.__spec__ = [], ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module


try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang.srt.mem_cache.hicache_storage as hicache

        without_torchvision()
        from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
        from sglang.srt.runtime_context import get_context, process_model_config
        from sglang.srt.server_args import ServerArgs
except ImportError as error:
    pytest.skip(f"needs SGLang, see docs/tiers.md: {error}", allow_module_level=True)


def make_pool(
    layout: str, heads: int = HEADS, pages: int = 8, head_dim: int = DIM, dtype: torch.dtype = torch.float32
) -> Any:
    """SGLang's memory on the host for the tiny model."""
    device = [torch.zeros(PAGE, heads, head_dim, dtype=dtype) for _ in range(LAYERS)]
    pointers = torch.zeros(LAYERS, dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(device), v=tuple(device), k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD
        ),
        **{"page_size": PAGE, "head_num": heads, "head_dim": head_dim, "v_head_dim": head_dim, "dtype": dtype},
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=LAYERS,
        host_token_capacity=pages * PAGE,
    )


def make_storage(model: Path, folder: Path, layout: str = "layer_first", **changes: Any) -> tuple[Any, Any]:
    """A backend as SGLang makes it, and its pool."""
    shape = {name: changes.pop(name) for name in ("head_dim", "dtype") if name in changes}
    pool = make_pool(layout, changes.pop("heads", HEADS), **shape)
    fields = hicache.HiCacheStorageConfig.__annotations__
    of_config = {name: changes.pop(name) for name in list(changes) if name in fields}
    coding = {} if {"artifact", "method"} & changes.keys() else {"method": "kivi-2"}
    extra = {"backend_name": "kvcli", "module_path": "kvcli.integrations.sglang.storage", "class_name": "KvcliStorage"}
    extra |= {"interface_v1": 1, "folder": str(folder), **coding, **changes}
    sizes = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    config = hicache.HiCacheStorageConfig(
        **{
            **sizes,
            **{"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False},
            **{"model_name": str(model), "extra_config": extra},
            **of_config,
        }
    )
    storage = StorageBackendFactory.create_backend("dynamic", config, pool)
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()
    return storage, pool


@pytest.fixture
def pages(tiny_model: Any) -> list[tuple[Tensor, Tensor]]:
    """Four pages of the model's own cache, [layers, heads, tokens, DIM]."""
    return cached_chunks(tiny_model, PAGE, 4 * PAGE)


KEYS = [f"{i:064x}" for i in range(4)]
PLACES = [5, 2, 7, 0]
"""Pages of the pool."""


def indices(places: list[int]) -> Tensor:
    return torch.cat([torch.arange(PAGE) + place * PAGE for place in places])


def fill(pool: Any, pages: list[tuple[Tensor, Tensor]], heads: slice = slice(None)) -> None:
    """Writes pages token by token into the pool's own buffer."""
    for place, (keys, values) in zip(PLACES, pages, strict=True):
        for side, x in ((0, keys[:, heads]), (1, values[:, heads])):
            for layer in range(LAYERS):
                for token in range(PAGE):
                    place_of(pool, side, layer, place, token)[:] = x[layer, :, token]


def place_of(pool: Any, side: int, layer: int, place: int, token: int) -> Tensor:
    """The heads of a token, [heads, DIM]."""
    buffer, row = pool.kv_buffer[side], place * PAGE + token
    views = {
        "layer_first": lambda: buffer[layer, row],
        "page_first": lambda: buffer[row, layer],
        "page_first_direct": lambda: buffer[place, layer, token],
        "page_head": lambda: buffer[place, :, token, layer],
    }
    view: Tensor = views[pool.layout]()
    return view


def read(pool: Any) -> list[tuple[Tensor, Tensor]]:
    """The pages at `PLACES`, as `pages`."""

    def of(side: int, place: int) -> Tensor:
        rows = [[place_of(pool, side, layer, place, token) for token in range(PAGE)] for layer in range(LAYERS)]
        return torch.stack([torch.stack(row, dim=1) for row in rows])

    return [(of(0, place), of(1, place)) for place in PLACES]


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("coding", ["method", "artifact"])
def test_pages_come_back_as_their_codes(
    pages: Any, model_folder: Path, artifact: Path, tmp_path: Path, layout: str, coding: str
) -> None:
    chosen: dict[str, Any] = {"artifact": str(artifact)} if coding == "artifact" else {"method": "kivi-2"}
    storage, pool = make_storage(model_folder, tmp_path / "store", layout, **chosen)
    fill(pool, pages)
    before = hicache.HiCacheStorageExtraInfo(prefix_keys=[])
    assert storage.batch_set_v1(KEYS[:2], indices(PLACES[:2]), before) == [True, True]
    later = hicache.HiCacheStorageExtraInfo(prefix_keys=KEYS[:2])
    assert storage.batch_set_v1(KEYS[2:], indices(PLACES[2:]), later) == [True, True]
    other, pool = make_storage(model_folder, tmp_path / "store", "page_first", **chosen)
    assert other.batch_exists([*KEYS, "ff"]) == 4
    pool.kv_buffer.fill_(float("nan"))
    assert other.batch_get_v1(KEYS, indices(PLACES), before) == [True] * 4
    served = Served.load(ChunkSettings(model=str(model_folder), **chosen))
    assert equal(read(pool), coded(served, pages))
    untouched = set(range(8)) - set(PLACES)
    assert all(place_of(pool, 0, 0, place, 3).isnan().all() for place in untouched)


def test_positions_are_found_where_sglang_does_not_pass_them(
    pages: Any, model_folder: Path, artifact: Path, tmp_path: Path
) -> None:
    storage, pool = make_storage(model_folder, tmp_path / "store", artifact=str(artifact))
    fill(pool, pages)
    assert storage.batch_set_v1(KEYS, indices(PLACES)) == [True] * 4
    assert storage.batch_get_v1(KEYS, indices(PLACES)) == [True] * 4
    for (keys, _), (true, _) in zip(read(pool), pages, strict=True):
        assert (keys - true).square().sum() < 0.6 * true.square().sum()


def test_ranks_keep_their_own_heads(pages: Any, model_folder: Path, tmp_path: Path) -> None:
    ranks = [make_storage(model_folder, tmp_path / "store", heads=1, tp_rank=rank, tp_size=2) for rank in range(2)]
    for rank, (storage, pool) in enumerate(ranks):
        fill(pool, pages, slice(rank, rank + 1))
        assert not storage.exists(KEYS[0])
        assert storage.batch_set_v1(KEYS, indices(PLACES)) == [True] * 4
    served = Served.load(ChunkSettings(model=str(model_folder), method="kivi-2"))
    for rank, (storage, pool) in enumerate(ranks):
        pool.kv_buffer.zero_()
        assert storage.batch_get_v1(KEYS, indices(PLACES)) == [True] * 4
        assert equal(read(pool), coded(served, [(k[:, rank : rank + 1], v[:, rank : rank + 1]) for k, v in pages]))


def test_damaged_and_unfit_pages_are_left_out(pages: Any, model_folder: Path, tmp_path: Path) -> None:
    storage, pool = make_storage(model_folder, tmp_path / "store")
    pages[1][0][0, 0, 3, 3] = float("nan")
    fill(pool, pages)
    assert storage.batch_set_v1(KEYS, indices(PLACES)) == [True, False, True, True]
    path = storage.store._path(storage._name(KEYS[2]))
    data = bytearray(path.read_bytes())
    data[-3] ^= 8
    path.write_bytes(data)
    assert storage.batch_exists(KEYS) == 1
    assert storage.batch_get_v1(KEYS, indices(PLACES)) == [True, False, False, True]
    assert not storage.exists(KEYS[2])


def test_pages_of_another_dtype_or_length_are_others(
    pages: Any, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, pool = make_storage(model_folder, tmp_path / "store")
    fill(pool, pages)
    storage.batch_set_v1(KEYS, indices(PLACES))
    assert make_storage(model_folder, tmp_path / "store", dtype=torch.bfloat16)[0].batch_exists(KEYS) == 0
    monkeypatch.setattr(sys.modules[__name__], "PAGE", 64)
    assert make_storage(model_folder, tmp_path / "store")[0].batch_exists(KEYS) == 0


def test_a_text_that_does_not_fit_keeps_its_beginning(pages: Any, model_folder: Path, tmp_path: Path) -> None:
    storage, pool = make_storage(model_folder, tmp_path / "store")
    fill(pool, pages)
    storage.store.max_bytes = 3 * storage._codec.stored_bytes(storage._layout)
    before, later = (hicache.HiCacheStorageExtraInfo(prefix_keys=x) for x in ([], KEYS[:2]))
    for _ in range(2):
        assert storage.batch_set_v1(KEYS[:2], indices(PLACES[:2]), before) == [True, True]
        assert storage.batch_set_v1(KEYS[2:], indices(PLACES[2:]), later) == [True, False]
    storage.store._index.at_once("UPDATE chunks SET used = ?", [(1.0,)])
    assert storage.batch_get_v1(KEYS[2:], indices(PLACES[2:]), later) == [True, False]
    with storage.store._index.reading() as db:
        used = db.execute("SELECT key FROM chunks WHERE used > 1 ORDER BY used DESC").fetchall()
    assert [key for (key,) in used] == [storage._name(key) for key in KEYS[:3]]


def test_clear_leaves_what_other_methods_stored(pages: Any, model_folder: Path, tmp_path: Path) -> None:
    stores = [make_storage(model_folder, tmp_path / "store", method=x) for x in ("kivi-2", "kivi-4")]
    for storage, pool in stores:
        fill(pool, pages)
        storage.batch_set_v1(KEYS, indices(PLACES))
    stores[0][0].clear()
    assert [storage.batch_exists(KEYS) for storage, _ in stores] == [0, 4]
    (left,) = chunks_of(tmp_path / "store")
    assert left.kind.endswith("kivi-4")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"interface_v1": 0}, "interface_v1"),
        ({"should_split_heads": True}, "tp_lcm_size"),
        ({"head_dim": 32}, "of 3 layers of full attention of 16 channels"),
        ({"is_mla_model": True}, "latents"),
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"metod": "kivi-2"}, "did you mean 'method'"),
        ({"method": "squat-2"}, "state"),
        ({"max_bytes": "many"}, "not a size"),
        ({"method": "kivi-2", "settings": {"group_size": 64}}, "32 tokens; kivi needs a multiple of 64"),
        ({"heads": 1, "tp_size": 2, "artifact": "ARTIFACT"}, "without tensor"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(
    model_folder: Path, artifact: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    changes = {name: str(artifact) if x == "ARTIFACT" else x for name, x in changes.items()}
    with pytest.raises(KvcliError, match=named):
        make_storage(model_folder, tmp_path / "store", **changes)


def test_the_model_is_as_flags_of_the_engine_changed_it(
    model_folder: Path, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the one of the name that it is served by, which may be missing."""
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    scaled = {"rope_parameters": {**config["rope_parameters"], "rope_type": "linear", "factor": 4.0}}
    for coding in ({"method": "kivi-2"}, {"artifact": str(artifact)}):
        plain = Served.load(ChunkSettings(model=str(model_folder), **coding))
        for overrides in ({}, scaled):
            args: dict[str, Any] = {"model_path": str(model_folder), "served_model_name": "alias", "device": "cpu"}
            args |= {"skip_tokenizer_init": True, "json_model_override_args": json.dumps(overrides), "revision": "v2"}
            monkeypatch.setattr(get_context(), "_server_args", ServerArgs(**args))
            assert process_model_config().revision == "v2"
            if overrides and "artifact" in coding:
                with pytest.raises(KvcliError, match="rope"):
                    make_storage(Path(), tmp_path / "store", **coding)
                continue
            for name in (None, "alias"):
                storage, _ = make_storage(Path(), tmp_path / "store", model_name=name, **coding)
                assert (storage.served.identity == plain.identity) == (not overrides)
                assert storage.served.spec.rope.rope_type == ("linear" if overrides else "default")


def test_a_model_that_nobody_names_is_refused(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(KvcliError, match='say "model"'):
        make_storage(model_folder, tmp_path / "store", model_name=None)


def test_calls_without_positions_are_refused(model_folder: Path, tmp_path: Path) -> None:
    storage, _ = make_storage(model_folder, tmp_path / "store")
    for call in (storage.get, storage.set, storage.batch_get, storage.batch_set):
        with pytest.raises(KvcliError, match="interface_v1"):
            call(KEYS[0])
