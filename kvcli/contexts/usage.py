"""Which contexts of a store name which files: counted from the manifests, which need not be whole for that."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from kvcli.contexts.manifest import manifest_names, manifest_path
from kvcli.contexts.tensor_files import TensorFiles, digests_in


class Usage:
    """The files of a store at one moment; the caller holds its lock.

    Everything in a manifest that could be the name of a file counts as one, so that the files of a damaged manifest,
    which cannot be read otherwise, are not taken for unused ones.

    Args:
        folder: with the manifests.
        files: of the store.

    Attributes:
        held: bytes of every file, by name.
        named: files that are there, by the name of the context that names them.
        count: how many contexts name a file.
        manifest_bytes: of every manifest.
    """

    def __init__(self, folder: Path, files: TensorFiles) -> None:
        self.held = files.held()
        self.named: dict[str, set[str]] = {}
        self.manifest_bytes: dict[str, int] = {}
        self.count: Counter[str] = Counter()
        for name in manifest_names(folder):
            text = manifest_path(folder, name).read_bytes()
            self.named[name] = digests_in(text) & self.held.keys()
            self.manifest_bytes[name] = len(text)
            self.count.update(self.named[name])

    @property
    def nbytes(self) -> int:
        """Bytes of all files that a context names, and of the manifests."""
        return sum(self.held[file] for file in self.count) + sum(self.manifest_bytes.values())

    @property
    def unused(self) -> set[str]:
        """Files that no context names."""
        return set(self.held) - set(self.count)

    def shared_bytes(self, name: str) -> int:
        """Bytes of a context's files that other contexts name, too; 0 for one that was stored later."""
        return sum(self.held[file] for file in self.named.get(name, ()) if self.count[file] > 1)

    def forget(self, name: str) -> set[str]:
        """Leaves a context out of account; returns its files that no other context names."""
        self.manifest_bytes.pop(name)
        alone = set()
        for file in self.named.pop(name):
            self.count[file] -= 1
            if not self.count[file]:
                del self.count[file]
                alone.add(file)
        return alone
