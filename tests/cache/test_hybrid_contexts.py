"""Contexts of models of which some layers keep a window, a convolution or a recurrence: stored and used whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import CHAT, byte_tokenizer
from factories import load
from families import make
from passes import ids

import kvcli
from kvcli.attention.generation import prefill
from kvcli.cache.snapshot import Snapshot
from kvcli.errors import CacheError
from kvcli.text.chat import Conversation
from kvcli.text.generate import generate_text

SETTINGS = {"sink_length": 2, "residual_length": 8}


@torch.inference_mode()
def test_states_of_another_kind_are_refused() -> None:
    with kvcli.attach(make("qwen3_5_text"), "rtn-4", **SETTINGS) as session:
        cache = session.new_cache()
        prefill(session.model, cache, ids(1, 40), None, None)
        taken = cache.snapshot()
        name = next(x for x in taken.tensors if x.endswith("conv_states.0"))
        for tensors, said in (
            ({name: taken.tensors[name].int()}, "which is not of 1 rows"),
            ({name.replace("conv_states.0", "record_past.0"): taken.tensors[name]}, "has no place"),
            ({"others.3.state.keys": taken.tensors[name]}, "there are states of layers"),
        ):
            with pytest.raises(CacheError, match=said):
                session.new_cache().restore(Snapshot(taken.counts, taken.tensors | tensors))


@pytest.fixture(params=["gemma3_text", "qwen3_5_text"])
def chatting(request: pytest.FixtureRequest) -> Any:
    tokenizer = byte_tokenizer(CHAT)
    return replace(load(make(request.param, vocab_size=300)), tokenizer=tokenizer)


def test_an_edited_document_goes_on_from_states_at_an_end_of_a_pass(chatting: Any, tmp_path: Path) -> None:
    """Kept before the last half, quarter and eighth; answers are those of reading it anew, in the same passes."""
    text, sampling = "It was the best of times, it was the worst of times. " * 8, kvcli.SamplingConfig(8)
    with kvcli.attach(chatting, "rtn-4", **SETTINGS) as session:

        def asked(text: str, **options: Any) -> tuple[str, int]:
            document = kvcli.Document(chatting, session, text, prefill_chunk=32, **options)
            return document.ask("Which?", sampling).text, document.reused_tokens

        assert asked(text, store=tmp_path) == (asked(text)[0], 0)
        length = len(text)
        for at, least in ((length - 10, 0.8), (3 * length // 4 + 60, 0.7), (length // 2 + 60, 0.45)):
            edited = f"{text[:at]}#{text[at + 1 :]}"
            answer, reused = asked(edited, store=tmp_path)
            assert answer == asked(edited)[0]
            assert least * length < reused <= at + 10
        assert asked(f"{text[:100]}#{text[101:]}", store=tmp_path)[1] == 0


def test_a_reply_that_is_rendered_otherwise_later_is_cut_off(chatting: Any) -> None:
    """As that of a template which leaves out what a model thought; the answer is that of reading all anew."""
    said: list[str] = []
    with kvcli.attach(chatting, "fp16", **SETTINGS) as session:
        talk = Conversation(chatting, session, kvcli.SamplingConfig(12), say=said.append)
        first = talk.reply("Hello there, who are you?")
        assert (first.reused_tokens, said) == (0, [])
        again = talk.reply("And now?")
        assert again.reused_tokens >= first.prompt_tokens
        talk._rendered = replace(talk._rendered, ids=talk._rendered.ids.index_fill(1, torch.tensor([-1]), 5))
        last = again.prompt_tokens
        rendered = talk._rendered.followed_by(chatting, {"role": "user", "content": "Why?"})
        changed = replace(rendered, ids=torch.cat((rendered.ids[:, :last], rendered.ids[:, last:] * 0 + 7), 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(talk._rendered), "followed_by", lambda *call: changed)
            reply = talk.reply("Why?")
        assert reply.reused_tokens == last - 1
        assert "rendered differently" in said[-1]
        assert reply.text == generate_text(chatting, session, changed.ids, kvcli.SamplingConfig(12))[0].text
