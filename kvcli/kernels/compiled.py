"""The kernels of kvcli that Triton has compiled, as its cache folder has them."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CompiledKernels:
    """Kernels on disk.

    Attributes:
        folder: Triton's cache.
        counts: variants by compute capability, such as 90.
        nbytes: their files.
    """

    folder: Path
    counts: dict[str, int]
    nbytes: int


def compiled_kernels(folder: Path | None = None) -> CompiledKernels:
    """Those in a folder, by default the one that `TRITON_CACHE_DIR` names, else Triton's own."""
    folder = folder or Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    sources = Path(__file__).parent.parent.rglob("*.py")
    ours = {name for path in sources for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    counts: dict[str, int] = {}
    nbytes = 0
    for path in folder.glob("*/*_kernel.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(path.read_text())
            if found["name"] in ours:
                capability = str(found["target"]["arch"])
                counts[capability] = counts.get(capability, 0) + 1
                nbytes += sum(file.stat().st_size for file in path.parent.iterdir())
    return CompiledKernels(folder, counts, nbytes)
