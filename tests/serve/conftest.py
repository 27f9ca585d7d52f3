"""Sessions of every method, and stores with small blocks."""

from __future__ import annotations

from contexts_made import maker, store  # noqa: F401
