"""Requests of several clients in the same passes of `kvcli serve`, which join and leave between them."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import openai
import pytest
import torch
from engine_answers import prompts_of
from factories import load
from families import make
from served import LONG, Served, request, serving_together, session_ids, session_text, tiny, until

import kvcli
from kvcli.artifact.choice import MethodChoice
from kvcli.attention.graphs import Graphs
from kvcli.cache.identity import CacheIdentity
from kvcli.contexts import ContextStore, identity_of
from kvcli.errors import CacheError, UsageError
from kvcli.models.fingerprint import text_identity
from kvcli.paged.attention import PagedAttention
from kvcli.paged.captured import CapturedPasses
from kvcli.paged.model import PagedModel
from kvcli.paged.requests import ScheduledRequest
from kvcli.registry import parse_method
from kvcli.seam.versions import with_cache
from kvcli.serve.answers import Answer
from kvcli.serve.continuous import ContinuousEngine
from kvcli.serve.engine import open_engine

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


def is_idle(served: Served) -> bool:
    """Whether nothing is left of requests."""
    return not (served.engine._running or len(served.engine._waiting))


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


@pytest.mark.parametrize(
    "name",
    ["rtn-2", "kivi-2", "turboquant-3", "fp8", "fp16", "klt", "klt-tcq", "commvq", "blockgtq", "oscar", "kvquant"],
)
def test_an_answer_depends_on_its_prompt_alone(name: str, tiny_model: Any, tiny_artifact: Any, tmp_path: Path) -> None:
    """Not on what was kept, nor on who else is there: prompts that begin alike, one by one, together, and kept."""
    method = parse_method(name)[0]
    artifact = tiny_artifact(method) if method.needs_artifact else None
    (ids,) = prompts_of(tiny_model, 525)
    prompts = [ids[: 40 + 97 * i] for i in range(6)]
    with serving_together(name, tiny_model, artifact=artifact) as served:
        alone = [served.complete(prompt, 12) for prompt in prompts[::-1]][::-1]
    with (
        serving_together(name, tiny_model, artifact=artifact, store=tmp_path) as served,
        ThreadPoolExecutor(12) as pool,
    ):
        with paused(served):
            first = [pool.submit(served.complete, prompt, 12) for prompt in prompts]
            until(lambda: len(served.engine._running) + len(served.engine._waiting) == len(prompts))
        together = [x.result() for x in [*first, *(pool.submit(served.complete, x, 12) for x in prompts)]]
        assert served.counted("kvcli_cache_bytes", place="hot") > 0
    with serving_together(name, tiny_model, artifact=artifact, store=tmp_path) as served:
        together += [served.complete(prompt, 12) for prompt in prompts]
        assert served.counted("vllm:external_prefix_cache_hits_total") > 0
    texts = [x.choices[0].text for x in alone]
    assert [x.choices[0].text for x in together] == texts * 3
    assert len({*texts}) > 3
    cached = [x.usage.prompt_tokens_details.cached_tokens for x in together]
    assert min(cached[11], cached[17]) >= 480
    assert sum(cached[:6]) > 0  # of some that were read at the same time
    assert all(x <= len(prompt) for x, prompt in zip(cached, prompts * 3, strict=True))


def as_captured(model: PagedModel) -> CapturedPasses:
    return CapturedPasses(model.capturable, model.page_size, model.num_rings, Graphs(model.device, enabled=False))


def test_texts_of_captured_passes_follow_while_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    log, feed, run = list[str](), ContinuousEngine._feed, CapturedPasses.__call__
    monkeypatch.setattr(ContinuousEngine, "_feed", lambda *args: (log.append("text"), feed(*args))[1])
    monkeypatch.setattr(CapturedPasses, "__call__", lambda *args: (log.append("pass"), run(*args))[1])
    with serving_together("kivi-2") as served:
        served.engine.model.captured = as_captured(served.engine.model)
        served.complete("Hi", 4)
    assert log == ["pass", "text", "pass", "pass", "text", "pass", "text", "text"]


def test_answers_are_the_same_where_passes_are_captured() -> None:
    """Prompts are read one by one then, before requests that decode go on; texts follow during the next pass."""
    prompts = [TEXT * 5, TEXT, "Hi", TEXT * 5 + "Now?", TEXT * 3]
    with serving_together("kivi-2") as served, ThreadPoolExecutor(5) as pool:
        texts = [served.complete(prompt, 30).choices[0].text for prompt in prompts]
        stops, sampled = [{"stop": [texts[1][9:12]]}, {"stop": [texts[4][4:5]]}], {"temperature": 0.8, "seed": 3}
        ways: list[dict[str, Any]] = [{}, stops[0], {"logprobs": 2}, {"n": 2, **sampled}, stops[1]]
        expected = [served.complete(prompt, 30, **way) for prompt, way in zip(prompts, ways, strict=True)]
        model = served.engine.model
        model.captured = as_captured(model)
        answers = [pool.submit(served.complete, prompt, 30, **way) for prompt, way in zip(prompts, ways, strict=True)]
        for answer, expectation in zip(answers, expected, strict=True):
            pairs = zip(answer.result().choices, expectation.choices, strict=True)
            assert all((x.text, x.finish_reason) == (y.text, y.finish_reason) for x, y in pairs)
            assert answer.result().usage.completion_tokens == expectation.usage.completion_tokens
        assert answers[2].result().choices[0].logprobs.tokens == expected[2].choices[0].logprobs.tokens
        assert {x.choices[0].finish_reason for x in expected} == {"stop", "length"}
        until(lambda: not served.engine._running)
        assert (served.engine._pool.num_available, len(served.engine._rings)) == (model.num_pages, model.num_rings)


def test_what_cannot_be_captured_is_told_and_launched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(model: PagedModel, *_: Any) -> None:
        model.captured = as_captured(model)
        model.captured.graphs.note = "an operation cannot be captured"

    monkeypatch.setattr(PagedModel, "warm_up", warm_up)
    log = list[str]()
    with open_engine(tiny(), MethodChoice.of("rtn-4"), "tiny", max_batch=2, hot_bytes=2**24, note=log.append) as engine:
        assert isinstance(engine, ContinuousEngine)
        assert (log, engine.model.captured) == (["an operation cannot be captured"], None)


@pytest.mark.parametrize("max_batch", [1, 2])
def test_a_length_that_the_model_has_no_positions_for_is_refused_at_start(max_batch: int) -> None:
    """A request of that length would end, and others in its pass with it."""
    loaded, sizes = load(make("gpt2", max_position_embeddings=64)), {"max_batch": max_batch, "hot_bytes": 2**24}
    opened = partial(open_engine, loaded, MethodChoice.of("rtn-4"), "tiny", **sizes)
    with pytest.raises(UsageError, match="has positions for 64 tokens, not for 65"):
        opened(max_model_len=65).__enter__()
    with opened() as engine:
        assert engine.max_length == 64


def test_what_a_request_reads_itself_is_not_cached(served: Served) -> None:
    """Also where what comes next is found in memory meanwhile."""
    prompt, pool = [7 * i % 200 + 9 for i in range(300)], served.engine._pool
    with ThreadPoolExecutor(1) as client:
        with paused(served):
            answer = client.submit(served.complete, prompt, 4)
            until(lambda: served.engine._running)
            (_, (end, digest), _) = served.engine._running[0].ends
            pool.keep(digest, pool.take(4))
        assert (end, answer.result().usage.prompt_tokens_details.cached_tokens) == (256, 128)
    pool.release([digest], ())


def test_requests_of_a_key_use_its_own_contexts_alone(tmp_path: Path) -> None:
    """In memory and on disk."""
    for expected in ((0, 384, 0), (384, 384, 384)):
        with serving_together(store=tmp_path, keys=("one", "two"), per_key=True) as served:
            cached = []
            for key in ("one", "one", "two"):
                with served.client(key) as client:
                    done = client.completions.create(model="tiny", prompt=TEXT * 5, max_tokens=2)
                cached.append(done.usage.prompt_tokens_details.cached_tokens)
        assert (*cached,) == expected


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
            (found,) = paged.run([ScheduledRequest(ids[start:stop].tolist(), start, start, [*range(9)], 1)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_answers_without_codes_are_those_of_the_model(exact: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of clients that come and go, in the same passes."""
    rows, run = [], PagedModel.run
    monkeypatch.setattr(PagedModel, "run", lambda self, new: (rows.append(len(new)), run(self, new))[1])
    prompts = [TEXT[i : i + 5 + 9 * i] for i in range(6)]
    with ThreadPoolExecutor(3) as pool:
        with paused(exact):
            answers = [pool.submit(exact.complete, prompt, 20 + 7 * i) for i, prompt in enumerate(prompts)]
            until(lambda: len(exact.engine._running) + len(exact.engine._waiting) == 3)
        texts = [answer.result().choices[0].text for answer in answers]
    assert texts == [session_text(prompt, 20 + 7 * i) for i, prompt in enumerate(prompts)]
    assert max(rows) == 3


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
        until(lambda: len(served.engine._waiting) == 1)
        with pytest.raises(openai.RateLimitError):
            served.complete("Two", 2)
        connection.close()
        until(lambda: len(served.engine._waiting) == 0)
        assert served.counted("vllm:prompt_tokens_total") == len("Go on")


def test_a_token_that_ends_answers_does() -> None:
    ids, model = session_ids("End", 9), tiny().model
    model.generation_config.eos_token_id = ids[5]
    with serving_together("fp16", model) as served:
        done = served.complete("End", 40)
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
        assert sum(x.nbytes for x in model.pages) == model.nbytes == (model.num_pages + 1) * model.page_bytes


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


def test_a_context_in_pages_is_no_context_of_a_session(tmp_path: Path) -> None:
    """Nor the other way round: neither can go on from the other's, and both read the prompt."""
    prompt = TEXT * 5
    with serving_together(store=tmp_path) as served:
        served.complete(prompt, 1)
    store, loaded = ContextStore(tmp_path), tiny()
    (context,) = store.contexts()
    ids = torch.tensor([loaded.tokenizer(prompt).input_ids])
    settings = {**context.record.identity["config"], "method": "rtn-2"}
    with kvcli.attach(loaded.model, **{x: settings[x] for x in ("method", "residual_length")}) as session:
        identity = identity_of(session, loaded.tokenizer)
        assert "in pages of 32 tokens" in str(identity.difference(CacheIdentity.from_dict(context.record.identity)))
        assert store.fetch(ids, identity, session.model.device) is None
        cache = session.new_cache()
        session.model(ids, **with_cache(cache))
        store.put(cache.context(ids, text_identity(loaded.tokenizer)), name="own")
    with serving_together(store=tmp_path) as served:
        again = served.complete(prompt, 1)
        assert again.usage.prompt_tokens_details.cached_tokens == 384


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


@pytest.mark.parametrize("prompts", [["Bad~"], ["Good", "Bad~", "Other"]], ids=len)
def test_values_that_codes_do_not_hold_end_the_request_that_has_them(prompts: list[str], served: Served) -> None:
    """While others run, and in the pass in which others are read."""
    model, tilde = served.engine.model, ord("~")
    run, check, seen = model.run, model.range_error, list[int]()

    def note(requests: Any) -> Any:
        seen.extend(token for x in requests for token in x.tokens)
        return run(requests)

    def fail() -> CacheError | None:
        found = tilde in seen
        seen.clear()
        return CacheError("too large") if found else None

    expected = [served.complete(x, 20).choices[0].text for x in prompts if "~" not in x]
    (tilde,) = served.loaded.tokenizer("~", add_special_tokens=False)["input_ids"]
    before = served.complete("Before", 60).choices[0].text
    model.range_error = fail
    try:
        with ThreadPoolExecutor(4) as pool:
            model.run = note
            running = pool.submit(served.complete, "Before", 60)
            until(lambda: served.engine._running)
            with paused(served):
                answers = [pool.submit(served.ask, "/v1/completions", {"prompt": x, "max_tokens": 20}) for x in prompts]
                until(lambda: len(served.engine._running) + len(served.engine._waiting) == len(prompts) + 1)
            done = [x.result() for x in answers]
            assert running.result().choices[0].text == before
    finally:
        model.run, model.range_error = run, check
    assert [x.status for x in done] == [500 if "~" in x else 200 for x in prompts]
    assert [json.loads(x.body)["choices"][0]["text"] for x in done if x.status == 200] == expected


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
