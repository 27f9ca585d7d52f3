"""The serde inside LMCache itself: its registry, its adapters, its server with its own benchmark."""

import argparse
import json
import os
import select
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from chunks_made import real_chunks
from factories import make_model
from torch import Tensor

from kvcli.integrations.chunks.format import ChunkHeader
from kvcli.integrations.lmcache.layout import keys_and_values
from kvcli.spec import ModelSpec

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["LMCACHE_DISABLE_BANNER"] = "1"

pytestmark = pytest.mark.filterwarnings("default")  # of LMCache and of what it imports
pytest.importorskip("lmcache.v1.distributed.serde", reason="needs LMCache, see docs/tiers.md", exc_type=ImportError)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
    from lmcache.v1.distributed.l1_manager import L1Manager
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
    from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
    from lmcache.v1.distributed.serde import create_serde_processor, get_registered_serde_types
    from lmcache.v1.multiprocess.transfer_context.base import gather_paged_kv_to_cpu

SHAPE = torch.Size([2, 3, 64, 32])


def adapter_json(chunks: Path, model_folder: Path, **serde: Any) -> dict[str, Any]:
    """The adapter as `lmcache server --l2-adapter` takes it."""
    return {
        "type": "plugin",
        "module_path": "kvcli.integrations.lmcache.plugin",
        "class_name": "FileSystemAdapter",
        "adapter_params": {"base_path": str(chunks)},
        "serde": {"type": "kvcli", "model": str(model_folder), "method": "kivi-2", **serde},
    }


def object_key(number: int) -> ObjectKey:
    return ObjectKey(chunk_hash=number.to_bytes(32, "big"), model_name="org/model", kv_rank=1)


class Store:
    """LMCache's memory and disk as its server puts them together, without the server."""

    def __init__(self, spec: dict[str, Any]) -> None:
        memory = L1MemoryManagerConfig(size_in_bytes=8 << 20, use_lazy=False, shm_name="")
        self.memory = L1Manager(L1ManagerConfig(memory))
        (config,) = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)])).adapters
        inner = create_l2_adapter(config, self.memory.get_l1_memory_desc())
        self.serde = create_serde_processor(config.serde_config)
        self.disk = SerdeL2AdapterWrapper(inner, self.serde, self.memory)

    def room(self, keys: list[ObjectKey], dtype: torch.dtype) -> list[Any]:
        """Memory for chunks, as for those that an engine hands over."""
        reserved = self.memory.reserve_write(keys, [False] * len(keys), MemoryLayoutDesc([SHAPE], [dtype]))
        return [reserved[key][1] for key in keys]

    def save(self, keys: list[ObjectKey], chunks: list[Tensor]) -> bool:
        """Stores chunks on disk."""
        objects = self.room(keys, chunks[0].dtype)
        for memory, chunk in zip(objects, chunks, strict=True):
            memory.tensor.copy_(chunk)
        task = self.disk.submit_store_task(keys, objects)
        _wait(self.disk.get_store_event_fd())
        return bool(self.disk.pop_completed_store_tasks()[task].is_successful())

    def load(self, keys: list[ObjectKey], dtype: torch.dtype) -> tuple[list[bool], list[Tensor]]:
        """Loads chunks from disk: which were, and what is in memory then."""
        objects = self.room(keys, dtype)
        for memory in objects:
            memory.tensor.fill_(7)
        task = self.disk.submit_load_task(keys, objects)
        _wait(self.disk.get_load_event_fd())
        found = self.disk.query_load_result(task)
        return [found.test(i) for i in range(len(keys))], [memory.tensor.clone() for memory in objects]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.disk.close()
        self.memory.close()


def _wait(event_fd: int) -> None:
    assert select.select([event_fd], [], [], 60)[0], "LMCache did not answer"


def some_chunks(count: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_chunks_are_stored_on_disk_and_loaded_after_a_restart(
    dtype: torch.dtype, model_folder: Path, tmp_path: Path
) -> None:
    spec = adapter_json(tmp_path / "chunks", model_folder)
    keys, chunks = [object_key(i) for i in range(3)], some_chunks(3, dtype)
    with Store(spec) as store:
        assert "kvcli" in get_registered_serde_types()
        assert store.save(keys, chunks)
        expected = store.serde.estimate_serialized_size(MemoryLayoutDesc([SHAPE], [dtype]))
    files = sorted((tmp_path / "chunks").glob("*.data"))
    assert [path.stat().st_size for path in files] == [expected] * 3
    assert ChunkHeader.unpack(memoryview(files[0].read_bytes())).method == "kivi"
    with Store(spec) as store:
        found, loaded = store.load([*keys, object_key(9)], dtype)
    assert found == [True, True, True, False]
    for chunk, copy in zip(chunks, loaded, strict=False):
        assert torch.equal(copy[:, :, 0], chunk[:, :, 0])
        assert (copy - chunk).float().square().mean() < 0.2
    assert (loaded[3] == 7).all()


def test_an_artifact_codes_what_lmcache_holds(
    tiny_model: Any, artifact: Path, model_folder: Path, tmp_path: Path
) -> None:
    spec = adapter_json(tmp_path / "chunks", model_folder, artifact=str(artifact))
    del spec["serde"]["method"]
    (chunk,) = real_chunks(tiny_model, 64, num_tokens=64)
    with Store(spec) as store:
        assert store.save([object_key(0)], [chunk])
    with Store(spec) as store:
        found, (loaded,) = store.load([object_key(0)], chunk.dtype)
    assert found == [True]
    assert (loaded - chunk).square().sum() / chunk.square().sum() < 0.5


def test_damaged_files_and_those_of_other_settings_are_not_loaded(model_folder: Path, tmp_path: Path) -> None:
    key, (chunk,) = object_key(0), some_chunks(1, torch.float16)
    with Store(adapter_json(tmp_path / "chunks", model_folder)) as store:
        assert store.save([key], [chunk])
    (path,) = (tmp_path / "chunks").glob("*.data")
    stored = path.read_bytes()
    with Store(adapter_json(tmp_path / "chunks", model_folder, settings={"residual_length": 64})) as store:
        assert store.load([key], torch.float16)[0] == [False]
    path.write_bytes(stored[:-1])  # flipped bytes are refused in test_chunks
    with Store(adapter_json(tmp_path / "chunks", model_folder)) as store:
        found, (memory,) = store.load([key], torch.float16)
        assert found == [False]
        assert (memory == 7).all()


def test_a_chunk_that_cannot_be_coded_is_not_stored(model_folder: Path, tmp_path: Path) -> None:
    (chunk,) = some_chunks(1, torch.float16)
    chunk[0, 1, 40, 3] = float("nan")
    with Store(adapter_json(tmp_path / "chunks", model_folder)) as store:
        assert not store.save([object_key(0)], [chunk])
    assert not list((tmp_path / "chunks").iterdir())


@pytest.mark.parametrize("form", ["split NHD", "split HND", "fused NHD", "fused HND"])
def test_chunks_as_lmcache_gathers_them_from_an_engine(form: str) -> None:
    """Three layers of 8 blocks of 16 tokens with 2 heads of 16 channels, of which a chunk takes blocks 5, 2, 7, 0."""
    spec = ModelSpec.from_config(make_model("llama").config)
    keys, values = torch.randn(2, 3, 8, 16, 2, 16).unbind(0)
    pages = torch.stack((keys, values), dim=1) if form.startswith("split") else torch.cat((keys, values), dim=-1)
    order = "HND" if form.endswith("HND") else "NHD"
    if order == "HND":
        pages = pages.transpose(-2, -3)
    engine = {f"layer {i}": layer.contiguous() for i, layer in enumerate(pages)}
    (chunk,) = gather_paged_kv_to_cpu(engine, [5, 2, 7, 0], 4, layout_hints={"kv_layout": order})
    for x, paged in zip(keys_and_values(chunk, spec)[1:], (keys, values), strict=True):
        assert torch.equal(x, paged[:, [5, 2, 7, 0]].flatten(1, 2).transpose(1, 2))


def free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [x.getsockname()[1] for x in sockets]


def lmcache(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from lmcache.cli.main import main; main()", *arguments]


@contextmanager
def server(spec: dict[str, Any], log: Path) -> Iterator[Callable[[], subprocess.CompletedProcess[str]]]:
    """LMCache's server, and what runs its own benchmark against it."""
    port, http = map(str, free_ports(2))
    command = lmcache(
        *("server", "--host", "127.0.0.1", "--port", port, "--http-host", "127.0.0.1", "--http-port", http),
        *("--chunk-size", "64", "--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "engine_driven", "--disable-observability"),
        *("--l2-adapter", json.dumps(spec)),
    )

    def benchmark() -> subprocess.CompletedProcess[str]:
        url = f"http://127.0.0.1:{http}"
        asked = lmcache(
            *("bench", "server", "--mode", "cpu", "--rpc-url", f"tcp://127.0.0.1:{port}", "--url", url),
            *("--kvcache-shape-spec", "(2,64,16,2,16):float16:3", "--num-blocks", "64", "--num-tokens", "256"),
            *("--end", "2", "--interval", "0.5", "--format", "json"),
        )
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.run(asked, check=False, timeout=240, **output)

    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            _until(lambda: _answers(f"http://127.0.0.1:{http}/") or process.poll() is not None, "the server to start")
            assert process.poll() is None, log.read_text()
            yield benchmark
        finally:
            process.terminate()
            process.wait(60)


def _answers(url: str) -> bool:
    try:
        return bool(urlopen(url, timeout=2).status == 200)
    except (URLError, OSError):
        return False


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.2)


@pytest.mark.slow
def test_the_stock_server_passes_its_own_benchmark(model_folder: Path, tmp_path: Path) -> None:
    """A second server finds on disk what the first stored, so that its requests are hits from the start."""
    folder = tmp_path / "chunks"
    spec = adapter_json(folder, model_folder)
    with server(spec, tmp_path / "first.log") as benchmark:
        result = benchmark()
        assert result.returncode == 0, result.stdout
        assert result.stdout.count("CHECKSUM MATCH OK") == 2
        _until(lambda: len(list(folder.glob("*.data"))) == 8, "the chunks on disk")
    with server(spec, tmp_path / "second.log") as benchmark:
        benchmark()  # fails, because it expects that nothing is there yet
    log = (tmp_path / "second.log").read_text()
    assert log.count("4/4 retained keys (0 L1, 4 L2)") == 4, log
    assert log.count("Retrieved 256 tokens") == 4, log
    assert "Traceback" not in log
