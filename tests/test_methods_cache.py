"""Every method without an artifact, through the whole cache: batches, padding, chunks, beams, bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factories import prompt_and_steps

import kvcli

SETTINGS: dict[str, dict[str, Any]] = {
    "fp8": {"residual_length": 6, "flush_block": 1},
    "rtn-2": {"residual_length": 6, "group_size": 8, "flush_block": 1},
    "kivi-2": {"residual_length": 8, "group_size": 4},
    "squat-2": {"residual_length": 8, "group_size": 4},
    "squat-pre-2": {"residual_length": 8, "group_size": 4},
    "qjl": {"residual_length": 6, "num_outliers": 2, "group_size": 8, "flush_block": 1},
}


@pytest.fixture(params=SETTINGS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def logits(model: Any, method: str, pieces: list[dict[str, torch.Tensor]], **changes: Any) -> torch.Tensor:
    with kvcli.attach(model, method, **{"sink_length": 2, **SETTINGS[method], **changes}) as session, torch.no_grad():
        cache = session.new_cache()
        for piece in pieces:
            extra = {}
            if "attention_mask" in piece:  # as `generate` does it: padding takes no positions
                positions = (piece["attention_mask"].cumsum(-1) - 1).clamp_min(0)
                extra["position_ids"] = positions[:, -piece["input_ids"].shape[1] :]
            out = model(**piece, **extra, past_key_values=cache).logits[:, -1]
    return out


def alone(pieces: list[dict[str, torch.Tensor]], row: int, length: int) -> list[dict[str, torch.Tensor]]:
    """The pieces of one row without its padding."""
    found = []
    for extra, piece in enumerate(pieces):
        ids = piece["input_ids"][row : row + 1]
        mask = piece["attention_mask"][row : row + 1, -(length + extra) :]
        found.append({"input_ids": ids if extra else ids[:, -length:], "attention_mask": mask})
    return found


@pytest.mark.parametrize("sink_length", [0, 2])
def test_a_left_padded_row_equals_the_same_prompt_alone(
    tiny_model: Any, prompt: Any, method: str, sink_length: int
) -> None:
    lengths = (40, 17, 9, 1)
    pieces = prompt_and_steps(prompt, *lengths)
    together = logits(tiny_model, method, pieces, sink_length=sink_length)
    for row, length in enumerate(lengths):
        found = logits(tiny_model, method, alone(pieces, row, length), sink_length=sink_length)
        assert torch.allclose(found, together[row : row + 1], atol=2e-4), f"row {row} of {length} tokens"


def test_decode_time_tokens_become_lossy(tiny_model: Any, prompt: Any, method: str) -> None:
    with kvcli.attach(tiny_model, method, sink_length=2, **SETTINGS[method]) as session, torch.no_grad():
        cache = session.new_cache()
        tiny_model(**prompt(1), past_key_values=cache)
        assert cache.memory().num_encoded == 0
        for _ in range(30):
            tiny_model(torch.tensor([[5]]), past_key_values=cache)
        assert cache.memory().num_encoded >= 16
        assert cache.memory().window_bytes < cache.memory().fp16_bytes


def test_true_bits_equal_the_formula(tiny_model: Any, prompt: Any, method: str) -> None:
    with kvcli.attach(tiny_model, method, sink_length=2, **SETTINGS[method]) as session, torch.no_grad():
        cache = session.new_cache()
        tiny_model(**prompt(50), past_key_values=cache)
        memory = cache.memory()
        keys = [codec.key.bits_per_token() for codec in session.codecs]
        values = [codec.value.bits_per_token() for codec in session.codecs]
    assert memory.key_bits == pytest.approx(sum(keys) / len(keys) / 32)
    assert memory.value_bits == pytest.approx(sum(values) / len(values) / 32)


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"do_sample": True}, {"prefill_chunk_size": 7}])
def test_generate_and_continue(tiny_model: Any, prompt: Any, method: str, settings: dict[str, Any]) -> None:
    inputs = prompt(30, 4)
    with kvcli.attach(tiny_model, method, sink_length=2, **SETTINGS[method]) as session, torch.no_grad():
        cache = session.new_cache()
        out = tiny_model.generate(**inputs, past_key_values=cache, max_new_tokens=20, **settings)
        assert out.shape[1] == 50
        if "num_beams" in settings:
            return
        mask = torch.cat((inputs["attention_mask"], torch.ones(2, 26, dtype=torch.long)), dim=1)
        more = torch.cat((out, torch.full((2, 6), 7)), dim=1)
        again = tiny_model.generate(input_ids=more, attention_mask=mask, past_key_values=cache, max_new_tokens=5)
        assert again.shape[1] == 61


def test_chunked_prefill_is_close_to_one_prefill(tiny_model: Any, prompt: Any, method: str) -> None:
    """Later chunks see codes of earlier ones, so the two differ, but not by much."""
    inputs = prompt_and_steps(prompt, 60)
    whole = logits(tiny_model, method, inputs)
    first, rest = inputs[0]["input_ids"], inputs[1:]
    chunks = [{"input_ids": part} for part in first.split(13, dim=1)]
    chunked = logits(tiny_model, method, [*chunks, *({"input_ids": p["input_ids"]} for p in rest)])
    assert (chunked - whole).norm() / whole.norm() < 0.6


def test_a_window_longer_than_the_text_is_exact(tiny_model: Any, prompt: Any, method: str) -> None:
    pieces = prompt_and_steps(prompt, 20)
    ids = torch.cat([piece["input_ids"] for piece in pieces], dim=1)
    with torch.no_grad():
        expected = tiny_model(ids).logits[:, -1]
    assert torch.allclose(logits(tiny_model, method, pieces, residual_length=64), expected, atol=1e-4)


def test_works_under_autocast(tiny_model: Any, prompt: Any, method: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert logits(tiny_model, method, prompt_and_steps(prompt, 40, 12)).isfinite().all()
