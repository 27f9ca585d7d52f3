"""Chunks whose counts are on the device give the states of ordinary passes, and leave the same cache behind."""

from contextlib import closing
from typing import Any

import interpret  # noqa: F401
import pytest
import torch
from factories import make_model
from test_decoder import MODEL, assert_same_logits, attached, prompts

import kvcli
from kvcli.attention import steps
from kvcli.attention.session import Session
from kvcli.errors import CacheError, UsageError
from kvcli.registry import METHODS
from kvcli.seam.versions import with_cache


def states(session: Session, cache: Any, ids: torch.Tensor, width: int, mode: Any) -> torch.Tensor:
    """All chunks, the last of which may be shorter."""
    with torch.no_grad(), closing(session.chunks(cache, width, ids.shape[1], mode)) as read:
        return torch.cat([read(part).clone() for part in ids.split(width, dim=1)], dim=1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Capacity and width of the steps that were made; capacities small, so that rows outgrow them."""
    found: list[tuple[int, int]] = []
    real = steps.DeviceCounts

    def counts(sequences: Any, capacity: int, layers: int, width: int) -> Any:
        found.append((capacity, width))
        return real(sequences, capacity, layers, width)

    monkeypatch.setattr(steps, "DeviceCounts", counts)
    monkeypatch.setattr(steps, "_HEADROOM", 16)
    return found


Encoded = list[tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Numbers of two rows and their codes, of one pass after another."""


def recorded(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[Encoded]:
    """What the codecs of keys and of values encode from now on, layer by layer."""
    found: list[Encoded] = []
    for part in (part for codec in session.codecs for part in (codec.key, codec.value)):
        found.append([])

        def encode(x: torch.Tensor, state: Any, real: Any = part.encode, into: Encoded = found[-1]) -> Any:
            codes = real(x, state)
            if len(x) == 2 and x.shape[2]:
                into.append((x.clone(), {name: y.clone() for name, y in codes.tensors().items()}))
            return codes

        monkeypatch.setattr(part, "encode", encode)
    return found


def rows_without_edges(passes: list[Encoded], steps: list[Encoded], rows: list[int]) -> list[int]:
    """The rows but for one with a number on the edge of two codes, which falls by rounding, other on each machine.

    The first codes that differ are one or two, and of equal numbers.
    """
    left = [*rows]
    for ours, theirs in zip(passes, steps, strict=True):
        x, y = (torch.cat([numbers for numbers, _ in some], dim=2) for some in (ours, theirs))
        for name in ours[0][1]:
            one, other = (torch.cat([codes[name] for _, codes in some], dim=2) for some in (ours, theirs))
            for row in [*left]:
                if unequal := int((one[row] != other[row]).sum()):
                    assert torch.allclose(x[row], y[row], atol=1e-5)
                    assert unequal <= 2
                    left.remove(row)
    assert left
    return left


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("width", "length"), [(7, 94), (32, 270)])
def test_chunks_equal_ordinary_passes(
    name: str, width: int, length: int, made: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, _ = prompts(2, length)
    with attached(name) as session:
        caches, encoded = [session.new_cache() for _ in range(2)], recorded(session, monkeypatch)

        def read(ids: torch.Tensor, rows: list[int]) -> list[int]:
            """The rows whose states are compared, which both ways of reading have equal."""
            both = list[Any]()
            for cache, mode in zip(caches, ("passes", "steps"), strict=True):
                both.append((states(session, cache, ids, width, mode), [[*part] for part in encoded]))
                for part in encoded:
                    part.clear()
            (expected, passes), (found, steps) = both
            if not torch.allclose(found[rows], expected[rows], atol=1e-3):
                rows = rows_without_edges(passes, steps, rows)
            assert torch.allclose(found[rows], expected[rows], atol=1e-3)
            return rows

        rows = read(ids, [0, 1])
        assert len(made) >= 2
        assert {size for _, size in made} == {width}
        first, second = (cache.memory() for cache in caches)
        assert (
            (first.num_tokens, first.num_encoded)
            == (second.num_tokens, second.num_encoded)
            == (2 * length, second.num_encoded)
        )
        assert first.code_bytes == second.code_bytes
        logits = [MODEL(prompts(2, 5)[0], **with_cache(cache)).logits[rows] for cache in caches]
        assert torch.allclose(*logits, atol=1e-3)
        for part in encoded:
            part.clear()
        made.clear()
        read(prompts(2, 5 * width)[0], rows)  # again, from what chunks and a pass left
        assert made


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "settings"), [("kivi", {"group_size": 16}), ("rtn", {})])
def test_chunks_of_kernels(name: str, settings: dict[str, int]) -> None:
    model = make_model("llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    ids = prompts(2, 80)[0]
    with attached(name, "fused", model, residual_length=16, **settings) as session:
        expected, found = (states(session, session.new_cache(), ids, 8, mode) for mode in ("passes", "steps"))
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_chunk_that_breaks_off_leaves_a_cache_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompts(2, 100)[0]
    with attached("kivi") as session, torch.no_grad():
        cache = session.new_cache()
        read = session.chunks(cache, 10, 100, "steps")
        for part in ids[:, :80].split(10, dim=1):
            read(part)
        monkeypatch.setattr(MODEL.model.norm, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            read(ids[:, 80:90])
        monkeypatch.undo()
        read.close()
        with pytest.raises(CacheError, match="did not reach the last layer"):
            MODEL(ids[:, 90:], **with_cache(cache))


def test_another_batch_is_refused_and_gradients_are_not_kept() -> None:
    ids = prompts(3, 100)[0]
    with attached("rtn") as session, closing(session.chunks(session.new_cache(), 10, 100, "steps")) as read:
        for part in ids[:2, :60].split(10, dim=1):
            assert not read(part).requires_grad
        assert read.mode == "steps"
        with pytest.raises(CacheError, match="holds 2 sequences, but a batch of 3"):
            read(ids[:, 60:70])


def test_more_tokens_than_announced_are_read_by_ordinary_passes() -> None:
    ids = prompts(2, 150)[0]
    with attached("rtn") as session:
        caches = session.new_cache(), session.new_cache()
        expected = states(session, caches[0], ids, 10, "passes")
        with closing(session.chunks(caches[1], 10, 95, "steps")) as read:
            found = torch.cat([read(part).clone() for part in ids.split(10, dim=1)], dim=1)
            assert read.mode == "passes"
        assert torch.allclose(found, expected, atol=1e-3)
        assert_same_logits(ids[:, :3], *caches)


def test_what_cannot_be_captured_is_refused() -> None:
    model = make_model("gemma2", num_hidden_layers=2)
    with attached("rtn") as session, pytest.raises(UsageError, match="need a GPU"):
        session.chunks(session.new_cache(), 10, 100, "graphs")
    with kvcli.attach(model, "rtn", group_size=4) as session:
        with pytest.raises(UsageError, match="other kinds than full attention"):
            session.chunks(session.new_cache(), 10, 100, "steps")
        assert states(session, session.new_cache(), prompts(1, 60)[0], 10, None).shape[1] == 60


def test_few_passes_and_caches_of_other_sessions(made: list[tuple[int, int]]) -> None:
    with attached("kivi") as session:
        states(session, session.new_cache(), prompts(1, 40)[0], 20, "steps")
        cache = session.new_cache()
    assert not made
    with attached("kivi") as session, pytest.raises(CacheError, match="detached"):
        session.chunks(cache, 10, 100)


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_captured_chunks_equal_ordinary_passes(name: str, made: list[tuple[int, int]]) -> None:
    model = make_model("llama", num_hidden_layers=2, head_dim=64).cuda()
    ids = prompts(3, 600)[0].cuda()
    with attached(name, "auto", model, residual_length=16) as session:
        expected, found = (states(session, session.new_cache(), ids, 16, mode) for mode in ("passes", "graphs"))
        assert made
        assert torch.allclose(found, expected, atol=2e-3)
