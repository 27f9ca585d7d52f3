"""Reading prompts into a cache, and tokens of conversations."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from byte_tokenizer import CHAT, byte_tokenizer
from passes import assert_equal, ids

import kvcli
from kvcli.cache.context import Context
from kvcli.errors import CacheError, ModelError, UsageError
from kvcli.models.fingerprint import text_identity
from kvcli.seam.versions import with_cache
from kvcli.text.generate import compress
from kvcli.text.prompts import Rendered, chat_text, checked_messages, common_length, ids_of_text

SETTINGS = {"residual_length": 8, "sink_length": 2, "group_size": 8}


def test_chunks_are_those_of_passes_and_are_counted_layer_by_layer(tiny_model: Any) -> None:
    told: list[int] = []

    def progress(label: str, total: int, unit: str) -> Any:
        told.append(total)
        return nullcontext(told.append)

    with kvcli.attach(tiny_model, "kivi-2", **SETTINGS) as session, torch.no_grad():
        expected = session.new_cache()
        for piece in ids(1, 50).split(16, dim=1):
            tiny_model(piece, **with_cache(expected))
        cache = compress(session, ids(1, 50), prefill_chunk=16, progress=progress)
        assert_equal(cache.snapshot(), expected.snapshot())
        assert told == [50, *[5, 5, 6] * 3, 0, 1, 1]
        first = compress(session, ids(1, 50)[:, :32], prefill_chunk=16)
        went_on = compress(session, ids(1, 50), prefill_chunk=16, past_key_values=first, progress=progress)
        assert_equal(went_on.snapshot(), expected.snapshot())
        assert told[13:] == [18, 5, 5, 6, 0, 1, 1]
        with pytest.raises(UsageError, match="nothing is left to read"):
            compress(session, ids(1, 50), past_key_values=cache)


def test_what_no_reader_takes_is_not_written(tiny_model: Any, tmp_path: Any) -> None:
    with kvcli.attach(tiny_model, "rtn-4", **SETTINGS) as session, torch.no_grad():
        cache = compress(session, ids(1, 50))
        cache.sequences.positions[0, 30:50] -= 30
        with pytest.raises(CacheError, match="not in order"):
            cache.save(tmp_path / "c.safetensors", ids(1, 50))
        with pytest.raises(CacheError, match="not in order"):
            Context(cache.snapshot(), session.identity(), ids(1, 50)).encode()
        assert not list(tmp_path.iterdir())


def test_a_model_whose_values_are_not_finite_compresses_nothing(tiny_model: Any) -> None:
    tiny_model.lm_head.weight.data[0, 0] = float("nan")
    with kvcli.attach(tiny_model, "kivi-2", **SETTINGS) as session, pytest.raises(ModelError, match="in the logits"):
        compress(session, ids(1, 50))


def test_a_reply_keeps_the_tokens_that_the_model_made(loaded: Any) -> None:
    """Three bytes that are no text are shown as one character, which has other tokens."""
    nothing, more = Rendered((), "", torch.zeros(1, 0, dtype=torch.int64)), {"role": "user", "content": "Go on"}
    first = nothing.followed_by(loaded, {"role": "user", "content": "Hello"})
    assert torch.equal(first.ids, ids_of_text(loaded, chat_text(loaded, first.messages)))
    second = first.replied("\ufffd", torch.cat((first.ids, torch.tensor([[200, 201, 202]])), dim=1))
    third = second.followed_by(loaded, more)
    assert torch.equal(third.ids[:, : second.ids.shape[1]], second.ids)
    assert not torch.equal(third.ids, ids_of_text(loaded, chat_text(loaded, third.messages)))
    again = Rendered.from_notes(second.notes(7), second.ids[:, :7], "c")
    assert (again.messages, again.text) == (second.messages, second.text)
    assert torch.equal(again.ids, second.ids)
    loaded.tokenizer.chat_template = "Other: " + CHAT
    fourth = second.followed_by(loaded, more)
    assert torch.equal(fourth.ids, ids_of_text(loaded, chat_text(loaded, fourth.messages)))


@pytest.mark.parametrize("notes", [{}, {"messages": []}, {"messages": [{"role": "user", "content": "x"}]}])
def test_notes_that_hold_no_conversation(notes: Any) -> None:
    with pytest.raises(UsageError):
        Rendered.from_notes(notes, torch.zeros(1, 3, dtype=torch.int64), "c")


@pytest.mark.parametrize("values", [None, {}, [], "x", [1], [{"role": "user"}], [{"role": "user", "content": 3}]])
def test_values_that_are_no_conversation(values: Any) -> None:
    with pytest.raises(UsageError, match="m: "):
        checked_messages(values, "m")


@pytest.mark.parametrize(
    ("first", "second", "count"), [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 3, 3], 1)]
)
def test_common_length(first: list[int], second: list[int], count: int) -> None:
    a, b = torch.tensor([first]), torch.tensor([second])
    assert common_length(a, b) == common_length(b, a) == count


def test_tokenizers_and_templates_are_told_apart(loaded: Any) -> None:
    mine = text_identity(loaded.tokenizer)
    other = byte_tokenizer()
    assert text_identity(other) == {"tokenizer": mine["tokenizer"], "chat_template": ""}
    assert text_identity(None)["chat_template"] == ""
    more = byte_tokenizer()
    more.add_tokens(["more"])
    assert text_identity(more)["tokenizer"] != mine["tokenizer"]


def test_a_vocabulary_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As sorting and hashing it took two thirds of the calls of `kvcli ask`; the template is read each time."""
    tokenizer = byte_tokenizer()
    first = text_identity(tokenizer)
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda tokenizer: pytest.fail("read again"))
    tokenizer.chat_template = "another"
    again = text_identity(tokenizer)
    assert again["tokenizer"] == first["tokenizer"]
    assert again["chat_template"] != first["chat_template"]
