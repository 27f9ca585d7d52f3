"""The machine and the versions in use, for records and bug reports."""

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

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
    return {
        "kvcli": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "cpu": cpu,
        "cpu_count": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        "cuda": torch.version.cuda,
    }


def resident_bytes() -> int:
    """Resident memory of this process."""
    return psutil.Process().memory_info().rss


def free_bytes(device: Any) -> int:
    """Memory that torch can still allocate on a GPU, or that processes can on a CPU."""
    import torch

    if device.type != "cuda":
        return psutil.virtual_memory().available
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserved


def commit() -> str | None:
    """The commit of the source checkout that is running, with `+` when it has changes; None when installed."""
    root = Path(__file__).resolve().parents[2]
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
