"""`kvcli compress`, `kvcli generate --context` and `kvcli chat`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from console import invoke
from factories import load, make_model
from typer.testing import CliRunner

from kvcli.builtin_models import DEFAULT_MODEL
from kvcli.cache.context import Context
from kvcli.cli.app import app
from kvcli.cli.paths import contexts_folder
from kvcli.contexts import ContextStore
from kvcli.errors import CacheError

WINDOW = ("--residual-length", "8", "--sink-length", "2")
GROUPED = (*WINDOW, "--setting", "group_size=8")
SHORT = ("--max-new-tokens", "12", "--json")
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom"


@pytest.fixture
def chatty(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model whose tokenizer decodes what it encodes and has a chat template."""
    from byte_tokenizer import CHAT, byte_tokenizer

    from kvcli import models

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    made = replace(load(make_model("llama", vocab_size=300, eos_token_id=2)), tokenizer=tokenizer)
    monkeypatch.setattr(models, "load_model", lambda name="tiny", **_: replace(made, name=name))
    return made


def result(*arguments: str, exit_code: int = 0) -> Any:
    done = invoke(*arguments)
    assert done.exit_code == exit_code, done.stderr
    return json.loads(done.stdout) if "--json" in arguments else done


def compressed(*arguments: str, text: str = TEXT, chunk: int = 32) -> dict[str, Any]:
    Path("text.txt").write_text(text)
    options = ("--prompt-file", "text.txt", "--out", "c.safetensors", "--prefill-chunk", str(chunk), "--json")
    made: dict[str, Any] = result("compress", *options, *arguments)
    return made


@pytest.mark.parametrize(
    "method",
    [
        ("--method", "fp16", *WINDOW),
        ("--method", "kivi-2", *GROUPED),
        ("--method", "squat-pre-2", *GROUPED),
        ("--method", "qjl", *WINDOW),
        ("--method", "rtn-4", *GROUPED),
    ],
)
def test_a_context_goes_on_as_if_it_had_been_read_now(chatty: Any, method: tuple[str, ...]) -> None:
    """The chunks are the same: the text's first 64 bytes two at a time, then 16 of the text and the question."""
    expected = result("generate", "--prompt", TEXT[:64] + " And then?", "--prefill-chunk", "32", *SHORT, *method)
    record = compressed(*method, text=TEXT[:64])
    assert (record["contexts"][0]["tokens"], record["contexts"][0]["file_bytes"]) == (
        64,
        Path("c.safetensors").stat().st_size,
    )
    actual = result("generate", "--context", "c.safetensors", "--prompt", " And then?", *SHORT)
    assert actual["text"] == expected["text"]
    assert (actual["reused_tokens"], actual["prompt_tokens"]) == (64, 74)
    assert actual["method"] == method[1].split("-2")[0].split("-4")[0]
    assert actual["memory"]["num_tokens"] == expected["memory"]["num_tokens"]
    again = result("generate", "--context", "c.safetensors", "--prompt", " And then?", *SHORT)
    assert again["text"] == expected["text"]


def test_an_artifact_is_found_again(artifact: Path) -> None:
    method = ("--method", "commvq", *WINDOW)
    expected = result("generate", "--prompt", TEXT[:64] + "more", "--prefill-chunk", "32", *SHORT, *method)
    compressed(*method, text=TEXT[:64])
    assert result("generate", "--context", "c.safetensors", "--prompt", "more", *SHORT)["text"] == expected["text"]
    assert Context.load("c.safetensors").identity.codecs.keys() == {"fitted"}
    default = compressed("--overwrite")
    assert default["method"] == "commvq"
    artifact.rename(artifact.with_name("elsewhere"))
    named = ("--artifact", str(artifact.with_name("elsewhere")))
    assert result("generate", "--context", "c.safetensors", "--prompt", "more", *SHORT, *named)["reused_tokens"] > 0


def test_what_is_said(chatty: Any) -> None:
    Path("text.txt").write_text(TEXT)
    options = ("--method", "kivi-2", *GROUPED, "--prompt-file", "text.txt", "--out", "c.safetensors")
    done = result("compress", *options)
    assert done.stdout == "c.safetensors\n"
    assert f"{len(TEXT)} tokens in" in done.stderr
    assert "bits per value, codes at" in done.stderr
    assert "next: kvcli generate --context c.safetensors --prompt 'In short,'" in done.stderr
    assert "77/77 tokens" in done.stderr
    went_on = result("generate", "--context", "c.safetensors", "--prompt", "In short,", "--stats")
    assert went_on.stdout.startswith("In short,")
    assert f"{len(TEXT)} of 86 tokens reused from c.safetensors, loaded in" in went_on.stderr
    assert f"({len(TEXT)} reused)" in went_on.stderr


def test_options_that_were_not_given_are_the_contexts(chatty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcli import models

    asked = []

    def loaded(name: str, **options: Any) -> Any:
        asked.append((name, options["dtype"]))
        return replace(chatty, name=name)

    monkeypatch.setattr(models, "load_model", loaded)
    compressed("other/model", "--method", "rtn-2", *GROUPED)
    assert result("generate", "--context", "c.safetensors", "--prompt", "x", *SHORT)["model"] == "other/model"
    assert [(name, str(dtype)) for name, dtype in asked] == [("other/model", "None"), ("other/model", "torch.float32")]
    given = ("generate", "third", "--context", "c.safetensors", "--prompt", "x", *SHORT)
    assert result(*given)["model"] == "third"  # which has the same weights here


@pytest.mark.parametrize(
    ("changes", "said", "code"),
    [
        (("--method", "qjl"), "c.safetensors was made with method 'kivi', not 'qjl'", 1),
        (("--method", "kivi-4", *GROUPED), "was made with k_bits 2, which is 4 here", 1),
        (("--residual-length", "16"), "was made with residual_length 8, which is 16 here", 1),
        (("--setting", "group_size=4"), "was made with group_size 8, which is 4 here", 1),
        (("--chat",), "c.safetensors holds a text and no conversation", 2),
    ],
)
def test_a_context_is_refused_where_it_means_something_else(
    chatty: Any, changes: tuple[str, ...], said: str, code: int
) -> None:
    compressed("--method", "kivi-2", *GROUPED)
    refused = invoke("generate", "--context", "c.safetensors", "--prompt", "x", *changes)
    assert (refused.exit_code, refused.stdout) == (code, "")
    assert said in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_contexts_that_cannot_be_gone_on_from(chatty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compressed("--method", "kivi-2", *GROUPED)
    missing = invoke("generate", "--context", "c.safetensors")
    assert (missing.exit_code, "--context needs a text" in missing.stderr) == (2, True)
    empty = invoke("generate", "--context", "c.safetensors", "--prompt", "")
    assert (empty.exit_code, "with one token or more" in empty.stderr) == (2, True)
    none = invoke("generate", "--context", "none", "--prompt", "x")
    assert (none.exit_code, "no context in none" in none.stderr) == (1, True)
    context = Context.load("c.safetensors")
    replace(context, notes={**context.notes, "tokenizer": "x"}).save("other.safetensors")
    other = invoke("generate", "--context", "other.safetensors", "--prompt", "x")
    assert (other.exit_code, "was made with another tokenizer" in other.stderr) == (1, True)
    replace(context, input_ids=None).save("other.safetensors")
    other = invoke("generate", "--context", "other.safetensors", "--prompt", "x")
    assert (other.exit_code, "has no token ids" in other.stderr) == (1, True)
    replace(context, identity=replace(context.identity, dtype="load")).save("other.safetensors")
    other = invoke("generate", "--context", "other.safetensors", "--prompt", "x")
    assert (other.exit_code, "with a model in load, in which kvcli loads none" in other.stderr) == (1, True)
    content = Path("c.safetensors").read_bytes()
    Path("c.safetensors").write_bytes(content[:-100])
    damaged = invoke("generate", "--context", "c.safetensors", "--prompt", "x")
    assert (damaged.exit_code, damaged.stdout, "damaged" in damaged.stderr) == (1, "", True)


def test_several_texts_a_folder_and_standard_input(chatty: Any) -> None:
    Path("texts").mkdir()
    for name in ("b.txt", "a.md", ".hidden"):
        (Path("texts") / name).write_text(f"{name} {TEXT}")
    options = ("--method", "rtn-2", *GROUPED)
    made = result(
        "compress", "--prompt-file", "texts", "--prompt-file", "texts/.hidden", "--out", "o", *options, "--json"
    )
    assert [record["context"] for record in made["contexts"]] == [f"o/{x}.safetensors" for x in ("a", "b", ".hidden")]
    piped = CliRunner().invoke(app, ["compress", "--prompt-file", "-", "--out", "o", *options], input=TEXT)
    assert piped.stdout == "o/stdin.safetensors\n"
    assert Context.load("o/stdin.safetensors").snapshot.num_tokens == len(TEXT)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give what is to be compressed with --prompt-file"),
        (("--prompt-file", "a.txt", "--messages", "m.json"), "give what is to be compressed"),
        (("--prompt-file", "none.txt", "--out", "c.safetensors"), "cannot read none.txt"),
        (("--prompt-file", "empty.txt", "--out", "c.safetensors"), "empty.txt is empty"),
        (("--prompt-file", "binary", "--out", "c.safetensors"), "binary is not UTF-8 text"),
        (("--prompt-file", "hollow", "--out", "c.safetensors"), "hollow has no files"),
        (("--prompt-file", "a.txt", "--prompt-file", "b.txt", "--out", "c.safetensors"), "name a folder"),
        (("--prompt-file", "a.txt", "--prompt-file", "two/a.txt", "--out", "o"), "two files are named a"),
        (("--prompt-file", "a.txt", "--out", "there.safetensors"), "exists already; use --overwrite"),
        (("--messages", "a.txt", "--out", "c.safetensors"), "a: the conversation is not JSON"),
        (("--messages", "bad.json", "--out", "c.safetensors"), "message 0 is no object with the texts role and"),
        (("--messages", "none.json", "--out", "c.safetensors"), "messages are a JSON list of objects"),
    ],
)
def test_what_cannot_be_compressed(chatty: Any, arguments: tuple[str, ...], said: str) -> None:
    for folder in ("hollow", "two"):
        Path(folder).mkdir()
    files = {"a.txt": "a", "b.txt": "b", "two/a.txt": "c", "empty.txt": "\n", "there.safetensors": "x"}
    for name, text in {**files, "bad.json": '[{"role": 3}]', "none.json": "[]", "m.json": "[]"}.items():
        Path(name).write_text(text)
    Path("binary").write_bytes(b"\xff\xfe\x00")
    refused = invoke("compress", "--method", "rtn-2", *arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert said in refused.stderr
    assert Path("there.safetensors").read_text() == "x"
    assert not Path("c.safetensors").exists()


@pytest.mark.parametrize("command", [("compress", "--prompt-file", "a.txt", "--out"), ("chat", "--save")])
def test_a_folder_that_cannot_be_made_is_said_before_anything_is_read(chatty: Any, command: tuple[str, ...]) -> None:
    Path("a.txt").write_text("a")
    done = CliRunner().invoke(app, [*command, "a.txt/c.safetensors", "--method", "fp8"], input="Hello\n")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "a.txt" in done.stderr
    assert "tokens" not in done.stderr


def test_only_some_layers(chatty: Any) -> None:
    import kvcli
    from kvcli.compress import compress
    from kvcli.prompts import prompt_ids

    with kvcli.attach(chatty, "rtn-2", layers=[0, 1], group_size=8, residual_length=8) as session:
        ids = prompt_ids(chatty, TEXT, chat=False)
        compress(session, ids).save("c.safetensors", ids)
    assert result("generate", "--context", "c.safetensors", "--prompt", "x", *SHORT)["reused_tokens"] == len(TEXT)


def test_more_tokens_than_the_model_knows_are_announced(chatty: Any) -> None:
    Path("long.txt").write_text("x" * 600)
    done = result("compress", "--prompt-file", "long.txt", "--method", "fp8", "--out", "c.safetensors")
    assert "warning: 600 tokens are more than the 512" in done.stderr


MESSAGES = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A tiny model."}]
METHOD = ("--method", "kivi-2", *GROUPED)


def test_a_conversation_is_compressed_and_gone_on_from(chatty: Any) -> None:
    Path("m.json").write_text(json.dumps(MESSAGES))
    made = result("compress", "--messages", "m.json", "--out", "c.safetensors", *METHOD, "--json")
    assert made["contexts"][0]["tokens"] == len("<user>Who are you?</s><assistant>A tiny model.</s>") - 2 * len("/s>")
    reply = result("generate", "--context", "c.safetensors", "--chat", "--prompt", "And now?", *SHORT)
    assert reply["reused_tokens"] == made["contexts"][0]["tokens"]
    talk = CliRunner().invoke(app, ["chat", "--resume", "c.safetensors", *SHORT], input="And now?\n")
    assert json.loads(talk.stdout)["messages"] == [
        *MESSAGES,
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": reply["text"]},
    ]


def chat(*arguments: str, lines: str, exit_code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["chat", *SHORT, *arguments], input=lines)
    assert done.exit_code == exit_code, done.stderr
    return json.loads(done.stdout)


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
    talked = CliRunner().invoke(app, ["chat", "--resume", "talk", "--store", "s", "--json"], input="And you?\n")
    assert talked.exit_code == 0, talked.stderr
    assert [message["content"] for message in json.loads(talked.stdout)["messages"]][:3] == ["Who?", "I.", "And you?"]


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
    assert stored.get("talk").notes["messages"] == whole["messages"]
    assert stored.get("half").notes["messages"] == whole["messages"][:2]
    assert not Path("talk").exists()
    chat(*METHOD, "--save", "talk", lines="Hello there!\n")
    assert ContextStore(contexts_folder(DEFAULT_MODEL)).names() == ["talk"]


def test_a_context_of_the_store_is_not_replaced_by_a_conversation(chatty: Any) -> None:
    compressed(*METHOD)
    result("contexts", "import", "c.safetensors", "--store", "s")
    before = ContextStore("s").get("c")
    done = CliRunner().invoke(app, ["chat", "--store", "s", "--save", "c"], input="Hello\n")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "c exists already; use --overwrite to replace it" in done.stderr
    done = CliRunner().invoke(app, ["chat", "--store", "s", "--save", "a b"], input="Hello\n")
    assert done.exit_code == 2
    assert "'a b' is no name of a context" in done.stderr
    done = CliRunner().invoke(app, ["chat", *METHOD, "--store", "s", *SHORT], input="Hello\n/save c\n/save ?\n")
    assert done.exit_code == 0
    assert "c exists already" in done.stderr
    assert "'?' is no name of a context" in done.stderr
    assert ContextStore("s").get("c") == before
    chat(*METHOD, "--store", "s", "--save", "c", "--overwrite", lines="Hello\n")
    assert "messages" in ContextStore("s").get("c").notes


def test_commands_of_a_conversation(chatty: Any) -> None:
    lines = "/stats\n\n/save\n/nothing\nHello!\n/stats\n/save a.safetensors\n/save a.safetensors\n/exit\nNever read\n"
    done = CliRunner().invoke(app, ["chat", *METHOD, "--max-new-tokens", "5", "--system", "Be short."], input=lines)
    assert done.exit_code == 0, done.stderr
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
    done = CliRunner().invoke(app, ["chat", *METHOD, "--save", "a.safetensors"], input="")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "nothing was said" in done.stderr
    assert not Path("a.safetensors").exists()


def test_a_template_that_renders_earlier_turns_differently(chatty: Any) -> None:
    """The number of messages stands at the beginning: nothing of a cache with a state can be kept."""
    chatty.tokenizer.chat_template = "[{{ messages | length }}]" + chatty.tokenizer.chat_template
    done = CliRunner().invoke(
        app, ["chat", "--method", "qjl", *WINDOW, *SHORT], input="Hello there, who are you?\nAnd now?\n"
    )
    assert done.exit_code == 0, done.stderr
    assert "the conversation is read again from its start: cannot remove" in done.stderr
    assert [turn["reused_tokens"] for turn in json.loads(done.stdout)["turns"]] == [0, 0]


def test_a_template_that_changes_the_last_turn_costs_its_tokens_only(chatty: Any) -> None:
    """Replies are left out once they are past: the cache is cut before the last one."""
    chatty.tokenizer.chat_template = chatty.tokenizer.chat_template.replace(
        "m['content']", "'(a reply)' if m['role'] == 'assistant' else m['content']"
    )
    method = ("--method", "rtn-2", *GROUPED)
    done = CliRunner().invoke(app, ["chat", *method, *SHORT], input="Hello there, who are you?\nAnd now?\n")
    assert done.exit_code == 0, done.stderr
    first, second = json.loads(done.stdout)["turns"]
    assert first["prompt_tokens"] <= second["reused_tokens"] < first["prompt_tokens"] + first["new_tokens"] - 1
    assert "tokens are read again" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (("--resume", "c.safetensors"), "c.safetensors holds a text and no conversation", 2),
        (("--resume", "none"), "no context in none", 1),
        (("--resume", "c.safetensors", "--system", "x"), "--system goes before the first message", 2),
        (("--save", "c.safetensors"), "exists already; use --overwrite", 2),
    ],
)
def test_conversations_that_cannot_begin(chatty: Any, arguments: tuple[str, ...], said: str, code: int) -> None:
    compressed(*METHOD)
    done = CliRunner().invoke(app, ["chat", *arguments], input="Hello\n")
    assert (done.exit_code, done.stdout) == (code, "")
    assert said in done.stderr


def test_a_model_without_a_template(tiny: Any) -> None:
    done = CliRunner().invoke(app, ["chat"], input="Hello\n")
    assert done.exit_code == 2
    assert "has no chat template" in done.stderr


def test_the_token_that_ends_a_reply_is_the_templates(chatty: Any) -> None:
    """A reply that was cut off has a last token that the cache does not hold yet; one that ended has not."""
    import kvcli
    from kvcli.attention.next_token import SamplingConfig
    from kvcli.chat import Conversation

    with kvcli.attach(chatty, "rtn-2", group_size=8, residual_length=8, sink_length=2) as session:
        talk = Conversation(chatty, session, SamplingConfig(12))
        made = talk.reply("Hello there, who are you?")
        cut = talk.context()
        assert cut.input_ids is not None
        assert len(cut.notes["pending"]) == 1
        chatty.model.generation_config.eos_token_id = int(cut.input_ids[0, made.prompt_tokens + 4])
        talk = Conversation(chatty, session, SamplingConfig(12))
        made = talk.reply("Hello there, who are you?")
        assert 1 <= made.new_tokens <= 5
        assert talk.context().notes["pending"] == []
        assert talk.reply("And now?").reused_tokens == made.prompt_tokens + made.new_tokens - 1


def test_a_reply_that_broke_off_is_not_taken_for_a_whole_one(chatty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvcli
    from kvcli.attention.next_token import SamplingConfig
    from kvcli.chat import Conversation

    said: list[str] = []
    with kvcli.attach(chatty, "rtn-2", group_size=8, residual_length=8, sink_length=2) as session:
        talk = Conversation(chatty, session, SamplingConfig(12), say=said.append)
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
