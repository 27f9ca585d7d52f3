"""Token ids of prompts are those that a text begins with."""

from dataclasses import replace

from byte_tokenizer import byte_tokenizer
from factories import load, make_model
from tokenizers.processors import TemplateProcessing

from kvcli.text.prompts import chat_text, prompt_ids


def test_a_prompt_is_not_ended_by_its_tokenizer() -> None:
    """Fault: `add_eos_token` of a tokenizer, so that a model goes on with another text. Result: as without."""
    tokenizer = byte_tokenizer()
    loaded = replace(load(make_model("llama", vocab_size=300)), tokenizer=tokenizer)
    plain = tokenizer("ab")["input_ids"]
    pieces = {"single": "<s> $A </s>", "pair": "<s> $A $B", "special_tokens": [("<s>", 1), ("</s>", 2)]}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**pieces)
    assert tokenizer("ab")["input_ids"] == [1, *plain, 2]
    assert [prompt_ids(loaded, x, chat=False)[0].tolist() for x in ("ab", "")] == [[1, *plain], [1]]


def test_a_template_that_takes_parts_gets_them() -> None:
    chat = "{% for m in messages %}<s>{% for x in m.content if x.text %}{{ x.text }}{% endfor %}</s>{% endfor %}"
    loaded = replace(load(make_model("llama", vocab_size=300)), tokenizer=byte_tokenizer(chat))
    messages = [{"role": "user", "content": " Hi"}, {"role": "assistant", "content": "Yo"}]
    assert (chat_text(loaded, messages), loaded.end_tokens) == ("<s> Hi</s><s>Yo</s>", [2])
