"""Token ids of prompts are those that a text begins with."""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from factories import WINDOW, load, make_model
from spm_tokenizer import spm_tokenizer, tokens
from tokenizers.processors import TemplateProcessing

import kvcli
from kvcli.calibrate import corpus
from kvcli.eval.greedy import chat_in_pieces, in_pieces
from kvcli.text.prompts import Rendered, chat_text, ids_of_text, prompt_ids

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
"""A template without special tokens, so that nothing begins anew between texts."""


@pytest.mark.parametrize("end", ["</s>", "</s> <pad>"])
def test_a_prompt_is_not_ended_by_its_tokenizer(end: str) -> None:
    """Fault: `add_eos_token` of a tokenizer, or a language after it, as MBart's: a model goes on with another text."""
    tokenizer = byte_tokenizer()
    loaded = replace(load(make_model("llama", vocab_size=300)), tokenizer=tokenizer)
    plain = tokenizer("ab")["input_ids"]
    special = [("<s>", 1), ("</s>", 2), ("<pad>", 0)]
    pieces = {"single": f"<s> $A {end}", "pair": "<s> $A $B", "special_tokens": special}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**pieces)
    assert tokenizer("ab")["input_ids"][: len(plain) + 2] == [1, *plain, 2]
    assert [prompt_ids(loaded, x, chat=False)[0].tolist() for x in ("ab", "")] == [[1, *plain], [1]]


def test_a_template_that_takes_parts_gets_them() -> None:
    chat = "{% for m in messages %}<s>{% for x in m.content if x.text %}{{ x.text }}{% endfor %}</s>{% endfor %}"
    loaded = replace(load(make_model("llama", vocab_size=300)), tokenizer=byte_tokenizer(chat))
    messages = [{"role": "user", "content": " Hi"}, {"role": "assistant", "content": "Yo"}]
    assert (chat_text(loaded, messages), loaded.end_tokens) == ("<s> Hi</s><s>Yo</s>", [2])


@pytest.mark.parametrize("tokenizer", [spm_tokenizer(), byte_tokenizer()], ids=["sentencepiece", "bytes"])
def test_what_follows_a_text_has_the_tokens_that_it_has_within_one(tokenizer: Any, monkeypatch: Any) -> None:
    """Fault: tokenizers such as Llama 2's put a space before every text, also before what is to follow one."""
    tokenizer.chat_template = PLAIN
    loaded = replace(load(make_model("llama", vocab_size=320)), tokenizer=tokenizer)
    user = {"role": "user", "content": "The capital of France\n\nWhat is x"}
    talk = Rendered((user,), text := chat_text(loaded, [user], to_reply=False), ids_of_text(loaded, text))
    with kvcli.attach(loaded, "fp16", **WINDOW) as session:
        asked = kvcli.Document(loaded, session, "The capital of France").prompt("What is x", 1)
    found = {chat_text(loaded, [user]): asked[0].tolist()}
    found[talk.followed_by(loaded, user).text] = talk.followed_by(loaded, user).ids[0].tolist()
    found["x is\n\nWhat\n\nx"] = [*chain(*in_pieces(loaded, "x is", "What", "x", chat=False))]
    found[text + "assistant:"] = [*chain(*chat_in_pieces(loaded, [user], "What is x"))]
    monkeypatch.setattr(corpus, "_PIECE_CHARACTERS", 16)
    found[text] = corpus.token_sequences([text], tokenizer, 1, len(ids_of_text(loaded, text)[0]))[0].tolist()
    assert found == {x: ids_of_text(loaded, x)[0].tolist() for x in found}
    assert corpus.bare_ids(spm_tokenizer(byte_fallback=False), "\nx is", follows=True) == tokens("<unk>", "x", "▁is")
