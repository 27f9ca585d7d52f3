"""Sessions of every method, and stores with small blocks."""

from contexts_made import maker, store  # noqa: F401
