"""vLLM's pages as codes, beside sessions of the same codes."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_answers import NEW_TOKENS, check, check_each, pages_of, prompts_of, session_of
from engines import answers, engine, fitted, needs_vllm, saved, with_biases
from factories import load, make_model
from families import make

import kvcli
from kvcli.artifact.artifact import Artifact
from kvcli.artifact.recipe import Recipe
from kvcli.errors import ArtifactError, CacheError, KvcliError, UsageError
from kvcli.registry import get_method, parse_method

pytestmark = needs_vllm()

METHODS = ("turboquant-3", "rtn-4", "fp8", "klt", "klt-tcq", "commvq", "blockgtq", "oscar", "kvquant")


def forget(llm: Any) -> None:
    """Empties an engine's cache of prefixes."""
    assert llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.reset_prefix_cache()


@pytest.mark.parametrize("name", METHODS)
def test_answers_are_those_of_a_session_without_a_window(
    name: str, ask: Any, tiny_model: Any, tiny_artifact: Callable[[Any], Artifact], tmp_path: Path
) -> None:
    method, _ = parse_method(name)
    artifact = tiny_artifact(method) if method.needs_artifact else None
    ask(name, artifact)
    prompts = prompts_of(tiny_model, 20, 9, 3, 17, 70)
    with engine(saved(tiny_model, tmp_path)) as llm:
        found = answers(llm, prompts)
    with session_of(tiny_model, name, artifact) as session:
        check_each(tiny_model, session, prompts, found)


@pytest.mark.parametrize("name", METHODS)
def test_sinks_and_recent_tokens_are_exact(
    name: str, ask: Any, tiny_model: Any, tiny_artifact: Callable[[Any], Artifact], tmp_path: Path
) -> None:
    """As in a session with as many, in prompts of fewer tokens and of more, read at once and in chunks."""
    method, _ = parse_method(name)
    artifact = tiny_artifact(method) if method.needs_artifact else None
    ask(name, artifact, sink_length=3, residual_length=7)
    prompts = prompts_of(tiny_model, 20, 2, 9, 70)
    with engine(saved(tiny_model, tmp_path), max_num_batched_tokens=64, max_num_seqs=4) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in prompts]
        forget(llm)
        together = answers(llm, prompts)
    exact = {"sink_length": 3, "residual_length": 7, "flush_block": 1}
    with kvcli.attach(tiny_model, name, artifact=artifact, **exact) as session:
        check_each(tiny_model, session, prompts, alone, chunk=64)
        check_each(tiny_model, session, prompts[:3], together[:3])


def test_exact_tokens_of_requests_that_share_a_prefix(ask: Any, tiny_model: Any, tmp_path: Path) -> None:
    """Sinks are those of the shared page; recent tokens before the first one that a request reads are codes."""
    ask("rtn-2", sink_length=3, residual_length=7)
    first, rest = prompts_of(tiny_model, 40, 8)
    second, third = first[:32] + rest, first[:16] + rest
    with engine(saved(tiny_model, tmp_path)) as llm:
        (cold,) = answers(llm, [first])
        warm = [answers(llm, [prompt])[0] for prompt in (second, third, first)]
        forget(llm)
        together = answers(llm, [first, second, third])

    def after(tokens: int) -> Any:
        return pages_of(tiny_model, "rtn-2", sinks=3, residual=7, first=tokens, sequence_offset="none")

    for answer in (cold, together[0]):
        check(tiny_model, after(0), first, answer)
    for found in (warm, [*together[1:], warm[2]]):
        for prompt, answer, hit in zip((second, third, first), found, (32, 16, 32), strict=True):
            check(tiny_model, after(hit), prompt, answer, chunks=[0, hit])
            with pytest.raises(AssertionError):
                check(tiny_model, after(0), prompt, answer)


def test_more_requests_than_rings_that_end_one_after_another(ask: Any, tiny_model: Any, tmp_path: Path) -> None:
    """A ring is used again; each request has its own, while others come and go."""
    ask("kivi-2", sink_length=2, residual_length=32)
    prompts = prompts_of(tiny_model, *range(20, 60))
    with engine(saved(tiny_model, tmp_path), block_size=32, max_num_seqs=3, max_num_batched_tokens=64) as llm:
        found = answers(llm, prompts, 40)
    check_each(tiny_model, pages_of(tiny_model, "kivi-2", sinks=2, residual=32), prompts[:3], found[:3])
    assert [len(answer.tokens) for answer in found] == [40] * 40


def test_chunks_of_a_prompt_read_earlier_ones_from_codes(ask: Any, tiny_model: Any, tmp_path: Path) -> None:
    """Beside them, other requests decode: batches are mixed."""
    ask("rtn-2")
    prompts = prompts_of(tiny_model, 20, 90, 150)
    with engine(saved(tiny_model, tmp_path), max_num_batched_tokens=64, max_num_seqs=4) as llm:
        (alone,) = answers(llm, prompts[1:2])
        together = answers(llm, prompts)
    with session_of(tiny_model, "rtn-2") as session:
        check(tiny_model, session, prompts[1], alone, chunk=64)
        check(tiny_model, session, prompts[0], together[0])
        with pytest.raises(AssertionError):
            check(tiny_model, session, prompts[1], alone)
    assert [len(answer.tokens) for answer in together] == [NEW_TOKENS] * 3


def test_a_prefix_that_requests_share_is_read_from_codes(ask: Any, tiny_model: Any, tmp_path: Path) -> None:
    ask("turboquant-2")
    first, rest = prompts_of(tiny_model, 40, 8)
    second = first[:32] + rest
    with engine(saved(tiny_model, tmp_path)) as llm:
        answers(llm, [first])
        (warm,) = answers(llm, [second])
        forget(llm)
        (cold,) = answers(llm, [second])
        forget(llm)
        _, same_pass = answers(llm, [first, second])
    with session_of(tiny_model, "turboquant-2") as session:
        check(tiny_model, session, second, warm, chunk=32)
        check(tiny_model, session, second, same_pass, chunk=32)
        check(tiny_model, session, second, cold)
        with pytest.raises(AssertionError):
            check(tiny_model, session, second, warm)


def test_a_preempted_request_is_read_again(ask: Any, tiny_model: Any, tmp_path: Path) -> None:
    """What it had generated is then part of its prompt."""
    ask("rtn-4")
    prompts, preempted = prompts_of(tiny_model, 30, 31, 29, 28), {}
    small = {"max_model_len": 64, "num_gpu_blocks_override": 9, "enable_prefix_caching": False}
    with engine(saved(tiny_model, tmp_path), **small) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def note(request: Any, *rest: Any, **options: Any) -> Any:
            preempted[tuple(request.prompt_token_ids)] = request.num_output_tokens
            return preempt(request, *rest, **options)

        scheduler._preempt_request = note
        found = answers(llm, prompts)
    assert preempted
    with session_of(tiny_model, "rtn-4") as session:
        for prompt, answer in zip(prompts, found, strict=True):
            before = preempted.get(tuple(prompt), 0)
            if before:
                check(tiny_model, session, prompt, answer.part(0, before))
            check(tiny_model, session, prompt + answer.tokens[:before], answer.part(before, NEW_TOKENS))


def test_capacity_is_that_of_the_codes(ask: Any, tiny_model: Any, tmp_path: Path) -> None:
    """Also where layers differ in their bytes."""
    one, two = ((8,),) * 2, ((4, 4, 4, 4),) * 2
    artifact = fitted(tiny_model, "klt", tmp_path, key_fields=(one, two, one), value_fields=(one, one, two))
    folder, size, prompts = saved(tiny_model, tmp_path), 2**20, prompts_of(tiny_model, 40, 9)
    for name, made in (("turboquant-3", None), ("klt", artifact)):
        ask(name, made)
        with engine(folder, kv_cache_memory_bytes=size) as llm:
            config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
            found = answers(llm, prompts)
        with session_of(tiny_model, name, made) as session:
            bits = [x.key.bits_per_token() + x.value.bits_per_token() for x in session.codecs]
            check_each(tiny_model, session, prompts, found)
        assert len(set(bits)) == (1 if made is None else 2)
        assert config.num_blocks == int(size // (16 * sum(bits) / 8))


@pytest.mark.parametrize("name", ["turboquant", "kivi"])
def test_a_recipe_is_followed_with_bits_by_layer(name: str, tiny_model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """And with its sinks and recent tokens; with TurboQuant, layers are exact."""
    bits = {"turboquant": {"k_bits": [4, 16, 2], "v_bits": 16}, "kivi": {"k_bits": [4, 2, 2], "v_bits": [2, 2, 16]}}
    settings: dict[str, Any] = {**bits[name], "sink_length": 3, "residual_length": 32}
    recipe = Recipe(model="tiny", fingerprint=load(tiny_model).fingerprint, method=name, settings=settings)
    recipe.save(tmp_path / "r.yaml")
    monkeypatch.setenv("KVCLI_RECIPE", str(tmp_path / "r.yaml"))
    prompts = prompts_of(tiny_model, 20, 2, 9, 70)
    with engine(saved(tiny_model, tmp_path), block_size=32) as llm:
        found = [answers(llm, [prompt], 40)[0] for prompt in prompts]
        together = answers(llm, prompts, 40)
    reader = pages_of(tiny_model, recipe=tmp_path / "r.yaml", sinks=3, residual=32)
    check_each(tiny_model, reader, prompts, found)
    check_each(tiny_model, reader, prompts[:3], together[:3])


def test_layers_of_vllm_0_26_ask_no_backend(ask: Any, tiny_model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The layers of the vLLM that is installed answer here as those of 0.26 do."""
    import vllm
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    def spec_of(layer: Any, config: Any) -> Any:
        heads, dtype = layer.num_kv_heads, layer.kv_cache_torch_dtype
        return FullAttentionSpec(
            block_size=config.cache_config.block_size, num_kv_heads=heads, head_size=layer.head_size, dtype=dtype
        )

    monkeypatch.setattr(Attention, "get_kv_cache_spec", spec_of)
    monkeypatch.setattr(vllm, "__version__", "0.26.0")
    ask("turboquant-3")
    prompts = prompts_of(tiny_model, 40, 9)
    with engine(saved(tiny_model, tmp_path), kv_cache_memory_bytes=2**20) as llm:
        config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        layers = list(llm.llm_engine.vllm_config.compilation_config.static_forward_context.values())
        specs = [layer.get_kv_cache_spec(llm.llm_engine.vllm_config) for layer in layers]
        found = answers(llm, prompts)
    for layer, spec in zip(layers, specs, strict=True):
        assert (spec.num_kv_heads, spec.head_size_v) == (1, 0)
        assert layer.attn_backend.get_kv_cache_shape(5, 16, 1, spec.head_size) == (5, 1, 16, spec.head_size)
    assert layers
    with session_of(tiny_model, "turboquant-3") as session:
        bits = sum(x.key.bits_per_token() + x.value.bits_per_token() for x in session.codecs)
        check_each(tiny_model, session, prompts, found)
    assert config.num_blocks == int(2**20 // (16 * bits / 8))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}),
        ("llama", {"hidden_size": 96, "head_dim": 128, "num_attention_heads": 6, "num_key_value_heads": 3}),
        ("qwen3", {"num_key_value_heads": 1, "head_dim": 32}),
    ],
)
@pytest.mark.parametrize(
    ("method", "dtype", "atol"), [("turboquant-3", "float32", 1e-4), ("rtn-8", "bfloat16", 0.15)], ids=["32", "16"]
)
def test_families_and_shapes(
    family: str, changes: dict[str, Any], method: str, dtype: str, atol: float, ask: Any, tmp_path: Path
) -> None:
    """Biases of keys are not encoded. In 16 bits keys are rounded in different places, which fine codes hardly see."""
    model, settings = with_biases(make_model(family, **changes)), {}
    if family == "qwen3":
        settings["sequence_offset"] = "none"
    model = model.to(getattr(torch, dtype))
    folder, prompts = saved(model, tmp_path), prompts_of(model, 20, 9, 70)
    ask(method, **settings)
    with engine(folder, dtype=dtype) as llm:
        found = answers(llm, prompts)
    with session_of(model, method, **settings) as session:
        check_each(model, session, prompts, found, atol=atol)


@pytest.mark.parametrize(("name", "settings"), [("commvq", {}), ("turboquant-3", {"key_variant": "prod"})])
def test_codecs_of_a_model_in_16_bits_are_those_of_a_session(
    name: str, settings: dict[str, Any], ask: Any, tiny_model: Any, tiny_artifact: Any, tmp_path: Path
) -> None:
    """vLLM loads weights with their dtype as the default."""
    from kvcli.integrations.vllm.engine import engine_state

    artifact = tiny_artifact(get_method(name)) if name == "commvq" else None
    ask(name, artifact, **settings)
    with engine(saved(tiny_model.bfloat16(), tmp_path), dtype="bfloat16") as llm:
        assert len(answers(llm, prompts_of(tiny_model, 20))[0].tokens) == NEW_TOKENS
        encoders = engine_state(llm.llm_engine.vllm_config).encoders
    with session_of(tiny_model, name, artifact, **settings) as session:
        for ours, codec in zip(encoders.values(), session.codecs, strict=True):
            torch.testing.assert_close(ours.codec.state_dict(), codec.state_dict(), rtol=0, atol=0)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
@pytest.mark.parametrize("name", ["commvq", "klt"])
def test_keys_of_scaled_rope_are_rotated_back(name: str, rope: dict[str, Any], ask: Any, tmp_path: Path) -> None:
    parameters = {**rope, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    model = make_model("qwen2", rope_parameters=parameters)
    artifact = fitted(model, name, tmp_path / "fit")
    ask(name, artifact)
    prompts = prompts_of(model, 20, 150)
    with engine(saved(model, tmp_path)) as llm:
        found = answers(llm, prompts)
    with session_of(model, name, artifact) as session:
        check_each(model, session, prompts, found)


def test_an_artifact_of_another_model_is_refused_at_start(
    ask: Any, tiny_model: Any, tiny_artifact: Any, tmp_path: Path
) -> None:
    ask("commvq", tiny_artifact(get_method("commvq")))
    other = saved(make_model("llama", num_hidden_layers=2), tmp_path)
    with pytest.raises(ArtifactError, match="whose shapes differ: num_layers 3 instead of 2"), engine(other):
        pass
    for name, x in tiny_model.named_parameters():
        if name.endswith("k_proj.weight"):
            x.data = x.data.flip(0)
    with pytest.raises(ArtifactError, match="whose weights differ"), engine(saved(tiny_model, tmp_path)):
        pass


def test_what_cannot_be_is_refused_by_name(ask: Any, tiny_model: Any, tmp_path: Path) -> None:
    folder = saved(tiny_model, tmp_path)
    ask("rtn-4")
    with pytest.raises(UsageError, match="kv_cache_dtype not supported"), engine(folder, kv_cache_dtype="fp8"):
        pass
    windows = make_model("mistral", sliding_window=32)
    for model, what in ((windows, "no layer attends to the whole context"), (make("deepseek_v2"), "MLA not supported")):
        with pytest.raises(KvcliError, match=what), engine(saved(model, tmp_path / what[:3])):
            pass


def test_keys_are_encoded_when_their_group_is_whole(ask: Any, tiny_model: Any, tmp_path: Path) -> None:
    """Requests end in every part of a group and of a page, in chunks that do not end with groups, and share pages."""
    ask("kivi-2", residual_length=32)
    prompts = prompts_of(tiny_model, 20, 31, 32, 33, 60, 64, 90, 150)
    shared = prompts[-1][:130] + prompts[0]
    options = {"block_size": 64, "max_num_batched_tokens": 72, "max_num_seqs": 4, "kv_cache_memory_bytes": 2**20}
    with engine(saved(tiny_model, tmp_path), **options) as llm:
        config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        alone = [answers(llm, [prompt], 40)[0] for prompt in prompts]
        (hit,) = answers(llm, [shared], 40)
        together = answers(llm, prompts, 40)
        forget(llm)
        _, same_pass = answers(llm, [prompts[5], prompts[5] + prompts[0]], 40)
    with kvcli.attach(tiny_model, "kivi-2") as session:
        bits = session.codecs[0].key.bits_per_token() + session.codecs[0].value.bits_per_token()

    def after(tokens: int) -> Any:
        return pages_of(tiny_model, "kivi-2", residual=32, first=tokens)

    check_each(tiny_model, after(0), prompts, alone, chunk=72)
    check(tiny_model, after(128), shared, hit, chunks=[0, 72, 128])
    check(tiny_model, after(64), prompts[5] + prompts[0], same_pass, chunks=[0, 64, 72])
    check(tiny_model, after(0), prompts[0], together[0])
    assert [len(answer.tokens) for answer in together] == [40] * len(prompts)
    assert config.num_blocks == int(2**20 // (3 * 64 * bits / 8))


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("kivi-2", 16, "pages of 16 tokens are no multiple of 32 tokens"),
        ("rtn-4", 48, "pages of 48 tokens are not supported"),
        ("rtn-4", 8, "pages of 8 tokens are not supported"),
    ],
)
def test_pages_that_cannot_be_are_refused_at_start(
    name: str, size: int, reason: str, ask: Any, tiny_model: Any, tmp_path: Path
) -> None:
    ask(name, residual_length=32)
    with pytest.raises(UsageError, match=reason), engine(saved(tiny_model, tmp_path), block_size=size):
        pass


@pytest.mark.parametrize(
    ("name", "counts", "slots", "written"),
    [
        ("rtn-4", [2, 1], [98, 99, -1, 7], [[3, 2], [3, 3]]),
        ("rtn-4", [1, 1], [99, -1, 7, 7], [[3, 3]]),  # decoding: of what is not stored zeros, in vLLM's own page
        ("kivi-2", [2, 1], [-1] * 4, []),
    ],
)
def test_tokens_without_a_slot_are_not_stored(
    name: str, counts: list[int], slots: list[int], written: list[list[int]], ask: Any, tiny_model: Any, tmp_path: Path
) -> None:
    """Passes that vLLM runs for its own sake have slots of -1."""
    from kvcli.integrations.vllm.backend import BatchBuilder

    ask(name, sink_length=1, residual_length=32)
    with engine(saved(tiny_model, tmp_path), block_size=32) as llm:
        config = llm.llm_engine.vllm_config
        layer_name, layer = next(iter(config.compilation_config.static_forward_context.items()))
        builder = BatchBuilder(SimpleNamespace(block_size=32), [layer_name], config, torch.device("cpu"))
        common = SimpleNamespace(
            causal=True,
            num_reqs=2,
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=4,
            query_start_loc_cpu=torch.tensor([0, counts[0], sum(counts)]),
            seq_lens=torch.tensor([4, 4]),
            seq_lens_cpu_upper_bound=None,
            block_table_tensor=torch.tensor([[3], [5]], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
        )
        other = BatchBuilder(SimpleNamespace(block_size=32), [layer_name], config, torch.device("cpu"))
        first, same, batch = (x.build(0, common) for x in (builder, other, builder))  # type: ignore[arg-type]
        assert first is same  # both are asked in a pass
        assert batch is not first  # of the next one, though vLLM gives the same object
        query, new = torch.randn(4, 4, 16), torch.randn(4, 2, 16)
        layer.kv_cache.zero_()
        layer.impl.forward(layer, query, new, new, layer.kv_cache, batch, torch.empty(4, 4, 16))
        *codes, sinks = layer.impl.page(32).views(layer.kv_cache.flatten(1))
        for side in codes:
            scale = side.tensors()["scale"]  # of a token or a group, never 0
            assert scale.any(3).any(1).nonzero().tolist() == written
        assert sinks.shape[1] == 1
        assert not sinks.any()
        assert layer.impl._attend.rings.flatten(2).any(2).sum() == sum(page > 0 for page, _ in written)


@pytest.mark.parametrize(
    ("part", "value", "what"),
    [
        ("speculative_config", 1, "speculative decoding"),
        ("kv_transfer_config", SimpleNamespace(kv_connector="NixlConnector"), "transfer of pages by NixlConnector"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config.decode_context_parallel_size", 2, "decode context parallelism"),
    ],
)
def test_features_that_were_not_tried_are_refused_by_name(part: str, value: Any, what: str) -> None:
    from kvcli.integrations.vllm.engine import check_engine

    parallel = SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1)
    config = SimpleNamespace(speculative_config=None, kv_transfer_config=None, parallel_config=parallel)
    config.cache_config = SimpleNamespace(cache_dtype="auto")
    check_engine(config)  # type: ignore[arg-type]
    *owner, name = part.split(".")
    setattr(parallel if owner else config, name, value)
    with pytest.raises(UsageError, match=what):
        check_engine(config)  # type: ignore[arg-type]


def test_numbers_that_codes_cannot_hold_end_the_engine_with_the_reason(
    ask: Any, tiny_model: Any, tmp_path: Path
) -> None:
    tiny_model.model.layers[1].self_attn.v_proj.weight.data *= 1e7
    ask("turboquant-3")
    with engine(saved(tiny_model, tmp_path)) as llm, pytest.raises(CacheError, match="values of layer 1 reach"):
        answers(llm, prompts_of(tiny_model, 9))


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="vLLM binds each process to a core of its own")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("turboquant-3", {}),
        ("commvq", {"value_groups": 2, "key_offset": "bias"}),
        ("klt", {"head_groups": 2, "bits": 1.5}),
    ],
)
def test_heads_divided_among_processes(
    name: str, settings: dict[str, Any], ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor parallelism in two processes, which vLLM starts; in each it calls the plugin of the entry point."""
    model = with_biases(make_model("qwen2", hidden_size=128, num_attention_heads=8, num_key_value_heads=4))
    artifact = fitted(model, name, tmp_path / "fit", **settings) if settings else None
    ask(name, artifact)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    prompts = prompts_of(model, 40, 9)
    with engine(saved(model, tmp_path), tensor_parallel_size=2) as llm:
        found = answers(llm, prompts)
    with session_of(model, name, artifact) as session:
        check_each(model, session, prompts, found)


@pytest.mark.parametrize("name", ["klt", "kivi-2"])
def test_kernels_read_the_pages_of_a_batch(
    name: str, ask: Any, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the interpreter; requests of one token each are one call."""
    from kvcli.attention.backend import choose_backend
    from kvcli.integrations.vllm import engine as state

    model = make_model("llama", head_dim=64, num_hidden_layers=2)
    ask(name, fitted(model, name, tmp_path) if name == "klt" else None, sink_length=4, residual_length=32)
    prompts, folder, batches = prompts_of(model, 20, 33, 70), saved(model, tmp_path), []
    with engine(folder, block_size=64) as llm:
        expected = answers(llm, prompts, 4)

    def fused(method: Any, codecs: Any, impl: str, device: torch.device) -> Any:
        chosen = choose_backend(method, codecs, "fused", device)
        assert chosen.note is None  # kernels of the method's own

        def attend(codec: Any, query: torch.Tensor, encoded: Any, scaling: float) -> Any:
            batches.append((tuple(query.shape[::2]), encoded.page_size))
            return chosen.attend_codes(codec, query, encoded, scaling)

        return dataclasses.replace(chosen, attend_codes=attend)

    monkeypatch.setattr(state, "choose_backend", fused)
    with engine(folder, block_size=64) as llm:
        found = answers(llm, prompts, 4)
    assert ((3, 1), 64) in batches
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-3)
