"""`kvcli serve --continuous`: requests of several clients in the same passes, which join and leave between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import openai
import pytest
import torch
from byte_tokenizer import CHAT
from served import LONG, Served, request, serving, serving_together, tiny, until

import kvcli
from kvcli.attention.generation import SamplingConfig
from kvcli.cache.identity import CacheIdentity
from kvcli.errors import CacheError, UsageError
from kvcli.paged.attention import PagedAttention
from kvcli.paged.model import NewRequestTokens, PagedModel
from kvcli.seam.versions import with_cache
from kvcli.serve.answers import Answer
from kvcli.serve.continuous import ContinuousEngine

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. "
STREAM = {"prompt": "Go on", "max_tokens": LONG, "stream": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server of codes for the tests that leave it as it was."""
    with serving_together() as made:
        yield made


@pytest.fixture(scope="module")
def exact() -> Iterator[Served]:
    """A server without codes."""
    with serving_together("fp16") as made:
        yield made


def streamed(events: Any) -> tuple[str, list[str]]:
    """Text and finish reasons of a stream."""
    choices = [choice for event in events for choice in event.choices]
    text = "".join((x.text if hasattr(x, "text") else x.delta.content) or "" for x in choices)
    return text, [x.finish_reason for x in choices if x.finish_reason]


def is_idle(served: Served) -> bool:
    """Whether nothing is left of requests."""
    return not (served.engine._running or served.engine.num_waiting)


@contextmanager
def paused(served: Served) -> Iterator[None]:
    """No pass begins as long as this is open."""
    run, go_on = served.engine.model.run, Event()
    served.engine.model.run = lambda requests: (go_on.wait(60), run(requests))[1]
    try:
        yield
    finally:
        served.engine.model.run = run
        go_on.set()


def session_ids(prompt: str, count: int, seed: int = 0, **sampling: Any) -> list[int]:
    """What a session of the same model without codes generates."""
    loaded = tiny()
    torch.manual_seed(seed)
    with kvcli.attach(loaded, "fp16") as session:
        ids = torch.tensor([loaded.tokenizer(prompt)["input_ids"]])
        made = session.generate(ids, sampling=SamplingConfig(count, **sampling)).sequences
    return made[0, ids.shape[1] :].tolist()


def text_of(ids: list[int]) -> str:
    """The text of an answer, without what is only the beginning of a character."""
    return str(tiny().tokenizer.decode(ids, skip_special_tokens=True)).rstrip("\ufffd")


def session_text(prompt: str, count: int, **sampling: Any) -> str:
    return text_of(session_ids(prompt, count, **sampling))


@pytest.mark.parametrize("method", ["rtn-2", "kivi-2", "turboquant-3", "fp8"])
def test_an_answer_depends_on_its_prompt_alone(method: str) -> None:
    """Not on what was kept, nor on who else is there: prompts with common beginnings, one by one and together."""
    prompts = [(TEXT * 9)[: 40 + 97 * i] for i in range(6)]
    with serving_together(method) as served:
        alone = [served.complete(prompt, 12) for prompt in prompts[::-1]][::-1]
    with serving_together(method) as served, ThreadPoolExecutor(12) as pool:
        with paused(served):
            first = [pool.submit(served.complete, prompt, 12) for prompt in prompts]
            until(lambda: len(served.engine._running) + served.engine.num_waiting == len(prompts))
        together = [x.result() for x in [*first, *(pool.submit(served.complete, x, 12) for x in prompts)]]
        assert served.counted("kvcli_cache_bytes", place="hot") > 0
    texts = [x.choices[0].text for x in alone]
    assert [x.choices[0].text for x in together] == texts * 2
    assert len({*texts}) > 3
    cached = [x.usage.prompt_tokens_details.cached_tokens for x in together]
    assert cached[-1] > 400
    assert max(cached[:6]) > 0  # of one that was read at the same time


def test_what_is_read_of_a_prompt_is_what_a_session_reads() -> None:
    """Where each pass of a session begins with all tokens before it in codes."""
    loaded = tiny()
    ids = torch.tensor(loaded.tokenizer(TEXT * 3)["input_ids"])
    passes = (0, 128), (128, 192), (192, 224), (224, len(ids))
    with kvcli.attach(loaded, "rtn-2", residual_length=8, sink_length=4, flush_block=0) as session:
        cache = session.new_cache()
        for start, stop in passes:
            with torch.inference_mode():
                expected = loaded.model(ids[None, start:stop], **with_cache(cache)).logits[0, -1]
            session.flush(cache)
    with PagedModel(session, max_bytes=2**20, num_rings=1, max_length=512, residual_length=8, page_size=32) as paged:
        for start, stop in passes:
            (found,) = paged.run([NewRequestTokens(ids[start:stop].tolist(), start, start, [*range(9)], 1)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_answers_without_codes_are_those_of_the_model(exact: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of clients that come and go, in the same passes."""
    rows, run = [], PagedModel.run
    monkeypatch.setattr(PagedModel, "run", lambda self, new: (rows.append(len(new)), run(self, new))[1])
    prompts = [TEXT[i : i + 5 + 9 * i] for i in range(6)]
    with ThreadPoolExecutor(3) as pool:
        with paused(exact):
            answers = [pool.submit(exact.complete, prompt, 20 + 7 * i) for i, prompt in enumerate(prompts)]
            until(lambda: len(exact.engine._running) + exact.engine.num_waiting == 3)
        texts = [answer.result().choices[0].text for answer in answers]
    assert texts == [session_text(prompt, 20 + 7 * i) for i, prompt in enumerate(prompts)]
    assert max(rows) == 3


def test_conversations_are_answered(exact: Served) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    prompt = exact.loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = session_text(prompt, 30)
    with exact.client() as client:
        stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=30, stream=True)
        assert streamed(stream) == (expected, ["length"])
    choice = exact.chat("Hi", 30).choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected, "length")


def test_a_request_joins_those_that_run(served: Served) -> None:
    with served.open(request("/v1/completions", STREAM)):
        until(lambda: served.engine._running)
        (running,) = served.engine._running
        until(lambda: running.job.answer.num_tokens)
        assert served.complete("Short", 3).usage.completion_tokens == 3
        assert running.job.answer.finish_reason is None
    until(lambda: is_idle(served))


@pytest.mark.parametrize("stream", [True, False])
def test_work_for_a_client_that_goes_away_ends(served: Served, stream: bool) -> None:
    until(lambda: is_idle(served))
    generated = served.counted("vllm:generation_tokens_total")
    used = served.counted("kvcli_cache_bytes", place="hot")
    connection = served.open(request("/v1/completions", {**STREAM, "prompt": "Gone", "stream": stream}))
    until(lambda: served.engine._running and served.engine._running[0].job.answer.num_tokens > 2)
    assert served.counted("kvcli_cache_bytes", place="hot") > used
    assert 0 < served.counted("vllm:kv_cache_usage_perc") <= 1
    connection.close()
    until(lambda: is_idle(served))
    assert served.counted("kvcli_cache_bytes", place="hot") == used
    assert served.counted("vllm:kv_cache_usage_perc") == 0
    assert served.counted("vllm:generation_tokens_total") < generated + LONG / 2


def test_a_client_that_goes_away_while_it_waits_costs_nothing() -> None:
    with serving_together(max_batch=1, max_waiting=1) as served, served.open(request("/v1/completions", STREAM)):
        until(lambda: served.engine._running)
        connection = served.open(request("/v1/completions", {**STREAM, "prompt": "Wait"}))
        until(lambda: served.engine.num_waiting == 1)
        with pytest.raises(openai.RateLimitError):
            served.complete("Two", 2)
        connection.close()
        until(lambda: served.engine.num_waiting == 0)
        assert served.counted("vllm:prompt_tokens_total") == len("Go on")


def test_a_stop_string_ends_an_answer_and_its_work(exact: Served) -> None:
    text = session_text("Stop", 40)
    stop = text[len(text) // 2 :][:3]
    done = exact.complete("Stop", LONG, stop=[stop, "never there"])
    assert (done.choices[0].text, done.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    until(lambda: is_idle(exact))


def test_a_token_that_ends_answers_does(exact: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = session_ids("End", 9)
    monkeypatch.setattr(exact.loaded.model.generation_config, "eos_token_id", ids[5])
    done = exact.complete("End", 40)
    assert (done.usage.completion_tokens, done.choices[0].finish_reason) == (ids.index(ids[5]) + 1, "stop")


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "seed": 6},
        {"temperature": 0.0, "repetition_penalty": 3.0},
    ],
    ids=str,
)
def test_requests_are_sampled_as_each_says(sampling: dict[str, Any], exact: Served) -> None:
    """As by a session, whatever runs beside them."""
    prompt, ours = "Some words, some words", dict(sampling)
    extra = {name: ours.pop(name) for name in ("top_k", "repetition_penalty") if name in ours}
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(exact.complete, "Other", 30, temperature=1.0)
        answer = exact.complete(prompt, 20, extra_body=extra, **ours).choices[0].text
        assert other.result().choices[0].text != session_text("Other", 30)
    assert answer == session_text(prompt, 20, **sampling)
    assert answer != session_text(prompt, 20)


def test_samples_without_a_seed_differ(exact: Served) -> None:
    assert len({exact.complete("Hi", 20, temperature=1.0).choices[0].text for _ in range(3)}) == 3


def test_what_does_not_fit_the_pages_is_refused_and_what_fits_waits_for_room() -> None:
    with serving_together(max_bytes=2**16) as served, ThreadPoolExecutor(3) as pool:
        most = served.engine.max_length
        assert 256 <= most < 4096
        refused = served.ask("/v1/completions", {"prompt": [5] * 9, "max_tokens": most - 8})
        assert refused.error()["code"] == "context_length_exceeded"
        assert f"maximum context length is {most} tokens" in refused.error()["message"]
        answers = [pool.submit(served.complete, [5 + i] * (most - 9), 9) for i in range(3)]
        assert [x.result().usage.completion_tokens for x in answers] == [9] * 3
        with pytest.raises(UsageError, match=f"pages hold {most} tokens, not {most + 1}"):
            ContinuousEngine(served.engine.model, served.loaded.tokenizer, "tiny", max_model_len=most + 1)


def test_there_are_no_more_pages_than_requests_need() -> None:
    with serving_together(max_bytes=2**30, max_batch=3) as served:
        model = served.engine.model
        assert (model.num_pages, served.engine.max_length) == (3 * 4096 // 32, 4096)
        numbers = model.num_pages * 32 * served.session.spec.kv_width * 3
        assert model.bits == 8 * sum(x.nbytes for x in model.pages) / numbers


def test_what_was_used_least_recently_makes_room() -> None:
    with serving_together(max_bytes=2**16) as served:
        most = served.engine.max_length
        first, second, third = ([5 + i] * (most // 2) for i in range(3))

        def cached(prompt: list[int]) -> int:
            return int(served.complete(prompt, 4).usage.prompt_tokens_details.cached_tokens)

        assert [cached(x) for x in (first, second)] == [0, 0]
        whole = cached(first)
        assert [cached(x) for x in (third, first)] == [0, whole]
        assert cached(second) < whole


@pytest.mark.parametrize("method", ["rtn-2", "kivi-2", "fp16"])
def test_contexts_are_found_after_a_restart(method: str, tmp_path: Path) -> None:
    """All whole pages that leave the exact tokens to be read, in the same pages, and others that begin alike."""
    prompts = [(TEXT * 9)[:545], (TEXT * 9)[:290], (TEXT * 9)[:545] + "Else", "Another" + TEXT]

    def answers(served: Served) -> list[tuple[str, int]]:
        made = [served.complete(prompt, 12) for prompt in prompts]
        return [(x.choices[0].text, x.usage.prompt_tokens_details.cached_tokens) for x in made]

    with serving_together(method) as served:
        alone = [text for text, _ in answers(served)]
    with serving_together(method, store=tmp_path) as served:
        served.complete(prompts[0], 1)
    with serving_together(method, store=tmp_path) as served:
        found = answers(served)
        assert served.counted("kvcli_load_seconds_count") == 1
        assert served.counted("kvcli_contexts_stored_total", written="true") == 1  # the other one
    assert [text for text, _ in found] == alone
    assert [count for _, count in found] == [512, 256, 512, 0]


def test_a_damaged_context_is_read_anew(tmp_path: Path) -> None:
    with serving_together(store=tmp_path) as served:
        text = served.complete(TEXT * 5, 9).choices[0].text
    for path in (tmp_path / "blocks").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with serving_together(store=tmp_path) as served:
        for cached in (0, 384):
            done = served.complete(TEXT * 5, 9)
            assert (done.choices[0].text, done.usage.prompt_tokens_details.cached_tokens) == (text, cached)
    with serving_together(store=tmp_path) as served:
        assert served.complete(TEXT * 5, 9).usage.prompt_tokens_details.cached_tokens == 384


def test_a_context_of_other_pages_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheIdentity, "difference", lambda self, other: None)
    with serving_together("rtn-4", store=tmp_path) as served:
        served.complete(TEXT * 5, 1)
    with serving_together("rtn-2", store=tmp_path) as served:
        assert served.complete(TEXT * 5, 1).usage.prompt_tokens_details.cached_tokens == 0


def test_a_prompt_that_may_not_be_kept_is_not(served: Served) -> None:
    body = {"prompt": TEXT * 5, "max_tokens": 2}
    cached = []
    for store in (False, True, False):
        done = json.loads(served.ask("/v1/completions", {**body, "store": store}).body)
        cached.append(done["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 384]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (CacheError("secret /root/x"), 500, "the request failed"),
        (torch.OutOfMemoryError("secret /root/x"), 503, "out of memory; send a shorter prompt, or try again later"),
    ],
)
def test_a_pass_that_fails_ends_its_requests_and_no_later_ones(
    error: Exception, status: int, message: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    expected = served.complete("Hi you", 12).choices[0].text
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(PagedAttention, "__call__", fail)
        plain = pool.submit(served.ask, "/v1/completions", {"prompt": "Hi"})
        stream = served.ask("/v1/completions", {"prompt": "Hi", "stream": True})
        refused = plain.result()
    assert (refused.status, refused.error()["message"]) == (status, message)
    assert message in stream.body.decode()
    assert b"secret" not in refused.body + stream.body
    assert served.ask("/health").status == 200
    assert served.complete("Hi you", 12).choices[0].text == expected


def test_a_request_that_fails_takes_no_others_along(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because of its text."""
    feed = Answer.feed

    def fail(self: Answer, *args: Any, **options: Any) -> bool:
        if self.max_tokens == 5:
            raise RuntimeError("secret")
        return feed(self, *args, **options)

    monkeypatch.setattr(Answer, "feed", fail)
    with served.open(request("/v1/completions", STREAM)):
        until(lambda: served.engine._running)
        (running,) = served.engine._running
        with pytest.raises(openai.InternalServerError, match="internal error"):
            served.complete("Bad", 5)
        assert running.job.answer.finish_reason is None
        assert served.engine._running == [running]
    until(lambda: is_idle(served))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_an_error_that_nobody_expects_clients_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_together() as served:
        monkeypatch.setattr(served.engine, "_next_pass", None)
        assert served.ask("/v1/completions", {"prompt": "Hi"}).status == 503
        assert served.ask("/health").status == 503


def test_logits_that_are_not_finite_are_no_answer(exact: Served) -> None:
    weight = exact.loaded.model.lm_head.weight.data
    before = weight[7].clone()
    weight[7] = torch.nan
    try:
        refused = exact.ask("/v1/completions", {"prompt": "Hi"})
    finally:
        weight[7] = before
    assert refused.error()["message"] == "the model computed values that are not finite"
    assert exact.complete("Hi you", 12).choices[0].text == session_text("Hi you", 12)


def test_health_metrics_and_usage(served: Served) -> None:
    assert json.loads(served.ask("/health").body) == {"status": "ok"}
    before = {x: served.counted(f"vllm:{x}_total", model_name="tiny") for x in ("prompt_tokens", "generation_tokens")}
    first = served.counted("vllm:time_to_first_token_seconds_count")
    done = served.complete("Count", 7)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 7)
    assert done.usage.prompt_tokens_details.cached_tokens == 0
    assert served.counted("vllm:prompt_tokens_total") == before["prompt_tokens"] + 5
    assert served.counted("vllm:generation_tokens_total") == before["generation_tokens"] + 7
    assert served.counted("vllm:time_to_first_token_seconds_count") == first + 1
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
        until(lambda: served.engine.num_waiting == 0 or all(x.cancelled.is_set() for x in served.engine._waiting))


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
    assert [x.token for x in entries] == [exact.loaded.tokenizer.decode([x]) for x in ids]
    for entry, row in zip(entries, rows, strict=True):
        assert [x.logprob for x in entry.top_logprobs] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


def test_log_probabilities_of_a_completion(exact: Served) -> None:
    told = exact.complete("Hi", 5, logprobs=2).choices[0].logprobs
    assert [len(x) for x in (told.tokens, told.token_logprobs, told.top_logprobs)] == [5] * 3
    assert [max(x.values()) for x in told.top_logprobs] == pytest.approx(told.token_logprobs)
    assert exact.complete("Hi", 5).choices[0].logprobs is None


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
    assert "is no variable of a chat template" in refused(chat_template_kwargs={"chat_template": "x"})[1]
    with serving() as other:
        for name, value in (("logprobs", True), ("response_format", {"type": "json_object"})):
            body = {"messages": [{"role": "user", "content": "Hi"}], name: value}
            error = other.ask("/v1/chat/completions", body).error()
            assert (error["param"], "--continuous" in error["message"]) == (name, True)
        assert len(other.chat("Hi", 4, n=2).choices) == 2


def test_variables_of_a_chat_template_are_the_clients(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    template = CHAT + "{% if loud %}LOUD{% endif %}"
    monkeypatch.setattr(served.loaded.tokenizer, "chat_template", template)
    plain, loud = (served.chat("Hi", 2, extra_body={"chat_template_kwargs": {"loud": x}}) for x in (False, True))
    assert loud.usage.prompt_tokens == plain.usage.prompt_tokens + 4
