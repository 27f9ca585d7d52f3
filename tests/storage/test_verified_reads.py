"""Parts of files: read to where they belong, with the checksums of what was read."""

from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blake3 import blake3
from torch import Tensor

from kvcli.storage import reads
from kvcli.storage.reads import READ_BYTES, FilePart, _neighbours, memory_for, read_parts

SIZES = [0, 1, 9, READ_BYTES - 1, READ_BYTES, READ_BYTES + 1, 2 * READ_BYTES + 7]
TOTAL, CPU = sum(SIZES), torch.device("cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(torch.randint(0, 256, (TOTAL,), dtype=torch.uint8).numpy().tobytes())
    return tmp_path / "file"


def check(path: Path, memory: Tensor) -> None:
    """Reads a file in parts; memory and checksums are those of the file."""
    content, ends = path.read_bytes(), list(accumulate(SIZES))
    parts = [FilePart(path, int(piece.storage_offset()), piece) for piece in memory.split(SIZES)]
    digests = [blake3(content[end - size : end]).hexdigest() for size, end in zip(SIZES, ends, strict=True)]
    assert read_parts(parts) == digests
    assert memory.cpu().numpy().tobytes() == content


@pytest.mark.parametrize("inference", [False, True])
def test_parts_on_the_host_are_the_file(file: Path, inference: bool) -> None:
    with torch.inference_mode(inference):
        memory = memory_for(file, TOTAL, CPU)
        check(file, memory)
    assert not memory.is_inference()


def test_only_neighbours_in_file_and_memory_are_read_together_up_to_a_whole_piece(tmp_path: Path) -> None:
    memory, path, half = torch.zeros(READ_BYTES + 1, dtype=torch.uint8), tmp_path / "file", READ_BYTES // 2
    for part, groups in (
        (FilePart(path, half, memory[half : 2 * half]), 1),
        (FilePart(path, half, memory[half : 2 * half + 1]), 2),
        (FilePart(path, half, memory[half + 1 : 2 * half]), 2),
        (FilePart(path, half + 1, memory[half : 2 * half]), 2),
        (FilePart(tmp_path / "other", half, memory[half : 2 * half]), 2),
        (FilePart(path, half, torch.zeros_like(memory)[half : 2 * half]), 2),
    ):
        assert len(_neighbours([FilePart(path, 0, memory[:half]), part])) == groups
    assert read_parts([]) == []


def copy_events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets a GPU's reader copy to the host; returns what its stream was told, in order."""
    events: list[str] = []

    def note(event: str) -> Any:
        return lambda *_: events.append(event)

    def empty(*shape: int, pin_memory: bool = False, **options: Any) -> Tensor:
        events.append("pinned" if pin_memory else "ordinary")
        return torch.zeros(*shape, **options)

    reader = reads._Reader
    stream = SimpleNamespace(wait_stream=note("wait"), synchronize=note("synchronize"))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(reads, "_Reader", lambda device, nbytes: reader(torch.device("cuda"), nbytes))
    return events


def test_a_gpu_gets_every_byte(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for GPUs, on the host: pieces go through buffers that are not written before they were copied."""
    memory = torch.zeros(TOTAL, dtype=torch.uint8)
    events = copy_events(monkeypatch)
    check(file, memory)
    assert events.count("synchronize") == 1 + 1 + 1 + 2 + 3  # the first three parts are read as one piece
    assert "ordinary" not in events
    assert events.count("pinned") == events.count("wait")


def test_a_buffer_is_free_before_an_error_goes_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, memory, real = copy_events(monkeypatch), torch.zeros(100, dtype=torch.uint8), reads._bytes

    def fail(x: Tensor) -> memoryview:
        if "wait" in events and memory.any():
            raise OSError("no more")
        return real(x)

    monkeypatch.setattr(reads, "_bytes", fail)
    with pytest.raises(OSError, match="no more"):
        read_parts([FilePart(file, 0, memory)])
    assert events[-1] == "synchronize"


def test_a_file_that_ends_early_is_an_error(file: Path) -> None:
    with pytest.raises(OSError, match="file is truncated"):
        read_parts([FilePart(file, 1, torch.zeros(TOTAL, dtype=torch.uint8))])
    with pytest.raises(OSError, match=r"No such file|cannot|unable"):
        memory_for(file.with_name("other"), 3, CPU)


@pytest.mark.gpu
def test_a_gpu_gets_every_byte_while_its_memory_is_in_use(file: Path) -> None:
    device = torch.device("cuda", 0)
    for _ in range(20):
        # freed at once and given out again, while the product that fills it still runs
        busy = torch.zeros(TOTAL // 4 + 1, device=device)
        for _ in range(50):
            busy.add_(1)
        del busy
        check(file, memory_for(file, TOTAL, device))
