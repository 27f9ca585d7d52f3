"""Passes whose counts are on the device make the tokens of ordinary passes, and leave the same cache behind."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from factories import make_model
from transformers import (
    BatchEncoding,
    DynamicCache,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import kvcli
from kvcli.attention import decoder
from kvcli.attention import steps as step_passes
from kvcli.attention.generation import Generated, NextToken, SamplingConfig
from kvcli.attention.session import Session
from kvcli.bench.layer import randomize_
from kvcli.cache.counts import TokenCounts
from kvcli.errors import CacheError, UsageError
from kvcli.registry import METHODS, get_method, make_config
from kvcli.seam.versions import with_cache
from kvcli.spec import ModelSpec

MODEL = make_model("llama", num_hidden_layers=2)


@contextmanager
def attached(name: str, impl: str = "reference", model: Any = MODEL, **changes: Any) -> Iterator[Session]:
    """A session with random codebooks."""
    method, spec = get_method(name), ModelSpec.from_config(model.config)
    settings = {"residual_length": 8, **method.example_settings, **changes}
    known = {key: value for key, value in settings.items() if key in method.config_cls.model_fields}
    config = make_config(method.name, known).resolve(spec)
    codecs = [method.build(spec, config, layer_idx).eval() for layer_idx in range(spec.num_layers)]
    for codec in codecs:
        randomize_(codec, torch.Generator().manual_seed(0))
        codec.to(model.device)
    with Session(model, spec, method, config, codecs, impl) as session:
        yield session


def by_transformers(session: Session, ids: torch.Tensor, count: int, **options: Any) -> tuple[torch.Tensor, Any]:
    """Tokens, and the cache, of the model's own `generate`."""
    cache, settings = session.new_cache(), {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, **options}
    return MODEL.generate(ids, **with_cache(cache), **settings), cache


def make(
    session: Session, ids: torch.Tensor, mask: torch.Tensor | None, count: int, mode: Any = "steps", **options: Any
) -> Generated:
    return session.generate(ids, mask, sampling=SamplingConfig(count), mode=mode, **options)


def prompts(batch: int, length: int, padded: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    ids = torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(length))
    if not padded:
        return ids, None
    mask = (torch.arange(length) >= torch.tensor([0, 5, 11])[:batch, None]).long()
    return ids.masked_fill(mask == 0, 0), mask


def assert_same_logits(ids: torch.Tensor, *caches: Any, tolerance: float = 1e-3, **positions: Any) -> None:
    """Of an ordinary pass over two caches."""
    logits = [MODEL(ids, **with_cache(cache), **positions).logits for cache in caches]
    assert torch.allclose(*logits, atol=tolerance)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Capacities of the steps that were made; small, so that rows outgrow them."""
    made: list[int] = []
    real = step_passes.DeviceCounts

    def step(sequences: Any, capacity: int, *sizes: int) -> Any:
        made.append(capacity)
        return real(sequences, capacity, *sizes)

    monkeypatch.setattr(step_passes, "DeviceCounts", step)
    monkeypatch.setattr(step_passes, "_HEADROOM", 16)
    return made


@pytest.mark.parametrize(
    ("name", "batch", "length", "padded"),
    [*((name, 3, 40, True) for name in METHODS), ("kivi", 3, 40, False), ("qjl", 3, 40, False), ("kivi", 2, 7, True)],
)
def test_steps_make_the_tokens_of_transformers(
    name: str, batch: int, length: int, padded: bool, steps: list[int]
) -> None:
    """Also after short prompts, first by passes until every row holds codes; and passes go on from what steps left."""
    (ids, mask), count = prompts(batch, length, padded), 74 - length  # until steps are made anew
    with attached(name) as session:
        expected, expected_cache = by_transformers(session, ids, count, attention_mask=mask)
        made = make(session, ids, mask, count)
        assert len(steps) >= 2
        assert torch.equal(made.sequences, expected)
        assert made.cache.memory().num_tokens == expected_cache.memory().num_tokens
        assert made.cache.memory().code_bytes == expected_cache.memory().code_bytes
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, count + 5), value=1)
        positions = None if mask is None else (mask.cumsum(1) - 1)[:, -6:]
        chunk = torch.cat((expected[:, -1:], torch.randint(3, 97, (batch, 5))), dim=1)
        assert_same_logits(chunk, made.cache, expected_cache, attention_mask=mask, position_ids=positions)


@pytest.mark.kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only without a GPU")
def test_steps_of_kernels(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "LEAST_STEPS", 1)
    ids, mask = prompts(2, 40, padded=True)
    model = make_model("llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    with attached("kivi", "fused", model, group_size=16, residual_length=16) as session:
        assert torch.equal(*(make(session, ids, mask, 4, mode).sequences for mode in ("passes", "steps")))
    assert steps


def test_layers_that_cannot_be_captured_run_uncaptured_and_the_note_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """As quantized layers that copy from the host do: what ends the capture then raises an error of its own."""
    captures: list[bool] = []

    @contextmanager
    def capture(*_: Any, **__: Any) -> Iterator[None]:
        captures.append(True)
        try:
            yield
        finally:
            captures[-1] = False
            raise RuntimeError("operation failed due to a previous error during capture\nand more")

    def forward(*_: Any) -> None:
        if any(captures):
            raise RuntimeError("cannot copy between CPU and CUDA tensors\nand more")

    for name in ("graph_pool_handle", "empty_cache", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", capture)
    model = make_model("llama", num_hidden_layers=2)
    model.model.layers[0].register_forward_pre_hook(forward)  # while capturing, a GPU would run nothing before it
    ids, _ = prompts(2, 40)
    with attached("kivi", model=model) as session:
        expected = make(session, ids, None, 30, "passes")
        monkeypatch.setattr("kvcli.attention.session.default_mode", lambda *_, **__: "graphs")
        made = make(session, ids, None, 30, mode=None)
    assert captures == [False]
    assert made.note == "steps are not captured as CUDA graphs: cannot copy between CPU and CUDA tensors"
    assert torch.equal(made.sequences, expected.sequences)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_graphs_make_the_tokens_of_passes(name: str, padded: bool, steps: list[int]) -> None:
    ids, mask = prompts(3, 90, padded)
    ids, mask = ids.cuda(), None if mask is None else mask.cuda()
    changes = {"group_size": 16, "residual_length": 32}
    model = make_model("llama", num_hidden_layers=2).cuda()
    with attached(name, "auto", model, **changes) as session:
        expected, uncaptured, captured, again = (
            make(session, ids, mask, 150, mode) for mode in ("passes", "steps", "graphs", None)
        )
    assert len(steps) >= 4
    assert captured.note is None
    assert torch.equal(captured.sequences, uncaptured.sequences)
    assert torch.equal(captured.sequences, again.sequences)
    assert captured.cache.memory().code_bytes == expected.cache.memory().code_bytes
    differ = (captured.sequences != expected.sequences).any(0).nonzero()
    if len(differ):  # passes sum over other splits of the tokens: a near-tie may turn out differently
        place = int(differ[0])
        with attached(name, "auto", model, **changes) as session:
            logits = logits_of_passes(session, expected.sequences[:, :place], 90, mask)
        wrong = captured.sequences[:, place] != expected.sequences[:, place]
        best, second = logits[wrong].topk(2).values.unbind(-1)
        assert (best - second < 1e-3).all()


@torch.inference_mode()
def logits_of_passes(session: Session, ids: torch.Tensor, prompt: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Logits after the last of some tokens, read one by one after a prompt of so many."""
    cache: Any = session.new_cache()
    model: Any = session.model
    for stop in range(prompt, ids.shape[1] + 1):
        start = 0 if stop == prompt else stop - 1
        seen = None if mask is None else torch.nn.functional.pad(mask, (0, stop - prompt), value=1)
        positions = None if seen is None else (seen.cumsum(1) - 1).clamp(min=0)[:, start:]
        logits = model(ids[:, start:stop], attention_mask=seen, position_ids=positions, **with_cache(cache)).logits[
            :, -1
        ]
    return logits


@pytest.mark.gpu
def test_graphs_stop_and_sample() -> None:
    ids = prompts(2, 90)[0].cuda()
    with attached("kivi", "auto", make_model("llama").cuda(), group_size=16, residual_length=32) as session:
        free = make(session, ids, None, 60, "passes").sequences[:, 90:]
        stops = [int(free[0, 30]), int(free[1, 37])]
        made = [make(session, ids, None, 60, mode, eos_token_id=stops).sequences for mode in ("passes", "graphs")]
        sampled = []
        for _ in range(2):
            torch.manual_seed(3)
            sampled.append(session.generate(ids, sampling=SamplingConfig(60, temperature=1.0, top_p=0.95)).sequences)
    assert torch.equal(*made)
    assert torch.equal(*sampled)
    assert len(sampled[0][0, 90:].unique()) > 10


@pytest.mark.parametrize("name", ["kivi", "rtn"])
def test_what_follows_the_last_stop_is_taken_back(name: str, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ids, _ = prompts(2, 40)
    taken_back: list[int] = []
    state = TokenCounts.state
    restored = property(state.fget, lambda counts, value: (taken_back.append(1), state.fset(counts, value)))
    monkeypatch.setattr(TokenCounts, "state", restored)
    with attached(name, **({} if name == "kivi" else {"flush_block": 7})) as session:
        free = make(session, ids, None, 60, "passes").sequences[:, 40:]
        for place in range(4, 40, 3):  # a stop at every place between two looks, and between two flushes
            stops, seen = [int(free[0, place]), int(free[1, place])], []
            expected, cache = by_transformers(session, ids, 60, eos_token_id=stops)
            made = make(session, ids, None, 60, eos_token_id=stops, pad_token_id=0, on_tokens=seen.append)
            assert torch.equal(made.sequences, expected)
            assert torch.equal(torch.cat(seen, dim=1), expected[:, 40:])
            for figure in ("num_tokens", "num_encoded", "code_bytes", "window_bytes"):
                assert getattr(made.cache.memory(), figure) == getattr(cache.memory(), figure)
            assert_same_logits(torch.cat((expected[:, -1:], ids[:, :9]), dim=1), made.cache, cache)
    assert taken_back or name == "kivi"  # which encodes values in every step, and so looks in every step


def test_seen_tokens_are_penalized_as_by_transformers() -> None:
    ids, _ = prompts(2, 20)
    with attached("rtn") as session:
        expected, _ = by_transformers(session, ids, 30, repetition_penalty=1.3)
        made = session.generate(ids, sampling=SamplingConfig(30, repetition_penalty=1.3), mode="steps")
    assert torch.equal(made.sequences, expected)


@pytest.mark.parametrize("stops", [[], [96]])
@pytest.mark.parametrize("name", ["kivi", "rtn"])
def test_a_cache_is_whole_whenever_its_user_breaks_off(name: str, stops: list[int], steps: list[int]) -> None:
    ids, _ = prompts(1, 40)
    with attached(name) as session:
        for calls in range(1, 6):
            seen: list[torch.Tensor] = []

            def interrupt(tokens: torch.Tensor, seen: list[torch.Tensor] = seen, calls: int = calls) -> None:
                seen.append(tokens)
                if len(seen) == calls:
                    raise KeyboardInterrupt

            cache, expected = session.new_cache(), session.new_cache()
            with pytest.raises(KeyboardInterrupt):
                make(session, ids, None, 60, cache=cache, on_tokens=interrupt, eos_token_id=stops)
            assert cache.passes.step is None
            made = torch.cat(seen, dim=1)
            assert cache.get_seq_length() == 40 + made.shape[1] - 1
            for piece in (ids, *made.split(1, dim=1)[:-1]):
                MODEL(piece, **with_cache(expected))
            assert_same_logits(made[:, -1:], cache, expected, tolerance=1e-4)
    assert steps


def test_a_cache_refuses_to_go_on_when_a_step_broke_off(monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> None:
    ids, encoded, real = prompts(1, 40)[0], [], step_passes.flush_layer

    def interrupted(*args: Any) -> None:
        encoded.append(1)
        if len(encoded) == 9:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(step_passes, "flush_layer", interrupted)
    with attached("kivi") as session:
        cache = session.new_cache()
        with pytest.raises(KeyboardInterrupt):
            make(session, ids, None, 60, cache=cache)
        with pytest.raises(CacheError, match="reset"):
            MODEL(ids[:, :1], **with_cache(cache))


def test_what_cannot_be_generated_is_refused() -> None:
    ids, _ = prompts(2, 12)
    right = torch.ones_like(ids)
    right[0, -2:], empty = 0, torch.tensor([[1] * 12, [0] * 12])
    with attached("rtn") as session:
        for x, mask, said in (
            (ids, empty, "row 1 has no token: its attention_mask is 0 everywhere"),
            (ids, right[:, :11], r"not \[2, 12\] and \[2, 11\]"),
            (ids, torch.ones(2, 13, dtype=torch.int64), r"not \[2, 12\] and \[2, 13\]"),
            (ids[:0], right[:0], r"one row or more, not \[0, 12\] and \[0, 12\]"),
            (ids[0], None, r"not \[12\]"),
            (ids.tolist(), None, r"input_ids is a tensor \[batch, time\], not a list"),
            (BatchEncoding({"input_ids": ids}), None, r"not a BatchEncoding; .*generate\(\*\*inputs\)"),
            (ids, [[1] * 12], "attention_mask is a tensor"),
            (ids.float(), None, "input_ids are int64, not float32"),
            (torch.full_like(ids, 5000), None, "input_ids are 5000 to 5000, but the model has"),
            (ids - 97, None, "input_ids are -"),
        ):
            with pytest.raises(UsageError, match=said):
                make(session, x, mask, 3, None)
        for mask, count, mode, said in (
            (right, 3, None, "left"),
            (None, 3, "graphs", "GPU"),
            (None, 3, "auto", "passes or steps or graphs, not 'auto'"),
            (None, 0, None, "max_new_tokens"),
        ):
            with pytest.raises(UsageError, match=said):
                make(session, ids, mask, count, mode)
        for options, said in (
            ({"cache": DynamicCache()}, "not a DynamicCache"),
            ({"prefill_chunk": -1}, "prefill_chunk is 1 or more, not -1"),
        ):
            with pytest.raises(UsageError, match=said):
                make(session, ids, None, 3, None, **options)
        made = make(session, ids, None, 3, None)
        with pytest.raises(UsageError, match="nothing is left"):
            make(session, made.sequences[:, :-1], None, 3, None, cache=made.cache)
        again = make(session, made.sequences, None, 3, None, cache=made.cache)
        assert torch.equal(again.sequences, make(session, ids, None, 6, None).sequences)
        mask, stops = right.flip(1), ({96}, torch.tensor(96))  # a mask of any dtype, and stops as a set or a tensor
        both = zip((torch.int64, torch.float32), stops, strict=True)
        made = [make(session, ids, mask.to(x), 6, None, eos_token_id=stop) for x, stop in both]
        assert torch.equal(*(x.sequences for x in made))


def test_prompts_in_chunks_make_the_tokens_of_whole_prompts(steps: list[int]) -> None:
    ids, mask = prompts(3, 40, padded=True)
    with attached("fp16") as session:
        assert torch.equal(*(make(session, ids, mask, 30, prefill_chunk=x).sequences for x in (None, 7)))


def test_padding_is_not_penalized() -> None:
    """It is often the token that ends a text."""
    ids, mask, logits = torch.tensor([[2, 2, 5], [2, 3, 5]]), torch.tensor([[0, 0, 1], [1, 1, 1]]), torch.ones(2, 8)
    seen = NextToken(SamplingConfig(repetition_penalty=2.0), ids, 8, mask=mask).penalized(logits) < 1
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [[5], [2, 3, 5]]


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_sampling_has_the_distribution_of_transformers(penalty: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, ids = 3 * torch.randn(1, 20, generator=generator), torch.tensor([[3, 4, 5, 4]])
    sampling = SamplingConfig(temperature=0.8, top_k=9, top_p=0.9, repetition_penalty=penalty)
    steps = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else [])
    steps.extend([TemperatureLogitsWarper(0.8), TopKLogitsWarper(9), TopPLogitsWarper(0.9)])
    expected = steps(ids, logits.clone()).softmax(-1)[0]
    torch.manual_seed(0)
    counts = torch.zeros(20)
    for _ in range(400):
        batch = NextToken(sampling, ids.expand(50, -1), 20)(logits.expand(50, -1))
        counts += torch.bincount(batch[:, 0], minlength=20)
    assert torch.allclose(counts / counts.sum(), expected, atol=0.015)
    assert not counts[expected == 0].any()


IDS = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(0))

KEYWORDS: dict[str, tuple[dict[str, Any], SamplingConfig]] = {
    "greedy": ({"max_new_tokens": 5}, SamplingConfig(5)),
    "a temperature": ({"temperature": 0.7, "top_k": 4}, SamplingConfig(temperature=0.7, top_k=4)),
    "do_sample": ({"do_sample": True, "top_p": 0.9}, SamplingConfig(temperature=1.0, top_p=0.9)),
    "not sampled": ({"do_sample": False, "temperature": 0.7}, SamplingConfig()),
    "None": ({"temperature": None, "top_p": None, "repetition_penalty": 1.2}, SamplingConfig(repetition_penalty=1.2)),
}


@pytest.mark.parametrize("case", KEYWORDS)
def test_generate_takes_the_keywords_of_transformers(case: str) -> None:
    keywords, sampling = KEYWORDS[case]
    made = []
    with kvcli.attach(MODEL, "rtn", group_size=4) as session:
        for options in ({"sampling": sampling}, keywords):
            torch.manual_seed(0)
            made.append(session.generate(IDS, eos_token_id=[], **options).sequences)
    assert torch.equal(*made)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"max_new_token": 3}, "did you mean 'max_new_tokens'"),
        ({"num_beams": 2}, "does not take 'num_beams'; the model's own generate may"),
        ({"sampling": SamplingConfig(), "top_k": 3}, "top_k is part of sampling"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample=True needs a temperature above 0"),
        *(({name: x}, f"{name} is .*, not {x}") for name, x in (("temperature", -1.0), ("top_p", 0.0), ("top_k", -1))),
        ({"temperature": "1"}, "temperature is a number, not '1'"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is more than 0, not nan"),
    ],
)
def test_keywords_that_generate_does_not_take(keywords: dict[str, Any], said: str) -> None:
    with kvcli.attach(MODEL, "rtn", group_size=4) as session, pytest.raises(UsageError, match=said):
        session.generate(IDS, **keywords)
