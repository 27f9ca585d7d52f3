"""Token ids of prompts and of conversations. This module does not know what is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcli.errors import ModelError, UsageError
from kvcli.models import LoadedModel
from kvcli.progress import Say, say_nothing

Message = Mapping[str, str]
"""One message of a conversation: `role` and `content`."""


def prompt_ids(loaded: LoadedModel, prompt: str, chat: bool, say: Say = say_nothing) -> Tensor:
    """Token ids [1, time] of a prompt; with `chat`, of a conversation whose only message it is.

    An empty prompt becomes the beginning-of-text token.

    Args:
        loaded: the model, with its tokenizer.
        prompt: the text.
        chat: whether to put it into the tokenizer's chat template.
        say: called with a line if the prompt is empty.

    Raises:
        UsageError: an empty prompt, where the tokenizer has no beginning-of-text token.
        ModelError: a chat template that fails, or token ids that the model has no embedding for.
    """
    if not prompt:
        say("the prompt is empty: the model starts from its first token alone")
    if chat:
        return chat_ids(loaded, [{"role": "user", "content": prompt}])
    tokenizer: Any = loaded.tokenizer
    ids = tokenizer(prompt)["input_ids"]
    if not ids:
        ids = [tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id]
    if ids[0] is None:
        raise UsageError("the prompt is empty, and the tokenizer has no beginning-of-text token to start from")
    return _as_tensor(loaded, ids)


def ids_of_text(loaded: LoadedModel, text: str) -> Tensor:
    """Token ids [1, time] of a text alone, without a token that begins it.

    Raises:
        UsageError: a text without a token.
        ModelError: token ids that the model has no embedding for.
    """
    tokenizer: Any = loaded.tokenizer
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise UsageError("the prompt is empty; a context is gone on from with one token or more")
    return _as_tensor(loaded, ids)


def chat_ids(loaded: LoadedModel, messages: Sequence[Message], to_reply: bool = True) -> Tensor:
    """Token ids [1, time] of a conversation in the tokenizer's chat template; see `chat_text`."""
    return ids_of_text(loaded, chat_text(loaded, messages, to_reply))


def chat_text(loaded: LoadedModel, messages: Sequence[Message], to_reply: bool = True) -> str:
    """A conversation as the tokenizer's chat template renders it.

    Args:
        loaded: the model, with its tokenizer.
        messages: of the conversation.
        to_reply: whether the beginning of the model's reply follows.

    Raises:
        UsageError: a tokenizer without a chat template.
        ModelError: a chat template that fails.
    """
    return template_text(loaded.tokenizer, loaded.name, messages, to_reply)


def template_text(tokenizer: Any, model: str, messages: Sequence[Message], to_reply: bool = True) -> str:
    """`chat_text` where no model is loaded.

    Args:
        tokenizer: of the model.
        model: its name, for messages.
        messages: of the conversation.
        to_reply: whether the beginning of the model's reply follows.

    Raises:
        UsageError: a tokenizer without a chat template.
        ModelError: a chat template that fails.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(f"{model} has no chat template")
    try:
        return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=to_reply, tokenize=False))
    except Exception as error:  # a template is a program of the model's author, run by jinja in its sandbox
        raise ModelError(f"the chat template of {model} fails: {' '.join(str(error).split())}") from error


def checked_messages(values: Any, what: str) -> list[dict[str, str]]:
    """A conversation from plain values.

    Args:
        values: what should be a list of objects with `role` and `content`, both texts.
        what: where they are from, for the message.

    Raises:
        UsageError: they are something else, or none.
    """
    if not isinstance(values, list) or not values:
        raise UsageError(f"{what}: messages are a JSON list of objects with role and content, one or more")
    for i, message in enumerate(values):
        texts = [message.get(name) for name in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise UsageError(f"{what}: message {i} is no object with the texts role and content")
    return [{"role": message["role"], "content": message["content"]} for message in values]


def common_length(first: Tensor, second: Tensor) -> int:
    """Tokens at the beginning of two prompts [1, time] that are the same."""
    count = min(first.shape[1], second.shape[1])
    differs = (first[0, :count].cpu() != second[0, :count].cpu()).nonzero()
    return int(differs[0]) if len(differs) else count


def _as_tensor(loaded: LoadedModel, ids: list[int]) -> Tensor:
    if max(ids) >= loaded.spec.vocab_size:
        raise ModelError(
            f"the tokenizer makes token {max(ids)}, but {loaded.name} has {loaded.spec.vocab_size} embeddings; "
            "use the tokenizer and the weights of one model"
        )
    return torch.tensor([ids], device=loaded.model.device)
