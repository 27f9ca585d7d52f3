"""The attention suite: random codes, the check before the time, and what a row says."""

from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from benched import CPU, SMALL
from commvq_reordered import reordered_attend

from kvcli.artifact.choice import MethodChoice
from kvcli.attention.reference import attend_codes as reference_attend
from kvcli.bench import layer as layers
from kvcli.bench.attention import SUITE, AttentionOptions, prepare
from kvcli.bench.layer import EncodedLayer, compare_attention, encoded_layer, randomize_, tile, unfitted_codec
from kvcli.cli.output import Output
from kvcli.errors import ConfigError, UsageError
from kvcli.methods.layer_codec import AttendCodes
from kvcli.methods.scalar.codec import ScalarCodes
from kvcli.models.shapes import shape_spec

SPEC = shape_spec("tiny")
NAMES = ("fp16", "fp8", "rtn-4", "kivi-2", "squat-2", "squat-pre-2", "qjl", "commvq-1", "commvq-2")


def make_layer(name: str, context: int = 100, batch: int = 2, seed: int = 0, **settings: Any) -> EncodedLayer:
    case = MethodChoice(name).plus({**SMALL, **settings})
    shape = {"layer_idx": 2, "context": context, "batch": batch, "device": CPU, "dtype": torch.float32}
    return encoded_layer(case, SPEC, layers.shape_rope("tiny", CPU), **shape, seed=seed)


def rows(*names: str, **changes: Any) -> list[dict[str, Any]]:
    """Rows of the suite on the tiny shape, as records."""
    options = {"shape": "tiny", "contexts": [64], "repeats": 3, "device": "cpu", "method": [*names], **changes}
    prepared = prepare(AttentionOptions(**options), Output(quiet=True))
    return [{**SUITE.record(row), **prepared.shared} for row in prepared.rows]


def rows_with(monkeypatch: pytest.MonkeyPatch, attend_codes: AttendCodes, **changes: Any) -> list[dict[str, Any]]:
    """Rows of CommVQ with another function for attention over codes."""
    backend = SimpleNamespace(impl="fake", attend_codes=attend_codes)
    monkeypatch.setattr("kvcli.attention.backend.choose_backend", lambda *_: backend)
    return rows("commvq-2", setting=["codebook_size=8"], **changes)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_holds_what_its_codec_would_store(name: str) -> None:
    layer = make_layer(name)
    assert layer.num_tokens == layer.key_codes.num_tokens == (96 if name.startswith(("kivi", "squat")) else 100)
    bits = layer.codec.key.bits_per_token() + layer.codec.value.bits_per_token()
    if name == "fp16":
        bits *= 2  # the blocks are float32
    assert layer.stored_bytes == 2 * layer.num_tokens * bits / 8
    out, lse = layer.attend(reference_attend, layer.encoded_tokens())
    assert out.shape == (2, 4, 1, 16)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_codes_in_pages_are_rows_of_their_own() -> None:
    rows_, in_pages, refused = rows("kivi-2", page_size=[32, 16])[1:]
    assert [row["page_size"] for row in (rows_, in_pages, refused)] == [None, 32, 16]
    assert (in_pages["encoded"], in_pages["stored_bytes"]) == (rows_["encoded"], rows_["stored_bytes"])
    assert (in_pages["status"], refused["status"]) == ("ok", "refused")
    assert refused["note"] == "pages of 16 tokens do not hold whole groups of 32 tokens"
    layer = make_layer("kivi-2", context=128)
    paged, expected = (x.attend(reference_attend, x.encoded_tokens()) for x in (layer.in_pages(64), layer))
    torch.testing.assert_close(paged, expected, atol=1e-6, rtol=1e-5)


def test_codes_are_seeded_and_differ_between_sequences_and_blocks() -> None:
    first, again, other = (make_layer("kivi-2", seed=seed).key_codes.packed for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    long = make_layer("kivi-2", context=5000, batch=1).key_codes
    assert long.num_tokens == 5000
    assert not torch.equal(long.packed[:, :, :2048], long.packed[:, :, 2048:4096])


def test_tiling_keeps_tokens_with_their_scales() -> None:
    def block(start: int) -> ScalarCodes:
        token = torch.arange(start, start + 8).view(1, 1, 8, 1)
        return ScalarCodes(token.clone(), token[:, :, ::4] // 4, -token[:, :, ::4] // 4)

    codes = tile([block(0), block(8), block(16)], 2, 20)
    assert codes.packed.flatten(1).tolist() == [list(range(20)), [*range(8, 24), 0, 1, 2, 3]]
    assert codes.scale.flatten(1).tolist() == [[0, 1, 2, 3, 4], [2, 3, 4, 5, 0]]


def test_pre_rope_codes_are_rotated_by_their_positions() -> None:
    assert make_layer("kivi-2").encoded_tokens().rotations is None
    rotations = make_layer("commvq-2", sink_length=3).encoded_tokens().rotations
    assert rotations.positions.tolist() == [list(range(3, 103))] * 2


def test_only_what_a_fit_would_fill_is_randomized() -> None:
    for name in ("qjl", "commvq-1"):
        codec = unfitted_codec(MethodChoice(name).plus(SMALL), SPEC, 2)
        before = {key: buffer.clone() for key, buffer in codec.named_buffers()}
        randomize_(codec, torch.Generator().manual_seed(0))
        for key, buffer in codec.named_buffers():
            assert buffer.any() != (key == "key_offset")  # none is the default of a fit
            if before[key].any() and not key.endswith("codebook_scale"):
                assert torch.equal(before[key], buffer)
    assert codec.key.codebook.unique().numel() > 50
    keys = codec.key.decode(codec.key.encode(torch.randn(1, 2, 64, 16)))
    assert 0.1 < keys.square().mean() ** 0.5 < 10  # scores of a usual size


def test_attention_is_compared_with_the_reference() -> None:
    layer = make_layer("commvq-2")
    good = compare_attention(layer, reordered_attend)
    assert good.holds
    assert 0 < good.out_error < 1e-5

    def compare(change: Any) -> Any:
        return compare_attention(layer, lambda *arguments: change(*reference_attend(*arguments)))

    shifted, scaled = compare(lambda out, lse: (out, lse + 0.1)), compare(lambda out, lse: (out * 1.001, lse))
    assert shifted.lse_error == pytest.approx(0.1, abs=1e-5)
    assert scaled.out_error == pytest.approx(1e-3, rel=1e-2)
    for wrong in (shifted, scaled, compare(lambda out, lse: (out / 0 * 0, lse))):
        assert not wrong.holds


def test_rows_in_order_with_their_figures() -> None:
    settings = ["group_size=8", "residual_length=8", "codebook_size=8"]
    made = rows("kivi-2", "commvq-2", setting=settings, contexts=[64, 100], batches=["1", "3"])
    order = [*product((1, 3), (64, 100), ("fp16", "kivi-2", "commvq-2"))]
    assert [(row["batch"], row["context"], row["method"]) for row in made] == order
    assert [row["encoded"] for row in made] == [64, 64, 64, 100, 96, 100] * 2
    sdpa, kivi, commvq = made[-3:]
    assert (sdpa["impl"], kivi["impl"], sdpa["speedup"]) == ("sdpa", "reference", 1.0)
    for row in made:
        assert (row["status"], row["repeats"]) == ("ok", 3)
        assert row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        assert row["stored_gb_s"] == pytest.approx(row["stored_bytes"] / row["p50_us"] / 1e3)
        assert row["copy_gb_s"] > 0
        assert row["out_error"] is None  # the reference cannot be checked against itself
    assert kivi["speedup"] == pytest.approx(sdpa["p50_us"] / kivi["p50_us"])
    assert kivi["true_bits"] == pytest.approx(2 + 32 / 8)
    assert commvq["true_bits"] < sdpa["true_bits"] / 4


def test_right_kernels_are_timed_and_their_error_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows_with(monkeypatch, reordered_attend)[-1]
    assert (row["impl"], row["status"], row["note"]) == ("fake", "ok", None)
    assert 0 < row["out_error"] < 1e-5
    assert all(row[name] > 0 for name in ("p20_us", "p50_us", "p80_us", "eager_us", "speedup", "stored_gb_s"))


@pytest.mark.parametrize(
    ("error", "status", "note"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory", ""),
        (UsageError("no such head_dim"), "refused", "no such head_dim"),
        (LookupError("out of resource:\n memory"), "failed", "LookupError: out of resource: memory ("),
    ],
)
def test_the_run_goes_on_after_a_failed_row(monkeypatch: Any, error: Exception, status: str, note: str) -> None:
    made = rows_with(monkeypatch, Mock(side_effect=error), contexts=[64, 32])
    assert [row["status"] for row in made] == ["ok", status, "ok", status]
    assert made[1]["p50_us"] is None
    assert (made[1]["note"] or "").startswith(note)


def test_what_cannot_be_benched_is_refused_at_once() -> None:
    for settings, said in (
        ({"group_size": 5, "residual_length": 10}, "group_size"),
        ({"context": 7}, "no whole group"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_layer("kivi-2", **settings)
