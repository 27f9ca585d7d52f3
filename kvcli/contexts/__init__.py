"""Contexts on disk: a store that finds the longest prefix of a prompt and has equal parts once.

`store` puts, removes and prunes; `reader` finds, loads and verifies; `search` finds the context with most in common
with a prompt; `index` is the SQLite file of all contexts and blocks, and does not import torch.
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
