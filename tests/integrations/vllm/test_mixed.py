"""Codes in the pages of layers of full attention, beside layers whose cache vLLM keeps."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_answers import check, check_each, pages_of, prompts_of, session_of
from engines import answers, engine, fitted, needs_vllm, saved
from families import make

import kvcli
from kvcli.errors import CacheError, KvcliError, UnsupportedModelError, UsageError

pytestmark = needs_vllm()

SIZES = {"head_dim": 64, "max_position_embeddings": 4096}
"""Of models; vLLM's own attention on a CPU has heads of 32 channels and more."""
WINDOWS = ("gemma2", "gemma3_text", "gpt_oss")
GRANITE = {"hidden_size": 256, "mamba_d_head": 64, "num_attention_heads": 4}
"""A model with Mamba layers that vLLM has on a CPU, for prompts of one page."""


def groups_of(llm: Any) -> dict[str, tuple[int, int]]:
    """Tokens and bytes of the pages of each kind of layers."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    return {type(x).__name__: (x.block_size, x.page_size_bytes) for x in specs}


@pytest.mark.parametrize("family", WINDOWS)
@pytest.mark.parametrize("name", ["turboquant-3", "klt"])
def test_windows_are_those_of_vllm(family: str, name: str, ask: Any, tmp_path: Path) -> None:
    """Soft caps, sinks as logits and biases among them; prompts are read in chunks, and are longer than windows."""
    model, settings = make(family, **SIZES), {} if name == "klt" else {"sequence_offset": "none"}
    # values of two heads have more channels than hidden states: of those that are 0, codes are up or down by rounding
    artifact = fitted(model, name, tmp_path, joint_heads=1) if name == "klt" else None
    ask(name, artifact, **settings)
    prompts = prompts_of(model, 20, 9, 70, 150)
    with engine(saved(model, tmp_path), max_num_batched_tokens=64, max_num_seqs=4) as llm:
        found, pages = [answers(llm, [prompt])[0] for prompt in prompts], groups_of(llm)
    with session_of(model, name, artifact, **settings) as session:
        bits = max(x.key.bits_per_token() + x.value.bits_per_token() for x in session.codecs)
        check_each(model, session, prompts, found, chunk=64)
        if name == "turboquant-3":  # what klt loses here is too little to see
            with pytest.raises(AssertionError):
                check(model, session, prompts[3], found[3])
    windows, codes = pages["SlidingWindowSpec"], pages["FullAttentionSpec"]
    assert windows[1] == codes[1]  # as vLLM wants it
    assert codes[0] / windows[0] in (4, 8, 16, 32)
    plain = windows[0] * 2 * 2 * 64 * 4
    assert codes[1] == max(plain, -(-int(codes[0] * bits / 8) // codes[0]) * codes[0])
    assert codes[1] < 1.42 * min(plain, codes[0] * bits / 8)


def test_sinks_recent_tokens_and_groups_beside_windows(ask: Any, tmp_path: Path) -> None:
    model = make("gemma3_text", **SIZES)
    ask("kivi-2", sink_length=2, residual_length=32)
    prompts = prompts_of(model, 20, 33, 90, 150)
    with engine(saved(model, tmp_path), block_size=32, max_num_batched_tokens=64, max_num_seqs=4) as llm:
        alone = [answers(llm, [prompt], 40)[0] for prompt in prompts]
        together = answers(llm, prompts, 40)
    paged = pages_of(model, "kivi-2", sinks=2, residual=32)
    check_each(model, paged, prompts, alone, chunk=64)
    check(model, paged, prompts[0], together[0])
    assert [len(answer.tokens) for answer in together] == [40] * len(prompts)


def test_a_prefix_is_found_in_pages_of_both_kinds(ask: Any, tmp_path: Path) -> None:
    model = make("gemma3_text", **SIZES)
    ask("rtn-2", sequence_offset="none")
    first, rest = prompts_of(model, 1100, 8)
    with engine(saved(model, tmp_path), max_model_len=2048, max_num_batched_tokens=2048) as llm:
        pages = groups_of(llm)["FullAttentionSpec"][0]
        answers(llm, [first])
        (warm,) = answers(llm, [first + rest])
    hit = len(first) // pages * pages
    assert hit
    with session_of(model, "rtn-2", sequence_offset="none") as session:
        check(model, session, first + rest, warm, chunks=[0, hit])
        with pytest.raises(AssertionError):
            check(model, session, first + rest, warm, chunk=2048)


@pytest.mark.parametrize("name", ["rtn-4", "klt", "kivi-2"])
def test_states_are_those_of_vllm(name: str, ask: Any, tmp_path: Path) -> None:
    """Whose pages have as many tokens as those of codes."""
    model = make("granitemoehybrid", **GRANITE)
    artifact = fitted(model, name, tmp_path) if name == "klt" else None
    settings = {"rtn-4": {"sequence_offset": "none"}, "kivi-2": {"residual_length": 32}}.get(name, {})
    ask(name, artifact, **settings)
    prompts = prompts_of(model, 20, 70, 100)
    with engine(saved(model, tmp_path), max_model_len=128) as llm:
        found, pages = answers(llm, prompts), groups_of(llm)
    in_pages = nullcontext(pages_of(model, name, residual=32)) if name == "kivi-2" else None
    with in_pages or session_of(model, name, artifact, **settings) as reader:
        for prompt, answer in zip(prompts, found, strict=True):  # a processor may round a number to another code
            check(model, reader, prompt, answer, atol=5e-3)
            with pytest.raises(AssertionError):
                check(model, reader, prompt[:5] + prompt[6:], answer, atol=5e-3)
    assert pages["MambaSpec"] == pages["FullAttentionSpec"]


def test_layers_of_states_that_have_large_pages(ask: Any, tmp_path: Path) -> None:
    """Of Qwen3-Next, in bfloat16, which vLLM's kernels on a CPU need."""
    model = make("qwen3_next", linear_key_head_dim=128, linear_value_head_dim=128, **SIZES).bfloat16()
    ask("rtn-2", sequence_offset="none")
    prompts = prompts_of(model, 20, 70)
    with engine(saved(model, tmp_path), dtype="bfloat16", kv_cache_memory_bytes=2**24) as llm:
        found, pages = answers(llm, prompts), groups_of(llm)
    assert pages["MambaSpec"] == pages["FullAttentionSpec"]
    assert pages["MambaSpec"][0] > 512
    for prompt, answer in zip(prompts, found, strict=True):
        with session_of(model, "rtn-2", sequence_offset="none") as session:
            check(model, session, prompt, answer, atol=0.03)
        with session_of(model, "rtn-8", sequence_offset="none") as other, pytest.raises(AssertionError):
            check(model, other, prompt, answer, atol=0.03)


def test_layers_of_unequal_bits_have_pages_of_one_kind(ask: Any, tmp_path: Path) -> None:
    model, bits = make("gemma3_text", **SIZES), [2, 8]
    ask("rtn", sequence_offset="none", k_bits=bits, v_bits=4, sink_length=100)
    prompts = prompts_of(model, 20, 150)
    with engine(saved(model, tmp_path), block_size=64) as llm:
        config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        found = answers(llm, prompts)
    assert len(config.kv_cache_groups) == 2
    exact = {"sink_length": 100, "residual_length": 0, "flush_block": 1}
    with kvcli.attach(model, "rtn", sequence_offset="none", k_bits=bits, v_bits=4, **exact) as session:
        check_each(model, session, prompts, found)


def test_states_beside_many_sinks(ask: Any, tmp_path: Path) -> None:
    model = make("granitemoehybrid", **GRANITE)
    ask("rtn-4", sequence_offset="none", sink_length=150)
    with engine(saved(model, tmp_path), max_model_len=256, block_size=16) as llm:
        (found,), pages = answers(llm, prompts_of(model, 200)), groups_of(llm)
    assert pages["MambaSpec"] == pages["FullAttentionSpec"]
    assert pages["MambaSpec"][0] == 256
    exact = {"sink_length": 150, "residual_length": 0, "flush_block": 1}
    with kvcli.attach(model, "rtn-4", sequence_offset="none", **exact) as session:
        check(model, session, prompts_of(model, 200)[0], found)


def test_pages_are_as_large_as_those_beside_them() -> None:
    """By powers of two, with the least padding; those of states are padded alone."""
    from kvcli.integrations.vllm.beside import LayersBeside, tokens_beside

    def tokens(least: int, nbytes: int, has_states: bool = False) -> int:
        return tokens_beside(least, lambda size: 10, LayersBeside(nbytes, has_states))

    assert tokens(16, 0) == 16
    assert tokens(512, 640) == 512
    assert tokens(16, 640) == 64
    assert (tokens(16, 900), tokens(16, 910)) == (64, 128)  # of 640 and 1280 bytes
    assert (tokens(16, 641, True), tokens(16, 640, True)) == (128, 64)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama4_text", {}, "layers of chunked_attention"),
        ("gemma3n_text", {"num_kv_shared_layers": 2}, "layers (that share|attend to what another one caches)"),
        ("mistral", {"sliding_window": 8}, "no layer attends to the whole context"),
    ],
)
def test_layers_that_were_not_tried_are_refused_by_name(
    family: str, changes: dict[str, Any], named: str, ask: Any, tmp_path: Path
) -> None:
    """Also after an engine for which vLLM has chosen backends."""
    ask("turboquant-3", sequence_offset="none")
    with engine(saved(make("gemma3_text", **SIZES), tmp_path / "first")):
        pass
    with pytest.raises(UnsupportedModelError, match=named), engine(saved(make(family, **SIZES, **changes), tmp_path)):
        pass


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"disable_sliding_window": True}, "layers.0.* attends to the whole context here"),
        ({"block_size": 1}, "1 tokens"),
    ],
)
def test_engines_that_cannot_be_are_refused_at_start(
    options: dict[str, Any], named: str, ask: Any, tiny_model: Any, tmp_path: Path
) -> None:
    ask("turboquant-3", sequence_offset="none")
    model = tiny_model if "block_size" in options else make("gemma3_text", **SIZES)
    with pytest.raises(KvcliError, match=named), engine(saved(model, tmp_path), **{"max_model_len": 8, **options}):
        pass


def test_an_engine_after_one_without_codes_has_them(ask: Any, tmp_path: Path) -> None:
    """vLLM keeps what it has chosen for a process."""
    folder, dtypes = saved(make("gemma3_text", **SIZES), tmp_path), []
    for method in (None, "rtn-4"):
        if method is not None:
            ask(method, sequence_offset="none")
        with engine(folder) as llm:
            config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
            dtypes.append({type(x.kv_cache_spec).__name__: x.kv_cache_spec.dtype for x in config.kv_cache_groups})
    assert [x["FullAttentionSpec"] for x in dtypes] == [torch.float32, torch.uint8]
    assert [x["SlidingWindowSpec"] for x in dtypes] == [torch.float32] * 2


def test_numbers_of_the_last_layer_that_codes_cannot_hold_end_the_engine(ask: Any, tmp_path: Path) -> None:
    model = make("gemma3_text", **SIZES)
    model.model.layers[3].self_attn.v_proj.weight.data *= 1e7
    ask("turboquant-3", sequence_offset="none")
    with engine(saved(model, tmp_path)) as llm, pytest.raises(CacheError, match="values of layer 3 reach"):
        answers(llm, prompts_of(model, 9), 1)


def test_vllm_0_26_has_codes_in_models_of_one_kind_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvcli.integrations.vllm.v0_26 import CodesBackend

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    beside = SimpleNamespace(nbytes=64, has_states=True)
    for layer in (None, SimpleNamespace(beside=beside, token_bytes=lambda size: 8)):
        monkeypatch.setattr(CodesBackend, "layer", layer)
        with pytest.raises(UnsupportedModelError, match=r"several kinds .* vLLM 0\.26"):
            CodesBackend.customize_spec(spec)
    beside.nbytes = 0
    assert CodesBackend.customize_spec(spec).head_size == 8


def test_codes_that_nobody_computes_are_refused(ask: Any) -> None:
    """On a GPU, where vLLM has to be told which layers have them."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvcli.integrations.vllm.platform import choose_codes

    checked: list[Any] = []
    platform: Any = type("Platform", (), {"check_and_update_config": staticmethod(checked.append)})
    for _ in range(2):
        choose_codes(platform, is_cpu=False)
    model = SimpleNamespace(hf_text_config=make("gemma3_text").config)

    def config(**attention: Any) -> Any:
        return SimpleNamespace(model_config=model, attention_config=SimpleNamespace(**attention))

    codes, other = AttentionBackendEnum.CUSTOM, AttentionBackendEnum.FLASH_ATTN
    right = [config(backend=codes, backend_per_kind={}), config(backend=None, backend_per_kind={"full": codes})]
    ask("kivi-2", residual_length=32)
    for each in (*right, SimpleNamespace(model_config=None)):
        platform.check_and_update_config(each)
    assert checked[:2] == right
    with pytest.raises(UsageError, match="say --attention-backend CUSTOM"):
        platform.check_and_update_config(config(backend=other, backend_per_kind={}))
    assert len(checked) == 3


def test_a_window_with_codes_says_which_backend_it_needs() -> None:
    """On a GPU, where `CUSTOM` is for all layers or for those of full attention."""
    from kvcli.integrations.vllm.backend import CodesAttention, CodesBackend

    assert CodesBackend.supports_sliding_window()
    with pytest.raises(UnsupportedModelError, match=r"backend_per_kind.*full_attention.*CUSTOM"):
        CodesAttention(4, 64, 1.0, sliding_window=8)
    with pytest.raises(UnsupportedModelError, match="several"):
        CodesAttention(4, 64, 1.0, several=True)
