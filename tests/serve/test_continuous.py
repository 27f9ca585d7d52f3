"""`kvcli serve --continuous`: requests of several clients in the same passes, beside transformers' `generate_batch`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from families import make
from served import LONG, Served, request, serving_together, tiny, until
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

import kvcli
from kvcli.attention.generation import SamplingConfig
from kvcli.errors import CacheError, UsageError
from kvcli.integrations.continuous_batching import CodesAllocator, enable
from kvcli.serve.answers import Answer
from kvcli.serve.continuous import ContinuousEngine, Sampler

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. "
STREAM = {"prompt": "Go on", "max_tokens": LONG, "stream": True}
STOCK_PAGE = 256 * 3 * 2 * 2 * 16 * 4
"""Bytes of one of transformers' own pages of the tiny model, of 256 tokens."""


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
    """Whether nothing is left of requests: transformers frees their pages after it has struck them off its lists."""
    scheduler = served.engine._manager.batch_processor.scheduler
    with scheduler._cancellation_lock:
        return not (served.engine._jobs or scheduler.active_requests or scheduler.waiting_requests)


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


@pytest.mark.parametrize("method", ["rtn-2", "kivi-2"])
def test_answers_are_those_of_generate_batch(method: str) -> None:
    """Of requests that begin at once: texts and conversations, streamed and not."""
    prompts = sorted((TEXT * (1 + i // 2))[i : i + 5 + 37 * i] for i in range(5))[::-1]
    loaded = tiny()
    ids = [loaded.tokenizer(prompt)["input_ids"] for prompt in prompts]
    with enable(loaded, method):
        config = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=2048)
        found = loaded.model.generate_batch(ids, GenerationConfig(max_new_tokens=12, eos_token_id=-1), config)
    expected = [text_of(x.generated_tokens) for x in found.values()]
    with serving_together(method) as served, ThreadPoolExecutor(5) as pool, served.client() as client:

        def ask(prompt: str, stream: bool) -> str:
            made = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, stream=stream)
            return streamed(made)[0] if stream else made.choices[0].text

        with served.engine._manager.pause():
            answers = []
            for i, prompt in enumerate(prompts):
                answers.append(pool.submit(ask, prompt, i % 2 == 0))
                until(lambda i=i: len(served.engine._jobs) == i + 1)
        assert [answer.result() for answer in answers] == expected


def test_answers_without_codes_are_those_of_the_model(exact: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of clients that come and go, in the same passes."""
    rows, choose = [], Sampler.__call__
    monkeypatch.setattr(Sampler, "__call__", lambda self, *x: (rows.append(len(self._requests)), choose(self, *x))[1])
    prompts = [TEXT[i : i + 5 + 9 * i] for i in range(6)]
    with ThreadPoolExecutor(3) as pool:
        with exact.engine._manager.pause():
            answers = [pool.submit(exact.complete, prompt, 20 + 7 * i) for i, prompt in enumerate(prompts)]
            until(lambda: len(exact.engine._jobs) == 3)
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
        until(lambda: served.engine._jobs)
        (job,) = served.engine._jobs.values()
        until(lambda: job.answer.num_tokens)
        assert served.complete("Short", 3).usage.completion_tokens == 3
        assert job.answer.finish_reason is None
    until(lambda: is_idle(served))


@pytest.mark.parametrize("stream", [True, False])
def test_work_for_a_client_that_goes_away_ends(served: Served, stream: bool) -> None:
    until(lambda: is_idle(served))
    generated = served.counted("kvcli_tokens_total", kind="generated")
    free = served.counted("kvcli_cache_bytes", place="hot")
    connection = served.open(request("/v1/completions", {**STREAM, "prompt": "Gone", "stream": stream}))
    until(lambda: served.engine._jobs and min(x.answer.num_tokens for x in served.engine._jobs.values()) > 2)
    assert served.counted("kvcli_cache_bytes", place="hot") > free
    connection.close()
    until(lambda: is_idle(served))
    assert served.counted("kvcli_cache_bytes", place="hot") == free
    assert served.counted("kvcli_tokens_total", kind="generated") < generated + LONG / 2


def test_a_client_that_goes_away_while_it_waits_costs_nothing() -> None:
    with serving_together(max_batch=1, max_waiting=1) as served, served.open(request("/v1/completions", STREAM)):
        until(lambda: served.engine._jobs and served.engine.num_waiting == 0)
        connection = served.open(request("/v1/completions", {**STREAM, "prompt": "Wait"}))
        until(lambda: served.engine.num_waiting == 1)
        with pytest.raises(openai.RateLimitError):
            served.complete("Two", 2)
        connection.close()
        until(lambda: len(served.engine._jobs) == 1)
        assert served.counted("kvcli_tokens_total", kind="prompt") == len("Go on")


def test_a_request_that_has_ended_takes_no_other_for_running() -> None:
    with serving_together(max_batch=1) as served:
        gone = served.open(request("/v1/completions", STREAM))
        until(lambda: served.engine._manager.batch_processor.scheduler.active_requests)
        with served.engine._manager.pause():
            gone.close()
            until(lambda: not served.engine._jobs)
            with served.open(request("/v1/completions", STREAM)):
                until(lambda: served.engine._jobs)
                assert served.engine.num_waiting == 1


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
    assert not exact.engine._choose


def test_samples_without_a_seed_differ(exact: Served) -> None:
    assert len({exact.complete("Hi", 20, temperature=1.0).choices[0].text for _ in range(3)}) == 3


def test_what_does_not_fit_the_pages_is_refused_and_what_fits_waits_for_room() -> None:
    with serving_together(hot_bytes=STOCK_PAGE // 3) as served, ThreadPoolExecutor(3) as pool:
        most = served.engine.max_length
        assert 256 <= most < 4096
        refused = served.ask("/v1/completions", {"prompt": [5] * 9, "max_tokens": most - 8})
        assert refused.error()["code"] == "context_length_exceeded"
        assert f"maximum context length is {most} tokens" in refused.error()["message"]
        answers = [pool.submit(served.complete, [5 + i] * (most - 9), 9) for i in range(3)]
        assert [x.result().usage.completion_tokens for x in answers] == [9] * 3
    loaded = tiny()
    with enable(loaded, "rtn-2"), pytest.raises(UsageError, match=f"pages hold {most} tokens, not {most + 1}"):
        ContinuousEngine(loaded, hot_bytes=STOCK_PAGE // 3, max_model_len=most + 1)


def test_there_are_no_more_pages_than_requests_need() -> None:
    loaded = tiny()
    with enable(loaded, "rtn-2"):
        engine = ContinuousEngine(loaded, max_batch=3, max_model_len=600)
        engine.close()
    assert engine.max_length == 600
    assert engine.num_tokens in (3 * 768, 3 * 768 + 256)
    assert 2 < engine.bits < 12


def test_layers_with_a_sliding_window_are_served() -> None:
    with serving_together("kivi-2", make("gemma3_text", vocab_size=259), max_model_len=512) as served:
        assert served.complete(TEXT, 8).usage.completion_tokens == 8


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

    def record_late(self: BackgroundThreadStatus, error: Exception) -> None:
        time.sleep(0.2)
        record(self, error)

    expected, record = served.complete("Hi you", 12).choices[0].text, BackgroundThreadStatus.record_fatal_error
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(CodesAllocator, "attend", fail)
        patch.setattr(BackgroundThreadStatus, "record_fatal_error", record_late)
        plain = pool.submit(served.ask, "/v1/completions", {"prompt": "Hi"})
        stream = served.ask("/v1/completions", {"prompt": "Hi", "stream": True})
        refused = plain.result()
    assert (refused.status, refused.error()["message"]) == (status, message)
    assert message in stream.body.decode()
    assert b"secret" not in refused.body + stream.body
    assert served.ask("/health").status == 200
    assert served.complete("Hi you", 12).choices[0].text == expected


def test_a_request_that_fails_takes_no_others_along(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because of its text, or alone among those that run."""
    feed, router = Answer.feed, served.engine._manager.output_router

    def fail(self: Answer, tokens: Any) -> bool:
        if self.max_tokens == 5:
            raise RuntimeError("secret")
        return feed(self, tokens)

    monkeypatch.setattr(Answer, "feed", fail)
    with served.open(request("/v1/completions", STREAM)), ThreadPoolExecutor(1) as pool:
        until(lambda: served.engine._jobs)
        with pytest.raises(openai.InternalServerError, match="internal error"):
            served.complete("Bad", 5)
        ((other, job),) = served.engine._jobs.items()
        failed = pool.submit(served.complete, "Worse", LONG)
        until(lambda: len(served.engine._jobs) == 2)
        (name,) = served.engine._jobs.keys() - {other}
        router.deliver(GenerationOutput(name, error="secret", status=RequestStatus.FAILED))
        with pytest.raises(openai.InternalServerError, match="internal error"):
            failed.result()
        assert job.answer.finish_reason is None
        assert [*served.engine._jobs] == [other]
    until(lambda: is_idle(served))


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
    before = {kind: served.counted("kvcli_tokens_total", kind=kind) for kind in ("prompt", "generated")}
    first = served.counted("kvcli_first_token_seconds_count")
    done = served.complete("Count", 7)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 7)
    assert done.usage.prompt_tokens_details is None
    assert served.counted("kvcli_tokens_total", kind="prompt") == before["prompt"] + 5
    assert served.counted("kvcli_tokens_total", kind="generated") == before["generated"] + 7
    assert served.counted("kvcli_first_token_seconds_count") == first + 1
    assert served.ask("/v1/completions", {"prompt": "Hi"}).headers["x-kvcli-method"] == "rtn-2"


def test_what_cannot_be_is_refused_by_name(served: Served) -> None:
    refused = served.ask("/v1/completions", {"prompt": "Hi", "store": False})
    assert (refused.status, refused.error()["param"]) == (400, "store")
    other = tiny(make("qwen3_next", vocab_size=259))
    with enable(other, "kivi-2"), pytest.raises(UsageError, match="transformers does not batch requests of this model"):
        ContinuousEngine(other)
