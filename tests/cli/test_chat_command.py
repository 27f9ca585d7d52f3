"""`kvcli chat`, and conversations that are compressed, saved and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from compressing import GROUPED, METHOD, SHORT, WINDOW, compressed
from console import invoke, refused, result

import kvcli
from kvcli.builtin_models import DEFAULT_MODEL
from kvcli.cache.context import Context
from kvcli.chat import Conversation
from kvcli.contexts import ContextStore
from kvcli.errors import CacheError
from kvcli.paths import model_folder

MESSAGES = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A tiny model."}]


def chat(*arguments: str, lines: str) -> Any:
    return result("chat", *SHORT, *arguments, stdin=lines)


def test_a_conversation_is_compressed_and_gone_on_from(chatty: Any) -> None:
    Path("m.json").write_text(json.dumps(MESSAGES))
    made = result("compress", "--messages", "m.json", "--out", "c.safetensors", *METHOD, "--json")
    assert made["contexts"][0]["tokens"] == len("<user>Who are you?</s><assistant>A tiny model.</s>") - 2 * len("/s>")
    reply = result("generate", "--context", "c.safetensors", "--chat", "--prompt", "And now?", *SHORT)
    assert reply["reused_tokens"] == made["contexts"][0]["tokens"]
    assert chat("--resume", "c.safetensors", lines="And now?\n")["messages"] == [
        *MESSAGES,
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": reply["text"]},
    ]


def test_a_conversation_in_the_store(chatty: Any) -> None:
    """What was noted of it is in its manifest, and goes with it into a file and back."""
    Path("m.json").write_text(json.dumps([{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]))
    result("compress", "--messages", "m.json", "--out", "c.safetensors", *METHOD)
    result("compress", "--messages", "m.json", "--store", "s", "--name", "talk", *METHOD)
    result("contexts", "export", "talk", "--store", "s", "--out", "d.safetensors")
    replies = [
        result("generate", "--context", name, *store, "--prompt", "And you?", "--chat", *SHORT)["text"]
        for name, store in (("c.safetensors", ()), ("d.safetensors", ()), ("talk", ("--store", "s")))
    ]
    assert len(set(replies)) == 1
    talked = chat("--resume", "talk", "--store", "s", lines="And you?\n")
    assert [message["content"] for message in talked["messages"]][:3] == ["Who?", "I.", "And you?"]


def test_a_conversation_is_saved_resumed_and_the_same_as_unbroken(chatty: Any) -> None:
    whole = chat(*METHOD, lines="Hello there, who are you?\nWhat do you know?\nAnd what else is there?\n")
    assert len(whole["messages"]) == 6
    reused = [turn["reused_tokens"] for turn in whole["turns"]]
    assert reused[0] == 0
    for turn, following in zip(whole["turns"], reused[1:], strict=False):
        held = turn["prompt_tokens"] + turn["new_tokens"] - 1
        assert following == held
    chat(*METHOD, "--save", "talk.safetensors", lines="Hello there, who are you?\nWhat do you know?\n")
    resumed = chat("--resume", "talk.safetensors", "--save", "talk.safetensors", lines="And what else is there?\n")
    assert resumed["messages"] == whole["messages"]
    assert resumed["turns"][0]["reused_tokens"] == reused[2]
    assert Context.load("talk.safetensors").notes["messages"] == whole["messages"]


def test_a_conversation_is_saved_into_the_store(chatty: Any) -> None:
    """As into a file; what a later save shares with an earlier one is held once."""
    whole = chat(*METHOD, lines="Hello there, who are you?\nWhat do you know?\nAnd what else is there?\n")
    store = ("--store", "s")
    chat(*METHOD, *store, "--save", "talk", lines="Hello there, who are you?\n/save half\nWhat do you know?\n")
    assert result("contexts", "verify", *store).exit_code == 0
    resumed = chat("--resume", "talk", "--save", "talk", *store, lines="And what else is there?\n")
    assert resumed["messages"] == whole["messages"]
    assert resumed["turns"][0]["reused_tokens"] == whole["turns"][2]["reused_tokens"]
    assert resumed["saved"] == "talk"
    stored = ContextStore("s")
    assert stored.names() == ["half", "talk"]
    assert stored.get("talk").record.notes["messages"] == whole["messages"]
    assert stored.get("half").record.notes["messages"] == whole["messages"][:2]
    assert not Path("talk").exists()
    chat(*METHOD, "--save", "talk", lines="Hello there!\n")
    assert ContextStore(model_folder(DEFAULT_MODEL, "contexts")).names() == ["talk"]


def test_a_context_of_the_store_is_not_replaced_by_a_conversation(chatty: Any) -> None:
    compressed(*METHOD)
    result("contexts", "import", "c.safetensors", "--store", "s")
    before = ContextStore("s").get("c")
    said = refused("chat", "--store", "s", "--save", "c", stdin="Hello\n")
    assert "c exists already; use --overwrite to replace it" in said
    assert "'a b' is no name of a context" in refused("chat", "--store", "s", "--save", "a b", stdin="Hello\n")
    done = result("chat", *METHOD, "--store", "s", *SHORT[:-1], stdin="Hello\n/save c\n/save ?\n")
    assert "c exists already" in done.stderr
    assert "'?' is no name of a context" in done.stderr
    assert ContextStore("s").get("c") == before
    chat(*METHOD, "--store", "s", "--save", "c", "--overwrite", lines="Hello\n")
    assert "messages" in ContextStore("s").get("c").record.notes


def test_commands_of_a_conversation(chatty: Any) -> None:
    lines = "/stats\n\n/save\n/nothing\nHello!\n/stats\n/save a.safetensors\n/save a.safetensors\n/exit\nNever read\n"
    done = result("chat", *METHOD, "--max-new-tokens", "5", "--system", "Be short.", stdin=lines)
    for said in (
        "nothing was said yet",
        "say where: /save FILE, or /save NAME",
        "/nothing is no command; /exit ends",
        "KV cache",
        "a.safetensors: ",
        "a.safetensors exists already",
    ):
        assert said in done.stderr
    messages = Context.load("a.safetensors").notes["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert done.stdout == messages[-1]["content"] + "\n"


def test_nothing_said_is_nothing_saved(chatty: Any) -> None:
    done = result("chat", *METHOD, "--save", "a.safetensors", stdin="")
    assert (done.stdout, "nothing was said" in done.stderr) == ("", True)
    assert not Path("a.safetensors").exists()


def test_a_template_that_renders_earlier_turns_differently(chatty: Any) -> None:
    """The number of messages stands at the beginning: nothing of a cache with a state can be kept."""
    chatty.tokenizer.chat_template = "[{{ messages | length }}]" + chatty.tokenizer.chat_template
    done = invoke("chat", "--method", "qjl", *WINDOW, *SHORT, stdin="Hello there, who are you?\nAnd now?\n")
    assert "the conversation is read again from its start: cannot remove" in done.stderr
    assert [turn["reused_tokens"] for turn in json.loads(done.stdout)["turns"]] == [0, 0]


def test_a_template_that_changes_the_last_turn_costs_its_tokens_only(chatty: Any) -> None:
    """Replies are left out once they are past: the cache is cut before the last one."""
    chatty.tokenizer.chat_template = chatty.tokenizer.chat_template.replace(
        "m['content']", "'(a reply)' if m['role'] == 'assistant' else m['content']"
    )
    method = ("--method", "rtn-2", *GROUPED)
    done = invoke("chat", *method, *SHORT, stdin="Hello there, who are you?\nAnd now?\n")
    first, second = json.loads(done.stdout)["turns"]
    assert first["prompt_tokens"] <= second["reused_tokens"] < first["prompt_tokens"] + first["new_tokens"] - 1
    assert "tokens are read again" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (("--resume", "c.safetensors"), "c.safetensors holds a text and no conversation", 2),
        (("--resume", "none"), "no context 'none' in", 1),
        (("--resume", "c.safetensors", "--system", "x"), "--system goes before the first message", 2),
        (("--save", "c.safetensors"), "exists already; use --overwrite", 2),
    ],
)
def test_conversations_that_cannot_begin(chatty: Any, arguments: tuple[str, ...], said: str, code: int) -> None:
    compressed(*METHOD)
    assert said in refused("chat", *arguments, code=code, stdin="Hello\n")


def test_a_model_without_a_template(tiny: Any) -> None:
    assert "has no chat template" in refused("chat", stdin="Hello\n")


def test_the_token_that_ends_a_reply_is_the_templates(chatty: Any) -> None:
    """A reply that was cut off has a last token that the cache does not hold yet; one that ended has not."""
    with kvcli.attach(chatty, "rtn-2", group_size=8, residual_length=8, sink_length=2) as session:
        talk = Conversation(chatty, session, kvcli.SamplingConfig(12))
        made = talk.reply("Hello there, who are you?")
        cut = talk.context()
        assert cut.input_ids is not None
        assert len(cut.notes["pending"]) == 1
        chatty.model.generation_config.eos_token_id = int(cut.input_ids[0, made.prompt_tokens + 4])
        talk = Conversation(chatty, session, kvcli.SamplingConfig(12))
        made = talk.reply("Hello there, who are you?")
        assert 1 <= made.new_tokens <= 5
        assert talk.context().notes["pending"] == []
        assert talk.reply("And now?").reused_tokens == made.prompt_tokens + made.new_tokens - 1


def test_a_reply_that_broke_off_is_not_taken_for_a_whole_one(chatty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault (calls): a reply of `kvcli chat` that was broken off. Result: the conversation is read again from its
    start, which is reported.
    """
    said: list[str] = []
    with kvcli.attach(chatty, "rtn-2", group_size=8, residual_length=8, sink_length=2) as session:
        talk = Conversation(chatty, session, kvcli.SamplingConfig(12), say=said.append)
        talk.reply("Hello there, who are you?")

        def stop(piece: str) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            talk.reply("And now?", stop)
        with pytest.raises(CacheError, match="was broken off"):
            talk.context()
        again = talk.reply("And now?")
        assert said == ["the conversation is read again from its start: the last reply was broken off"]
        assert again.reused_tokens == 0
        assert len(talk.messages) == 4
