"""Rotations that depend on the length of a text: those of longrope (Phi-3) and of dynamic NTK scaling."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

import kvcli
from kvcli.attention.generation import prefill
from kvcli.attention.session import Session
from kvcli.errors import CacheError
from kvcli.seam.versions import with_cache

SWITCH = 64
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SWITCH, "factor": 8.0,
    "short_factor": [1.0] * 8, "long_factor": [1.0 + 3 * i for i in range(8)],
}  # fmt: skip


def with_large_weights(model: Any) -> Any:
    """Whose logits tell one rotation from another."""
    for x in model.parameters():
        if x.dim() == 2:
            nn.init.normal_(x, std=0.15)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def phi() -> Any:
    torch.manual_seed(0)
    limits = {"max_position_embeddings": 512, "original_max_position_embeddings": SWITCH, "sliding_window": None}
    return with_large_weights(Phi3ForCausalLM(Phi3Config(**SIZES, **limits, rope_parameters=LONGROPE)))


@pytest.fixture(scope="module")
def ntk() -> Any:
    torch.manual_seed(0)
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return with_large_weights(
        LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=SWITCH, rope_parameters=scaling))
    )


@pytest.fixture
def session(phi: Any) -> Iterator[Session]:
    with kvcli.attach(phi, "fp16") as session:
        yield session


def some_tokens(count: int, rows: int = 1) -> Tensor:
    return torch.randint(3, 97, (rows, count), generator=torch.Generator().manual_seed(1))


def far(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("name", ["phi", "ntk"])
def test_a_text_read_in_passes_is_rotated_as_one_that_is_read_at_once(
    name: str, request: pytest.FixtureRequest
) -> None:
    model, ids = request.getfixturevalue(name), some_tokens(160)
    whole = model(ids, use_cache=False).logits[:, -1]
    with kvcli.attach(model, "fp16") as session, torch.inference_mode():
        assert far(prefill(model, session.new_cache(), ids, None, 32), whole) < 1e-5


@pytest.mark.parametrize("impl", ["reference", "fused"])
def test_keys_of_longrope_are_codes_from_before_they_are_rotated(phi: Any, impl: str) -> None:
    """With angles of texts of another length, logits would be off by far more than eight bits lose."""
    ids, settings = some_tokens(160), {"k_bits": 8, "v_bits": 8, "sink_length": 2}
    whole = phi(ids, use_cache=False).logits[:, -1]
    with kvcli.attach(phi, "squat-pre", **settings, impl=impl) as session, torch.inference_mode():
        assert not any("way of their own" in note for note in session.notes)
        cache = session.new_cache()
        logits = prefill(phi, cache, ids, None, 40)
    assert cache.memory().num_encoded > 0
    assert far(logits, whole) < 0.02


@pytest.mark.parametrize("rows", [1, 2])
def test_generate_reads_the_text_anew_where_it_grows_over_the_switch(session: Session, phi: Any, rows: int) -> None:
    ids = some_tokens(SWITCH - 4, rows)
    made = session.generate(ids, max_new_tokens=12)
    session.detach()
    assert torch.equal(made.sequences, phi.generate(ids, max_new_tokens=12, do_sample=False))
    assert made.cache.sequences.rope.length == SWITCH + 1


def test_padded_rows_grow_over_the_switch_together(session: Session, phi: Any) -> None:
    ids = some_tokens(SWITCH - 4, 2)
    mask = torch.ones_like(ids)
    mask[1, :5], ids[1, :5] = 0, 0
    made = session.generate(ids, mask, max_new_tokens=12).sequences
    session.detach()
    assert torch.equal(made, phi.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False))


def test_a_prompt_that_continues_a_shorter_one_over_the_switch_is_read_anew(session: Session, phi: Any) -> None:
    ids = some_tokens(SWITCH + 20)
    cache = session.generate(ids[:, :40], max_new_tokens=2).cache
    made = session.generate(ids, max_new_tokens=4, cache=cache).sequences
    session.detach()
    assert torch.equal(made, phi.generate(ids, max_new_tokens=4, do_sample=False))


def test_generate_of_transformers_is_right_or_says_what_is(session: Session, phi: Any) -> None:
    long, short = some_tokens(SWITCH + 20), some_tokens(SWITCH - 4)
    cache = {"cache": session.new_cache()}
    made = phi.generate(long, max_new_tokens=4, do_sample=False, **cache)
    with pytest.raises(CacheError, match=f"grows over {SWITCH} tokens: session.generate does not"):
        phi.generate(short, max_new_tokens=12, do_sample=False, cache=session.new_cache())
    session.detach()
    assert torch.equal(made, phi.generate(long, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("name", ["phi", "ntk"])
def test_a_pass_that_mixes_rotations_is_refused(name: str, request: pytest.FixtureRequest) -> None:
    model, ids = request.getfixturevalue(name), some_tokens(160)
    with kvcli.attach(model, "fp16") as session:
        cache = session.new_cache()
        model(ids[:, :40], **with_cache(cache))
        with pytest.raises(CacheError, match=f"rotates texts of more than {SWITCH} tokens differently"):
            model(ids[:, 40:], **with_cache(cache))
    assert cache.get_seq_length() == 40


def test_a_context_states_its_rotation(session: Session, tmp_path: Path) -> None:
    """One of a short text is not gone on with over the switch, one of a long text's beginning is."""
    ids, cache = some_tokens(160), session.new_cache()
    expected = prefill(session.model, cache, ids, None, 32)
    for name, length in (("short", None), ("long", 160)):
        cache = session.new_cache(length)
        prefill(session.model, cache, ids[:, :40], None, None)
        cache.save(tmp_path / name, ids[:, :40])
        cache = session.load_cache(tmp_path / name)
        assert cache.sequences.rope.length == (SWITCH if length is None else SWITCH + 1)
        assert far(prefill(session.model, cache, ids, None, 32), expected) < 1e-5
    assert session.identity(SWITCH).difference(session.identity(SWITCH + 1)) == "with other RoPE frequencies"


def test_dynamic_scaling_makes_tokens_as_transformers_does(ntk: Any) -> None:
    ids = some_tokens(SWITCH - 4)
    expected = ntk.generate(ids, max_new_tokens=40, do_sample=False)
    with kvcli.attach(ntk, "fp16") as session:
        assert torch.equal(session.generate(ids, max_new_tokens=40).sequences, expected)
