"""Shares of a recording: put together, they are what one process records, to the last bit."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from contexts_made import flip
from factories import load, make_model

from kvcli.calibrate import collect as collecting
from kvcli.calibrate import shards
from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig, Shard
from kvcli.calibrate.recording import Recording
from kvcli.calibrate.shards import merge
from kvcli.errors import SamplesError, UsageError

SEQUENCES = torch.randint(3, 97, (11, 48), generator=torch.Generator().manual_seed(0))
"""Longer than the window that sees keys in full precision: shorter ones have no gradients."""

CONFIG = CollectConfig(11, 48, 5, 2, 2, 7)
PART = "window-001-part-00002"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def recorded(folder: Path, shard: Shard | None = None, seed: int = 1) -> Path:
    collect(load(make_model("qwen2")), SEQUENCES, CONFIG, folder, {"seed": seed}, shard=shard)
    return folder


def record_shards(folder: Path, count: int) -> list[Path]:
    return [recorded(folder / f"{index}-of-{count}", Shard(index, count)) for index in range(1, count + 1)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return record_shards(tmp_path_factory.mktemp("three"), 3)


@pytest.fixture
def copy(three: list[Path], tmp_path: Path) -> Path:
    return shutil.copytree(three[0].parent, tmp_path / "shards")


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_merged_shards_are_the_recording_of_one_process(whole: Path, tmp_path: Path, count: int) -> None:
    places = record_shards(tmp_path / "shards", count)
    done: list[int] = []
    merge(places[::-1], tmp_path / "merged", advance=done.append)
    assert contents(tmp_path / "merged") == contents(whole)
    assert all(layer.key.count_nonzero() for layer in Recording(whole).fisher)
    assert sum(done) == 2 * 6 + 7
    before = contents(places[0])
    again = merge(places, tmp_path / "merged")  # over what is there
    assert (again.folder, again.spec) == (tmp_path / "merged", Recording(whole).spec)
    assert contents(tmp_path / "merged") == contents(whole)
    assert contents(places[0]) == before


def test_shards_share_all_passes_and_rows() -> None:
    for count in range(1, 7):
        shares = [Shard(index + 1, count) for index in range(count)]
        assert [part for share in shares for part in CONFIG.parts(share)] == list(range(6))
        assert [row for share in shares for row in CONFIG.sequences(share)] == list(range(11))
    spec = load(make_model("qwen2")).spec
    for size in (CollectConfig.disk_bytes, CollectConfig.total_tokens):
        assert sum(size(CONFIG, spec, Shard(index, 4)) for index in range(1, 5)) == size(CONFIG, spec)
    with pytest.raises(UsageError, match="6 forward passes cannot be shared among 7"):
        CONFIG.parts(Shard(1, 7))


@pytest.mark.parametrize("shard", [None, Shard(2, 3)])
def test_progress_reaches_its_total_whatever_is_there_already(tmp_path: Path, shard: Shard | None) -> None:
    """A token with gradients counts as often as it takes longer than one without."""
    loaded, done = load(make_model("qwen2")), list[int]()
    total = CONFIG.total_tokens(loaded.spec, shard)
    rows = len(CONFIG.fisher_rows) if shard is None else sum(x in CONFIG.sequences(shard) for x in CONFIG.fisher_rows)
    assert total == len(CONFIG.sequences(shard)) * 48 * len(CONFIG.windows(loaded.spec)) + 4 * 48 * rows
    for left in ("all", "gradients", "nothing"):
        if left == "gradients":
            next(tmp_path.glob("fisher*")).unlink()
        done.clear()
        collect(loaded, SEQUENCES, CONFIG, tmp_path, {}, shard=shard, advance=done.append)
        assert sum(done) == (0 if left == "nothing" else total)  # of a complete recording, that it is one is said


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/", "a/b", "-1/2", "1/2/3", "1.0/2"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--shard takes an index"):
        Shard.parse(text)
    assert Shard.parse(" 2/4 ") == Shard(2, 4)


def test_a_shard_resumes(tmp_path: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = collecting.write_part, []

    def cut(folder: Path, name: str, tensors: Any) -> None:
        written.append(name)
        if len(written) in (3, 7):
            raise KeyboardInterrupt
        write(folder, name, tensors)

    monkeypatch.setattr(collecting, "write_part", cut)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            recorded(tmp_path, Shard(2, 3))
    assert contents(recorded(tmp_path, Shard(2, 3))) == contents(three[1])
    assert len(written) == len(set(written)) + 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda x: shutil.rmtree(x / "2-of-3"), "shard 2/3 is missing"),
        (lambda x: shutil.copytree(x / "2-of-3", x / "again"), "both hold shard 2/3"),
        (lambda x: (x / "3-of-3" / "samples.json").unlink(), "no shard of a recording in"),
        (lambda x: flip(x / "3-of-3" / "samples.json"), "damaged"),
        (lambda x: flip(x / "2-of-3" / f"{PART}.safetensors"), f"{PART}.*missing or damaged"),
        (lambda x: (x / "1-of-3" / "fisher-00000.safetensors").unlink(), "fisher-00000.*missing or damaged"),
        (shutil.rmtree, "no shards to merge"),
    ],
)
def test_what_cannot_be_merged_is_refused(copy: Path, tmp_path: Path, damage: Callable[[Path], Any], said: str) -> None:
    """Fault (files): a shard missing, given twice, damaged, not finished, or of another recording. Result: `merge`
    names it.
    """
    damage(copy)
    folders = sorted(copy.iterdir()) if copy.exists() else []
    with pytest.raises(SamplesError, match=said):
        merge(folders, tmp_path / "merged")
    with pytest.raises(SamplesError, match=r"no recorded samples|not finished"):
        Recording(tmp_path / "merged")


@pytest.mark.parametrize("moment", [1, 4, 12])
def test_a_cut_merge_goes_on(whole: Path, three: Any, tmp_path: Path, monkeypatch: Any, moment: int) -> None:
    link, linked = shards.link_or_copy, []

    def cut(source: Path, target: Path) -> None:
        linked.append(target.name)
        if len(linked) == moment:
            target.write_bytes(b"half a file")
            raise KeyboardInterrupt
        link(source, target)

    monkeypatch.setattr(shards, "link_or_copy", cut)
    with pytest.raises(KeyboardInterrupt):
        merge(three, tmp_path / "merged")
    monkeypatch.setattr(shards, "link_or_copy", link)
    with pytest.raises(SamplesError, match="not finished"):
        Recording(tmp_path / "merged")
    merge(three, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(whole)


def test_shards_of_different_recordings_are_refused(copy: Path, whole: Path, tmp_path: Path) -> None:
    other = recorded(tmp_path / "other", Shard(2, 3), seed=2)
    for folders, folder, said in (
        ([copy / "1-of-3", other, copy / "3-of-3"], tmp_path / "merged", "different recordings: provenance differs"),
        ([whole], tmp_path / "merged", "whole recording"),
        (sorted(copy.iterdir()), other, "holds another recording"),
    ):
        with pytest.raises(SamplesError, match=said):
            merge(folders, folder)
    with pytest.raises(SamplesError, match=r"holds shard .* put all together with 'kvcli merge'"):
        Recording(other)


def test_files_that_cannot_be_linked_are_copied(whole: Path, three: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("os.link", Mock(side_effect=OSError(18, "Invalid cross-device link")))
    merge(three, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(whole)
