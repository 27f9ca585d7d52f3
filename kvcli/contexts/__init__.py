"""Contexts on disk: a store that finds the longest prefix of a prompt and holds equal parts once.

store    the folder: put, remove, prune
reader   what can be done without changing it: find, load, verify
search   the context that has most in common with a prompt
index    the SQLite file that says which contexts and blocks there are; importing it does not load torch
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcli.contexts.search import Match, StoredContext
    from kvcli.contexts.store import ContextStore, Pruned, Stored, identity_of

__all__ = ["ContextStore", "Match", "Pruned", "Stored", "StoredContext", "identity_of"]


def __getattr__(name: str) -> Any:
    """Imports the public names when they are first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'kvcli.contexts' has no attribute '{name}'")
    from kvcli.contexts import search, store

    return getattr(store if hasattr(store, name) else search, name)
