"""Contexts made with one attached model, and the fixtures for that."""

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import asked_for
from factories import load, make_model
from torch import Tensor

import kvcli
from kvcli.artifact.artifact import Artifact
from kvcli.attention.generation import SamplingConfig
from kvcli.attention.session import Session
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.context import Context
from kvcli.cache.snapshot import Snapshot
from kvcli.contexts import ContextStore, identity_of
from kvcli.methods.config import CacheConfig
from kvcli.models.fingerprint import text_identity
from kvcli.models.load import LoadedModel
from kvcli.registry import get_method
from kvcli.seam.versions import with_cache
from kvcli.storage.manifest import json_sha256


def tokens(count: int, seed: int = 0) -> Tensor:
    """Random token ids [count]; those of one seed are a prefix of longer ones."""
    return torch.randint(3, 97, (4096,), generator=torch.Generator().manual_seed(seed))[:count]


def text(common: int, seed: int, more: int = 40) -> Tensor:
    """The first `common` tokens of `tokens`, and others."""
    return torch.cat((tokens(common), tokens(more, seed)))


class Maker:
    """Reads and continues texts in one session."""

    def __init__(self, loaded: LoadedModel, session: Session) -> None:
        self.loaded, self.session = loaded, session
        self.identity = identity_of(session, loaded.tokenizer)

    @torch.no_grad()
    def read(self, ids: Tensor, cache: CompressedCache | None = None, chunk: int = 32) -> CompressedCache:
        """A cache with these tokens [count], read in chunks; `cache` holds the first of them."""
        cache = self.session.new_cache() if cache is None else cache
        for start in range(cache.get_seq_length(), len(ids), chunk):
            self.loaded.model(ids[None, start : start + chunk], **with_cache(cache))
        return cache

    def snapshot(self, ids: Tensor, chunk: int = 32) -> Snapshot:
        return self.read(ids, chunk=chunk).snapshot()

    def context(self, ids: Tensor, cache: CompressedCache | None = None, source: str = "") -> Context:
        """What is stored of a text."""
        cache = self.read(ids) if cache is None else cache
        return cache.context(ids[None], {**text_identity(self.loaded.tokenizer), "source": source})

    def greedy(self, cache: CompressedCache, prompt: Tensor, count: int = 12) -> list[int]:
        """Tokens that follow a prompt [count], of which the cache holds the first."""
        sampling = SamplingConfig(count)
        made = self.session.generate(prompt[None], sampling=sampling, cache=cache, eos_token_id=[])
        return made.sequences[0, len(prompt) :].tolist()


def attach_example(fit: Callable[[Any], Artifact], model: Any, name: str, **changes: Any) -> Session:
    """Attaches a method with its example settings; `fit` makes its artifact where it needs one."""
    method = get_method(name)
    artifact = fit(method) if method.needs_artifact else None
    known = CacheConfig.model_fields if artifact else method.config_cls.model_fields
    settings = {key: value for key, value in method.example_settings.items() if key in known}
    asked = name if artifact else asked_for(method)
    return kvcli.attach(model, asked, artifact=artifact, **{"sink_length": 2, **settings, **changes})


@pytest.fixture
def store(tmp_path: Path) -> ContextStore:
    return ContextStore(tmp_path / "contexts", block_tokens=16)


@pytest.fixture(scope="module")
def maker(tiny_artifact: Callable[[Any], Artifact]) -> Iterator[Callable[..., Maker]]:
    """Attaches a method with its example settings to one tiny model, until another one is asked for."""
    loaded, attached = load(make_model("llama")), ExitStack()

    @lru_cache(maxsize=1)
    def make(name: str, **changes: Any) -> Maker:
        attached.close()
        return Maker(loaded, attached.enter_context(attach_example(tiny_artifact, loaded, name, **changes)))

    with attached:
        yield make


def path_of(store: ContextStore, name: str, part: str) -> Path:
    """The file of a block of a stored context: `tokens`, `first`, `last`, or `coded` for the last of these."""
    block = getattr(store.get(name).record, part)
    return store.folder / "blocks" / f"{(block[-1] if part == 'coded' else block).digest}.safetensors"


def flip_a_byte(folder: Path, name: str, part: str) -> None:
    """Damages a block of a stored context."""
    flip(path_of(ContextStore(folder), name, part))


def flip(path: Path, at: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def execute(store: ContextStore, statement: str, *values: Any) -> list[Any]:
    """Reads or changes the index behind the store's back."""
    with closing(sqlite3.connect(store.folder / "index.sqlite", isolation_level=None)) as db:
        return db.execute(statement, values).fetchall()


def forge(store: ContextStore, name: str, change: Callable[[dict[str, Any]], Any], seal: bool = True) -> None:
    """Changes the record of a stored context, whose checksum is made to agree."""
    found = "SELECT id, record FROM contexts JOIN records ON context = id WHERE name = ?"
    ((context, text),) = execute(store, found, name)
    values = json.loads(text)
    change(values)
    seal and values.pop("sha256")
    text = json.dumps({**values, "sha256": json_sha256(values)} if seal else values)
    execute(store, "UPDATE records SET record = ? WHERE context = ?", text, context)


def blocks_of(store: ContextStore) -> set[str]:
    """Digests of the blocks that have a file."""
    return {path.stem for path in (store.folder / "blocks").glob("*.safetensors")}


def needed_by(store: ContextStore) -> set[str]:
    """Digests of the blocks that contexts need, by their records."""
    return {block.digest for context in store.contexts() for block in context.record.blocks}


TWO = {"a": text(50, 5), "b": text(50, 6)}
WINDOW = {"residual_length": 6, "flush_block": 1}


@pytest.fixture(scope="module")
def two_stored(maker: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store with the contexts of `TWO`."""
    folder = tmp_path_factory.mktemp("two") / "contexts"
    for name, ids in TWO.items():
        ContextStore(folder, block_tokens=16).put(maker("rtn", **WINDOW).context(ids), name=name)
    return folder


@pytest.fixture
def two(maker: Any, two_stored: Path, store: ContextStore) -> Maker:
    """Fills the store with two contexts, `a` and `b`, which begin alike."""
    shutil.copytree(two_stored, store.folder)
    made: Maker = maker("rtn", **WINDOW)
    return made
