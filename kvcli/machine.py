"""The machine and the versions in use, for records and bug reports."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvcli._version import __version__

_PACKAGES = ("torch", "triton", "transformers", "datasets", "safetensors", "numpy", "gguf", "accelerate")


def environment_info() -> dict[str, Any]:
    """Versions, processor, memory and GPUs as plain JSON values."""
    import torch

    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in lines if line.startswith("model name")).split(":", 1)[1].strip()
    on_windows = sys.platform == "win32"
    return {
        "kvcli": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "cpu": cpu,
        "cpu_count": os.cpu_count(),
        "memory_bytes": None if on_windows else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        "cuda": torch.version.cuda,
    }


def resident_bytes() -> int:
    """Resident memory of this process, or its peak where the system reports only that."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with suppress(ImportError):  # not every system has it
        from resource import RUSAGE_SELF, getrusage

        return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return 0


def free_bytes(device: Any) -> int:
    """Memory that torch can still allocate on a GPU, or that processes can on a CPU; 2**62 where that is not known."""
    import torch

    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return 2**62


def commit() -> str | None:
    """The commit of the source checkout that is running, with `+` when it has changes; None when installed."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
