"""A conversation on one compressed cache: only what is new of each turn is read.

This module does not know about files or the command line.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.generation import SamplingConfig
from kvcli.attention.session import Session
from kvcli.cache.context import Context
from kvcli.cache.others import EndOfPass
from kvcli.errors import CacheError
from kvcli.models.fingerprint import text_identity
from kvcli.models.load import LoadedModel
from kvcli.progress import Say, say_nothing
from kvcli.text.generate import Generation, compress, generate_text
from kvcli.text.prompts import Message, Rendered, common_length


class Conversation:
    """Messages of a user and a model, and the cache that holds their tokens.

    Args:
        loaded: the model, attached by the session; its tokenizer has a chat template.
        sampling: how tokens are chosen, and how many per reply at most.
        messages: that come before the first one, such as the system's.
        prefill_chunk: prompt tokens per forward pass; None: all.
        say: called with a line where the cache had to be cut or made anew.
        notes: plain JSON values that are kept with a saved conversation.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        session: Session,
        sampling: SamplingConfig,
        *,
        messages: Sequence[Message] = (),
        seed: int = 0,
        prefill_chunk: int | None = None,
        say: Say = say_nothing,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        session.check_later_passes()
        self.loaded, self.session, self.sampling, self.seed = loaded, session, sampling, seed
        self.prefill_chunk, self.say, self.notes = prefill_chunk, say, dict(notes or {})
        self.cache = session.new_cache()
        self._rendered = Rendered(tuple(messages), "", torch.zeros(1, 0, dtype=torch.int64))
        self._length: int | None = 0  # tokens that the cache holds; None after a reply that was broken off
        self._end: EndOfPass | None = None

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return list(self._rendered.messages)

    def resume(self, context: Context) -> None:
        """Goes on from a conversation that `context` saved, with its messages among the notes.

        UsageError: it holds no conversation; CacheError: it is of another model, method or settings.
        """
        tokens = torch.as_tensor(context.input_ids).clone()
        rendered = Rendered.from_notes(context.notes, tokens, context.name)
        self.cache = self.session.load_cache(context)
        self._rendered, self._length = rendered, tokens.shape[1]

    def reply(self, text: str, write: Callable[[str], None] = lambda piece: None) -> Generation:
        """Adds a user's message and generates the model's.

        Pieces of the reply are passed to `write` as they are finished; `reused_tokens` were in the cache already.

        ModelError: a chat template that fails, or logits that are not finite.
        """
        rendered = self._rendered.followed_by(self.loaded, {"role": "user", "content": text})
        try:
            cached = self._cached_ids()
            self.cache.identity()
            common = min(common_length(cached, rendered.ids), rendered.ids.shape[1] - 1)
            if cached.shape[1] > common and self._end is not None:
                common = min(common, self._end.slots)
            if surplus := cached.shape[1] - common:
                self.cache.crop(-surplus, self._end)
                self.say(f"earlier turns are rendered differently now: {surplus} tokens are read again")
        except CacheError as error:
            self.cache = self.session.new_cache()
            self.say(f"the conversation is read again from its start: {error}")
        self._length, reused, started = None, self.cache.get_seq_length(), time.perf_counter()
        if self.session.spec.other_layers and reused < rendered.ids.shape[1] - 1:
            # layers keep states of the whole text: the reply can be cut off where a pass before it ends
            before = rendered.ids[:, :-1].to(self.session.model.device)
            compress(self.session, before, prefill_chunk=self.prefill_chunk, past_key_values=self.cache)
            self._end = self.cache.end_of_pass()
        reading = time.perf_counter() - started
        generation, generated = generate_text(
            self.loaded,
            self.session,
            rendered.ids,
            self.sampling,
            seed=self.seed,
            write=write,
            cache=self.cache,
            prefill_chunk=self.prefill_chunk,
        )
        sequences = generated.sequences.cpu()
        has_stop = int(sequences[0, -1]) in self.loaded.end_tokens  # the template ends a reply itself
        self._rendered = rendered.replied(generation.text, sequences[:, : sequences.shape[1] - has_stop])
        self._length = self.cache.get_seq_length()
        return replace(generation, reused_tokens=reused, ttft_s=generation.ttft_s + reading)

    def context(self) -> Context:
        """A copy of cache and conversation, to be saved; CacheError: nothing was said, or a reply was broken off."""
        ids = self._cached_ids()
        notes = {**text_identity(self.loaded.tokenizer), **self._rendered.notes(ids.shape[1]), **self.notes}
        return self.cache.context(ids, notes)

    def _cached_ids(self) -> Tensor:
        """The tokens [1, time] that the cache holds, which are unknown after a reply that was broken off."""
        if self._length is None:
            raise CacheError("the last reply was broken off")
        return self._rendered.ids[:, : self._length]
