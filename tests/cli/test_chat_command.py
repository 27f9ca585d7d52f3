"""`kvcli chat`, and conversations that are compressed, saved and resumed."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from console import GROUPED, METHOD, SHORT, WINDOW, compressed, invoke, refused, result, says
from served import serving

import kvcli
from kvcli.cache.context import Context
from kvcli.commands.paths import model_folder
from kvcli.contexts import ContextStore
from kvcli.errors import CacheError
from kvcli.models.builtin_models import DEFAULT_MODEL
from kvcli.text.chat import Conversation

SETTINGS = {"group_size": 8, "residual_length": 8, "sink_length": 2}
MESSAGES = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A tiny model."}]


def chat(*arguments: str, lines: str) -> Any:
    return result("chat", *SHORT, *arguments, stdin=lines)


def test_a_compressed_conversation_goes_on_from_its_file_from_the_store_and_exported(chatty: Any) -> None:
    Path("m.json").write_text(json.dumps(MESSAGES))
    made = result("compress", "--messages", "m.json", "--out", "c.safetensors", *METHOD, "--json")["contexts"][0]
    assert made["tokens"] == len("<user>Who are you?</s><assistant>A tiny model.</s>") - 2 * len("/s>")
    result("compress", "--messages", "m.json", "--store", "s", "--name", "talk", *METHOD)
    result("contexts", "export", "talk", "--store", "s", "--out", "d.safetensors")
    texts = set()
    for context in (("c.safetensors",), ("d.safetensors",), ("talk", "--store", "s")):
        reply = result("generate", "--context", *context, "--chat", "--prompt", "And now?", *SHORT)
        assert reply["reused_tokens"] == made["tokens"]
        said = [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": reply["text"]}]
        assert chat("--resume", *context, lines="And now?\n")["messages"] == MESSAGES + said
        texts.add(reply["text"])
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("options", "folder", "suffix"),
    [((), "", ".safetensors"), (("--store", "s"), "s", ""), ((), model_folder(DEFAULT_MODEL, "contexts"), "")],
)
def test_a_conversation_is_saved_resumed_and_the_same_as_unbroken(
    chatty: Any, options: tuple[str, ...], folder: Path | str, suffix: str
) -> None:
    """In files and in a store, which holds what two saves share once."""

    def saved(name: str) -> Any:
        return (ContextStore(folder).get(name).record if folder else Context.load(name)).notes["messages"]

    talk, half = f"talk{suffix}", f"half{suffix}"
    whole = chat(*METHOD, lines="Hello there, who are you?\nWhat do you know?\nAnd what else is there?\n")
    assert len(whole["messages"]) == 6
    first, second, third = whole["turns"]
    assert first["reused_tokens"] == 0
    for turn, following in ((first, second), (second, third)):
        assert following["reused_tokens"] == turn["prompt_tokens"] + turn["new_tokens"] - 1
    lines = f"Hello there, who are you?\n/save {half}\nWhat do you know?\n"
    chat(*METHOD, *options, "--save", talk, lines=lines)
    resumed = chat("--resume", talk, "--save", talk, *options, lines="And what else is there?\n")
    assert (resumed["messages"], resumed["saved"]) == (whole["messages"], talk)
    assert resumed["turns"][0]["reused_tokens"] == third["reused_tokens"]
    assert (saved(talk), saved(half)) == (whole["messages"], whole["messages"][:2])
    if folder:
        assert result("contexts", "verify", "--store", str(folder)).exit_code == 0
        assert ContextStore(folder).names() == ["half", "talk"]
        assert not Path("talk").exists()


def test_the_last_messages_are_shown_when_a_conversation_is_resumed(chatty: Any) -> None:
    Path("m.json").write_text(json.dumps([*MESSAGES, *MESSAGES[:1], {"role": "assistant", "content": "word " * 200}]))
    result("compress", "--messages", "m.json", "--out", "c.safetensors", *METHOD)
    said = result("chat", "--resume", "c.safetensors", stdin="").stderr
    says(said, "4 messages\nuser: Who are you?\nassistant: word word", "word [...]\n")
    assert "A tiny model" not in said


def test_a_context_of_the_store_is_not_replaced_by_a_conversation(chatty: Any) -> None:
    compressed(*METHOD)
    result("contexts", "import", "c.safetensors", "--store", "s")
    before = ContextStore("s").get("c")
    wrong = {"c": "c exists already; use --overwrite to replace it", "a b": "'a b' is no name of a context"}
    for name, said in wrong.items():
        assert said in refused("chat", "--store", "s", "--save", name, stdin="Hello\n")
    done = result("chat", *METHOD, "--store", "s", *SHORT[:-1], stdin="Hello\n/save c\n/save ?\n")
    says(done.stderr, "c exists already", "'?' is no name of a context")
    assert ContextStore("s").get("c") == before
    chat(*METHOD, "--store", "s", "--save", "c", "--overwrite", lines="Hello\n")
    assert "messages" in ContextStore("s").get("c").record.notes


def test_commands_of_a_conversation(chatty: Any) -> None:
    lines = "/stats\n\n/save\n/nothing\nHello!\n/stats\n/save a.safetensors\n/save a.safetensors\n/exit\nNever read\n"
    done = result("chat", *METHOD, "--max-new-tokens", "5", "--system", "Be short.", stdin=lines)
    says(
        done.stderr,
        "nothing was said yet",
        "say where: /save FILE, or /save NAME",
        "/nothing is no command; /exit ends",
    )
    says(done.stderr, "KV cache", "a.safetensors: ", "a.safetensors exists already")
    messages = Context.load("a.safetensors").notes["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert done.stdout == messages[-1]["content"] + "\n"


def test_nothing_said_is_nothing_saved(chatty: Any) -> None:
    done = result("chat", *METHOD, "--save", "a.safetensors", stdin="")
    assert done.stdout == ""
    assert "nothing was said" in done.stderr
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
    done = invoke("chat", "--method", "rtn-2", *GROUPED, *SHORT, stdin="Hello there, who are you?\nAnd now?\n")
    first, second = json.loads(done.stdout)["turns"]
    assert first["prompt_tokens"] <= second["reused_tokens"] < first["prompt_tokens"] + first["new_tokens"] - 1
    assert "tokens are read again" in done.stderr


def test_conversations_that_cannot_begin(chatty: Any) -> None:
    compressed(*METHOD)
    for words, said in {
        "--resume c.safetensors": "c.safetensors holds a text and no conversation",
        "--resume c.safetensors --system x": "--system goes before the first message",
        "--save c.safetensors": "exists already; use --overwrite",
    }.items():
        assert said in refused("chat", *words.split(), stdin="Hello\n")
    assert "no context 'none' in" in refused("chat", "--resume", "none", code=1, stdin="Hello\n")
    chatty.tokenizer.chat_template = None
    assert "has no chat template" in refused("chat", stdin="Hello\n")


@pytest.mark.parametrize("known_to", ["generation_config", "config", "tokenizer"])
def test_the_token_that_ends_a_reply_is_the_templates(chatty: Any, known_to: str) -> None:
    """A reply that was cut off has a last token that the cache does not hold yet; one that ended has not."""
    with kvcli.attach(chatty, "rtn-2", **SETTINGS) as session:
        talk = Conversation(chatty, session, kvcli.SamplingConfig(12))
        made = talk.reply("Hello there, who are you?")
        cut = talk.context()
        assert cut.input_ids is not None
        assert len(cut.notes["pending"]) == 1
        knows = chatty.tokenizer if known_to == "tokenizer" else getattr(chatty.model, known_to)
        knows.eos_token_id = int(cut.input_ids[0, made.prompt_tokens + 3])
        talk = Conversation(chatty, session, kvcli.SamplingConfig(12))
        made = talk.reply("Hello there, who are you?")
        assert 1 <= made.new_tokens <= 4
        assert talk.context().notes["pending"] == []
        assert talk.reply("And now?").reused_tokens == made.prompt_tokens + made.new_tokens - 1


def test_a_reply_that_broke_off_is_not_taken_for_a_whole_one(chatty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a reply of `kvcli chat` that was broken off. Result: the conversation is read again from its
    start, which is reported.
    """
    said: list[str] = []
    with kvcli.attach(chatty, "rtn-2", **SETTINGS) as session:
        talk = Conversation(chatty, session, kvcli.SamplingConfig(12), say=said.append)
        talk.reply("Hello there, who are you?")
        with pytest.raises(KeyboardInterrupt):
            talk.reply("And now?", MagicMock(side_effect=KeyboardInterrupt))
        with pytest.raises(CacheError, match="was broken off"):
            talk.context()
        assert talk.reply("And now?").reused_tokens == 0
        assert said == ["the conversation is read again from its start: the last reply was broken off"]
        assert len(talk.messages) == 4


def test_a_conversation_with_a_server() -> None:
    """`--url`: each line goes with all before it; what is for the server to know is refused, errors are one line."""
    with serving() as served:
        url = f"http://127.0.0.1:{served.port}/v1"
        made = result("chat", "--url", url, "--max-new-tokens", "5", "--json", stdin="Hello there\nAnd now?\n/exit\n")
        texts = [message["content"] for message in made["messages"]]
        assert [message["role"] for message in made["messages"]] == ["user", "assistant"] * 2
        with served.client() as client:
            for end in (1, 3):
                asked = client.chat.completions.create(model="tiny", messages=made["messages"][:end], max_tokens=5)
                assert texts[end] == asked.choices[0].message.content
        assert texts[::2] == ["Hello there", "And now?"]
        assert [turn["new_tokens"] for turn in made["turns"]] == [5, 5]
        assert "--method is for the server" in refused("chat", "--url", url, "--method", "kivi-2", stdin="Hello\n")
    assert "Connection error" in refused("chat", "--url", url, code=1, stdin="Hello\n")


OTHER, NO_MODEL, NO_REPLY = ": no answer of an OpenAI API", " names no model", " replied nothing"
MODELS = {"<html></html>": OTHER, "[]": OTHER, "{}": NO_MODEL, '{"data": []}': NO_MODEL, '{"data": [{}]}': NO_MODEL}
REPLIES = {"": NO_REPLY, "{}": NO_REPLY, "data: {}\n\n": OTHER, "data: [1]\n\n": OTHER, "data: {\n\n": OTHER}


@pytest.mark.parametrize("models", MODELS)
def test_what_another_server_answers_is_one_line(models: str) -> None:
    assert _refused_of(models, "").endswith(MODELS[models])


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_in_another_form_is_one_line(reply: str) -> None:
    assert _refused_of('{"data": [{"id": "m"}]}', reply).endswith(REPLIES[reply])


def _refused_of(models: str, reply: str) -> str:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = (models if self.command == "GET" else reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if body[:1] == b"<" else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        done = refused("chat", "--url", f"http://127.0.0.1:{server.server_port}", code=1, stdin="Hello\n")
        server.shutdown()
    return done
