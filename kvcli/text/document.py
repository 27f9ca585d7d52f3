"""A text that a chat model reads once into a compressed cache, and any number of questions about it.

This module does not know about files of text or the command line.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.generation import SamplingConfig
from kvcli.attention.session import Session
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.context import Context
from kvcli.cache.record import START
from kvcli.contexts import ContextStore, identity_of
from kvcli.contexts.index import name_from
from kvcli.contexts.reader import TOKENS
from kvcli.errors import CacheError, ModelError, UsageError
from kvcli.models.fingerprint import text_identity
from kvcli.models.load import LoadedModel
from kvcli.progress import Progress, Say, no_progress, say_nothing
from kvcli.text.generate import Generation, compress, generate_text
from kvcli.text.prompts import chat_text, common_length, ids_of_text

BLANK_LINE = "\n\n"
"""What is between documents, and before a question."""

_READING_PER_KEEPING = 20
"""Seconds of reading for each second in which what was read is copied and stored."""


class Document:
    """A text at the beginning of a user's message to a chat model; the question follows it in the same message.

    What was read is kept chunk by chunk: `read` goes on from it after an error or Ctrl-C, with a store in any process,
    and the answers are the same.

    Args:
        loaded: the model, attached by the session; its tokenizer has a chat template.
        store: the store of contexts or its folder; None: what was read is kept in this object only.
        source: what the text is from.
        name: of the context in the store; default: one of the source and a checksum of what the context depends on.
        prefill_chunk: tokens per forward pass, part of the result; default: 512 on a CPU, else 4096.
        notes: plain JSON values that are kept with the context.
        beside_others: it is to stand side by side with others: a blank line ends it, and once it is read, its last
            tokens are kept as codes, too.

    Attributes:
        ids: the document's tokens, int64 [1, time], with the beginning of the message.
        start: how many of them come before the document.
        kept_tokens: how many of them are kept.
        reused_tokens: how many the store had.

    Raises:
        UsageError: a model without a chat template, or no text.
        ModelError: a template that fails, or that changes the text of a message; a model that must be read in one pass.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        session: Session,
        text: str,
        *,
        store: ContextStore | str | Path | None = None,
        source: str = "document",
        name: str | None = None,
        prefill_chunk: int | None = None,
        notes: Mapping[str, Any] | None = None,
        beside_others: bool = False,
    ) -> None:
        session.check_later_passes()
        self.loaded, self.session, self.text = loaded, session, text.strip()
        if not self.text:
            raise UsageError(f"{source} is empty")
        self.store = ContextStore(store) if isinstance(store, (str, Path)) else store
        self._beside_others = beside_others
        self.prefill_chunk = prefill_chunk or (512 if session.model.device.type == "cpu" else 4096)
        before = around(loaded, "?", self.text)[0]
        self.ids = ids_of_text(loaded, before + self.text + BLANK_LINE * beside_others)
        self.start = common_length(self.ids, ids_of_text(loaded, before)) if before else 0
        placed = {START: self.start, TOKENS: self.ids.shape[1]}
        self.notes = {**text_identity(loaded.tokenizer), "source": source, **placed, **(notes or {})}
        self._identity = identity_of(session, loaded.tokenizer, self.ids.shape[1])
        seed = json.dumps([self._identity.to_dict(), self.ids.tolist()], sort_keys=True)
        self.name = name or f"{name_from(source)[:80]}-{hashlib.sha256(seed.encode()).hexdigest()[:8]}"
        self.kept_tokens = self.reused_tokens = 0
        self._context: Context | None = None
        self._cache: CompressedCache | None = None
        self._found = ""
        self._keep_after = 0.0

    def prompt(self, question: str, new_tokens: int) -> Tensor:
        """Tokens [1, time] of document and question; UsageError: too many, with `new_tokens` of an answer."""
        after = BLANK_LINE * (not self._beside_others) + around(self.loaded, question, self.text)[1]
        ids = torch.cat((self.ids, ids_of_text(self.loaded, after, follows=True)), dim=1)
        limit, others = self.loaded.spec.max_position_embeddings, ids.shape[1] - self.ids.shape[1] + new_tokens
        if self.ids.shape[1] + others > limit:
            raise UsageError(
                f"the document has {self.ids.shape[1]} tokens, question and answer {others}, and {self.loaded.name} "
                f"was trained on {limit} in all; {self.that_fits(limit - others)}, or choose a model of longer contexts"
            )
        return ids

    def that_fits(self, tokens: int) -> str:
        """A clause that says how much of the document so many tokens are."""
        return f"its first {max(0, tokens)} tokens would fit, {100 * max(0, tokens) // self.ids.shape[1]} % of it"

    def read(self, progress: Progress = no_progress, say: Say = say_nothing) -> None:
        """Reads what is not kept yet. The next question is put to this very cache, later ones to what was kept.

        `say` gets a line about every damaged context that begins alike, which is passed over.

        CacheError: other weights or adapters than when this object was made; ContextError, OSError: the store cannot be
        read or written; ModelError: the model's values are not finite.
        """
        if (reason := identity_of(self.session, self.loaded.tokenizer).difference(self._identity)) is not None:
            raise CacheError(f"the document was made {reason}; make another one")
        if self._cache is None:
            cache = self._load(say)
            if cache is None or self.kept_tokens < self.ids.shape[1]:
                chunk: dict[str, Any] = {"prefill_chunk": self.prefill_chunk, "past_key_values": cache}
                cache = compress(self.session, self.ids, **chunk, progress=progress, after_chunk=self._keep)
            self._cache = cache

    def keep(self) -> None:
        """Stores what was read under this document's name, if the store had it under another one."""
        if self._cache is None or self.store is None:
            return
        stored = self.store.get(self.name).record.notes if self._found == self.name else {}
        if not self.notes.items() <= stored.items():
            self._keep(self._cache)

    def ask(
        self,
        question: str,
        sampling: SamplingConfig | None = None,
        *,
        seed: int = 0,
        write: Callable[[str], None] = lambda piece: None,
    ) -> Generation:
        """Answers a question, greedily in 256 tokens by default; the document is read before if it was not.

        Arguments and errors are those of `generate_text`; UsageError: more tokens than `prompt` lets pass.
        """
        sampling = sampling or SamplingConfig(256)
        ids = self.prompt(question, sampling.max_new_tokens)
        self.read()
        cache, self._cache = self._cache, None
        options: dict[str, Any] = {"seed": seed, "write": write, "prefill_chunk": self.prefill_chunk}
        return generate_text(self.loaded, self.session, ids, sampling, cache=cache, **options)[0]

    def _load(self, say: Say) -> CompressedCache | None:
        """A cache with the first of the document's tokens, of which there are `kept_tokens`; None: none are kept."""
        if self.store is None:
            return None if self._context is None else self.session.load_cache(self._context)
        window = max(1, self.session.config.residual_length)
        found = self.store.fetch(self.ids, self._identity, say=say, window=window)
        count = 0 if found is None else found[0].num_tokens
        self._found = "" if found is None or count < self.ids.shape[1] else found[0].context.name
        self.reused_tokens, self.kept_tokens = self.reused_tokens if self.kept_tokens else count, count
        return None if found is None else self.session.load_cache(found[1], release=True)

    def _keep(self, cache: CompressedCache) -> None:
        """Stores a cache with the first of the document's tokens, or copies it, if it is time or it has them all."""
        started, count = time.monotonic(), cache.get_seq_length()
        is_end = self.store is not None and self._is_end_to_keep(count)
        if count < self.ids.shape[1] and started < self._keep_after and not is_end:
            return
        if self._beside_others and count == self.ids.shape[1]:
            self.session.flush(cache)
        ids, shared = self.ids[:, :count].cpu(), self.store is not None and self.ids.device.type == "cpu"
        context = cache.context(ids, self.notes, copy=not shared)
        if self.store is None:
            self._context = context
        else:
            self.store.put(context, name=f"{self.name}.{count}" if is_end else self.name, overwrite=True)
            self._found = self.name if count == self.ids.shape[1] else ""
        self.kept_tokens, now = count, time.monotonic()
        self._keep_after = now + _READING_PER_KEEPING * (now - started)

    def _is_end_to_keep(self, count: int) -> bool:
        """Whether a context that ends here is kept beside the whole: where layers keep states of a whole text, another
        goes on from the last of these that it begins with, before the last half, quarter and eighth of this one.
        """
        whole, next_end = self.ids.shape[1], count + self.prefill_chunk
        ends = [whole - whole // part for part in (2, 4, 8)] if self.session.spec.other_layers else []
        return count < whole and any(count <= end < next_end for end in ends)


def around(
    loaded: LoadedModel, question: str, text: str = "?", variables: Mapping[str, Any] | None = None
) -> tuple[str, str]:
    """What the chat template writes before a document, and from the question on, a blank line after it.

    ModelError: a template that changes the text of a message.
    """
    content = f"{text}{BLANK_LINE}{question.strip()}"
    rendered = chat_text(loaded, [{"role": "user", "content": content}], variables=variables)
    before, found, after = rendered.partition(content)
    if not found:
        raise ModelError(f"the chat template of {loaded.name} changes the text of a message")
    return before, question.strip() + after
