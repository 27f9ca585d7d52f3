"""What clients get whether requests are answered at once or one by one: answers, and fields of the OpenAI API."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from byte_tokenizer import CHAT
from families import make
from served import LONG, Served, request, serving, serving_together, session_ids, session_text, streamed, text_of, until

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. "
LONGROPE = {
    **{"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "factor": 4.0},
    **{"original_max_position_embeddings": 200, "rope_theta": 10000.0},
}
STREAM = {"prompt": "Go on", "max_tokens": LONG, "stream": True}


@pytest.fixture(scope="module", params=[serving_together, serving])
def exact(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server without codes."""
    with request.param(method="fp16") as made:
        yield made


def test_answers_are_those_of_the_model(exact: Served) -> None:
    """Of a text and a conversation, streamed and not."""
    messages: Any = [{"role": "user", "content": "Hi"}]
    said = exact.loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    of_text, of_talk = ((session_text(prompt, 30), ["length"]) for prompt in ("Hi you", said))
    done, chat = exact.complete("Hi you", 30).choices[0], exact.chat("Hi", 30).choices[0]
    assert (done.text, [done.finish_reason]) == of_text
    assert (chat.message.content, [chat.finish_reason]) == of_talk
    with exact.client() as client:
        stream = client.completions.create(model="tiny", prompt="Hi you", max_tokens=30, stream=True)
        assert streamed(stream)[:2] == of_text
        talk = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=30, stream=True)
        assert streamed(talk)[:2] == of_talk


def test_a_seed_repeats_a_sample(served: Served) -> None:
    def sample(seed: int | None) -> str:
        return str(served.chat("Hi", 20, temperature=1.0, seed=seed).choices[0].message.content)

    assert sample(5) == sample(5)
    assert len({sample(5), sample(6), sample(None), sample(None)}) == 4


def test_a_stop_string_ends_an_answer_and_its_work(exact: Served) -> None:
    text = session_text("Stop", 40)
    stop = text[len(text) // 2 :][:3]
    done = exact.complete("Stop", LONG, stop=[stop, "never there"])
    assert (done.choices[0].text, done.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    assert done.usage.completion_tokens < 40
    until(lambda: exact.counted("vllm:num_requests_running") == 0)


def test_health_and_metrics(served: Served) -> None:
    assert json.loads(served.ask("/health").body) == {"status": "ok"}
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count")
    before = [served.counted(name, model_name="tiny") for name in names]
    requests = served.counted("kvcli_requests_total", endpoint="/v1/completions", status="200")
    usage = served.complete("Count", 7).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (5, 7, 0)
    assert [served.counted(name) - x for name, x in zip(names, before, strict=True)] == [5, 7, 1]
    assert served.counted("kvcli_requests_total", endpoint="/v1/completions", status="200") == requests + 1
    assert served.ask("/v1/completions", {"prompt": "Hi"}).headers["x-kvcli-method"] == "rtn-2"


def test_several_answers_to_one_prompt(served: Served) -> None:
    """As those of requests of their own, with seeds one after another; the prompt is read once."""
    prompt, sampling = TEXT * 4, {"temperature": 1.0, "max_tokens": 9}
    alone = [served.complete(prompt, 9, temperature=1.0, seed=5 + i).choices[0].text for i in range(3)]
    done = served.complete(prompt + "!", 9, temperature=1.0, seed=5, n=3)
    assert [x.index for x in done.choices] == [0, 1, 2]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(prompt) + 1, 27)
    with served.client() as client:
        stream = client.completions.create(model="tiny", prompt=prompt, seed=5, n=3, stream=True, **sampling)
        texts, ends = ["", "", ""], []
        for event in stream:
            for choice in event.choices:
                texts[choice.index] += choice.text
                ends += [choice.index] if choice.finish_reason else []
    assert (texts, sorted(ends)) == (alone, [0, 1, 2])


def test_one_of_several_answers_that_cannot_wait_takes_none() -> None:
    with serving_together(max_batch=1, max_waiting=2) as served, served.open(request("/v1/completions", STREAM)):
        until(lambda: served.engine._running)
        with pytest.raises(openai.RateLimitError):
            served.complete("Two", 2, n=4)
        until(lambda: len(served.engine._waiting) == 0 or all(x.cancelled.is_set() for x in served.engine._waiting))


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_model(exact: Served, stream: bool) -> None:
    """Of the tokens that were made, whatever they were sampled with."""
    messages: Any = [{"role": "user", "content": "Hi"}]
    options: Any = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "logprobs": True, "top_logprobs": 4}
    with exact.client() as client:
        made = client.chat.completions.create(model="tiny", messages=messages, stream=stream, **options)
        choices: Any = [x for event in made for x in event.choices] if stream else made.choices
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    text = exact.loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = session_ids(text, 6, 3, temperature=1.0)
    sequence = torch.tensor([*exact.loaded.tokenizer(text)["input_ids"], *ids])
    with torch.no_grad():
        rows = exact.loaded.model(sequence[None], use_cache=False).logits[0, -7:-1].log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(rows, ids, strict=True)]
    assert [x.logprob for x in entries] == pytest.approx(expected, abs=1e-4)
    assert not any("text_offset" in x.model_extra for x in entries)
    assert [x.token for x in entries] == [exact.loaded.tokenizer.decode([x]) for x in ids]
    data = bytes(x for entry in entries for x in entry.bytes)
    assert data.decode(errors="replace") == exact.loaded.tokenizer.decode(ids)
    for entry, row in zip(entries, rows, strict=True):
        assert [x.logprob for x in entry.top_logprobs] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


def test_log_probabilities_of_a_completion(exact: Served) -> None:
    told = exact.complete("Hi", 5, logprobs=2).choices[0].logprobs
    assert [len(x) for x in (told.tokens, told.token_logprobs, told.top_logprobs)] == [5] * 3
    assert [max(x.values()) for x in told.top_logprobs] == pytest.approx(told.token_logprobs)
    assert exact.complete("Hi", 5).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [1, 5, 700])
def test_a_prompt_is_echoed_with_its_probabilities(exact: Served, length: int, stream: bool) -> None:
    """Read whole, whatever is kept of it, as lm-eval scores texts: one entry for each token, none for the first."""
    prompt: Any = (TEXT * 9)[:length]
    tokenizer: Any = exact.loaded.tokenizer
    exact.complete(prompt + "!", 2)
    ids = tokenizer(prompt)["input_ids"]
    with exact.client() as client:
        options: Any = {"model": "tiny", "max_tokens": 2, "logprobs": 2, "echo": True, "stream": stream}
        for asked in (prompt, [ids]):
            made = client.completions.create(prompt=asked, **options)
            choices: Any = [x for event in made for x in event.choices] if stream else made.choices
            told = [x.logprobs for x in choices if x.logprobs]
            logprobs = [y for x in told for y in x.token_logprobs]
            tops = [y for x in told for y in x.top_logprobs]
            text = "".join(x.text for x in choices)
            sequence = torch.tensor([[*ids, *session_ids(prompt, 2)]])
            with torch.no_grad():
                rows = exact.loaded.model(sequence, use_cache=False).logits[0, :-1].log_softmax(-1)
            expected = rows.gather(1, sequence[0, 1:, None])[:, 0].tolist()
            assert (logprobs[0], tops[0]) == (None, None)
            assert logprobs[1:] == pytest.approx(expected, abs=1e-4)
            assert [max(x.values()) for x in tops[1:]] == pytest.approx(rows.amax(-1).tolist(), abs=1e-4)
            assert [y for x in told for y in x.tokens] == [tokenizer.decode([x]) for x in sequence[0].tolist()]
            assert text == prompt + text_of(sequence[0, len(ids) :].tolist())
            assert [y for x in told for y in x.text_offset][: len(ids) + 1] == [*range(len(ids) + 1)]
        if not stream:
            assert made.usage.prompt_tokens_details.cached_tokens == 0


def test_an_echo_does_not_depend_on_others(served: Served) -> None:
    """Nor on what is kept, and what is read for it is kept for nobody."""
    prompt = "Echo. " + TEXT * 7

    def ask() -> Any:
        return served.complete(prompt, 3, echo=True, logprobs=1).choices[0].logprobs

    alone = ask()
    assert served.complete(prompt, 3).usage.prompt_tokens_details.cached_tokens == 0
    with ThreadPoolExecutor(4) as threads:
        others = [threads.submit(served.complete, prompt + "!" * i, 4) for i in range(2)]
        for asked in [threads.submit(ask) for _ in range(2)]:
            assert asked.result().token_logprobs == pytest.approx(alone.token_logprobs, abs=1e-4)
        assert [x.result().usage.completion_tokens for x in others] == [4, 4]
    plain = served.complete(prompt, 3, echo=True)
    assert plain.choices[0].text == prompt + served.complete(prompt, 3).choices[0].text
    assert plain.usage.prompt_tokens_details.cached_tokens > 0
    assert plain.choices[0].logprobs is None


@pytest.mark.parametrize(
    ("family", "changes"),
    [("gemma3_text", {}), ("qwen3_next", {}), ("phi3", {"max_position_embeddings": 800, "rope_parameters": LONGROPE})],
)
def test_an_echo_of_layers_with_states_and_of_a_rotation_by_length(family: str, changes: dict[str, Any]) -> None:
    prompt, model = (TEXT * 5)[:330], make(family, vocab_size=262, **changes)
    with serving(method="fp16", model=model) as served, torch.no_grad():
        ids = torch.tensor(served.loaded.tokenizer(prompt)["input_ids"])
        told = served.complete(prompt, 2, echo=True, logprobs=1).choices[0].logprobs.token_logprobs
        rows = served.loaded.model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    assert len(told) == len(ids) + 2
    assert told[1:-2] == pytest.approx(rows.gather(1, ids[1:, None])[:, 0].tolist(), abs=1e-3)


@pytest.mark.parametrize("serve", [serving_together, serving])
def test_an_echo_takes_nothing_from_the_store(serve: Any, tmp_path: Path) -> None:
    prompt = TEXT * 5
    with serve(store=tmp_path) as served:
        served.complete(prompt, 2)
    with serve(store=tmp_path) as served:
        done = served.complete(prompt, 2, echo=True, logprobs=1)
        assert len(done.choices[0].logprobs.tokens) == done.usage.prompt_tokens + 2
        assert done.usage.prompt_tokens_details.cached_tokens == 0
        assert served.complete(prompt, 2).usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("serve", [serving_together, serving])
def test_an_echo_with_logits_that_are_not_finite_is_an_error(serve: Any) -> None:
    """Also where those of the last token are; one that runs beside it goes on."""

    def spoil(module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(1, torch.tensor([2]), torch.nan) if logits.shape[1] > 3 else logits

    together = serve is serving_together
    with serve(method="fp16") as served, served.open(request("/v1/completions", STREAM)) if together else nullcontext():
        until(lambda: not together or served.engine._running)
        handle = served.loaded.model.lm_head.register_forward_hook(spoil)
        try:
            refused = served.ask("/v1/completions", {"prompt": "Hi you", "echo": True, "logprobs": 1})
        finally:
            handle.remove()
        assert refused.error()["message"] == "the model computed values that are not finite"
        assert not together or served.engine._running


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "year": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "year"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_an_answer_is_json_of_its_schema(served: Served, kind: str) -> None:
    """Of a model with random weights, sampled, of which others run beside it."""
    wanted: Any = {"type": kind} | ({"json_schema": {"name": "x", "schema": SCHEMA}} if kind == "json_schema" else {})
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(served.complete, "Other", 40)
        answers = [served.chat("Hi", 60, response_format=wanted, temperature=0.3, seed=i, n=2) for i in range(2)]
        assert other.result().choices[0].text == served.complete("Other", 40).choices[0].text
    for choice in (x for answer in answers for x in answer.choices):
        if choice.finish_reason == "stop" or kind == "json_schema":
            found = json.loads(choice.message.content)
            assert isinstance(found, dict)
            assert kind == "json_object" or (found["city"] in ("Paris", "Rome") and 1 <= found["year"] <= 99)


def test_requests_that_cannot_be_met_are_refused_by_name(served: Served) -> None:
    def refused(**fields: Any) -> tuple[str, str]:
        body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        error = served.ask("/v1/chat/completions", body).error()
        return error["param"] or "", error["message"]

    def schema(of_json: Any) -> Any:
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": of_json}}

    assert refused(response_format=schema({"type": "nosuch"}))[0] == "response_format"
    assert "json_schema is given with" in refused(response_format={"type": "json_schema"})[1]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert "it goes with no tools" in refused(response_format={"type": "json_object"}, tools=tools)[1]
    assert refused(top_logprobs=2) == ("top_logprobs", "top_logprobs: it needs logprobs")
    assert refused(n=9)[0] == "n"
    for name in ("chat_template", "messages", "self"):
        assert f"'{name}' is no variable of a chat template" in refused(chat_template_kwargs={name: "x"})[1]


PROPERTIES = {f"a{i}": {"type": "string"} for i in range(600)}
DATES = {f"{i}": {"type": "string", "format": "date"} for i in range(13)}


@pytest.mark.parametrize(
    ("of_json", "said"),
    [
        ({"type": "array", "minItems": 10_001}, "the schema has 10001 minItems and maxItems together"),
        ({"properties": {x: {"maxItems": 20} for x in PROPERTIES}}, "12000 minItems"),
        ({"$defs": {"a": {"maxItems": 5000}}, "anyOf": [{"$ref": "#/$defs/a"}] * 200}, "5000 minItems"),
        ({"allOf": [{"type": "string", "pattern": f"{i}"} for i in range(13)]}, "texts of 13 patterns"),
        ({"$ref": "#/$defs/a", "format": "date", "$defs": {"a": {"enum": [{"pattern": "x"}] * 12}}}, "13 patterns"),
        ({"properties": DATES, "$ref": "#/$defs/a", "$defs": {"a": {"properties": DATES}}}, "26 patterns"),
        ({"type": "object", "properties": {**DATES, "a": {"title": "A", "allOf": [{"type": "null"}]}}}, ""),
        ({"type": "object", "properties": PROPERTIES}, "too complex to be followed: Parser Error: Current row has "),
        ({"type": "object", "properties": {x: {"type": "string", "pattern": "x"} for x in list(PROPERTIES)[:20]}}, ""),
    ],
)
def test_schemas_beyond_memory_or_parser_are_refused_by_name(served: Served, of_json: Any, said: str) -> None:
    """And not with an error of the server, or all of the schema once more."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": of_json}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": wanted, "max_tokens": 4}
    answer = served.ask("/v1/chat/completions", body)
    assert answer.status == (400 if said else 200)
    if said:
        error = answer.error()
        assert error["param"] == "response_format"
        assert said in error["message"]
        assert len(error["message"]) < 300


def test_variables_of_a_chat_template_are_the_clients(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    template = CHAT + "{% if loud %}LOUD{% endif %}"
    monkeypatch.setattr(served.loaded.tokenizer, "chat_template", template)
    plain, loud = (served.chat("Hi", 2, extra_body={"chat_template_kwargs": {"loud": x}}) for x in (False, True))
    assert loud.usage.prompt_tokens == plain.usage.prompt_tokens + 4
