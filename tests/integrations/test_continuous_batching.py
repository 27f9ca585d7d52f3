"""transformers' continuous batching on codes, beside sessions of the same codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_model, record
from families import make
from transformers import ContinuousBatchingConfig, GenerationConfig

import kvcli
from kvcli.artifact import Artifact
from kvcli.errors import UsageError
from kvcli.fit import assemble, fit_recording
from kvcli.integrations.continuous_batching import ALLOCATORS, CodesAllocator, block_bytes, enable
from kvcli.registry import get_method, parse_method

NEW_TOKENS = 12
METHODS = ("turboquant-3", "rtn-4", "fp8", "klt", "commvq", "blockgtq", "oscar", "kvquant")


def batching(**config: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(**{"page_size": 8, "num_blocks": 64, "max_batch_tokens": 64, **config})


def generated(
    model: Any, prompts: list[list[int]], persistent: bool = False, copies: int = 1, **config: Any
) -> list[list[int]]:
    """The continuations of `generate_batch`, in the order of the prompts."""
    generation = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=copies > 1,
        top_k=1,
        eos_token_id=-1,
        pad_token_id=0,
        num_return_sequences=copies,
    )
    found = model.generate_batch(prompts, generation, batching(**config), persistent_manager=persistent)
    outputs = sorted(found.values(), key=lambda output: prompts.index(list(output.prompt_ids)))
    assert [output.error for output in outputs] == [None] * len(prompts) * copies
    return [list(output.generated_tokens) for output in outputs]


def prompts_of(model: Any, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def answer(
    model: Any, name: str, prompt: list[int], artifact: Any = None, chunk: int | None = None, **settings: Any
) -> list[int]:
    """The continuation by a session that encodes every token at once."""
    settings |= {"sink_length": 0, "residual_length": 0, "flush_block": 1}
    with kvcli.attach(model, name, artifact=artifact, **settings) as session:
        ids, options = torch.tensor([prompt]), {"eos_token_id": -1, "pad_token_id": 0}
        out = session.generate(ids, max_new_tokens=NEW_TOKENS, prefill_chunk=chunk, **options)
    return out.sequences[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", METHODS)
def test_answers_are_those_of_a_session_without_a_window(
    name: str, tiny_model: Any, tiny_artifact: Callable[[Any], Artifact]
) -> None:
    method, _ = parse_method(name)
    artifact = tiny_artifact(method) if method.needs_artifact else None
    prompts = prompts_of(tiny_model, 20, 9, 3, 17)
    with enable(tiny_model, name, artifact=artifact):
        ours = generated(tiny_model, prompts)
    assert ours == [answer(tiny_model, name, prompt, artifact) for prompt in prompts]


def test_chunks_of_a_prompt_read_earlier_ones_from_codes(tiny_model: Any) -> None:
    (prompt,) = prompts_of(tiny_model, 90)
    with enable(tiny_model, "rtn-2"):
        ours = generated(tiny_model, [prompt])
    assert ours == [answer(tiny_model, "rtn-2", prompt, chunk=64)]
    assert ours != [answer(tiny_model, "rtn-2", prompt)]


def test_a_prefix_that_requests_share_is_read_from_codes(tiny_model: Any) -> None:
    first, rest = prompts_of(tiny_model, 40, 8)
    second = first[:32] + rest
    with enable(tiny_model, "turboquant-2"):
        generated(tiny_model, [first], persistent=True)
        ours = generated(tiny_model, [second], persistent=True)
        tiny_model.destroy_cached_continuous_batching_manager()
    assert ours == [answer(tiny_model, "turboquant-2", second, chunk=32)]
    assert ours != [answer(tiny_model, "turboquant-2", second)]


def test_copies_of_a_request_share_codes(tiny_model: Any) -> None:
    prompts = prompts_of(tiny_model, 20, 9)
    with enable(tiny_model, "turboquant-3"):
        ours = generated(tiny_model, prompts, copies=2)
    assert ours == [answer(tiny_model, "turboquant-3", prompt) for prompt in prompts for _ in range(2)]


def test_requests_that_do_not_fit_wait_or_are_read_again(tiny_model: Any) -> None:
    prompts = prompts_of(tiny_model, 30, 31, 29, 28)
    with enable(tiny_model, "rtn-4"):
        ours = generated(tiny_model, prompts, num_blocks=3)
    assert [len(tokens) for tokens in ours] == [NEW_TOKENS] * 4


def allocators(model: Any) -> dict[str, Any]:
    generated(model, prompts_of(model, 9), persistent=True)
    found: dict[str, Any] = model._cached_continuous_batching_manager.batch_processor.cache.cache_allocators
    model.destroy_cached_continuous_batching_manager()
    return found


def test_capacity_is_that_of_the_codes(tiny_model: Any) -> None:
    stock = allocators(tiny_model)["full_attention"]
    with enable(tiny_model, "turboquant-3"):
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
    with pytest.raises(UsageError, match="say sequence_offset='none'"), enable(model, "turboquant-3"):
        pass
    with enable(model, "turboquant-3", sequence_offset="none"):
        found = allocators(model)
        ours = generated(model, prompts)
    assert isinstance(found["full_attention"], CodesAllocator)
    assert not isinstance(found["sliding_attention"], CodesAllocator)
    assert ours == [answer(model, "turboquant-3", prompt, sequence_offset="none") for prompt in prompts]


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
    expected = generated(other, prompts_of(other, 9))
    first, second = enable(tiny_model, "rtn-4"), enable(third, "rtn-4")
    first.__enter__()
    second.__enter__()
    assert not isinstance(allocators(other)["full_attention"], CodesAllocator)
    assert generated(other, prompts_of(other, 9)) == expected
    first.__exit__(None, None, None)
    assert isinstance(allocators(third)["full_attention"], CodesAllocator)
    assert not isinstance(allocators(tiny_model)["full_attention"], CodesAllocator)
    with pytest.raises(UsageError, match="enabled already"), enable(third, "rtn-4"):
        pass
    second.__exit__(None, None, None)
    assert ALLOCATORS["full_attention"] is stock


@pytest.mark.parametrize("name", ["commvq", "klt"])
def test_keys_of_layers_without_rope_are_not_rotated(name: str, tmp_path: Path) -> None:
    model, method = make("smollm3", no_rope_layers=[1, 0, 0, 0]), get_method(name)
    for parameter in (x for key, x in model.named_parameters() if "v_proj" in key or "o_proj" in key):
        parameter.data *= 6
    samples = record(model, tmp_path / "samples")
    config = method.config_cls(**method.example_settings).resolve(samples.spec)
    fit_recording(samples, method, config, tmp_path / "fit")
    artifact, prompts = assemble([tmp_path / "fit"]), prompts_of(model, 90, 130, 200, 33, 50, 60)
    with enable(model, name, artifact=artifact):
        ours = generated(model, prompts, max_batch_tokens=1024, num_blocks=200)
    assert ours == [answer(model, name, prompt, artifact) for prompt in prompts]


def test_models_of_16_bits_and_layers_in_full_precision(tiny_model: Any) -> None:
    model = tiny_model.to(torch.bfloat16)
    with enable(model, "rtn-4", layers=[0, 2]):
        assert [len(tokens) for tokens in generated(model, prompts_of(model, 20, 9))] == [NEW_TOKENS] * 2
        found = allocators(model)["full_attention"]
    assert found.bytes_per_sector == found.bytes_per_block


def test_a_model_with_a_manager_of_its_own_is_refused(tiny_model: Any) -> None:
    generated(tiny_model, prompts_of(tiny_model, 9), persistent=True)
    with pytest.raises(UsageError, match="persistent manager"), enable(tiny_model, "rtn-4"):
        pass
    tiny_model.destroy_cached_continuous_batching_manager()


def test_what_cannot_be_is_refused_by_name(tiny_model: Any) -> None:
    for name in ("kivi-2", "squat-2", "squat-pre-2", "qjl", "kvarn"):
        with pytest.raises(UsageError, match=f"method '{name}' depend on other tokens"), enable(tiny_model, name):
            pass
    with (
        pytest.raises(UsageError, match="omit residual_length, sink_length"),
        enable(tiny_model, "rtn-4", residual_length=32, sink_length=4),
    ):
        pass


def test_numbers_that_codes_cannot_hold_end_the_request_with_the_reason(tiny_model: Any) -> None:
    tiny_model.model.layers[1].self_attn.v_proj.weight.data *= 1e7
    with enable(tiny_model, "turboquant-3"):
        found = tiny_model.generate_batch(prompts_of(tiny_model, 9), GenerationConfig(max_new_tokens=4), batching())
    (output,) = found.values()
    assert "values of layer 1 reach" in output.error


def test_a_transformers_without_these_allocators_is_refused_by_name() -> None:
    code = (
        "from kvcli.errors import UsageError; from transformers.generation.continuous_batching import cache\n"
        "del cache.ATTN_TYPE_TO_ALLOCATOR\n"
        "try: import kvcli.integrations.continuous_batching\n"
        "except UsageError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "continuous batching on codes needs transformers 5.18 to 5.23" in done.stdout
