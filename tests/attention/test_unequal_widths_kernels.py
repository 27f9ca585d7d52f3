"""Kernels for latents, whose queries go on with the channels of values, and for values wider or narrower than keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import make
from parts import DEVICE, Rotary, assert_same
from test_attention_kernels import window_of
from test_long_queries import DTYPES, library, some_state
from torch import Tensor

from kvcli.attention import chunk_kernels, decoded, decoder, reference, window_kernels
from kvcli.attention import steps as step_passes
from kvcli.attention.backend import choose_backend
from kvcli.attention.session import Session
from kvcli.bench.layer import randomize_
from kvcli.cache.window import WindowLayout, WindowTokens
from kvcli.errors import UsageError
from kvcli.kernels import launch
from kvcli.methods.per_layer import build_codecs
from kvcli.registry import METHODS, make_config, parse_method
from kvcli.rope import Rope, Rotation
from kvcli.seam.probe import probe
from kvcli.seam.versions import with_cache

WIDTHS = [(16, 32, True), (24, 40, True), (16, 32, False), (40, 24, False), (64, 64, False)]
"""Channels of keys and of values, and whether these are latents."""

TRUE_SIZE = (64, 512, True)
"""DeepSeek's."""


def tensors(
    widths: tuple[int, int, bool], dtype: torch.dtype, batch: int, heads: int, kv_heads: int, queries: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value; heads of queries after time, keys and values slices of longer tensors."""
    head_dim, value_dim, latent = widths
    query = torch.randn(batch, queries, heads, head_dim + value_dim * latent, device=DEVICE)
    key, value = (torch.randn(batch, kv_heads, tokens + 5, x, device=DEVICE)[:, :, 2:-3] for x in widths[:2])
    return query.to(dtype).transpose(1, 2), key.to(dtype), value.to(dtype)


def state_over(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return some_state(query.new_empty(*query.shape[:3], value.shape[3]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("widths", "heads", "kv_heads", "queries"),
    [
        *((widths, 4, 1, queries) for widths in WIDTHS for queries in (1, 9)),
        *((widths, 6, 2, 3) for widths in WIDTHS),
        (WIDTHS[0], 2, 1, 70),
        (TRUE_SIZE, 16, 1, 1),
        *([(TRUE_SIZE, 128, 1, 1), (TRUE_SIZE, 16, 1, 70)] if DEVICE == "cuda" else []),
    ],
)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_tokens_are_split_and_merged(
    widths: tuple[int, int, bool], heads: int, kv_heads: int, queries: int, soft_cap: float | None, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows that end before, at and after the border of a split, and hold nothing; with a state and without.

    Keys have room for more than any row holds, as where a CUDA graph attends to them.
    """
    torch.manual_seed(0)
    monkeypatch.setattr(chunk_kernels, "_SPLIT_TOKENS", 64)
    launched: list[int] = []

    def merge(*parts: Tensor) -> None:
        launched.append(parts[0].shape[1])
        merge_splits(*parts)

    merge_splits = chunk_kernels.merge_splits
    monkeypatch.setattr(chunk_kernels, "merge_splits", merge)
    room, held = 290, [150, 129, 128, 1, 0]
    lengths = torch.tensor(held, dtype=torch.int32, device=DEVICE)
    query, key, value = tensors(widths, dtype, len(held), heads, kv_heads, queries, room)
    visible = torch.arange(room, device=DEVICE) < lengths[:, None]
    part = reference.partial_attention(query, key, value, visible[:, None], 0.1, soft_cap)
    state = state_over(query, value)
    expected = reference.merge_state(state, part)
    for x in (key, value):
        x.masked_fill_(~visible[:, None, :, None], float("nan"))
    of_lengths = {"lengths": lengths, "soft_cap": soft_cap}
    assert chunk_kernels.extend(state, query, key, value, 0.1, **of_lengths) is state
    assert_same(state, expected, dtype)
    assert_same(chunk_kernels.extend(None, query, key, value, 0.1, **of_lengths), part, dtype)
    same = chunk_kernels.extend(None, query[:1], key[:1, :, :150], value[:1, :, :150], 0.1, soft_cap=soft_cap)
    assert_same(same, (part[0][:1], part[1][:1]), dtype)
    assert queries > 9 or (len(launched), min(launched)) == (3, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [WIDTHS[1], WIDTHS[3]])
def test_new_tokens_see_each_other_up_to_themselves(widths: tuple[int, int, bool], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = tensors(widths, dtype, 2, 4, 2, 66, 66)
    codes = state_over(query, value)
    expected = reference.merge_state(codes, library(query.float(), key.float(), value.float(), 0.1, causal=True))
    assert_same(decoded.attend_prefill(query, key, value, 0.1, codes), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [*WIDTHS[:4], TRUE_SIZE])
@pytest.mark.parametrize("way", ["alone", "codes", "decoded"])
def test_windows(way: str, widths: tuple[int, int, bool], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    queries, lengths, attended = 3, [140, 40], [100, 0]
    window = window_of(lengths, attended, 4, 66, [list(range(length - queries, length)) for length in lengths])
    query, key, value = tensors(widths, dtype, 2, 6, 2, queries, window.layout.capacity)
    part = given = None
    if way != "alone":
        older = tensors(widths, torch.float16 if dtype == torch.bfloat16 else dtype, 2, 6, 2, 1, 100)[1:]
        visible = torch.arange(100, device=DEVICE) < window.attended[:, None]
        part = reference.partial_attention(query, *older, visible[:, None], 0.1)
        given = {"codes": part} if way == "codes" else {"codes": None, "decoded": older}
    actual = window_kernels.attend_window(query, key, value, window, 0.1, **(given or {"codes": None}))
    expected = reference.attend_window(query, key, value, window, 0.1, part)
    assert actual.shape == (2, queries, 6, widths[1])
    assert (actual - expected).norm() < (1e-5 if dtype == torch.float32 else 5e-3) * expected.norm()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("query_dim", "head_dim", "value_dim"), [(40, 16, 32), (24, 24, 40), (40, 40, 24)])
def test_queries_keys_and_values_have_widths_of_their_own(
    query_dim: int, head_dim: int, value_dim: int, padded: bool
) -> None:
    torch.manual_seed(0)
    positions = torch.randint(0, 500, (2, 33), device=DEVICE)
    rotation: Rotation = Rope(Rotary(16)).rotation(positions, torch.float32)
    query, key, value = (
        torch.randn(2, 33, heads, width, device=DEVICE).transpose(1, 2)
        for heads, width in ((6, query_dim), (2, head_dim), (2, value_dim))
    )
    window = WindowTokens(WindowLayout(4, 67), 38, 0, 5)
    if padded:
        window = window_of([1, 1], [0, 0], 4, 67, [[-1, *range(32)], list(range(150, 183))])
    actual, expected = ([torch.zeros(2, 2, 71, x.shape[3], device=DEVICE) for x in (key, value)] for _ in range(2))
    ours = window_kernels.rotate_and_append(rotation, query, key, value, *actual, window)
    theirs = reference.rotate_and_append(rotation, query, key, value, *expected, window)
    assert all(map(torch.allclose, (ours, *actual), (theirs, *expected)))


@contextmanager
def attached(model: Any, name: str, impl: str, **changes: Any) -> Iterator[Session]:
    """A session with random codebooks, without the attention kernels that a method may have."""
    (method, bits), spec = parse_method(name), probe(model).spec
    settings = {"residual_length": 8, **method.example_settings, **bits, **changes}
    known = {key: value for key, value in settings.items() if key in method.config_cls.model_fields}
    config = make_config(method.name, known).resolve(spec)
    codecs = build_codecs(method, spec, config)
    for codec in codecs:
        randomize_(codec.eval(), torch.Generator().manual_seed(0))
        codec.to(model.device)
    with Session(model, spec, replace(method, attend_kernels=None), config, codecs, impl) as session:
        yield session


_MIMO = {"num_hidden_layers": 2, "num_experts_per_tok": 4}  # all, or rounding would choose others

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"num_hidden_layers": 1}) for name in ("deepseek_v3", "minicpm3", "glm4_moe_lite")},
    **{f"mimo-{width}": ("mimo_v2_flash", {**_MIMO, "v_head_dim": width}) for width in (8, 24)},
}


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    family, changes = MODELS[kind]
    model = make(family, **changes).to(DEVICE, dtype)
    spec = probe(model).spec
    if not (spec.latent or spec.value_dim != spec.head_dim):
        pytest.skip("this transformers caches keys and values of all heads")
    return model


@pytest.fixture
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_passes, "_HEADROOM", 16)
    monkeypatch.setattr(decoder, "LEAST_STEPS", 1)
    monkeypatch.setattr(chunk_kernels, "_SPLIT_TOKENS", 32)


def states(model: Any, name: str, impl: str, passes: tuple[int, ...], padding: int, **changes: Any) -> Tensor:
    """Last hidden states of passes, of which the first is longer than the window."""
    ids = torch.randint(3, 97, (2, sum(passes)), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask, made, seen = torch.ones_like(ids), [], 0
    mask[1, :padding] = 0
    with attached(model, name, impl, **changes) as session, torch.no_grad():
        cache = session.new_cache()
        for count in passes:
            seen += count
            masked = {"attention_mask": mask[:, :seen]} if padding else {}
            made.append(model.base_model(ids[:, seen - count : seen], **with_cache(cache), **masked)[0][:, -1])
        assert cache.memory().num_encoded > 0
    return torch.stack(made).float()


@pytest.mark.parametrize("name", METHODS)
def test_kernels_of_all_methods_code_latents(name: str) -> None:
    model = model_of("deepseek_v3")
    expected, actual = (states(model, name, impl, (24, 9, 2), 0) for impl in ("reference", "fused"))
    assert (actual - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.usefixtures("_small_steps")
@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "fp16") for kind in MODELS), ("deepseek_v3", "rtn-4"), ("mimo-8", "rtn-4")]
)
def test_models_attend_as_the_reference_does(kind: str, name: str) -> None:
    """With padding and without: chunks of all lengths, then steps, which make the tokens of passes."""
    model = model_of(kind)
    for padding in (0, 5):
        passes = (24, 9, 3, 1) if padding else (24, 9, 64, 1)
        expected, actual = (states(model, name, impl, passes, padding) for impl in ("reference", "fused"))
        assert (actual - expected).norm() < 1e-4 * expected.norm()
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with attached(model, name, "fused") as session:
        made = [session.generate(ids, max_new_tokens=5, mode=mode) for mode in ("passes", "steps")]
    assert made[1].mode == "steps"
    assert torch.equal(*(x.sequences for x in made))


@pytest.mark.gpu
@pytest.mark.usefixtures("_small_steps")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp16", "fp8", "rtn-4", "kivi-2", "turboquant-3", "klt-3", "qjl"])
@pytest.mark.parametrize("kind", [*MODELS, "true size"])
def test_steps_of_unequal_widths_are_captured(kind: str, name: str, dtype: torch.dtype) -> None:
    if kind.startswith("mimo") and dtype == torch.float32:
        pytest.skip("torch makes the products of its experts, in float32, on the host, which is not captured")
    sizes = {
        "head_dim": 64,
        "qk_rope_head_dim": 64,
        "kv_lora_rank": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }
    true_size = make("deepseek_v3", **sizes, num_hidden_layers=2).to(DEVICE, dtype) if kind == "true size" else None
    model = model_of(kind, dtype) if true_size is None else true_size
    settings: Any = {"residual_length": 32, "group_size": 16}
    expected, actual = (states(model, name, impl, (150, 70, 20, 9, 1), 0, **settings) for impl in ("reference", "auto"))
    ids = torch.randint(3, 97, (2, 200), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with attached(model, name, "auto", **settings) as session:
        uncaptured, captured = (session.generate(ids, max_new_tokens=100, mode=mode) for mode in ("steps", None))
    assert (captured.mode, captured.note) == ("graphs", None)
    assert torch.equal(captured.sequences, uncaptured.sequences)
    exact = states(model.float(), "fp16", "reference", (150, 70, 20, 9, 1), 0, **settings)
    rounded = (1e-4 if dtype == torch.float32 else 3e-2) * exact.norm()
    assert (actual - exact).norm() < 1.1 * (expected - exact).norm() + rounded


def test_kernels_of_methods_refuse_other_shapes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, said in (("deepseek_v3", r"latents \(MLA\)"), ("mimo-8", "values of 8 channels beside keys of 16")):
        method, _ = parse_method("kivi")
        spec = probe(model_of(kind)).spec
        codecs = build_codecs(method, spec, make_config("kivi", method.example_settings).resolve(spec))
        with pytest.raises(UsageError, match=f"kivi does not support {said}; use --impl auto"):
            choose_backend(method, codecs, "fused", torch.device(DEVICE))
        monkeypatch.setattr("kvcli.attention.backend.has_triton", lambda: True)
        monkeypatch.setattr("kvcli.attention.backend.check_device", lambda device: None)
        note = choose_backend(method, codecs, "auto", torch.device("cuda")).note
        assert note is not None
        assert note.endswith("blocks of codes are decoded")


def test_wide_tokens_are_coded_in_pytorch_on_small_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    method, _ = parse_method("rtn")
    spec = replace(probe(model_of("deepseek_v3")).spec, value_head_dim=512)
    (codec, *_) = build_codecs(method, spec, make_config("rtn", {}).resolve(spec))
    monkeypatch.setattr(launch, "shared_memory_limit", lambda device: 99 * 1024)
    launch.has_hopper_shared_memory.cache_clear()
    codec.use_kernels(True, torch.device("cpu"))
    note = codec.value.kernel_note(torch.device("cpu"))
    launch.has_hopper_shared_memory.cache_clear()
    assert (codec.key.fused, codec.value.fused) == (True, False)
    assert note == "512 channels are coded in PyTorch: kernels need more shared memory than the GPU has"
