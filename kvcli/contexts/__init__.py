"""Contexts on disk: a store that finds the longest prefix of a prompt and holds equal parts once.

store       the folder: find, load, put, remove, prune
manifest    what a context is; content, layout, stacking: its tensors as files; identity: what it is bound to
tensor_files, lock, usage: files named by their checksum, who may touch them, who needs them
"""

from kvcli.contexts.identity import ContextIdentity, identity_of
from kvcli.contexts.records import Match, Pruned, Stored
from kvcli.contexts.store import ContextStore

__all__ = ["ContextIdentity", "ContextStore", "Match", "Pruned", "Stored", "identity_of"]
