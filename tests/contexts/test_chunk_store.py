"""Chunks of engines in a store: bounded, shared, and whole after kills."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcli.contexts.chunks import Chunk, ChunkStore, chunks_of, used_now
from kvcli.contexts.index import names
from kvcli.errors import ContextError


def chunk(number: int, size: int = 1000, kind: str = "m klt") -> Chunk:
    errors = (0.1 * number, 0.2) if kind != "opaque" else None
    return Chunk(f"{number:040x}", bytes([number]) * size, kind, 8 * size, errors)


def files(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("chunks/*/*.kvc")}


def test_chunks_come_back_and_are_counted_by_kind(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, 10**6)
    assert chunks_of(tmp_path) == []
    store.put([chunk(1), chunk(3), chunk(2, kind="opaque")])
    assert store.get(chunk(3).key) == bytes([3]) * 1000
    assert store.has(chunk(1).key)
    assert not store.has(chunk(4).key)
    assert store.get(chunk(4).key) is None
    of_kind = {x.kind: x for x in chunks_of(tmp_path)}
    codes = of_kind["m klt"]
    assert (codes.chunks, codes.bytes, codes.plain_bytes) == (2, 2000, 16000)
    assert codes.key_error == pytest.approx(0.2)
    assert codes.worst_key_error == pytest.approx(0.3)
    assert of_kind["opaque"].key_error is None
    assert names(tmp_path) == []


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, 3000)
    for number in (1, 2, 3):
        store.put([chunk(number)])
        time.sleep(0.002)
    store.touch(used_now([chunk(1).key]))
    ChunkStore(tmp_path, 3000).put([chunk(4)])
    assert files(tmp_path) == {chunk(x).key for x in (1, 3, 4)}
    with pytest.raises(ContextError, match="has 4000 bytes, more than the 3000 of the whole store"):
        store.put([chunk(6), chunk(5, 4000)])
    assert files(tmp_path) == {chunk(x).key for x in (1, 3, 4)}
    text = [chunk(x) for x in (9, 7, 8, 6, 5, 4)]
    store.put(text)
    assert files(tmp_path) == {x.key for x in text[:3]}  # what follows is not found without what is before
    store.touch(used_now(x.key for x in text))
    store.put([chunk(1)])
    assert files(tmp_path) == {x.key for x in [chunk(1), *text[:2]]}
    (kind,) = chunks_of(tmp_path)
    assert kind.bytes == 3000


def test_a_text_that_is_stored_in_steps_never_pushes_its_beginning_out(tmp_path: Path, monkeypatch: Any) -> None:
    """And writes nothing that goes at once; what others did not use for longer goes first."""
    store, text = ChunkStore(tmp_path, 3000), [chunk(x) for x in (9, 7, 8, 6, 5)]
    store.put([chunk(1), chunk(2)])
    write, written = store._write, list[str]()
    monkeypatch.setattr(store, "_write", lambda new: written.append(new.key) or write(new))
    used = used_now(x.key for x in text)
    for step in text:
        store.put([step], used)
        assert sum(x.bytes for x in chunks_of(tmp_path)) == 1000 * len(files(tmp_path)) <= 3000
    assert files(tmp_path) == {x.key for x in text[:3]} == set(written)
    assert len(written) == 3


def test_a_use_is_noted_when_others_have_written_and_never_goes_back(tmp_path: Path) -> None:
    store, key = ChunkStore(tmp_path, 3000), chunk(1).key
    store.put([chunk(1)], {key: 1.0})
    with ChunkStore(tmp_path, 3000)._index.writing():
        store.touch({key: 5.0})
    assert chunks_of(tmp_path)[0].used == 1
    for later in ({}, {key: 3.0}):
        store.touch(later)
        assert chunks_of(tmp_path)[0].used == 5


def test_a_chunk_that_others_removed_while_it_was_written_is_counted(tmp_path: Path, monkeypatch: Any) -> None:
    store, other = ChunkStore(tmp_path, 10**6), ChunkStore(tmp_path, 10**6)
    write = store._write

    def removed_first(new: Chunk) -> None:
        other.remove([new.key])
        write(new)

    monkeypatch.setattr(store, "_write", removed_first)
    store.put([chunk(1)])
    assert chunks_of(tmp_path)[0].chunks == len(files(tmp_path)) == 1


def test_failed_writes_leave_no_rows_that_push_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ChunkStore(tmp_path, 5000)
    store.put([chunk(x) for x in range(4)])

    def full(new: Chunk) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store, "_write", full)
        for number in range(10, 20):
            with pytest.raises(OSError, match="No space"):
                store.put([chunk(number)])
    store.put([chunk(5)])
    assert files(tmp_path) == {chunk(x).key for x in (0, 1, 2, 3, 5)}
    assert chunks_of(tmp_path)[0].chunks == 5


def test_a_full_disk_takes_new_chunks_for_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ChunkStore(tmp_path, 10**9)
    store.put([chunk(1, 2**24), chunk(2, 2**24)])
    os.utime(store._path(chunk(2).key), (1, 1))
    write, failed = store._write, list[str]()

    def once(new: Chunk) -> None:
        if not failed:
            failed.append(new.key)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(new)

    monkeypatch.setattr(store, "_write", once)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
    store._path(chunk(1).key).with_name("gone.kvc").symlink_to("what another process has removed")
    store.put([chunk(3)])
    assert files(tmp_path) - {"gone"} == {chunk(3).key} | ({chunk(1).key} if store.has(chunk(1).key) else set())
    assert not store.has(chunk(2).key)
    assert {key for (key,) in rows(store)} == files(tmp_path) - {"gone"}


def rows(store: ChunkStore) -> list[tuple[str]]:
    with store._index.reading() as db:
        return db.execute("SELECT key FROM chunks").fetchall()


def test_files_and_rows_without_each_other_go_at_a_later_start(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, 10**6)
    store.put([chunk(1), chunk(2), chunk(3)])
    store._path(chunk(2).key).unlink()
    store._index.at_once("DELETE FROM chunks WHERE key = ?", [(chunk(3).key,)])
    half = store._path(chunk(1).key).with_suffix(".kvc.1.2.tmp")
    half.write_bytes(b"half")
    ChunkStore(tmp_path, 10**6)  # others may be writing them
    assert chunks_of(tmp_path)[0].chunks == 2
    assert files(tmp_path) == {chunk(1).key, chunk(3).key}
    assert half.exists()
    long_ago = time.time() - 3600
    store._index.at_once("UPDATE chunks SET used = ?", [(long_ago,)])
    for path in (store._path(chunk(3).key), half):
        os.utime(path, (long_ago, long_ago))
    ChunkStore(tmp_path, 10**6)
    assert not half.exists()
    assert chunks_of(tmp_path)[0].chunks == 1
    assert files(tmp_path) == {chunk(1).key}


WRITER = """
import sys
from kvcli.contexts.chunks import Chunk, ChunkStore
store, first = ChunkStore(sys.argv[1], 8_000_000), int(sys.argv[2])
print("ready", flush=True)
for i in range(first, first + 10**6):
    store.put([Chunk(f"{4 * i + j:040x}", bytes([i % 251]) * 200_000, "k", 1000) for j in range(4)])
"""


def test_kills_leave_only_whole_chunks_that_the_bound_counts(tmp_path: Path) -> None:
    for turn in range(4):
        programs = ([sys.executable, "-c", WRITER, str(tmp_path), str(10**6 * (2 * turn + i))] for i in range(2))
        writers = [subprocess.Popen(program, stdout=subprocess.PIPE) for program in programs]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        end, reader = time.monotonic() + 0.25, ChunkStore(tmp_path, 8_000_000)
        while time.monotonic() < end:
            for key in files(tmp_path):
                data = reader.get(key)
                assert data is None or (len(data) == 200_000 and len(set(data)) == 1)
            assert len(files(tmp_path)) <= 56  # and four of each writer
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
    store = ChunkStore(tmp_path, 8_000_000)
    store.put([chunk(1, 200_000)])
    assert sum(x.bytes for x in chunks_of(tmp_path)) <= 8_000_000
    left = files(tmp_path)
    assert 5 < len(left) <= 48  # four of each kill may be without a row until a later start
    store.remove(left)
    assert files(tmp_path) == set()


def test_a_folder_that_cannot_be_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(ContextError, match=r"damaged|not written by kvcli"):
        ChunkStore(tmp_path, 10**6)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        ChunkStore(tmp_path / "file", 10**6)
