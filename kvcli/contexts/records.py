"""What a store of contexts answers."""

from __future__ import annotations

from dataclasses import dataclass

from kvcli.contexts.manifest import Manifest


@dataclass(frozen=True)
class Match:
    """A stored context, or how much of it a prompt has in common with it.

    Attributes:
        manifest: of the stored one.
        num_tokens: its first tokens that are of use.
    """

    manifest: Manifest
    num_tokens: int

    @property
    def is_whole(self) -> bool:
        """Whether all of the context is of use."""
        return self.num_tokens == self.manifest.num_tokens


@dataclass(frozen=True)
class Stored:
    """What storing a context did.

    Attributes:
        manifest: of the context.
        new_bytes: of files that were written.
        shared_bytes: of files that were there.
        evicted: names of contexts that were removed to keep the store's size.
    """

    manifest: Manifest
    new_bytes: int
    shared_bytes: int
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pruned:
    """What pruning a store removed.

    Attributes:
        evicted: names of contexts, the least recently used first.
        freed_bytes: of all files removed.
    """

    evicted: tuple[str, ...]
    freed_bytes: int
