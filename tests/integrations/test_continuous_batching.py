"""transformers' continuous batching on codes, beside sessions of the same codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import lcm
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from engine_answers import NEW_TOKENS, Answer, PagedCache, check, prompts_of, session_of
from factories import load, make_model, record
from families import make
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig

import kvcli
from kvcli.artifact.artifact import Artifact
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.artifact.recipe import Recipe
from kvcli.errors import ConfigError, UsageError
from kvcli.integrations.continuous_batching import ALLOCATORS, CodesAllocator, block_bytes, enable
from kvcli.paged import attention as paged_attention
from kvcli.paged.pages import LayerEncoder
from kvcli.registry import get_method, parse_method

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
METHODS = ("turboquant-3", "rtn-4", "fp8", "klt", "commvq", "blockgtq", "oscar", "kvquant")


def enabled(model: Any, name: str, **settings: Any) -> AbstractContextManager[Any]:
    """By default without sinks, and without recent tokens but for KIVI, which needs a group of them."""
    residual = 32 if name.startswith("kivi") else 0
    return enable(model, name, **{"sink_length": 0, "residual_length": residual, **settings})


def batching(**config: Any) -> ContinuousBatchingConfig:
    sizes = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 256}
    return ContinuousBatchingConfig(**{**sizes, "return_logprobs": True, **config})


def sampling(count: int = NEW_TOKENS, copies: int = 1) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=count,
        do_sample=copies > 1,
        top_k=1,
        eos_token_id=-1,
        pad_token_id=0,
        num_return_sequences=copies,
    )


def generated(
    model: Any,
    prompts: list[list[int]],
    count: int = NEW_TOKENS,
    copies: int = 1,
    persistent: bool = False,
    **config: Any,
) -> list[Answer]:
    """The continuations of `generate_batch`, in the order of the prompts."""
    found = model.generate_batch(prompts, sampling(count, copies), batching(**config), persistent_manager=persistent)
    outputs = sorted(found.values(), key=lambda output: prompts.index(list(output.prompt_ids)))
    assert [output.error for output in outputs] == [None] * len(prompts) * copies
    return [Answer(list(output.generated_tokens), torch.tensor(output.logprobs)) for output in outputs]


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def check_all(
    model: Any, name: str, prompts: list[list[int]], answers: list[Answer], artifact: Any = None, **settings: Any
) -> None:
    """Checks answers against those of a session that encodes every token at once; with KIVI, every whole group."""
    checked = {key: settings.pop(key) for key in ("chunk", "chunks", "atol") if key in settings}
    if name.startswith("kivi"):
        sinks = settings.pop("sink_length", 0)
        with kvcli.attach(model, name, **settings) as session:
            codecs = session.codecs
        first = max(checked.get("chunks", [0]))
        reference: Any = SimpleNamespace(new_cache=lambda *_: PagedCache(codecs, sinks, residual=32, first=first))
        for prompt, answer in zip(prompts, answers, strict=True):
            check(model, reference, prompt, answer, **checked)
        return
    with session_of(model, name, artifact, **settings) as session:
        for prompt, answer in zip(prompts, answers, strict=True):
            check(model, session, prompt, answer, **checked)


@pytest.fixture
def stale_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are not empty but hold NaN, as if others had used them."""
    register = CodesAllocator.register_cache_tensor

    def fill(self: CodesAllocator, *arguments: Any) -> None:
        register(self, *arguments)
        self._copy_view.fill_(255)

    monkeypatch.setattr(CodesAllocator, "register_cache_tensor", fill)


@pytest.mark.usefixtures("stale_pages")
@pytest.mark.parametrize("name", METHODS)
def test_answers_are_those_of_a_session_without_a_window(
    name: str, tiny_model: Any, tiny_artifact: Callable[[Any], Artifact]
) -> None:
    method, _ = parse_method(name)
    artifact = tiny_artifact(method) if method.needs_artifact else None
    prompts = prompts_of(tiny_model, 20, 9, 3, 17, 33)
    with enabled(tiny_model, name, artifact=artifact):
        ours = generated(tiny_model, prompts)
    check_all(tiny_model, name, prompts, ours, artifact)


@pytest.mark.usefixtures("stale_pages")
@pytest.mark.usefixtures("stale_pages")
@pytest.mark.parametrize("name", ["turboquant-3", "klt", "commvq"])
def test_sinks_and_recent_tokens_are_exact(
    name: str, tiny_model: Any, tiny_artifact: Callable[[Any], Artifact]
) -> None:
    """As in a session with as many, in copies of a request, too, whose last page is copied."""
    method, _ = parse_method(name)
    artifact = tiny_artifact(method) if method.needs_artifact else None
    prompts, exact = prompts_of(tiny_model, 20, 9, 3, 70), {"sink_length": 3, "residual_length": 7}
    with enable(tiny_model, name, artifact=artifact, **exact):
        ours = generated(tiny_model, prompts)
        copies = generated(tiny_model, prompts, copies=2)
        chunks = generated(tiny_model, prompts[3:], max_batch_tokens=32)
    check_all(tiny_model, name, prompts, ours, artifact, **exact)
    check_all(tiny_model, name, prompts[3:], chunks, artifact, chunk=32, **exact)
    for prompt, one, other in zip(prompts, copies[::2], copies[1::2], strict=True):
        # copies are made before the last token of a prompt is read
        check_all(
            tiny_model, name, [prompt], [Answer(one.tokens, None)], artifact, chunks=[0, len(prompt) - 1], **exact
        )
        assert one.tokens == other.tokens


@pytest.mark.usefixtures("stale_pages")
@pytest.mark.parametrize("lengths", [(20, 64, 95, 3, 31, 130), (32,)], ids=str)
def test_kivi_has_whole_groups_as_codes_and_open_ones_exactly(
    lengths: tuple[int, ...], tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several pages, through the end of a group; requests that decode are one call."""
    batches, seen = [], paged_attention.EncodedTokens

    def encoded(*parts: Any) -> Any:
        batches.append(len(parts[4]))
        return seen(*parts)

    monkeypatch.setattr(paged_attention, "EncodedTokens", encoded)
    prompts = prompts_of(tiny_model, *lengths)
    with enabled(tiny_model, "kivi-2"):
        ours = generated(tiny_model, prompts, 40, page_size=64, max_batch_tokens=512)
    check_all(tiny_model, "kivi-2", prompts, ours)
    assert set(batches) == {len(prompts)}


@pytest.mark.parametrize("sinks", [3, 40])
def test_sinks_do_not_widen_the_scale_of_their_group(sinks: int, tiny_model: Any) -> None:
    """Of fewer tokens than a group, and of more."""
    prompts = prompts_of(tiny_model, 20, 95, 31)
    with enabled(tiny_model, "kivi-2", sink_length=sinks):
        ours = generated(tiny_model, prompts, 40, page_size=64)
    check_all(tiny_model, "kivi-2", prompts, ours, sink_length=sinks)


def test_sinks_are_encoded_as_zeros(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs are often out of the range of codes, which nobody reads."""
    seen, encode = [], LayerEncoder.encode_values

    def note(self: LayerEncoder, values: torch.Tensor) -> Any:
        seen.append(values.abs().amax((1, 2)) > 0)
        return encode(self, values)

    monkeypatch.setattr(LayerEncoder, "encode_values", note)
    with enabled(tiny_model, "rtn-4", sink_length=3):
        generated(tiny_model, prompts_of(tiny_model, 9), 1)
    assert all(x.tolist() == [False] * 3 + [True] * 6 for x in seen)


@pytest.mark.skipif(VERSION < (5, 19), reason="transformers asks for FlashAttention before it is called")
def test_models_with_flash_attention_are_given_no_mask(tiny_model: Any) -> None:
    """FlashAttention itself is not called."""
    prompts = prompts_of(tiny_model, 20, 9, 40)
    with enabled(tiny_model, "kivi-2"):
        tiny_model.config._attn_implementation = "flash_attention_2"
        ours = generated(tiny_model, prompts, page_size=32)
        tiny_model.config._attn_implementation = "sdpa"
    check_all(tiny_model, "kivi-2", prompts, ours)


@pytest.mark.parametrize("name", ["kivi-2", "rtn-4", "commvq"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_16_bits(name: str, dtype: torch.dtype, tiny_model: Any, tiny_artifact: Any) -> None:
    artifact = tiny_artifact(get_method(name)) if name == "commvq" else None
    model, prompts = tiny_model.to(dtype), prompts_of(tiny_model, 20, 9, 70)
    with enabled(model, name, artifact=artifact):
        ours = generated(model, prompts, page_size=64)
    # log-probabilities of 4 to 8 in units in the last place: processors add up products of 16 bits in other orders
    units = 4 if dtype == torch.float16 else 2.5
    check_all(model, name, prompts, ours, artifact, atol=units * 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["rtn-2", "kivi-2"])
def test_chunks_of_a_prompt_read_earlier_ones_from_codes(name: str, tiny_model: Any) -> None:
    prompts = prompts_of(tiny_model, 190)
    with enabled(tiny_model, name):
        ours = generated(tiny_model, prompts, page_size=32, max_batch_tokens=72)
    check_all(tiny_model, name, prompts, ours, chunk=72)
    with pytest.raises(AssertionError):
        check_all(tiny_model, name, prompts, ours)


@pytest.mark.parametrize("name", ["turboquant-2", "kivi-2"])
def test_a_prefix_that_requests_share_is_read_from_codes(name: str, tiny_model: Any) -> None:
    first, rest = prompts_of(tiny_model, 80, 18)
    second = first[:64] + rest
    with enabled(tiny_model, name):
        generated(tiny_model, [first], persistent=True, page_size=32)
        ours = generated(tiny_model, [second], persistent=True, page_size=32)
        tiny_model.destroy_cached_continuous_batching_manager()
    check_all(tiny_model, name, [second], ours, chunks=[0, 64])
    with pytest.raises(AssertionError):
        check_all(tiny_model, name, [second], ours)


@pytest.mark.parametrize("name", ["turboquant-3", "kivi-2"])
def test_copies_of_a_request_share_codes(name: str, tiny_model: Any) -> None:
    prompts = prompts_of(tiny_model, 50, 9)
    with enabled(tiny_model, name):
        ours = generated(tiny_model, prompts, copies=2, page_size=32)
    assert tokens_of(ours[::2]) == tokens_of(ours[1::2])
    # logarithms of probabilities among the likeliest tokens, one here, are 0
    with enabled(tiny_model, name):
        assert tokens_of(ours[::2]) == tokens_of(generated(tiny_model, prompts, page_size=32))


def test_requests_that_do_not_fit_wait_or_are_read_again(tiny_model: Any) -> None:
    prompts = prompts_of(tiny_model, 30, 31, 29, 28)
    with enabled(tiny_model, "rtn-4"):
        ours = generated(tiny_model, prompts, num_blocks=1)
    assert [len(answer.tokens) for answer in ours] == [NEW_TOKENS] * 4


def test_requests_that_are_moved_to_the_host_go_on_with_their_codes(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recent tokens are not moved: they are codes, then."""
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    moved, offload, empty = [], OffloadingManager._offload_to_cpu, torch.empty

    def record_moves(*arguments: Any) -> Any:
        moved.extend(found := offload(*arguments))
        return found

    monkeypatch.setattr(OffloadingManager, "_offload_to_cpu", record_moves)
    monkeypatch.setattr(torch, "empty", lambda *size, **rest: empty(*size, **{**rest, "pin_memory": False}))
    prompts = prompts_of(tiny_model, 30, 31, 29, 28)
    with enabled(tiny_model, "rtn-4"):
        ours = generated(tiny_model, prompts, 70, num_blocks=1, page_size=32, cpu_offload_space=0.01)
    assert moved
    check_all(tiny_model, "rtn-4", prompts, ours)


def test_clients_in_threads_are_answered_together(tiny_model: Any) -> None:
    prompts, answers = prompts_of(tiny_model, 20, 70, 9, 40), dict[int, Answer]()
    config = {"generation_config": sampling(), "continuous_batching_config": batching(page_size=32)}
    with enabled(tiny_model, "kivi-2"), tiny_model.continuous_batching_context_manager(**config) as manager:

        def ask(client: int) -> None:
            *_, found = manager.request_id_iter(manager.add_request(prompts[client]))
            answers[client] = Answer(list(found.generated_tokens), torch.tensor(found.logprobs))

        clients = [Thread(target=ask, args=(client,)) for client in range(len(prompts))]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    check_all(tiny_model, "kivi-2", prompts, [answers[client] for client in range(len(prompts))])


@pytest.mark.kernels
@pytest.mark.usefixtures("stale_pages")
def test_kernels_read_the_pages_of_a_batch() -> None:
    """In the interpreter."""
    model = make_model("llama", head_dim=64, num_hidden_layers=2)
    prompts = prompts_of(model, 20, 33, 70)
    with enabled(model, "kivi-2", impl="fused"):
        ours = generated(model, prompts, 4, page_size=64)
    check_all(model, "kivi-2", prompts, ours, atol=1e-3)


def allocators(model: Any, **config: Any) -> dict[str, Any]:
    generated(model, prompts_of(model, 9), persistent=True, **config)
    found: dict[str, Any] = model._cached_continuous_batching_manager.batch_processor.cache.cache_allocators
    model.destroy_cached_continuous_batching_manager()
    return found


def test_capacity_is_that_of_the_codes(tiny_model: Any) -> None:
    stock = allocators(tiny_model)["full_attention"]
    with enabled(tiny_model, "turboquant-3"):
        ours = allocators(tiny_model)["full_attention"]
    assert isinstance(ours, CodesAllocator)
    with kvcli.attach(tiny_model, "turboquant-3") as session:
        codec = session.codecs[0]
        bits = codec.key.bits_per_token() + codec.value.bits_per_token()
    layers = tiny_model.config.num_hidden_layers
    assert 0 <= ours.bytes_per_block - layers * ours.tokens_per_page * bits / 8 < 128
    assert ours.num_blocks == pytest.approx(stock.num_blocks * stock.bytes_per_block / ours.bytes_per_block, rel=0.1)


def test_layers_with_a_sliding_window_keep_their_cache() -> None:
    model = make("gemma3_text")
    prompts = prompts_of(model, 20, 9)
    with pytest.raises(UsageError, match="say sequence_offset='none'"), enabled(model, "turboquant-3"):
        pass
    with enabled(model, "turboquant-3", sequence_offset="none"):
        found = allocators(model)
        ours = generated(model, prompts)
    assert isinstance(found["full_attention"], CodesAllocator)
    assert not isinstance(found["sliding_attention"], CodesAllocator)
    check_all(model, "turboquant-3", prompts, ours, sequence_offset="none")


@pytest.mark.parametrize(
    "model_type", [pytest.param("gemma2", id="capped scores"), pytest.param("gpt_oss", id="sinks in every softmax")]
)
def test_scores_are_those_of_the_model(model_type: str) -> None:
    if model_type == "gemma2" and VERSION < (5, 21):
        pytest.skip("refused by name: the model's own attention does not cap scores")
    model = make(model_type, **({"layer_types": ["full_attention"] * 4} if model_type == "gemma2" else {}))
    prompts = prompts_of(model, 20, 9, 40)
    with enabled(model, "rtn-4"):
        ours = generated(model, prompts)
    check_all(model, "rtn-4", prompts, ours)


@pytest.mark.parametrize("codes", [250_880, 1_003_520, 1_315_840])
def test_sectors_beside_other_layers_stay_small(codes: int) -> None:
    """A sector holds whole blocks of both kinds; without the slack it would be gigabytes."""
    others = 29 * 2**20
    size = block_bytes(codes, others)
    assert codes <= size <= codes * 9 / 8 + 128
    assert 8 * lcm(size, others) <= lcm(codes, others)
    assert block_bytes(codes - 1, 0) == codes


def test_other_models_and_later_caches_are_those_of_transformers(tiny_model: Any) -> None:
    stock, other, third = ALLOCATORS["full_attention"], make_model("qwen2"), make_model("qwen2")
    functions, expected = dict(AttentionInterface()), tokens_of(generated(other, prompts_of(other, 9)))
    first, second = enabled(tiny_model, "rtn-4"), enabled(third, "rtn-4")
    first.__enter__()
    second.__enter__()
    assert isinstance(allocators(tiny_model)["full_attention"], CodesAllocator)
    assert not isinstance(allocators(other)["full_attention"], CodesAllocator)
    assert dict(AttentionInterface()) != functions
    assert tokens_of(generated(other, prompts_of(other, 9))) == expected
    first.__exit__(None, None, None)
    assert isinstance(allocators(third)["full_attention"], CodesAllocator)
    assert not isinstance(allocators(tiny_model)["full_attention"], CodesAllocator)
    with pytest.raises(UsageError, match="enabled already"), enabled(third, "rtn-4"):
        pass
    second.__exit__(None, None, None)
    assert ALLOCATORS["full_attention"] is stock
    assert dict(AttentionInterface()) == functions


def test_a_cache_of_codes_is_refused_outside_its_block(tiny_model: Any) -> None:
    with enabled(tiny_model, "rtn-4"):
        generated(tiny_model, prompts_of(tiny_model, 9), persistent=True)
    found = tiny_model.generate_batch(prompts_of(tiny_model, 9), sampling(), batching(), persistent_manager=True)
    tiny_model.destroy_cached_continuous_batching_manager()
    assert "use it inside the block of `enable`" in next(iter(found.values())).error


@pytest.mark.parametrize("name", ["commvq", "klt"])
def test_keys_of_layers_without_rope_are_not_rotated(name: str, tmp_path: Path) -> None:
    model, method = make("smollm3", no_rope_layers=[1, 0, 0, 0]), get_method(name)
    for parameter in (x for key, x in model.named_parameters() if "v_proj" in key or "o_proj" in key):
        parameter.data *= 6
    samples = record(model, tmp_path / "samples")
    config = method.config_cls(**method.example_settings).resolve(samples.spec)
    fit_recording(samples, method, config, tmp_path / "fit")
    artifact, prompts = assemble([tmp_path / "fit"]), prompts_of(model, 90, 130, 200, 33, 50, 60)
    with enabled(model, name, artifact=artifact):
        ours = generated(model, prompts, max_batch_tokens=1024, num_blocks=200)
    check_all(model, name, prompts, ours, artifact)


@pytest.mark.parametrize("name", ["rtn-4", "kivi-2"])
def test_layers_in_full_precision(name: str, tiny_model: Any) -> None:
    prompts = prompts_of(tiny_model, 20, 9, 70)
    with enabled(tiny_model, name, layers=[0, 2]):
        ours = generated(tiny_model, prompts, page_size=32)
        found = allocators(tiny_model, page_size=32)["full_attention"]
    check_all(tiny_model, name, prompts, ours, layers=[0, 2])
    assert found.bytes_per_sector == found.bytes_per_block


@pytest.mark.usefixtures("stale_pages")
@pytest.mark.parametrize(("name", "recent"), [("kivi", 32), ("turboquant", 7)])
def test_a_recipe_is_followed_with_bits_by_layer_and_exact_layers(
    name: str, recent: int, tiny_model: Any, tmp_path: Path
) -> None:
    """And with the recipe's own sinks and recent tokens, which can be changed."""
    settings: dict[str, Any] = {"k_bits": [4, 16, 2], "v_bits": [2, 16, 16], "sink_length": 3}
    settings["residual_length"] = recent
    path, prompts = tmp_path / "r.yaml", prompts_of(tiny_model, 20, 2, 70, 100)
    recipe = Recipe(model="tiny", fingerprint=load(tiny_model).fingerprint, method=name, settings=settings)
    recipe.save(path)
    with enable(tiny_model, recipe=path):
        ours = generated(tiny_model, prompts, page_size=32)
    check_all(tiny_model, name, prompts, ours, **settings)
    if name == "turboquant":
        with enable(tiny_model, recipe=path, residual_length=20):
            longer = generated(tiny_model, prompts, page_size=32)
        check_all(tiny_model, name, prompts, longer, **{**settings, "residual_length": 20})
        with pytest.raises(AssertionError):
            check_all(tiny_model, name, prompts, longer, **settings)


def test_a_recipe_of_another_model_or_beside_a_method_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    Recipe(model="tiny", fingerprint=load(make_model("qwen2")).fingerprint, method="rtn-4").save(path)
    with pytest.raises(ConfigError, match="made for tiny, not for this model"), enable(tiny_model, recipe=path):
        pass
    with pytest.raises(UsageError, match="name a method, an artifact or a recipe"), enable(tiny_model):
        pass
    other = "the recipe is for method 'rtn-4', not 'kivi-2'"
    with pytest.raises(UsageError, match=other), enable(tiny_model, "kivi-2", recipe=path):
        pass
    Recipe(model="tiny", fingerprint=load(tiny_model).fingerprint, method="squat-2").save(path)
    with pytest.raises(UsageError, match="method 'squat-2' depend on other tokens"), enable(tiny_model, recipe=path):
        pass


def test_a_model_with_a_manager_of_its_own_is_refused(tiny_model: Any) -> None:
    generated(tiny_model, prompts_of(tiny_model, 9), persistent=True)
    with pytest.raises(UsageError, match="persistent manager"), enabled(tiny_model, "rtn-4"):
        pass
    tiny_model.destroy_cached_continuous_batching_manager()


def test_what_cannot_be_is_refused_by_name(tiny_model: Any) -> None:
    for name in ("squat-2", "squat-pre-2", "qjl", "kvarn"):
        with pytest.raises(UsageError, match=f"method '{name}' depend on other tokens"), enable(tiny_model, name):
            pass
    with pytest.raises(UsageError, match="omit flush_block"), enabled(tiny_model, "rtn-4", flush_block=8):
        pass
    for name, size, reason in (("kivi-2", 16, "no multiple of 32 tokens"), ("rtn-4", 48, "of 48 tokens are not")):
        with pytest.raises(UsageError, match=reason), enabled(tiny_model, name):
            generated(tiny_model, prompts_of(tiny_model, 9), page_size=size)


def error_of(model: Any, name: str, **config: Any) -> str:
    with enabled(model, name):
        (output,) = model.generate_batch(prompts_of(model, 9), sampling(), batching(**config)).values()
    return str(output.error)


def test_numbers_that_codes_cannot_hold_end_the_request_with_the_reason(tiny_model: Any) -> None:
    tiny_model.model.layers[1].self_attn.v_proj.weight.data *= 1e7
    assert "values of layer 1 reach" in error_of(tiny_model, "turboquant-3")


def test_cuda_graphs_end_the_request_with_the_reason(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_batch = CodesAllocator._batch

    def captured(*arguments: Any) -> Any:
        with (
            patch("torch.cuda.is_available", lambda: True),
            patch("torch.cuda.is_current_stream_capturing", lambda: True),
        ):
            return make_batch(*arguments)

    monkeypatch.setattr(CodesAllocator, "_batch", captured)
    assert "say use_cuda_graph=False" in error_of(tiny_model, "rtn-4")


def test_a_transformers_without_these_allocators_is_refused_by_name() -> None:
    code = (
        "from kvcli.errors import UsageError; from transformers.generation.continuous_batching import cache\n"
        "del cache.ATTN_TYPE_TO_ALLOCATOR\n"
        "try: import kvcli.integrations.continuous_batching\n"
        "except UsageError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "continuous batching on codes needs transformers 5.18 to 5.24" in done.stdout
