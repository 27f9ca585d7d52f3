"""`kvcli ask`: a document is read once, the answer is the same however it was read, and slips are told first."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from console import GROUPED, invoke, refused, result, says
from contexts_made import flip_a_byte

from kvcli.commands.machine import environment_info, free_bytes
from kvcli.commands.paths import model_folder
from kvcli.contexts import ContextStore

TEXT = "".join(f"{i}. It was the best of times, it was the age of wisdom. " for i in range(6))
SHORT = ("--max-new-tokens", "12", "--prefill-chunk", "64", *GROUPED)
QUESTION = "Which times?"


@pytest.fixture(autouse=True)
def _model(chatty: Any) -> None:
    Path("book.txt").write_text(f"\n{TEXT}\n")


def ask(*words: str, store: str = "s", stdin: Any = None) -> dict[str, Any]:
    return dict(result("ask", *words, "--store", store, *SHORT, "--json", stdin=stdin))


@pytest.fixture
def passes(chatty: Any) -> Iterator[list[int]]:
    """Tokens of each forward pass; what is appended to it is called before the pass of that number."""
    counts: list[int] = []
    decoder = chatty.model.model
    hook = decoder.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield counts
    hook.remove()


@pytest.mark.parametrize("method", ["kivi-4", "fp16", "qjl"])
def test_a_document_is_read_once(chatty: Any, passes: list[int], method: str) -> None:
    """The answer is the one of a single process that reads document and question in the same chunks."""
    options = ("--method", method, *(() if method != "kivi-4" else GROUPED[-2:]))
    options = ("--store", "s", "--max-new-tokens", "12", "--prefill-chunk", "64", *GROUPED[:4], *options, "--json")
    first = result("ask", "book.txt", QUESTION, *options)
    before = f"<user>{TEXT.strip()}"
    assert first["read_tokens"] == first["document_tokens"] == len(before)
    passes.clear()
    again = result("ask", "book.txt", QUESTION, *options)
    assert (again["read_tokens"], again["text"]) == (0, first["text"])
    assert sum(passes[:1]) == again["prompt_tokens"] - len(before) == len(f"\n\n{QUESTION}</s><assistant>") - len("/s>")
    assert sum(passes) < 0.2 * again["prompt_tokens"]
    other = result("ask", "book.txt", "And then?", *options)
    assert (other["read_tokens"], other["context"]) == (0, first["context"])


def test_ctrl_c_keeps_what_was_read_and_the_answer_is_the_uninterrupted_one(
    chatty: Any, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command goes on from it."""
    monkeypatch.setattr("kvcli.text.document._READING_PER_KEEPING", 0)
    whole, chunks = ask("book.txt", QUESTION, store="uninterrupted"), [*passes]
    assert chunks[:5] == [64] * 5
    layer, before = chatty.model.model.layers[1], len(passes)

    def stop(*_: Any) -> None:
        if len(passes) == before + 4:
            raise KeyboardInterrupt

    hook = layer.register_forward_hook(stop)
    done = invoke("ask", "book.txt", QUESTION, "--store", "s", *SHORT)
    hook.remove()
    assert (done.exit_code, done.stdout) == (130, "")
    says(done.stderr, f"192 of {whole['document_tokens']} tokens are kept in s\n", "same command again to resume")
    (partial,) = ContextStore("s").names()
    passes.clear()
    resumed = ask("book.txt", QUESTION)
    assert passes == chunks[3:]
    assert resumed["document_tokens"] - resumed["read_tokens"] == 192
    assert resumed["text"] == whole["text"]
    for part in ("num_tokens", "num_encoded", "code_bytes", "window_bytes"):  # positions have room for more
        assert resumed["memory"][part] == whole["memory"][part]
    assert ContextStore("s").names() == [resumed["context"]] == [partial]


def test_storing_takes_a_small_part_of_the_time(chatty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it takes long, not every chunk is stored."""
    stored, clock, put = [], [0.0], ContextStore.put

    def slow(store: ContextStore, context: Any, **options: Any) -> Any:
        stored.append(context.snapshot.num_tokens)
        clock[0] += 1000
        return put(store, context, **options)

    monkeypatch.setattr("kvcli.text.document.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(ContextStore, "put", slow)
    count = ask("book.txt", QUESTION)["document_tokens"]
    assert stored == [64, count]


def test_several_files_are_one_document_in_their_order(chatty: Any) -> None:
    Path("more").mkdir()
    Path("more/end.txt").write_text("The end. " * 5)
    first = ask("book.txt", QUESTION)
    both = ask("book.txt", "more", QUESTION)
    assert both["document_tokens"] == first["document_tokens"] + len("\n\n" + "The end. " * 5) - 1
    assert both["read_tokens"] == both["document_tokens"] - first["document_tokens"]
    assert ask("more", "book.txt", QUESTION)["read_tokens"] == both["document_tokens"]
    assert ask("book.txt", "-", QUESTION, stdin="The end. " * 5)["read_tokens"] == 0
    sources = {context.name: context.record.notes["source"] for context in ContextStore("s").contexts()}
    assert sorted(sources.values()) == ["book", "book, end", "end, book"]
    assert all(name.startswith(source.replace(", ", "-") + "-") for name, source in sources.items())


def test_what_is_said(chatty: Any) -> None:
    count = len(f"<user>{TEXT.strip()}")
    words = ("ask", "book.txt", QUESTION, *SHORT)
    store = model_folder("smollm2-135m", "contexts")
    done = result(*words, "--stats")
    says(done.stderr, f"{count}/{count} tokens", f"book: {count} tokens read in ", f"; kept in {store}\n")
    says(done.stderr, "the answer ends after 12 tokens; --max-new-tokens lets", "KV cache")
    assert f"book: {count} tokens, read before, loaded in" in result(*words).stderr
    with Path("book.txt").open("a") as file:
        file.write("Fin.")
    assert f"s, {count} of them before; kept in {store}\n" in result(*words).stderr
    chatty.model.lm_head.register_forward_hook(lambda *call: call[-1].index_fill(-1, torch.tensor([2]), 1e4))
    assert "warning: the model's first token is the one that ends its answer" in result(*words).stderr


SLIPS = {
    "": "the question is missing: it comes after the files; an example: kvcli ask book.txt",
    "book.txt": "the question is missing: it comes after the files, but 'book.txt' is one of these",
    "book.txt -": "but '-' is one of these",
    "What?": "name a file before the question, or - for standard input",
    "none.txt What?": "cannot read none.txt: No such file",
    "empty.txt What?": "empty.txt is empty",
    "binary What?": "binary is not UTF-8 text; convert it to text first",
    "- What?": "standard input is empty",
    "book.txt caf\udce9?": "question: no UTF-8 text",
    "book.txt What? --max-new-tokens 400": "the document has 335 tokens, question and answer 419, and smollm2-135m was "
    "trained on 512 in all; its first 93 tokens would fit, 27 % of it, or choose a model of longer contexts",
}


@pytest.mark.parametrize(("words", "said"), SLIPS.items())
def test_slips_are_told_before_anything_is_read(chatty: Any, passes: list[int], words: str, said: str) -> None:
    Path("empty.txt").write_text("\n")
    Path("binary").write_bytes(b"\xff\xfe\x00")
    assert said in refused("ask", *words.split(), stdin="")
    assert passes == []
    assert "is one of these" not in refused("ask", "none.txt", "long " * 200)


def test_a_document_that_memory_may_not_hold_is_told_before_it_is_read(
    chatty: Any, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcli.commands.machine.free_bytes", lambda device: 2**20)
    line = refused("ask", "book.txt", QUESTION, *SHORT)
    says(line, "the document has 335 tokens, which may take 1.", "MiB beside the model, and 1.00 MiB are free")
    assert passes == []
    fits = int(re.findall(r"its first (\d+) tokens would fit", line)[0])
    Path("book.txt").write_text(TEXT[: fits - len("<user>")].strip())
    assert fits - 2 <= ask("book.txt", QUESTION)["document_tokens"] <= fits


def test_free_memory_is_a_part_of_the_machines() -> None:
    assert 2**24 < free_bytes(torch.device("cpu")) < environment_info()["memory_bytes"]


def test_models_and_templates_that_cannot_be_asked(chatty: Any) -> None:
    chatty.tokenizer.chat_template = chatty.tokenizer.chat_template.replace("m['content']", "m['content'] | upper")
    assert "the chat template of smollm2-135m changes the text" in refused("ask", "book.txt", QUESTION, code=1)
    chatty.tokenizer.chat_template = None
    assert "no chat template: it continues texts, as 'kvcli generate'" in refused("ask", "book.txt", QUESTION)


def test_a_damaged_document_is_told_and_its_removal_helps(chatty: Any) -> None:
    name, text = (ask("book.txt", QUESTION)[key] for key in ("context", "text"))
    flip_a_byte(Path("s"), name, "last")
    assert f"kvcli contexts rm {name}" in refused("ask", "book.txt", QUESTION, "--store", "s", *SHORT, code=1)
    result("contexts", "rm", name, "--store", "s")
    assert ask("book.txt", QUESTION)["text"] == text
