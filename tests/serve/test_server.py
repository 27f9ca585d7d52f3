"""A server of one request at a time as clients see it: what it answers, and errors."""

import json
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from byte_tokenizer import CHAT
from factories import make_model
from families import make
from served import LONG, Served, answered, busy, request, serving, serving_together, streamed, until

from kvcli.errors import CacheError, ModelError
from kvcli.serve import app as app_module
from kvcli.serve.answers import Answer

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. "
STREAM = {"prompt": "Go on", "max_tokens": LONG, "stream": True}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
TOOLS_SHOWN = "{% if tools is not none %}{{ tools | tojson }}{% endif %}"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One server for the tests that leave it as it was; without a store."""
    with serving() as made:
        yield made


def waiting(served: Served, count: int) -> None:
    until(lambda: len(served.engine._waiting) == count)


def test_token_ids_are_a_prompt(served: Served) -> None:
    ids = served.loaded.tokenizer("Hi you")["input_ids"]
    texts = {served.complete(prompt, 12).choices[0].text for prompt in ("Hi you", ids, [ids], ["Hi you"])}
    assert texts == {served.generated("Hi you", 12)}


def test_a_prompt_is_found_again_and_usage_says_so(served: Served) -> None:
    prompt = "Cached. " + TEXT
    done = [served.complete(prompt, 8, extra_body={"max_tokens": 8}) for _ in range(2)]
    first, second = (x.usage for x in done)
    assert done[0].choices[0].text == done[1].choices[0].text
    assert (first.prompt_tokens, first.completion_tokens) == (len(prompt), 8)
    assert first.prompt_tokens_details.cached_tokens == 0
    assert len(prompt) - 26 <= second.prompt_tokens_details.cached_tokens < len(prompt)
    with served.client() as client:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8}
        _, _, usage = streamed(client.completions.create(model="tiny", prompt=prompt, **options))
    assert usage == second


def test_streams_say_usage_only_if_asked(served: Served) -> None:
    with served.client() as client:
        assert streamed(client.completions.create(model="tiny", prompt="Hi", stream=True))[2] is None


def test_tools_reach_the_template() -> None:
    with serving(template=TOOLS_SHOWN + CHAT) as served:
        plain = served.chat("Hi").usage.prompt_tokens
        assert served.chat("Hi", tools=TOOLS).usage.prompt_tokens == plain + len(json.dumps(TOOLS))
        assert served.chat("Hi", tools=TOOLS, tool_choice="none").usage.prompt_tokens == plain
        assert served.chat("Hi", tools=[]).usage.prompt_tokens == plain
    with serving(template=TOOLS_SHOWN + "{% if not tools %}{{ raise_exception('') }}{% endif %}" + CHAT) as served:
        assert served.chat("Hi", tools=TOOLS).usage.prompt_tokens == plain + len(json.dumps(TOOLS))
    with serving() as served:
        refused = served.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS})
        assert "shows the model no tools" in refused.error()["message"]
        assert served.chat("Hi", tools=TOOLS, tool_choice="none").usage.prompt_tokens


@pytest.fixture(scope="module")
def qwen() -> Iterator[Served]:
    """A server of a model whose answers are parsed, with a template that transformers does not expect."""
    with serving(model=make_model("qwen2", vocab_size=259)) as made:
        yield made


def test_a_prompt_is_no_part_of_an_answer_that_is_parsed(qwen: Served) -> None:
    done = qwen.chat("<think>", 20).choices[0].message
    assert (done.content, done.tool_calls) == (qwen.generated("<think>", 20, chat=True), None)


def test_json_is_content_also_after_the_begin_of_reasoning(qwen: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reasoning can end in JSON: all of the answer was reasoning, and its content empty."""
    monkeypatch.setattr(qwen.loaded.tokenizer, "chat_template", CHAT.replace("<assistant>{%", "<assistant><think>{%"))
    schema = {"name": "x", "schema": {"type": "string", "enum": ["<think>", "<tool_call>"]}}
    done = qwen.chat("Hi", 40, response_format={"type": "json_schema", "json_schema": schema}).choices[0].message
    assert json.loads(done.content) in ("<think>", "<tool_call>")


def test_tool_calls_and_reasoning_are_told_apart(qwen: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
    monkeypatch.setattr(qwen.session, "generate", _says(qwen, f"<think>Hm.</think>Well.{call}{call}</s>"))
    monkeypatch.setattr(qwen.loaded.tokenizer, "chat_template", TOOLS_SHOWN + CHAT)
    qwen.loaded.model.generation_config.eos_token_id = 2
    done = qwen.chat("Hi", 300, tools=TOOLS).choices[0]
    assert (done.message.content, done.message.reasoning_content, done.finish_reason) == ("Well.", "Hm.", "tool_calls")
    assert [json.loads(x.function.arguments) for x in done.message.tool_calls] == [{"at": "it"}] * 2
    with qwen.client() as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        events = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, stream=True)
        stream = [event.choices[0] for event in events]
    assert "".join(x.delta.content or "" for x in stream) == "Well."
    assert "".join(getattr(x.delta, "reasoning_content", "") for x in stream) == "Hm."
    calls = [call for x in stream for call in x.delta.tool_calls or []]
    assert [(x.index, x.function.name) for x in calls] == [(0, "look"), (1, "look")]
    assert len({x.id for x in calls}) == 2
    assert stream[-1].finish_reason == "tool_calls"


def test_models_are_listed(served: Served) -> None:
    with served.client() as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other/model")


def test_curl_is_a_client(served: Served) -> None:
    url = f"http://127.0.0.1:{served.port}/v1/completions"
    body = json.dumps({"prompt": "Hi you", "max_tokens": 12})
    command = ["curl", "-s", "-i", url, "-H", "Content-Type: application/json", "-d", body]
    head, _, text = subprocess.run(command, capture_output=True, check=True).stdout.decode().partition("\r\n\r\n")
    assert json.loads(text)["choices"][0]["text"] == served.generated("Hi you", 12)
    assert "x-kvcli-method: rtn-2" in head
    assert any(2 <= float(x.split(":")[1]) < 9 for x in head.splitlines() if x.startswith("x-kvcli-bits"))


@pytest.mark.parametrize("opened", [serving, serving_together])
def test_a_request_is_counted_on_its_way(opened: Any, tmp_path: Path) -> None:
    """In memory, from disk, cut off by its client, and refused."""
    with opened(store=tmp_path) as served:
        served.complete(TEXT * 3, 4)
        assert served.counted("vllm:prefix_cache_hits_total") == 0
        cached = served.complete(TEXT * 3, 4).usage.prompt_tokens_details.cached_tokens
        assert served.counted("vllm:prefix_cache_hits_total", model_name="tiny", engine="0") == cached > 0
    with opened(store=tmp_path) as served:
        assert served.complete(TEXT * 3, 4).usage.prompt_tokens_details.cached_tokens == cached
        assert served.counted("vllm:prefix_cache_hits_total") == 0
        assert served.counted("vllm:prefix_cache_queries_total") == len(TEXT * 3)
        assert served.counted("vllm:external_prefix_cache_queries_total") == len(TEXT * 3)
        assert served.counted("vllm:external_prefix_cache_hits_total") == cached
        assert served.counted("kvcli_load_seconds_count") == 1
        with served.open(request("/v1/completions", STREAM)):
            until(lambda: served.counted("vllm:num_requests_running") == 1)
            until(lambda: served.counted("vllm:generation_tokens_total") > 8)  # before the answer has ended
            assert served.counted("vllm:num_requests_waiting") == 0
        until(lambda: served.counted("vllm:request_success_total", finished_reason="abort") == 1)
        assert served.counted("vllm:num_requests_running") == 0
        assert served.ask("/v1/completions", {"prompt": "Hi", "temperature": -1}).status == 400
        assert served.counted("vllm:request_success_total", finished_reason="length") == 1
        assert served.counted("vllm:request_success_total") == 2
        for name in ("e2e_request_latency", "request_inference_time", "request_decode_time"):
            assert served.counted(f"vllm:{name}_seconds_count") == 1
        assert served.counted("vllm:request_generation_tokens_sum") == 4
        made = served.counted("vllm:generation_tokens_total")
        assert served.counted("vllm:inter_token_latency_seconds_count") == made - 2


def test_names_that_clients_make_up_are_not_counted_apart(served: Served) -> None:
    """Labels are kept as long as the server runs."""
    for i in range(3):
        assert served.ask(f"/v1/models/{i}completions").status == 404
    assert b"0completions" not in served.ask("/metrics").body


def test_events_of_a_stream_are_lines_of_ascii(served: Served) -> None:
    """Clients that split lines as Python does would break those of a text with U+2028."""
    served.session.generate, generate = _says(served, "a\u2028b\x85c"), served.session.generate
    try:
        body = served.ask("/v1/completions", {"prompt": "Hi", "max_tokens": 8, "stream": True}).body.decode()
    finally:
        served.session.generate = generate
    events = [json.loads(x[6:]) for x in body.splitlines() if x.startswith("data: {")]
    assert "".join(x["choices"][0]["text"] for x in events) == "a\u2028b\x85c"


def _says(served: Served, text: str) -> Any:
    def generate(*args: Any, on_tokens: Any, **options: Any) -> None:
        on_tokens(torch.tensor([served.loaded.tokenizer(text)["input_ids"]]))

    return generate


@pytest.mark.parametrize("method", ["rtn-2", "qjl"])
def test_requests_at_once_get_what_each_gets_alone(method: str) -> None:
    """Eight that waited together, of different lengths, with cached prefixes and without."""
    prompts = [TEXT[i : i + 5 + 9 * i] for i in range(8)]
    with serving(method=method) as served, ThreadPoolExecutor(8) as pool:
        alone = [served.complete(prompt, 6 + 3 * i).choices[0].text for i, prompt in enumerate(prompts)]
        served.prefixes.hot[:] = served.prefixes.hot[::2]
        with busy(served):
            made = [pool.submit(served.complete, prompt, 6 + 3 * i) for i, prompt in enumerate(prompts)]
            waiting(served, 8)
        assert [x.result().choices[0].text for x in made] == alone


def test_requests_at_once_read_what_they_begin_with_once() -> None:
    """Such as questions about one document."""
    with serving() as served, ThreadPoolExecutor(4) as pool:
        with busy(served):
            made = [pool.submit(served.complete, f"{TEXT}Question {i}?", 4 + i) for i in range(4)]
            waiting(served, 4)
        done = [x.result() for x in made]
        cached = sorted(x.usage.prompt_tokens_details.cached_tokens for x in done)
        assert cached[0] == 0
        assert cached[1] > len(TEXT) - 30
        assert len(served.prefixes.hot) < 4
        served.prefixes.hot.clear()
        alone = [served.complete(f"{TEXT}Question {i}?", 4 + i).choices[0].text for i in range(4)]
    assert [x.choices[0].text for x in done] == alone


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_models_with_states_of_the_whole_text_keep_whole_prompts(family: str) -> None:
    longer = f"{TEXT}Question?"
    with serving(model=make(family, vocab_size=259)) as served, ThreadPoolExecutor(2) as pool:
        expected = served.generated(longer, 8)
        with busy(served):
            made = [pool.submit(served.complete, longer, 8) for _ in range(2)]
            waiting(served, 2)
        assert [x.result().choices[0].text for x in made] == [expected] * 2
        first, second = sorted(x.result().usage.prompt_tokens_details.cached_tokens for x in made)
        assert first == 0 < second
        served.prefixes.hot.clear()  # from the store
        assert served.complete(longer, 8).choices[0].text == expected
        assert served.complete(longer, 8, logprobs=1).choices[0].text == expected  # in passes of their own
        assert served.complete(longer + expected, 8).usage.prompt_tokens_details.cached_tokens == second


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_another_question_about_a_text_goes_on_from_states_at_an_end_of_a_pass(family: str, tmp_path: Path) -> None:
    """In memory, and after a restart; then from one whose cache others go on from, too."""
    text = TEXT * 3
    first, second, other = (f"{text}{question} " for question in ("What was it?", "And when?", "Or where then?"))
    with serving(model=make(family, vocab_size=259)) as served:
        expected = [served.generated(prompt, 8) for prompt in (first, second, other, first)]
        made = [served.complete(prompt, 8) for prompt in (first, second, other, first)]
        assert [x.choices[0].text for x in made] == expected
        cached = [x.usage.prompt_tokens_details.cached_tokens for x in made]
        assert cached[0] == 0
        assert min(cached[1:]) > len(text) - 256
    with serving(tmp_path, model=make(family, vocab_size=259)) as served:
        served.complete(first, 1)
    with serving(tmp_path, model=make(family, vocab_size=259)) as served:
        again = served.complete(f"{text}Who else?", 8)
        assert again.usage.prompt_tokens_details.cached_tokens == 130  # the first of the ends that were kept
        assert again.choices[0].text == served.generated(f"{text}Who else?", 8)


def test_too_many_requests_are_told_to_come_later() -> None:
    with serving(max_waiting=1) as served, ThreadPoolExecutor(1) as pool:
        with busy(served):
            first = pool.submit(served.complete, "One", 2)
            waiting(served, 1)
            with pytest.raises(openai.RateLimitError) as caught:
                served.complete("Two", 2)
            refused = served.ask("/v1/completions", {"prompt": "Three", "stream": True})
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert (refused.status, refused.error()["code"]) == (429, "rate_limit_exceeded")
        assert first.result().usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [True, False])
def test_work_for_a_client_that_goes_away_ends(served: Served, stream: bool) -> None:
    before = served.counted("vllm:generation_tokens_total")
    started = served.counted("vllm:time_to_first_token_seconds_count")
    connection = served.open(request("/v1/completions", {**STREAM, "stream": stream}))
    until(lambda: served.counted("vllm:time_to_first_token_seconds_count") > started)
    connection.close()
    assert served.complete("Next", 3).usage.completion_tokens == 3
    assert served.counted("vllm:generation_tokens_total") < before + LONG / 2


def test_a_client_that_goes_away_before_its_stream_begins_costs_nothing(served: Served, monkeypatch: Any) -> None:
    tokenizing, gone = threading.Event(), threading.Event()
    prompt_ids = app_module.prompt_ids

    def wait(*args: Any, **options: Any) -> Any:
        tokenizing.set()
        gone.wait(30)
        return prompt_ids(*args, **options)

    before = served.counted("vllm:generation_tokens_total")
    monkeypatch.setattr(app_module, "prompt_ids", wait)
    connection = served.open(request("/v1/completions", STREAM))
    assert tokenizing.wait(30)
    connection.close()
    assert served.ask("/health").status == 200  # the end of the other connection was read before
    gone.set()
    assert served.complete("Next", 3).usage.completion_tokens == 3
    assert served.counted("vllm:generation_tokens_total") < before + LONG / 2


def test_a_client_that_does_not_read_blocks_nobody(served: Served) -> None:
    started = served.counted("vllm:time_to_first_token_seconds_count")
    with served.open(request("/v1/completions", {**STREAM, "max_tokens": 300}), receive_bytes=2048) as connection:
        until(lambda: served.counted("vllm:time_to_first_token_seconds_count") > started)
        assert served.complete("Next", 3).usage.completion_tokens == 3
        text = answered(connection).body  # all of it waits for its client
    assert text.count(b'"finish_reason": "length"') == 1
    assert b"[DONE]" in text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_while_it_waits_costs_nothing(stream: bool) -> None:
    """Neither a place in the queue nor a token."""
    with serving(max_waiting=2) as served, ThreadPoolExecutor(2) as pool:
        with busy(served):
            first = pool.submit(served.complete, "One", 2)
            waiting(served, 1)
            connection = served.open(request("/v1/completions", {**STREAM, "stream": stream}))
            waiting(served, 2)
            connection.close()
            until(served.engine._waiting[1].cancelled.is_set)
            second = pool.submit(served.complete, "Two", 2)
            until(lambda: served.engine._waiting[-1].sampling.max_new_tokens == 2 and len(served.engine._waiting) == 2)
        assert [x.result().usage.completion_tokens for x in (first, second)] == [2, 2]
        assert served.counted("vllm:prompt_tokens_total") == len("waitOneTwo")
        assert served.counted("vllm:generation_tokens_total") == 5


def test_what_may_not_be_stored_is_not_found_again(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as served:
        for _ in range(2):
            done = served.chat(TEXT, extra_body={"store": False})
            assert done.usage.prompt_tokens_details.cached_tokens == 0
        served.prefixes.contexts.close()
        assert served.prefixes.contexts.store is not None
        assert served.prefixes.contexts.store.names() == []
        assert served.prefixes.hot == []


def test_a_request_that_may_not_be_stored_leaves_what_is_kept(served: Served) -> None:
    prompt = "Kept. " + TEXT
    served.complete(prompt)
    for _ in range(2):
        done = served.complete(prompt + "More", extra_body={"store": False})
        assert done.usage.prompt_tokens_details.cached_tokens > 0
    assert served.complete(prompt).usage.prompt_tokens_details.cached_tokens > 0


def test_keys_have_contexts_of_their_own(tmp_path: Path) -> None:
    def cached(key: str) -> int:
        with served.client(key) as client:
            usage = client.completions.create(model="tiny", prompt=TEXT, max_tokens=2).usage
        return int(usage.prompt_tokens_details.cached_tokens)  # type: ignore[union-attr,arg-type]

    with serving(tmp_path / "store", keys=("one", "two"), per_key=True) as served:
        assert [cached("one"), cached("two")] == [0, 0]
        assert cached("one") == cached("two") > 0
    with serving(keys=("one", "two")) as served:
        assert cached("one") == 0
        assert cached("two") > 0


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RuntimeError("secret /root/x"), 500, "internal error"),
        (torch.OutOfMemoryError("secret /root/x"), 503, "out of memory; send a shorter prompt, or try again later"),
        (CacheError("secret /root/x"), 500, "the request failed"),
        (ModelError("secret /root/x"), 500, "the model computed values that are not finite"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_errors_of_the_engine_are_told_and_passed_over(
    error: Exception, status: int, message: str, path: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    body = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    with monkeypatch.context() as patch:
        patch.setattr(served.session, "generate", fail)
        plain = served.ask(path, body)
        stream = served.ask(path, {**body, "stream": True})
        with served.client() as client, pytest.raises(openai.APIError, match=message):
            streamed(client.completions.create(model="tiny", prompt="Hi", stream=True))
    assert (plain.status, plain.error()["message"]) == (status, message)
    assert ("retry-after" in plain.headers) == (status == 503)
    assert message in stream.body.decode()
    assert b"[DONE]" not in stream.body
    assert b"secret" not in plain.body + stream.body
    assert served.complete("Hi you", 12).choices[0].text == served.generated("Hi you", 12)


def test_one_answer_that_fails_takes_no_others_along() -> None:
    with serving() as served, ThreadPoolExecutor(2) as pool:
        alone = served.complete("Good", 8).choices[0].text
        read = served.prefixes.read

        def fail(ids: Any, *args: Any) -> Any:
            if ids.shape[1] == 3:
                raise RuntimeError("secret")
            return read(ids, *args)

        served.prefixes.read = fail  # type: ignore[method-assign]
        with busy(served):
            made = [pool.submit(served.complete, prompt, 8) for prompt in ("bad", "Good")]
            waiting(served, 2)
        with pytest.raises(openai.InternalServerError, match="internal error"):
            made[0].result()
        assert made[1].result().choices[0].text == alone


def test_an_answer_whose_text_fails_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Answer.feed

    def failing(answer: Answer, tokens: Any, *told: Any) -> bool:
        if answer.max_tokens == 7:
            raise ValueError("no text")
        return feed(answer, tokens, *told)

    with serving() as served, ThreadPoolExecutor(2) as pool:
        alone = served.complete("twelve words", 9).choices[0].text
        monkeypatch.setattr(Answer, "feed", failing)
        with busy(served):
            made = [pool.submit(served.complete, "twelve words", count) for count in (7, 9)]
            waiting(served, 2)
        with pytest.raises(openai.InternalServerError, match="internal error"):
            made[0].result()
        assert made[1].result().choices[0].text == alone
