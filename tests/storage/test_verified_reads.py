"""Parts of files: read to where they belong, with the checksums of what was read."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blake3 import blake3
from torch import Tensor

from kvcli.storage import reads
from kvcli.storage.reads import READ_BYTES, Part, _neighbours, memory_for, read_parts

SIZES = [0, 1, 9, READ_BYTES - 1, READ_BYTES, READ_BYTES + 1, 2 * READ_BYTES + 7]
CPU = torch.device("cpu")


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    made = bytes(torch.randint(0, 256, (sum(SIZES),), dtype=torch.uint8).numpy())
    (tmp_path / "file").write_bytes(made)
    return made


def parts_of(path: Path, memory: Tensor) -> list[Part]:
    return [Part(path, int(piece.storage_offset()), piece) for piece in memory.split(SIZES)]


def expected(content: bytes) -> list[str]:
    pieces = torch.frombuffer(bytearray(content), dtype=torch.uint8).split(SIZES)
    return [blake3(piece.numpy().tobytes()).hexdigest() for piece in pieces]


@pytest.mark.parametrize("inference", [False, True])
def test_parts_on_the_host_are_the_file(tmp_path: Path, content: bytes, inference: bool) -> None:
    with torch.inference_mode(inference):
        memory = memory_for(tmp_path / "file", len(content), CPU)
        assert read_parts(parts_of(tmp_path / "file", memory)) == expected(content)
    assert memory.numpy().tobytes() == content
    assert not memory.is_inference()


def test_only_neighbours_in_file_and_memory_are_read_together_up_to_a_whole_piece(tmp_path: Path) -> None:
    memory, path, half = torch.zeros(READ_BYTES + 1, dtype=torch.uint8), tmp_path / "file", READ_BYTES // 2
    for part, groups in (
        (Part(path, half, memory[half : 2 * half]), 1),
        (Part(path, half, memory[half : 2 * half + 1]), 2),
        (Part(path, half, memory[half + 1 : 2 * half]), 2),
        (Part(path, half + 1, memory[half : 2 * half]), 2),
        (Part(tmp_path / "other", half, memory[half : 2 * half]), 2),
        (Part(path, half, torch.zeros_like(memory)[half : 2 * half]), 2),
    ):
        assert len(_neighbours([Part(path, 0, memory[:half]), part])) == groups
    assert read_parts([]) == []


def copy_events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets a GPU's reader copy to the host; returns what its stream was told, in order."""
    events: list[str] = []

    class Stream(SimpleNamespace):
        def wait_stream(self, other: Any) -> None:
            events.append("wait")

        def synchronize(self) -> None:
            events.append("synchronize")

    def empty(*shape: int, pin_memory: bool = False, **options: Any) -> Tensor:
        events.append("pinned" if pin_memory else "ordinary")
        return torch.zeros(*shape, **options)

    reader = reads._Reader
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(reads, "_Reader", lambda device, nbytes: reader(torch.device("cuda"), nbytes))
    return events


def test_a_gpu_gets_every_byte(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for GPUs, on the host: pieces go through buffers that are not written before they were copied."""
    events, memory = copy_events(monkeypatch), torch.zeros(len(content), dtype=torch.uint8)
    assert read_parts(parts_of(tmp_path / "file", memory)) == expected(content)
    assert memory.numpy().tobytes() == content
    assert events.count("synchronize") == 1 + 1 + 1 + 2 + 3  # the first three parts are read as one piece
    assert "ordinary" not in events
    assert events.count("pinned") == events.count("wait")


def test_a_buffer_is_free_before_an_error_goes_on(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, memory, real = copy_events(monkeypatch), torch.zeros(len(content), dtype=torch.uint8), reads._bytes

    def fail(x: Tensor) -> memoryview:
        if "wait" in events and memory.any():
            raise OSError("no more")
        return real(x)

    monkeypatch.setattr(reads, "_bytes", fail)
    with pytest.raises(OSError, match="no more"):
        read_parts([Part(tmp_path / "file", 0, memory[:100])])
    assert events[-1] == "synchronize"


def test_a_file_that_ends_early_is_an_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(OSError, match="file is truncated"):
        read_parts([Part(tmp_path / "file", 1, torch.zeros(len(content), dtype=torch.uint8))])
    with pytest.raises(OSError, match=r"No such file|cannot|unable"):
        memory_for(tmp_path / "other", 3, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_every_byte_while_its_memory_is_in_use(tmp_path: Path, content: bytes) -> None:
    device = torch.device("cuda", 0)
    for _ in range(20):
        # freed at once and given out again, while the product that fills it still runs
        busy = torch.zeros(len(content) // 4 + 1, device=device)
        for _ in range(50):
            busy.add_(1)
        del busy
        memory = memory_for(tmp_path / "file", len(content), device)
        assert read_parts(parts_of(tmp_path / "file", memory)) == expected(content)
        assert memory.cpu().numpy().tobytes() == content
