"""Shared fixtures: tiny random models of every family, on the CPU in float32."""

import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import interpret  # noqa: F401
import pytest
import torch
from byte_tokenizer import CHAT, byte_tokenizer
from factories import FAMILIES, make_model, record
from fake_pip import FakePip
from fast import FAST, SLOWER
from passes import mask_of

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.commands import paths
from kvcli.methods.method import Method
from kvcli.registry import get_method

pytest.register_assert_rewrite("contract")  # imported by test modules, later than this

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)  # the models are tiny: threads only cost time
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # commands that tests start: two threads on a busy core wait for ages
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2**32:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # a disk takes milliseconds to write a file anew


connected = sqlite3.connect


def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
    db = connected(*arguments, **options)
    with suppress(sqlite3.Error):
        db.execute("PRAGMA synchronous = OFF")
    return db


os.fsync, sqlite3.connect = lambda handle: None, connect  # tests kill processes, not machines: nothing waits for a disk

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def _no_artifacts_of_real_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have the names of real ones, for which the package and the user's cache have artifacts."""
    monkeypatch.setattr(paths, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(paths, "FITS", tmp_path / "fits")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Other files than those of `-m fast` are not even imported for it."""
    if config.option.markexpr != "fast" or not collection_path.name.startswith("test_") or collection_path.is_dir():
        return None
    return collection_path.relative_to(TESTS).as_posix() not in FAST or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests whose name speaks of kernels as `kernels`, and those of `FAST` as `fast`; slow ones come first, so
    that no worker ends with one. All sabotages and cells of the matrix run only where they are asked for, tests of a
    GPU where there is one.
    """
    unasked = {"sabotage", "matrix"} - {*config.option.markexpr.split()}
    items[:] = [item for item in items if not any(map(item.get_closest_marker, unasked))]
    for item in items:
        if re.search(r"kernels|(?<!re)fused", item.nodeid):
            item.add_marker("kernels")
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        fast = item.path.relative_to(TESTS).as_posix() in FAST and not SLOWER.search(item.nodeid)
        if fast and not {"kernels", "slow"} & item.keywords.keys():
            item.add_marker("fast")
    items.sort(key=lambda item: "slow" not in item.keywords)


@pytest.fixture(params=FAMILIES)
def any_model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


@pytest.fixture
def tiny_model() -> Any:
    return make_model("llama")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakePip:
    """Stands in for pip, with an empty cache for what it downloads."""
    made = FakePip(tmp_path / "pip")
    monkeypatch.setattr(sys, "executable", str(made.executable))
    monkeypatch.setenv("KVCLI_CACHE", str(tmp_path / "cache"))
    return made


@pytest.fixture(scope="session")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Method], Artifact]:
    """Fits a method with its example settings to the model of `tiny_model`."""
    folder = tmp_path_factory.mktemp("fitted")

    @cache
    def fit(method_name: str) -> Artifact:
        method, samples = get_method(method_name), record(make_model("llama"), folder / f"{method_name}-samples")
        config = method.config_cls(**method.example_settings).resolve(samples.spec)
        fit_recording(samples, method, config, folder / method_name)
        return assemble([folder / method_name])

    return lambda method: fit(method.name)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with the config of a model of 3 layers and 2 kv heads of 16 channels, and nothing else."""
    make_model("llama").config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model whose tokens are bytes, with a chat template."""
    made = tmp_path_factory.mktemp("models") / "tiny"
    make_model("llama", vocab_size=259, max_position_embeddings=4096).save_pretrained(made)
    byte_tokenizer(CHAT).save_pretrained(made)
    return made


@pytest.fixture
def artifact(tiny_artifact: Callable[[Method], Artifact], tmp_path: Path) -> Path:
    """An artifact of CommVQ."""
    tiny_artifact(get_method("commvq")).save(tmp_path / "artifact")
    return tmp_path / "artifact"


@pytest.fixture
def prompt() -> Callable[..., dict[str, torch.Tensor]]:
    """Makes a batch of random prompts of given lengths, padded on the left."""

    def make(*lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
        generator, mask = torch.Generator().manual_seed(seed), mask_of(*lengths)
        ids = torch.zeros_like(mask)
        for row, length in enumerate(lengths):
            ids[row, -length:] = torch.randint(3, 97, (length,), generator=generator)
        return {"input_ids": ids, "attention_mask": mask}

    return make


@pytest.fixture
def repo_root() -> Path:
    return Path(__file__).resolve().parent.parent
