"""Where `kvcli compress` puts contexts: files, or the store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.cli.output import Output
from kvcli.cli.prompt_sources import Source
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.attention.session import Session
    from kvcli.cache.compressed import CompressedCache
    from kvcli.contexts import ContextIdentity, ContextStore, Match

SUFFIX = ".safetensors"


class FileTarget:
    """A file per context.

    Args:
        out: a file, or a folder.
        sources: texts.
        prefill_chunk: tokens per forward pass.
        overwrite: replace files that exist.

    Raises:
        UsageError: one file for several texts, or a file that exists.
    """

    store: str | None = None

    def __init__(self, out: Path, sources: list[Source], prefill_chunk: int, overwrite: bool) -> None:
        if out.is_dir() or len(sources) > 1:
            if out.suffix == SUFFIX and not out.is_dir():
                raise UsageError(f"--out {out} is one file, but there are {len(sources)} texts; name a folder")
            self.paths = {source.name: out / f"{source.name}{SUFFIX}" for source in sources}
        else:
            self.paths = {sources[0].name: out}
        existing = [path for path in self.paths.values() if path.exists()]
        if existing and not overwrite:
            raise UsageError(f"{existing[0]} exists already; use --overwrite to replace it")
        self.prefill_chunk = prefill_chunk

    def make_folder(self) -> None:
        """Makes the folder of the files.

        Raises:
            OSError: it cannot be made.
        """
        next(iter(self.paths.values())).parent.mkdir(parents=True, exist_ok=True)

    def save(
        self, session: Session, source: Source, ids: Tensor, notes: dict[str, Any], output: Output
    ) -> dict[str, Any]:
        """Reads a text [1, time] into a cache and writes it; returns what was measured."""
        from kvcli.compress import compress

        path, started = self.paths[source.name], time.perf_counter()
        cache = compress(session, ids, prefill_chunk=self.prefill_chunk, progress=output.progress)
        read = time.perf_counter()
        num_bytes = cache.context(ids.cpu(), notes).save(path)
        return {
            "context": str(path),
            "reused_tokens": 0,
            "reused_from": None,
            "new_bytes": num_bytes,
            "shared_bytes": 0,
            "evicted": [],
            "read_s": read - started,
            "write_s": time.perf_counter() - read,
            **sizes(cache, num_bytes),
        }


class StoreTarget:
    """A store of contexts; of a text that begins like a stored one, only the rest is read.

    Args:
        store: of contexts.
        sources: texts.
        prefill_chunk: tokens per forward pass.
        name: of the only context; default: the source's.
        reuse: go on from stored contexts.
        overwrite: replace contexts of other tokens.
        max_bytes: of the store.

    Raises:
        UsageError: one name for several texts, or no name.
    """

    def __init__(
        self,
        store: ContextStore,
        sources: list[Source],
        prefill_chunk: int,
        name: str | None,
        reuse: bool,
        overwrite: bool,
        max_bytes: int | None,
    ) -> None:
        from kvcli.contexts.manifest import check_name, name_from

        if name is not None and len(sources) > 1:
            raise UsageError(f"--name is one name, but there are {len(sources)} texts")
        self.names = {source.name: name or name_from(source.name) for source in sources}
        for chosen in self.names.values():
            check_name(chosen)
        self.contexts, self.store = store, str(store.folder)
        self.prefill_chunk, self.reuse, self.overwrite, self.max_bytes = prefill_chunk, reuse, overwrite, max_bytes

    def make_folder(self) -> None:
        """Makes the folder of the store.

        Raises:
            OSError: it cannot be made.
        """
        self.contexts.make_folder()

    def save(
        self, session: Session, source: Source, ids: Tensor, notes: dict[str, Any], output: Output
    ) -> dict[str, Any]:
        """Reads what is new of a text [1, time] and stores all of it; returns what was measured."""
        from kvcli.compress import compress
        from kvcli.contexts import ContextIdentity

        name, started = self.names[source.name], time.perf_counter()
        identity = ContextIdentity(session.identity(), notes["tokenizer"], notes["chat_template"])
        if not self.overwrite:
            self.contexts.check_free(name, ids, identity)
        cache, match = self._begun(session, ids, identity, output) if self.reuse else (None, None)
        if cache is None or cache.get_seq_length() < ids.shape[1]:
            cache = compress(
                session, ids, prefill_chunk=self.prefill_chunk, past_key_values=cache, progress=output.progress
            )
        read = time.perf_counter()
        context = cache.context(ids.cpu(), notes)
        stored = self.contexts.put(context, name=name, overwrite=self.overwrite, max_bytes=self.max_bytes)
        return {
            "context": name,
            "reused_tokens": match.num_tokens if match else 0,
            "reused_from": match.manifest.name if match else None,
            "new_bytes": stored.new_bytes,
            "shared_bytes": stored.shared_bytes,
            "evicted": list(stored.evicted),
            "read_s": read - started,
            "write_s": time.perf_counter() - read,
            **sizes(cache, stored.manifest.nbytes),
        }

    def _begun(
        self, session: Session, ids: Tensor, identity: ContextIdentity, output: Output
    ) -> tuple[CompressedCache | None, Match | None]:
        """A cache with the beginning of a text, from a stored context.

        All of the text, if all of a context is it; else as much as leaves the window to be read, so that the last
        tokens are in full precision as in any other context.
        """
        match = self.contexts.find(ids, identity, output.warn)
        if match is None or not match.is_whole or match.num_tokens < ids.shape[1]:
            window = max(1, session.config.residual_length)
            match = self.contexts.find(ids[:, : max(0, ids.shape[1] - window)], identity)
        if match is None:
            return None, None
        return session.load_cache(self.contexts.load(match, session.model.device)), match


def sizes(cache: CompressedCache, num_bytes: int) -> dict[str, Any]:
    """What a context takes, as plain JSON values.

    Args:
        cache: that holds it.
        num_bytes: of its files.
    """
    memory = cache.memory()
    return {
        "tokens": memory.num_tokens,
        "file_bytes": num_bytes,
        "fp16_bytes": memory.fp16_bytes,
        "file_bits": 16 * num_bytes / memory.fp16_bytes,
        "true_bits": memory.true_bits,
        "memory": memory.to_dict(),
    }
