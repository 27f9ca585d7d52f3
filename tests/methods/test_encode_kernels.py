"""Encode kernels of scalar codes, sketches, TurboQuant and SQuat: on a GPU if there is one, else in the interpreter."""

from typing import Any, get_args

import pytest
import torch
from encoders import DEVICE, assert_same, both, many
from factories import make_spec
from torch import Tensor

from kvcli.methods.base import Codes
from kvcli.methods.config import QJLConfig, ScalarBits, SQuatConfig, TurboQuantConfig
from kvcli.methods.packing import unpack_bits
from kvcli.methods.qjl.codec import QJLKey, QJLState
from kvcli.methods.scalar.codec import PerChannelKey, PerTokenValue
from kvcli.methods.squat.codec import SQuatKey
from kvcli.registry import get_method

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def sample(heads: int, time: int, head_dim: int, *, batch: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random tokens as a cache hands them over: a part of a longer buffer, with channels of different size."""
    generator = torch.Generator().manual_seed(time + head_dim)
    x = torch.randn(batch, time + 5, heads, head_dim, generator=generator) * torch.logspace(-1, 1, head_dim)
    return x.to(DEVICE, dtype).transpose(1, 2)[:, :, 3 : 3 + time]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_bits", get_args(ScalarBits))
def test_keys_per_channel(n_bits: ScalarBits, dtype: torch.dtype) -> None:
    x = sample(2, many(64), 64, dtype=dtype)
    assert_same(*both(PerChannelKey(make_spec(64), n_bits, 32), x))


@pytest.mark.parametrize(("head_dim", "group_size", "batch"), [(80, 32, 3), (96, 64, 1), (128, 128, 1), (16, 24, 3)])
def test_keys_per_channel_in_awkward_shapes(head_dim: int, group_size: int, batch: int) -> None:
    x = sample(2, 2 * group_size, head_dim, batch=batch, dtype=torch.bfloat16)
    assert_same(*both(PerChannelKey(make_spec(head_dim), 2, group_size), x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_bits", get_args(ScalarBits))
def test_values_per_token(n_bits: ScalarBits, dtype: torch.dtype) -> None:
    x = sample(2, many(65), 64, dtype=dtype)
    assert_same(*both(PerTokenValue(make_spec(64), n_bits, 32), x))


@pytest.mark.parametrize(
    ("head_dim", "group_size", "batch", "time"),
    [(80, 128, 3, 63), (80, 16, 1, 64), (96, 32, 1, 1), (128, 64, 3, 65), (24, 12, 1, 7)],
)
def test_values_per_token_in_awkward_shapes(head_dim: int, group_size: int, batch: int, time: int) -> None:
    x = sample(2, time, head_dim, batch=batch, dtype=torch.bfloat16)
    for n_bits in (1, 4):
        assert_same(*both(PerTokenValue(make_spec(head_dim), n_bits, group_size), x))


@pytest.mark.parametrize("n_bits", get_args(ScalarBits))
def test_extreme_groups(n_bits: ScalarBits) -> None:
    """Constant groups, ranges too small and too large for float16, halves that round to even."""
    x = torch.zeros(1, 2, 64, 32)
    x[0, 0, :, 0] = torch.arange(64) / 2
    x[0, 0, :, 1] = torch.arange(64) * 1e-8
    x[0, 0, :, 2] = 7.25
    x[0, 0, ::2, 3], x[0, 0, 1::2, 3] = 1e9, -1e9
    x[0, 0, :, 4] = 3000 + torch.arange(64) * 1e-6
    x[0, 1] = x[0, 0].T.reshape(64, 32)
    x = x.to(DEVICE)
    for codec in (PerChannelKey(make_spec(32), n_bits, 32), PerTokenValue(make_spec(32), n_bits, 32)):
        reference, ours = both(codec, x)
        assert_same(reference, ours)
        assert codec.decode(ours).isfinite().all()


@pytest.mark.parametrize(
    ("head_dim", "time", "batch", "changes", "dtype"),
    [
        (64, 65, 1, {}, torch.float32),
        (80, 63, 3, {"num_outliers": 0}, torch.bfloat16),
        (96, 1, 3, {"sketch_dim": 100, "outlier_sketch_dim": 20, "initial_layers": 0}, torch.float16),
        (128, 64, 1, {"sketch": "gaussian"}, torch.bfloat16),
    ],
)
def test_qjl_keys(head_dim: int, time: int, batch: int, changes: dict[str, Any], dtype: torch.dtype) -> None:
    codec = QJLKey(make_spec(head_dim), QJLConfig(**changes), 0)
    x = sample(2, many(time), head_dim, batch=batch, dtype=dtype)
    x[0, :, 0] = 0
    x[0, :, -1] *= 1e3
    state = QJLState(torch.zeros(batch, 2, head_dim, device=DEVICE))
    codec.observe(state, x, x, torch.ones(batch, device=DEVICE))
    codec.finalize_state(state, list(range(batch)))
    reference, ours = both(codec, x, state)
    outlier = state.channels.unsqueeze(2)
    for kind, sketch in (("", codec.sketch), ("outlier_", codec.outlier_sketch)):
        part = x.double() * (outlier if kind else 1 - outlier)
        signs, expected = (unpack_bits(getattr(codes, f"{kind}signs"), 1, len(sketch)) for codes in (ours, reference))
        products = part @ sketch.double().T
        sure = products.abs() > 1e-5 * part.norm(dim=-1, keepdim=True) * sketch.double().norm(dim=-1)
        assert torch.equal(signs.bool() & sure, (products > 0) & sure)
        assert (signs == expected).float().mean() > 0.999 if len(sketch) else signs.numel() == 0
        norm, stored = getattr(ours, f"{kind}norm"), getattr(reference, f"{kind}norm")
        assert norm.shape == stored.shape
        assert torch.allclose(norm.float(), stored.float(), rtol=1e-3)
        assert (norm == stored).float().mean() > 0.97 if len(sketch) else norm.numel() == 0


@pytest.mark.parametrize(
    ("head_dim", "time", "batch", "bits", "dtype"),
    [
        (64, 65, 1, 1, torch.float32),
        (80, 63, 3, 3, torch.bfloat16),
        (96, 1, 3, 2, torch.float16),
        (128, 33, 1, 3, torch.bfloat16),
        (256, 17, 2, 4, torch.float32),
        (20, 7, 1, 3, torch.float16),  # the last byte holds 4 bits
    ],
)
def test_turboquant(head_dim: int, time: int, batch: int, bits: int, dtype: torch.dtype) -> None:
    """Indices are those of the nearest centroids unless a coordinate of a unit vector is within 1e-5 of a border."""
    codec = get_method("turboquant").build(make_spec(head_dim), TurboQuantConfig(k_bits=bits), 0).key
    x = sample(2, many(time), head_dim, batch=batch, dtype=dtype)
    x[:, 0, 0] = 0
    x[:, :, -1] *= 1e3
    units = torch.linspace(1, 9, head_dim, device=x.device)
    codec.use_units(units)
    reference, ours = both(codec, x)
    index, expected = (unpack_bits(codes.packed, bits, head_dim) for codes in (ours, reference))
    borders = (codec.centroids[1:] + codec.centroids[:-1]) / 2
    scaled = x.double() / units
    direction = scaled / scaled.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    turned = direction @ (codec.rotation / units).double().T
    sure = (turned.unsqueeze(-1) - borders).abs().amin(-1) > 1e-5
    assert torch.equal(index[sure], torch.bucketize(turned, borders.double(), out_int32=True)[sure])
    assert (index == expected).float().mean() > 0.999
    assert torch.allclose(ours.norm.float(), reference.norm.float(), rtol=1e-3)
    assert (ours.norm == reference.norm).float().mean() > 0.97
    assert_written_in_place(codec, x, ours)
    spare = -head_dim * bits % 8
    assert not (ours.packed[..., -1].int() >> (8 - spare)).any()


def assert_written_in_place(codec: Any, x: Tensor, codes: Codes) -> None:
    """`encode_into` writes the same codes between others, and nothing else."""
    count = x.shape[2]
    longer = codes.map(lambda field: field.new_full((*field.shape[:2], count + 16, *field.shape[3:]), 77))
    codec.encode_into(x, None, longer.slice(7, count + 7))
    assert_same(codes, longer.slice(7, count + 7))
    for field in (longer.packed, longer.norm):
        assert (field[:, :, :7] == 77).all()
        assert (field[:, :, count + 7 :] == 77).all()


@pytest.mark.parametrize(
    ("head_dim", "batch", "changes", "dtype"),
    [
        (64, 1, {}, torch.float32),
        (80, 3, {"block_size": 24, "k_bits": 4}, torch.bfloat16),
        (128, 1, {"block_size": 200}, torch.float16),
    ],
)
def test_squat_keys(head_dim: int, batch: int, changes: dict[str, Any], dtype: torch.dtype) -> None:
    codec = SQuatKey(make_spec(head_dim), SQuatConfig(**changes), "post_rope")
    x = sample(2, many(64), head_dim, batch=batch, dtype=dtype)
    state = codec.new_state(batch, DEVICE)
    queries = sample(4, 100, head_dim, batch=batch, dtype=dtype)
    codec.observe(state, queries, x, torch.full((batch,), 100.0, device=DEVICE))
    codec.finalize_state(state, list(range(batch)))
    before = x.clone()
    reference, ours = both(codec, x, state)
    assert torch.equal(x, before)
    assert_same(reference, ours)
    if not changes:
        moved = codec.decode(both(PerChannelKey(make_spec(head_dim), 2, 32), x)[1])
        assert (moved[..., 32:] != codec.decode(ours)[..., 32:]).any()
