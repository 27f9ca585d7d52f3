"""Removing contexts and what nobody names; the caller holds the store alone.

A manifest goes before its files, so that a kill in between leaves files without a name and no context without files.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

from kvcli.contexts.manifest import SUFFIX, last_used, manifest_path
from kvcli.contexts.records import Pruned
from kvcli.contexts.tensor_files import TensorFiles
from kvcli.contexts.usage import Usage


def drop(folder: Path, files: TensorFiles, name: str, usage: Usage) -> int:
    """Removes a context and those of its files that no other names; returns the bytes.

    Args:
        folder: of the manifests.
        files: of the store.
        name: of the context.
        usage: of the store, which leaves the context out from now on.
    """
    return _unlink(manifest_path(folder, name)) + files.remove(usage.forget(name))


def prune(folder: Path, files: TensorFiles, max_bytes: int | None, keep: Collection[str]) -> Pruned:
    """Removes what killed processes left and files that nobody names, then contexts, the least recently used first.

    Args:
        folder: of the manifests.
        files: of the store.
        max_bytes: to which the store is to shrink; None: no context is removed.
        keep: names of contexts that stay.
    """
    left = [path for path in folder.glob(f"*{SUFFIX}.tmp") if path.is_file()]
    freed = sum(map(_unlink, [*left, *files.unfinished()]))
    usage, evicted = Usage(folder, files), []
    freed += files.remove(usage.unused)
    for name in sorted(usage.named, key=partial(last_used, folder)):
        if max_bytes is None or usage.nbytes <= max_bytes:
            break
        if name not in keep:
            freed += drop(folder, files, name, usage)
            evicted.append(name)
    return Pruned(tuple(evicted), freed)


def _unlink(path: Path) -> int:
    """Removes a file; returns its bytes."""
    size = path.stat().st_size
    path.unlink()
    return size
