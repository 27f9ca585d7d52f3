"""Sessions of every method, stores with small blocks, and a tiny model that chats."""

from dataclasses import replace
from typing import Any

import pytest
from byte_tokenizer import CHAT, byte_tokenizer
from contexts_made import maker, store  # noqa: F401
from factories import load, make_model


@pytest.fixture
def loaded() -> Any:
    tokenizer = byte_tokenizer(CHAT)
    return replace(load(make_model("llama", vocab_size=300, eos_token_id=None)), tokenizer=tokenizer)
