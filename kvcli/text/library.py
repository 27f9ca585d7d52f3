"""A library: documents in a store of contexts, each read once and alone, asked in any number and order.

A document is a context whose notes name the library; `kvcli contexts` knows it as any other.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.compose import Composed, check_composable
from kvcli.attention.generation import SamplingConfig
from kvcli.attention.session import Session
from kvcli.cache.joined import shifts
from kvcli.cache.record import start_of
from kvcli.contexts import ContextStore, StoredContext, identity_of
from kvcli.contexts.index import LIBRARY, name_from
from kvcli.contexts.reader import DOCUMENT, documents_of
from kvcli.errors import UsageError
from kvcli.models.load import LoadedModel
from kvcli.progress import Progress, Say, no_progress, say_nothing
from kvcli.text.document import Document, around
from kvcli.text.generate import Generation, generate_text
from kvcli.text.prompts import ids_of_text


class Library:
    """The documents of one name in a store.

    Args:
        loaded: the model, attached by the session; its tokenizer has a chat template.
        prefill_chunk: as of `Document`.

    UsageError: a model or method of which documents cannot stand side by side.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        session: Session,
        store: ContextStore | str | Path,
        name: str,
        prefill_chunk: int | None = None,
    ) -> None:
        check_composable(session)
        self.loaded, self.session, self.name, self.prefill_chunk = loaded, session, name, prefill_chunk
        self.store = ContextStore(store) if isinstance(store, (str, Path)) else store

    def document(self, name: str, text: str, notes: dict[str, Any] | None = None) -> Document:
        """A document to be read; it replaces one of its name whose text was another."""
        of_library = {LIBRARY: self.name, DOCUMENT: name, **(notes or {})}
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        context = f"{name_from(self.name)[:40]}.{name_from(name)[:40]}-{digest}"
        options: dict[str, Any] = {"source": name, "name": context, "prefill_chunk": self.prefill_chunk}
        return Document(
            self.loaded, self.session, text, store=self.store, notes=of_library, beside_others=True, **options
        )

    def add(self, document: Document, progress: Progress = no_progress, say: Say = say_nothing) -> None:
        """Reads what is not kept of a document, and keeps it under its name here; raises as `Document.read`.

        UsageError: the library's documents are of another model or method, and would not stand beside it.
        """
        if self._mismatch is not None:
            raise UsageError(
                f"library '{self.name}' in {self.store.folder} was made {self._mismatch}; take another name, or "
                "remove it with 'kvcli library rm'"
            )
        document.read(progress, say)
        document.keep()

    @cached_property
    def _mismatch(self) -> str | None:
        """Why documents that are there cannot stand beside those of this session: a clause after "it was made"."""
        identity = identity_of(self.session, self.loaded.tokenizer)
        return next(filter(None, (x.difference(identity) for x in self.documents().values())), None)

    def documents(self) -> dict[str, StoredContext]:
        """The documents that were read to their end, by name."""
        return documents_of(self.store, self.name)

    def text(self, stored: StoredContext) -> str:
        """The text of a document, from its token ids."""
        ids = self.store.token_ids(stored)[start_of(stored.record.notes) :]
        tokenizer: Any = self.loaded.tokenizer
        known = [x for x in ids.tolist() if 0 <= x < self.loaded.spec.vocab_size]
        return str(tokenizer.decode(known, skip_special_tokens=True)).strip()

    def best(self, question: str, top: int) -> list[str]:
        """The documents with most in common with a question by BM25, the best first; at most `top`.

        The first ones, where none has a word of the question.

        UsageError: the package bm25s is not installed.
        """
        try:
            import bm25s  # type: ignore[import-untyped]
        except ImportError as error:
            raise UsageError("bm25s chooses documents: pip install 'kvcli[library]', or name them") from error
        documents, options = self.documents(), {"stopwords": None, "show_progress": False, "token_pattern": r"\w+"}
        texts = bm25s.tokenize([self.text(x) for x in documents.values()], **options)
        words = bm25s.tokenize([question], **options)
        if not texts.vocab or not words.vocab:  # nothing to compare
            return [*documents][:top]
        ranked = bm25s.BM25()
        ranked.index(texts, show_progress=False)
        found, scores = ranked.retrieve(words, [*documents], k=min(top, len(documents)), show_progress=False)
        chosen = [str(name) for name, score in zip(found[0], scores[0], strict=True) if score > 0]
        return chosen or [*documents][:top]

    def compose(self, names: Sequence[str], *, repair: float = 0.1, progress: Progress = no_progress) -> Composed:
        """The documents side by side, as `Session.compose`; UsageError: there is none of a name."""
        documents, identity = self.documents(), identity_of(self.session, self.loaded.tokenizer)
        if unknown := [name for name in names if name not in documents]:
            known = ", ".join(documents) or "none yet"
            raise UsageError(f"library '{self.name}' has no document '{unknown[0]}'; it has {known}"[:500])
        matches = [self.store.whole(documents[name].name, identity) for name in names]
        with ThreadPoolExecutor(4) as threads:
            contexts = [*threads.map(partial(self.store.load, device=self.session.model.device), matches)]
        return self.session.compose(contexts, repair=repair, prefill_chunk=self.prefill_chunk, progress=progress)

    def that_fit(self, names: Sequence[str], question: str, new_tokens: int) -> int:
        """How many of the documents, the first ones, fit with a question and an answer into the model's context."""
        documents, limit = self.documents(), self.loaded.spec.max_position_embeddings
        records = [documents[name].record for name in names if name in documents]
        lengths = [record.num_tokens for record in records]
        starts = [start_of(record.notes) for record in records]
        moved = shifts(lengths, starts, self.session.codecs) if lengths else []
        left = limit - new_tokens - self.question(question).shape[1]
        return next(i for i in count() if i == len(moved) or moved[i] + lengths[i] > left)

    def question(self, question: str) -> Tensor:
        """Token ids [1, time] of a question and of the beginning of a reply."""
        return ids_of_text(self.loaded, around(self.loaded, question)[1], follows=True)

    def ask(
        self,
        question: str,
        composed: Composed,
        sampling: SamplingConfig | None = None,
        *,
        seed: int = 0,
        write: Callable[[str], None] = lambda piece: None,
    ) -> Generation:
        """Answers a question about documents side by side, greedily in 256 tokens by default; once."""
        ids = torch.cat((composed.input_ids, self.question(question)), dim=1)
        options: dict[str, Any] = {"seed": seed, "write": write, "prefill_chunk": self.prefill_chunk}
        return generate_text(
            self.loaded, self.session, ids, sampling or SamplingConfig(256), cache=composed.cache, **options
        )[0]
