"""GPUs whose shared memory is too small for a kernel."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import clustered, fitted_keys, make_model, make_spec, prompt_and_steps

import kvcli
from kvcli.attention import window_kernels
from kvcli.kernels import launch
from kvcli.methods.base import Codec
from kvcli.methods.commvq import encode_keys_kernels, search_kernels
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.values import CommVQValueCodec
from kvcli.methods.config import QJLConfig
from kvcli.methods.qjl import decode_kernels, encode_kernels
from kvcli.methods.qjl.codec import QJLKey
from kvcli.seam.versions import with_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL_LIMIT, LARGE_LIMIT = 64 * 1024, 99 * 1024
"""Bytes of shared memory per block of GPUs of compute capability 7.5 and 8.6."""


def limited(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    properties = SimpleNamespace(shared_memory_per_block=48 * 1024, shared_memory_per_block_optin=limit)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    cuda = launch.shared_memory_limit
    monkeypatch.setattr(search_kernels, "shared_memory_limit", lambda device: cuda(torch.device("cuda")))


def test_the_search_of_256_codewords_asks_for_what_the_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert search_kernels.search_note(256, 64, cpu) is None
    limited(monkeypatch, LARGE_LIMIT)
    assert search_kernels.search_note(256, 32, cpu) is None
    assert search_kernels.search_note(256, 64, cpu) == (
        "keys are encoded in PyTorch: the search of 256 codewords needs 147968 bytes of shared memory, "
        "and the GPU has 101376 per block"
    )
    limited(monkeypatch, SMALL_LIMIT)
    assert search_kernels.search_note(256, 32, cpu) is not None
    assert search_kernels.search_note(64, 64, cpu) is None


@pytest.mark.parametrize("key_norm", ["joint", "per_head"])
def test_without_the_kernel_codes_are_the_same(monkeypatch: pytest.MonkeyPatch, key_norm: str) -> None:
    config = CommVQConfig(bits=2, codebook_size=8, num_residuals=3, key_iterations=3, key_norm=key_norm)
    codec, _ = fitted_keys(make_spec(32, rotary_dim=16), config, tokens=300)
    x = clustered(4, 40, 32, seed=1).view(2, 2, 40, 32)
    expected = codec.encode(x)
    limited(monkeypatch, 1024)
    monkeypatch.setattr(search_kernels, "_search_kernel", None)
    codec.fused = True
    found = codec.encode(x)
    assert torch.equal(found.packed, expected.packed)
    assert torch.equal(found.norm, expected.norm)


def test_a_tile_that_does_not_fit_gives_way_to_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a GPU with too little shared memory for CommVQ's key search. Result: a smaller tile, or the
    search in PyTorch.
    """
    config = CommVQConfig(bits=2, codebook_size=8, num_residuals=2, key_iterations=3)
    codec, _ = fitted_keys(make_spec(16), config, tokens=300)
    launched: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **sizes: launched.append(sizes)

    monkeypatch.setattr(search_kernels, "_search_kernel", Kernel())
    for limit in (LARGE_LIMIT, 9 * 1024):
        limited(monkeypatch, limit)
        encode_keys_kernels.encode_keys(torch.randn(1, 2, 600, 16), codec.search_tables(), True, 16)
    assert [sizes["BLOCK_T"] for sizes in launched] == [64, 16]


def test_a_session_says_what_is_encoded_without_kernels(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Codec, "kernel_note", lambda self, device: f"encoded in PyTorch on {device}")
    with kvcli.attach(tiny_model, "kivi-2", impl="fused") as session:
        assert str(session.backend.note).endswith("encoded in PyTorch on cpu")
    with kvcli.attach(tiny_model, "kivi-2", impl="reference") as session:
        assert session.backend.note is None


@pytest.mark.kernels
def test_smaller_tiles_give_the_same_logits(prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, steps, and a chunk whose query rows fill more than one smaller tile."""
    model = make_model("llama", num_attention_heads=4, num_key_value_heads=1, head_dim=64, num_hidden_layers=1)
    model = model.to(DEVICE)
    pieces = [*prompt_and_steps(prompt, 90, 70), prompt_and_steps(prompt, 105, 85)[0]]
    pieces[-1]["input_ids"] = pieces[-1]["input_ids"][:, -12:]
    pieces = [{name: x.to(DEVICE) for name, x in piece.items()} for piece in pieces]

    tiles = []

    def logits(hopper: bool) -> torch.Tensor:
        monkeypatch.setattr(launch, "has_hopper_shared_memory", lambda device: hopper)
        limit = launch.HOPPER_SHARED_MEMORY if hopper else LARGE_LIMIT
        monkeypatch.setattr(window_kernels, "shared_memory_limit", lambda device: limit)
        window_kernels.tile_for.cache_clear()
        tiles.append(window_kernels.tile_for(48, (64, 64, 64), 4, model.device))
        with kvcli.attach(model, "qjl", impl="fused", residual_length=32) as session, torch.no_grad():
            cache = session.new_cache()
            return torch.stack([model(**piece, **with_cache(cache)).logits[:, -1] for piece in pieces])

    try:
        assert torch.allclose(logits(False), logits(True), rtol=1e-4, atol=1e-4)
    finally:
        window_kernels.tile_for.cache_clear()
    assert [(tile["BLOCK_M"], tile["BLOCK_N"]) for tile in tiles] == [(16, 32), (16, 64)]


@pytest.mark.kernels
def test_smaller_tiles_encode_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CommVQConfig(bits=2, codebook_size=8)
    codec = CommVQValueCodec(make_spec(64), config.resolve(make_spec(64)))
    codec.randomize_(torch.Generator().manual_seed(0))
    codec = codec.to(DEVICE)
    codec.fused = True
    x = torch.randn(1, 2, 40, 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    whole = codec.decode(codec.encode(x))
    monkeypatch.setattr(launch, "has_hopper_shared_memory", lambda device: False)
    assert (codec.decode(codec.encode(x)) - whole).norm() < 1e-2 * whole.norm()


@pytest.mark.kernels
def test_smaller_tiles_of_wide_keys_code_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than 128 channels, of which QJL encodes half as many tokens at a time."""
    codec = QJLKey(make_spec(160), QJLConfig(), 0).to(DEVICE)
    codec.fused = True
    x = torch.randn(1, 2, 70, 160, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    state = codec.new_state(1, x.device)
    codec.observe(state, x, x, torch.ones(1, device=DEVICE))
    codec.finalize_state(state, [0])
    whole = codec.encode(x, state)
    expected = codec.decode_to(whole, state, torch.float32)
    monkeypatch.setattr(launch, "has_hopper_shared_memory", lambda device: False)
    for module in (encode_kernels, decode_kernels):
        monkeypatch.setattr(module, "shared_memory_limit", lambda device: LARGE_LIMIT)
    assert [encode_kernels.encode_tile(70, width, x.device)["BLOCK_T"] for width in (128, 256)] == [64, 32]
    codes = codec.encode(x, state)
    assert (codes.signs != whole.signs).float().mean() < 1e-3
    assert torch.allclose(codec.decode_to(whole, state, torch.float32), expected, rtol=1e-5, atol=1e-5)
