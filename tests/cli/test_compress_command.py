"""`kvcli compress`, and `kvcli generate --context` after it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from console import GROUPED, METHOD, SHORT, TEXT, WINDOW, compressed, invoke, refused, result, says

import kvcli
from kvcli.cache.context import Context
from kvcli.registry import method_name
from kvcli.text.generate import compress
from kvcli.text.prompts import prompt_ids


@pytest.mark.parametrize(("method", "options"), [("fp16", WINDOW), ("kivi-2", GROUPED), ("qjl", WINDOW)])
def test_a_context_goes_on_as_if_it_had_been_read_now(chatty: Any, method: str, options: tuple[str, ...]) -> None:
    """The chunks are the same: the text's first 64 bytes two at a time, then 16 of the text and the question."""
    chosen = ("--method", method, *options)
    expected = result("generate", "--prompt", TEXT[:64] + " And then?", "--prefill-chunk", "32", *SHORT, *chosen)
    (context,) = compressed(*chosen, text=TEXT[:64])["contexts"]
    assert (context["tokens"], context["file_bytes"]) == (64, Path("c.safetensors").stat().st_size)
    for _ in range(2):
        actual = result("generate", "--context", "c.safetensors", "--prompt", " And then?", *SHORT)
        assert (actual["text"], actual["method"]) == (expected["text"], method_name(method, {}))
        assert (actual["reused_tokens"], actual["prompt_tokens"]) == (64, 74)
        assert actual["memory"]["num_tokens"] == expected["memory"]["num_tokens"]


def test_an_artifact_is_found_again(artifact: Path) -> None:
    def generated(*options: str) -> Any:
        return result("generate", "--context", "c.safetensors", "--prompt", "more", *SHORT, *options)

    method = ("--method", "commvq", *WINDOW)
    expected = result("generate", "--prompt", TEXT[:64] + "more", "--prefill-chunk", "32", *SHORT, *method)
    compressed(*method, text=TEXT[:64])
    assert generated()["text"] == expected["text"]
    assert Context.load("c.safetensors").identity.codecs.keys() == {"fitted"}
    assert compressed("--overwrite")["method"] == "commvq-2"
    elsewhere = artifact.rename(artifact.with_name("elsewhere"))
    assert generated("--artifact", str(elsewhere))["reused_tokens"] > 0


def test_what_is_said(chatty: Any) -> None:
    Path("text.txt").write_text(TEXT)
    done = result("compress", *METHOD, "--prompt-file", "text.txt", "--out", "c.safetensors")
    assert done.stdout == "c.safetensors\n"
    next_command = "next: kvcli generate --context c.safetensors --prompt 'In short,'"
    says(done.stderr, "77 tokens in", "77/77 tokens", "bits per value, codes at", next_command)
    went_on = result("generate", "--context", "c.safetensors", "--prompt", "In short,", "--stats")
    assert went_on.stdout.startswith("In short,")
    says(went_on.stderr, "77 of 86 tokens reused from c.safetensors, loaded in", "(77 reused)")
    large = result("compress", "--method", "fp8", "--prompt-file", "text.txt", "--out", "large.safetensors")
    says(large.stderr, "all in the window", "larger than in fp16, as every context below")


def test_options_that_were_not_given_are_the_contexts(chatty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def loaded(name: str, **options: Any) -> Any:
        asked.append((name, str(options["dtype"])))
        return replace(chatty, name=name)

    monkeypatch.setattr("kvcli.models.load.load_model", loaded)
    compressed("other/model", "--method", "rtn-2", *GROUPED)
    assert result("generate", "--context", "c.safetensors", "--prompt", "x", *SHORT)["model"] == "other/model"
    assert asked == [("other/model", "None"), ("other/model", "torch.float32")]
    given = ("generate", "the/third", "--context", "c.safetensors", "--prompt", "x", *SHORT)
    assert result(*given)["model"] == "the/third"  # which has the same weights here


def test_contexts_that_cannot_be_gone_on_from(chatty: Any) -> None:
    compressed(*METHOD)
    context = Context.load("c.safetensors")
    replace(context, notes={**context.notes, "tokenizer": "x"}).save("another")
    replace(context, input_ids=None).save("empty")
    replace(context, identity=replace(context.identity, dtype="load")).save("odd")
    Path("cut").write_bytes(Path("c.safetensors").read_bytes()[:-100])
    for words, said in {
        "c.safetensors --method qjl": "c.safetensors was made with method 'kivi', not 'qjl'",
        f"c.safetensors --method kivi-4 {' '.join(GROUPED)}": "was made with k_bits 2, which is 4 here",
        "c.safetensors --residual-length 16": "was made with residual_length 8, which is 16 here",
        "c.safetensors --setting group_size=4": "was made with group_size 8, which is 4 here",
        "none": "no context 'none' in",
        "another": "was made with another tokenizer",
        "empty": "has no token ids",
        "odd": "with a model in load, in which kvcli loads none",
        "cut": "damaged",
    }.items():
        assert said in refused("generate", "--prompt", "x", "--context", *words.split(), code=1)
    for options, said in {
        (): "--context needs a text",
        ("--prompt", ""): "with one token or more",
        ("--prompt", "x", "--chat"): "c.safetensors holds a text and no conversation",
    }.items():
        assert said in refused("generate", "--context", "c.safetensors", *options)


def test_several_texts_a_folder_and_standard_input(chatty: Any) -> None:
    Path("texts").mkdir()
    for name in ("b.txt", "a.md", ".hidden"):
        (Path("texts") / name).write_text(f"{name} {TEXT}")
    options = ("--method", "rtn-2", *GROUPED)
    files = ("--prompt-file", "texts", "--prompt-file", "texts/.hidden")
    made = result("compress", *files, "--out", "o", *options, "--json")
    assert [record["context"] for record in made["contexts"]] == [f"o/{x}.safetensors" for x in ("a", "b", ".hidden")]
    piped = invoke("compress", "--prompt-file", "-", "--out", "o", *options, stdin=TEXT)
    assert piped.stdout == "o/stdin.safetensors\n"
    assert Context.load("o/stdin.safetensors").snapshot.num_tokens == len(TEXT)


WRONG = {
    "": "give what is to be compressed with --prompt-file",
    "--prompt-file a.txt --messages m.json": "give what is to be compressed",
    "--prompt-file none.txt --out c.safetensors": "cannot read none.txt",
    "--prompt-file empty.txt --out c.safetensors": "empty.txt is empty",
    "--prompt-file binary --out c.safetensors": "binary is not UTF-8 text",
    "--prompt-file hollow --out c.safetensors": "hollow has no files",
    "--prompt-file a.txt --prompt-file b.txt --out c.safetensors": "name a folder",
    "--prompt-file a.txt --prompt-file two/a.txt --out o": "two files are named a",
    "--prompt-file a.txt --out there.safetensors": "exists already; use --overwrite",
    "--messages a.txt --out c.safetensors": "a: the conversation is not JSON",
    "--messages bad.json --out c.safetensors": "message 0 is no object with the texts role and",
    "--messages half.json --out c.safetensors": "the text is not UTF-8",
    "--messages none.json --out c.safetensors": "messages are a JSON list of objects",
    "--prompt-file a.txt --out c.safetensors --store s": "--store is of the store, and --out",
    "--prompt-file a.txt --out c.safetensors --max-bytes 1GiB": "--max-bytes is of the store",
    "--prompt-file a.txt --prompt-file b.txt --name a": "--name is one name, but there are 2",
    "--prompt-file a.txt --name a?b": "'a?b' is no name of a context",
    "--prompt-file a.txt --name a/b": "'a/b' is no name of a context",
    "--prompt-file a.txt --max-bytes much": "'much' is not a size",
}


@pytest.mark.parametrize(("arguments", "said"), WRONG.items())
def test_what_cannot_be_compressed(chatty: Any, arguments: str, said: str) -> None:
    for folder in ("hollow", "two"):
        Path(folder).mkdir()
    files = {"a.txt": "a", "b.txt": "b", "two/a.txt": "c", "empty.txt": "\n", "there.safetensors": "x"}
    files["half.json"] = r'[{"role": "user", "content": "\ud83d"}]'
    for name, text in {**files, "bad.json": '[{"role": 3}]', "none.json": "[]", "m.json": "[]"}.items():
        Path(name).write_text(text)
    Path("binary").write_bytes(b"\xff\xfe\x00")
    before = sorted(Path().rglob("*"))
    assert said in refused("compress", "--method", "rtn-2", *arguments.split())
    assert Path("there.safetensors").read_text() == "x"
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("command", [("compress", "--prompt-file", "a.txt", "--out"), ("chat", "--save")])
def test_a_folder_that_cannot_be_made_is_said_before_anything_is_read(chatty: Any, command: tuple[str, ...]) -> None:
    Path("a.txt").write_text("a")
    done = result(*command, "a.txt/c.safetensors", "--method", "fp8", stdin="Hello\n", exit_code=1)
    assert done.stdout == ""
    assert "a.txt" in done.stderr
    assert "tokens" not in done.stderr


def test_only_some_layers(chatty: Any) -> None:
    with kvcli.attach(chatty, "rtn-2", layers=[0, 1], group_size=8, residual_length=8) as session:
        ids = prompt_ids(chatty, TEXT, chat=False)
        compress(session, ids).save("c.safetensors", ids)
    assert result("generate", "--context", "c.safetensors", "--prompt", "x", *SHORT)["reused_tokens"] == len(TEXT)


def test_more_tokens_than_the_model_knows_are_announced(chatty: Any) -> None:
    Path("long.txt").write_text("x" * 600)
    done = result("compress", "--prompt-file", "long.txt", "--method", "fp8", "--out", "c.safetensors")
    assert "warning: 600 tokens are more than the 512" in done.stderr
