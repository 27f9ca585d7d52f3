"""A context that a command goes on from: the file, and the token ids of what follows it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.cli.output import Output
from kvcli.cli.store_options import open_store
from kvcli.errors import CacheError

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.attention.session import Session
    from kvcli.cache.compressed import CompressedCache
    from kvcli.cache.context import Context
    from kvcli.contexts import ContextStore
    from kvcli.models import LoadedModel


def load_context(source: Path, model: str, store: Path | None = None) -> Context:
    """Reads and verifies a context, the one place where a command does it.

    Args:
        source: a file, or the name of a context in the store.
        model: whose store is meant, where `store` is None.
        store: folder of the store.

    Raises:
        CacheError: a file that is missing or damaged, of several sequences, with padding, or without its token ids.
        ContextError: a context of the store that is damaged.
    """
    from kvcli.cache.context import Context

    if not source.exists():
        contexts = open_store(store, model, must_exist=False)
        return contexts.load(contexts.whole(str(source)))
    context = Context.load(source)
    rows = len(context.snapshot.counts.lengths)
    if context.input_ids is None:
        raise CacheError(f"{source} has no token ids: it can be gone on from in Python only")
    if rows > 1 or context.input_ids.numel() > context.snapshot.num_tokens:
        what = f"{rows} sequences" if rows > 1 else "padding"
        raise CacheError(f"{source} holds {what}: it can be gone on from in Python only")
    return context


@dataclass(frozen=True)
class Start:
    """What a prompt is continued from.

    Attributes:
        ids: of all of the prompt, int64 [1, time].
        cache: holds the first of them; None: nothing was reused.
        source: what they were reused from.
        load_s: seconds until the cache held them.
    """

    ids: Tensor
    cache: CompressedCache | None = None
    source: str | None = None
    load_s: float = 0.0


def begin(
    loaded: LoadedModel,
    session: Session,
    prompt: str,
    chat: bool,
    context: Context | None,
    store: ContextStore | None,
    output: Output,
) -> Start:
    """A prompt, after a context or with what a store has of it.

    Args:
        loaded: the model.
        session: that it is attached by.
        prompt: the text.
        chat: whether it is a user's message.
        context: that the prompt follows.
        store: where the prompt's beginning is looked for.
        output: hears of an empty prompt and of damaged contexts.

    Raises:
        UsageError: an empty prompt, or with `chat` a context of a text.
        CacheError: a context of another model, method, artifact, setting or tokenizer.
        ContextError: a damaged file of what was found.
        ModelError: token ids that the model has no embedding for.
    """
    from kvcli.prompts import prompt_ids

    if context is not None:
        started = time.perf_counter()
        cache = session.load_cache(context)
        return Start(ids_after(loaded, context, prompt, chat), cache, context.name, time.perf_counter() - started)
    ids = prompt_ids(loaded, prompt, chat, output.say)
    if store is None:
        return Start(ids)
    from kvcli.contexts import identity_of

    identity = identity_of(session, loaded.tokenizer)
    started = time.perf_counter()
    found = store.fetch(ids[:, :-1], identity, loaded.model.device, output.warn)
    if found is None:
        output.say(f"no context of this model, method and settings in {store.folder} begins like the prompt")
        return Start(ids)
    cache = session.load_cache(found[1])
    return Start(ids, cache, found[1].name, time.perf_counter() - started)


def check_tokenizer(loaded: LoadedModel, context: Context) -> None:
    """Checks that token ids mean the same here as where a context was made.

    Raises:
        CacheError: another tokenizer.
    """
    from kvcli.fingerprint import text_identity

    stored = context.identity.tokenizer
    if stored is not None and stored != text_identity(loaded.tokenizer)["tokenizer"]:
        raise CacheError(f"{context.name} was made with another tokenizer")


def ids_after(loaded: LoadedModel, context: Context, prompt: str, chat: bool) -> Tensor:
    """Token ids [1, time] of a context and of a prompt that goes on from it.

    Args:
        loaded: the model.
        context: as `load_context` returns it.
        prompt: the text.
        chat: whether it is a user's message that goes on from a conversation.

    Raises:
        UsageError: an empty prompt, or with `chat` a context of a text.
        CacheError: another tokenizer, or a chat template that renders the conversation differently now.
        ModelError: token ids that the model has no embedding for.
    """
    import torch

    from kvcli.prompts import common_length, ids_of_text
    from kvcli.rendered import Rendered

    check_tokenizer(loaded, context)
    held = torch.as_tensor(context.input_ids).clone()
    if not chat:
        return torch.cat((held.to(loaded.model.device), ids_of_text(loaded, prompt)), dim=1)
    conversation = Rendered.from_notes(context.notes, held, context.name)
    ids = conversation.followed_by(loaded, {"role": "user", "content": prompt}).ids
    if common_length(held, ids) < held.shape[1] or held.shape[1] == ids.shape[1]:
        raise CacheError(f"the chat template renders {context.name} differently when a message follows; use kvcli chat")
    return ids
