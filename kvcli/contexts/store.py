"""A folder of contexts: found by the tokens that they begin with, equal parts stored once, within a size.

    NAME.context.json             the manifest of a context; a context is there when its manifest is
    blocks/BLAKE3.safetensors     parts of contexts, named by the BLAKE3 of their bytes

Files are written before the manifest that names them and removed after it, so whatever a kill leaves is a whole store
with files that nobody names, which `prune` removes. Other files of the folder are neither read nor removed. Who reads
or writes holds the folder's lock with others; who removes holds it alone. How often a file is used is counted from the
manifests each time.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from kvcli.cache.context import Context
from kvcli.contexts.content import (
    as_tokens,
    check_content,
    default_name,
    read_context,
    read_tokens,
    write_content,
)
from kvcli.contexts.identity import ContextIdentity
from kvcli.contexts.layout import BLOCK_TOKENS, check_storable
from kvcli.contexts.manifest import (
    Manifest,
    check_name,
    former_names,
    former_store,
    last_used,
    manifest_names,
    manifest_path,
    no_context,
    read_manifest,
    write_manifest,
)
from kvcli.contexts.pruning import drop, prune
from kvcli.contexts.records import Match, Pruned, Stored
from kvcli.contexts.search import longest, names_to_read
from kvcli.contexts.tensor_files import TensorFile, TensorFiles
from kvcli.contexts.usage import Usage
from kvcli.errors import ContextError
from kvcli.progress import Progress, Say, no_progress, say_nothing
from kvcli.storage.locks import lock

_MAX_WAIT_S = 600.0


class ContextStore:
    """The contexts of a folder.

    Args:
        folder: made by the first `put`.
        block_tokens: tokens of a block of codes, rounded up to whole groups of the method; what two contexts have in
            common is found and stored once block by block.
    """

    def __init__(self, folder: str | Path, block_tokens: int = BLOCK_TOKENS) -> None:
        self.folder, self.block_tokens = Path(folder), block_tokens
        self._files = TensorFiles(self.folder / "blocks")

    def make_folder(self) -> None:
        """Makes the folder, which stays empty until something is stored.

        Raises:
            OSError: it cannot be made.
        """
        self._files.folder.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """Names of all contexts, also of damaged ones.

        Raises:
            ContextError: a store that an earlier version of kvcli has written.
        """
        names = manifest_names(self.folder)
        if not names and former_names(self.folder):
            raise ContextError(former_store(self.folder))
        return names

    def get(self, name: str) -> Manifest:
        """One context, by name.

        Raises:
            UsageError: no name of a context.
            ContextError: no such context, or a damaged manifest.
        """
        return read_manifest(self.folder, name)

    def manifests(self, say: Say = say_nothing, names: Sequence[str] | None = None) -> Iterator[Manifest]:
        """The contexts whose manifests can be read.

        Args:
            say: called with a line about every other one.
            names: of contexts; default: all, the most recently used first.
        """
        for name in sorted(self.names(), key=self.last_used, reverse=True) if names is None else names:
            try:
                yield self.get(name)
            except ContextError as error:
                if manifest_path(self.folder, name).exists():  # not removed meanwhile
                    say(str(error))

    def last_used(self, name: str) -> float:
        """When a context was stored or loaded last, seconds since the epoch; 0 if there is none."""
        return last_used(self.folder, name)

    def find(
        self, token_ids: Sequence[int] | Tensor, identity: ContextIdentity, say: Say = say_nothing
    ) -> Match | None:
        """The stored context that has most in common with the beginning of a prompt, compared token by token.

        Args:
            token_ids: of the prompt, one row. A cache needs a token that it does not hold to go on from: leave out the
                prompt's last.
            identity: of the model, the method and the artifact; contexts of another identity are passed over.
            say: called with a line about every damaged context that begins alike, which is passed over.

        Returns:
            None if no context is of use. One is if all of its tokens are the prompt's first, or so many of them that
            they end where a block ends or in its window; fewer than 16 are not, unless the prompt has no more.

        Raises:
            ContextError: token ids of several rows.
        """
        wanted = as_tokens(token_ids)
        if not self.folder.is_dir():
            return None
        with _lock(self.folder, alone=False):
            manifests = self.manifests(say, names_to_read(self.folder, wanted))
            return longest(manifests, self._files, wanted, identity, say)

    def fetch(
        self,
        token_ids: Sequence[int] | Tensor,
        identity: ContextIdentity,
        device: torch.device | str = "cpu",
        say: Say = say_nothing,
    ) -> tuple[Match, Context] | None:
        """`find` and `load`, between which no other process can remove what was found.

        Raises:
            ContextError: token ids of several rows, or a damaged file of what was found.
        """
        if not self.folder.is_dir():
            return None
        with _lock(self.folder, alone=False):
            match = self.find(token_ids, identity, say)
            return None if match is None else (match, self.load(match, device))

    def whole(self, name: str, identity: ContextIdentity | None = None) -> Match:
        """All of a context, by name.

        Args:
            name: of the context.
            identity: of the model, the method and the artifact that are to go on from it; None: not compared.

        Raises:
            UsageError: no name of a context.
            ContextError: no such context, a damaged manifest, or another identity; the message says what differs.
        """
        manifest = self.get(name)
        if identity is not None and (reason := identity.difference(manifest.identity, manifest.notes)) is not None:
            raise ContextError(f"context '{name}' cannot be used here: it was made {reason}")
        return Match(manifest, manifest.num_tokens)

    def token_ids(self, manifest: Manifest) -> Tensor:
        """All token ids of a context, int64 [tokens].

        Raises:
            ContextError: their file is missing or damaged.
        """
        with self._reading(manifest.name, manifest):
            return read_tokens(self._files, manifest)

    def load(self, match: Match, device: torch.device | str = "cpu") -> Context:
        """Reads what `find` or `whole` found, after a check of its files, and notes that the context was used.

        Args:
            match: what to read; of a part, only the files that hold it are read.
            device: of the tensors, to which the mapped files are copied.

        Returns:
            What `Session.load_cache` goes on from, with its token ids, int64 [1, tokens].

        Raises:
            ContextError: a file is missing, truncated or damaged, or of another version of kvcli.
        """
        manifest = match.manifest
        with self._reading(manifest.name, manifest):
            context = read_context(self._files, match, device)
            with suppress(OSError):  # a store of somebody else
                os.utime(manifest_path(self.folder, manifest.name))
        return context

    def put(
        self, context: Context, *, name: str | None = None, overwrite: bool = False, max_bytes: int | None = None
    ) -> Stored:
        """Stores a context; only what is not there is written, and the context appears when all of it is.

        Args:
            context: of one row, with its token ids; of its notes, `tokenizer` and `chat_template` are compared by
                `find` (`kvcli.fingerprint.text_identity` gives them), and `source` says what it was made from.
            name: default: from a checksum of tokens and identity, so that the same context gets the same name.
            overwrite: replace a context of this name that has other tokens or another identity, or is damaged.
            max_bytes: of the whole store; contexts that were not used for longest are removed to keep it.

        Raises:
            UsageError: no name of a context.
            ContextError: padding or several rows, a context without token ids, a name that is taken, or a context that
                alone is larger than `max_bytes`; nothing was written then.
        """
        if context.input_ids is None:
            raise ContextError("a context without its token ids cannot be found again; it can be used as a file only")
        snapshot, tokens = context.snapshot, as_tokens(context.input_ids)
        check_storable(snapshot)
        if len(tokens) != snapshot.num_tokens:
            raise ContextError(f"{len(tokens)} token ids were given for a context of {snapshot.num_tokens} tokens")
        if max_bytes is not None and snapshot.nbytes > max_bytes:
            raise ContextError(f"the context has {snapshot.nbytes} bytes, more than the {max_bytes} of the whole store")
        identity = ContextIdentity.of(context)
        name = default_name(tokens, context.identity.to_dict()) if name is None else name
        check_name(name)
        self.make_folder()
        with _lock(self.folder, alone=False):
            if not overwrite:
                self.check_free(name, tokens, identity)
            stored = write_content(self._files, context, tokens, name, self.block_tokens)
            with _lock(self._files.folder, alone=True):  # of those who store, one at a time
                if not overwrite:
                    self.check_free(name, tokens, identity)
                replaces = manifest_path(self.folder, name).exists()
                write_manifest(self.folder, stored.manifest)
        if max_bytes is None and not replaces:
            return stored
        evicted = self.prune(max_bytes, keep=(name,)).evicted
        return Stored(stored.manifest, stored.new_bytes, stored.shared_bytes, evicted)

    def check_free(self, name: str, token_ids: Sequence[int] | Tensor, identity: ContextIdentity) -> None:
        """Checks that a context of this name is the same one, or that there is none.

        Args:
            name: of a context.
            token_ids: of the one that is to be stored, one row.
            identity: likewise.

        Raises:
            UsageError: no name of a context.
            ContextError: the name belongs to a context of other tokens or another identity, or to a damaged one.
        """
        check_name(name)
        if not manifest_path(self.folder, name).exists():
            return
        manifest = self.get(name)
        same = identity.difference(manifest.identity, manifest.notes) is None
        if not same or not torch.equal(self.token_ids(manifest), as_tokens(token_ids)):
            raise ContextError(
                f"there is a context '{name}' of other tokens or another model already; choose another name, or "
                "replace it with --overwrite"
            )

    def remove(self, name: str) -> int:
        """Removes a context, also a damaged one, and its files that no other context names.

        Returns:
            The bytes that were freed.

        Raises:
            UsageError: no name of a context.
            ContextError: no such context.
        """
        check_name(name)
        if not self.folder.is_dir():
            raise no_context(self.folder, name)
        with _lock(self.folder, alone=True):
            usage = Usage(self.folder, self._files)
            if name not in usage.named:
                raise no_context(self.folder, name)
            return drop(self.folder, self._files, name, usage)

    def prune(self, max_bytes: int | None = None, keep: Collection[str] = ()) -> Pruned:
        """Removes files that no context names, then contexts until the store is small enough.

        Args:
            max_bytes: of the whole store; None: no context is removed.
            keep: names of contexts that stay.

        Raises:
            ContextError: other processes used the store all the time.
        """
        if not self.folder.is_dir():
            return Pruned((), 0)
        with _lock(self.folder, alone=True):
            return prune(self.folder, self._files, max_bytes, keep)

    def usage(self) -> Usage:
        """Which contexts name which files, now."""
        if not self.folder.is_dir():
            return Usage(self.folder, self._files)
        with _lock(self.folder, alone=False):
            return Usage(self.folder, self._files)

    def damages(self, names: Sequence[str], progress: Progress = no_progress) -> dict[str, str]:
        """What is wrong with those contexts that are not whole; all of their files are read, shared ones once.

        Args:
            names: of contexts.
            progress: shows how many were read.
        """
        damages: dict[str, str] = {}
        whole: set[TensorFile] = set()
        with progress("verify", len(names), "contexts") as advance:
            for name in names:
                try:
                    with self._reading(name):
                        check_content(self._files, self.get(name), whole)
                except ContextError as error:
                    damages[name] = str(error)
                advance(1)
        return damages

    @contextmanager
    def _reading(self, name: str, manifest: Manifest | None = None) -> Iterator[None]:
        """Holds the lock; an error inside the block says which context it is of, and what to do.

        Args:
            name: of the context.
            manifest: as it was read before the lock was held; None: it is read inside the block.
        """
        with _lock(self.folder, alone=False):
            try:
                yield
            except ContextError as error:
                if not manifest_path(self.folder, name).exists():
                    raise ContextError(f"context '{name}' was removed by another process") from error
                if manifest is not None and self._differs(manifest):
                    raise ContextError(
                        f"context '{name}' was replaced by another process; run the same command again"
                    ) from error
                if "contexts rm" in str(error):  # a damaged manifest
                    raise
                raise ContextError(
                    f"context '{name}' is damaged: {error}; remove it with 'kvcli contexts rm {name}' and make it again"
                ) from error

    def _differs(self, manifest: Manifest) -> bool:
        """Whether a context has another manifest now that can be read."""
        try:
            return self.get(manifest.name) != manifest
        except ContextError:
            return False


def _lock(folder: Path, *, alone: bool) -> AbstractContextManager[None]:
    """Holds a folder against those that want it alone, or against all."""
    busy = ContextError(f"other kvcli processes use {folder}; wait until they have ended")
    return lock(folder, busy, shared=not alone, wait_s=_MAX_WAIT_S)
