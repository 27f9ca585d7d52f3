"""A context that a command goes on from: the file, and the token ids of what follows it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.errors import CacheError

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.cache.context import Context
    from kvcli.models import LoadedModel


def load_context(source: Path) -> Context:
    """Reads and verifies a context, the one place where a command does it.

    Raises:
        CacheError: missing or damaged, of several sequences, with padding, or without its token ids.
    """
    from kvcli.cache.context import Context

    context = Context.load(source)
    rows = len(context.snapshot.counts.lengths)
    if context.input_ids is None:
        raise CacheError(f"{source} has no token ids: it can be gone on from in Python only")
    if rows > 1 or context.input_ids.numel() > context.snapshot.num_tokens:
        what = f"{rows} sequences" if rows > 1 else "padding"
        raise CacheError(f"{source} holds {what}: it can be gone on from in Python only")
    return context


def check_tokenizer(loaded: LoadedModel, context: Context) -> None:
    """Checks that token ids mean the same here as where a context was made.

    Raises:
        CacheError: another tokenizer.
    """
    from kvcli.fingerprint import text_identity

    stored = context.notes.get("tokenizer")
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
