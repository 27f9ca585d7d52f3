"""Options of commands that use a store of contexts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from kvcli.builtin_models import DEFAULT_MODEL
from kvcli.errors import UsageError
from kvcli.options import Options
from kvcli.paths import contexts_folder

if TYPE_CHECKING:
    from kvcli.contexts import ContextStore


STORE_HELP = "folder of the store of contexts; default: runs/MODEL/contexts"
"""Help of every `--store`."""

MAX_BYTES_HELP = "size that the store may have, as 20GiB or 20G; the least recently used contexts are removed"
"""Help of every `--max-bytes` of what is stored."""


class StoreOptions(Options):
    """Options of commands that read or change a store."""

    model: str = Field(default=DEFAULT_MODEL, description="model whose contexts are meant")
    store: Path | None = Field(default=None, description=STORE_HELP)


def open_store(folder: Path | None, model: str, must_exist: bool = True) -> ContextStore:
    """A store by its folder, or else that of a model.

    Raises:
        UsageError: there is no such folder, and it must exist.
    """
    from kvcli.contexts import ContextStore

    folder = folder or contexts_folder(model)
    if must_exist and not folder.is_dir():
        raise UsageError(
            f"there is no store of contexts in {folder}; 'kvcli compress' makes one, --store names another"
        )
    return ContextStore(folder)
