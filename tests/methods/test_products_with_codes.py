"""Scores and weighted sums from codes as they are stored, against decoded tokens, on awkward shapes."""

import pytest
import torch
from contract import Coder
from factories import make_spec
from torch import Tensor

from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.packing import (
    byte_fields,
    fields_to_planes,
    pack_bits,
    pack_planes,
    planes_to_fields,
    stream_to_fields,
)
from kvcli.methods.scalar.codec import quantize
from kvcli.registry import get_method
from kvcli.rope import Rotation

BATCH, TIME = 3, 64


def build(name: str, head_dim: int, settings: dict[str, object], rotary_dim: int | None = None) -> LayerCodec:
    method, spec = get_method(name), make_spec(head_dim=head_dim, rotary_dim=rotary_dim)
    codec = method.build(spec, method.config_cls(**settings).resolve(spec), 0)
    generator = torch.Generator().manual_seed(1)
    codec.key.randomize_(generator)
    codec.value.randomize_(generator)
    return codec


def check(codec: LayerCodec, head_dim: int, rows: int = 3) -> None:
    """Compares products on tokens that do not begin at the first one."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads = codec.key.spec.num_kv_heads
    rotary = codec.key.spec.rope.rotary_dim
    angles = normal(BATCH, 1, TIME // 2, rotary // 2)
    rotation = Rotation(angles.cos() * 1.2, angles.sin() * 1.2) if codec.needs_rotations else None
    query, weights = normal(BATCH, heads, rows, head_dim), normal(BATCH, heads, rows, TIME // 2).abs()
    key, value = Coder(codec.key, BATCH), Coder(codec.value, BATCH)
    x = normal(BATCH, heads, TIME, head_dim) * 3 + 1
    key_codes, value_codes = (coder.encode(x).slice(TIME // 2, TIME) for coder in (key, value))
    keys = codec.decode_keys(key_codes, key.state, rotation, torch.float32)
    scores = codec.scores(query, key_codes, key.state, rotation)
    assert torch.allclose(scores, query @ keys.transpose(-1, -2), atol=1e-3, rtol=1e-4)
    sums = codec.value.weighted_sum(weights, value_codes)
    assert torch.allclose(sums, weights @ codec.value.decode(value_codes, None), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize(("head_dim", "group"), [(16, 8), (64, 32), (128, 32), (40, 8), (24, 8), (16, 16)])
@pytest.mark.parametrize("name", ["rtn", "kivi"])
def test_scalar_codes(name: str, bits: int, head_dim: int, group: int) -> None:
    settings = {"k_bits": bits, "v_bits": bits, "group_size": group, "residual_length": 64}
    check(build(name, head_dim, settings), head_dim)


@pytest.mark.parametrize("rows", [1, 4, 60])
@pytest.mark.parametrize(
    ("head_dim", "settings", "rotary_dim"),
    [
        (16, {"codebook_size": 8, "num_residuals": 3}, None),
        (16, {"codebook_size": 8, "num_residuals": 3, "pairs_per_group": 4, "key_norm": "per_head"}, None),
        (64, {"codebook_size": 64, "num_residuals": 5, "value_code_bits": 40}, None),
        (32, {"codebook_size": 2, "num_residuals": 7, "value_code_bits": 13}, 16),
    ],
)
def test_commvq_codes(head_dim: int, settings: dict[str, object], rotary_dim: int | None, rows: int) -> None:
    check(build("commvq", head_dim, settings, rotary_dim), head_dim, rows)


@pytest.mark.parametrize("settings", [{"num_outliers": 0}, {"num_outliers": 4}, {"sketch_dim": 21}])
def test_sketches(settings: dict[str, object]) -> None:
    check(build("qjl", 16, settings), 16)


@pytest.mark.parametrize("name", ["rtn", "qjl", "commvq"])
def test_key_offsets_are_part_of_scores(name: str) -> None:
    codec = build(name, 16, {})
    codec.key_offset = torch.randn(codec.key.spec.num_kv_heads, 16) * 20
    assert codec.needs_rotations
    check(codec, 16)


@pytest.mark.parametrize(("n_bits", "count"), [(1, 16), (1, 37), (2, 64), (2, 33), (4, 12), (8, 10), (8, 7)])
def test_fields_of_bytes_are_the_codes(n_bits: int, count: int) -> None:
    codes, x = torch.randint(0, 2**n_bits, (2, 3, count)), torch.randn(2, 3, count)
    expected = (codes * x).sum(-1)
    for pack, arrange in ((pack_bits, stream_to_fields), (pack_planes, planes_to_fields)):
        fields = byte_fields(pack(codes, n_bits), n_bits)
        assert torch.allclose((fields * arrange(x, n_bits)).sum(-1), expected, atol=1e-4)
    assert torch.equal(fields_to_planes(fields, n_bits, count), codes.float())


@pytest.mark.parametrize("n_bits", [1, 2, 4, 8])
def test_fields_of_every_byte(n_bits: int) -> None:
    every = torch.arange(256).view(2, 1, 128)
    shifts = torch.arange(0, 8, n_bits)
    expected = (every.unsqueeze(-1) & (2**n_bits - 1 << shifts)).flatten(-2).float()
    packed = every.to(torch.uint8)
    assert torch.equal(byte_fields(packed, n_bits), expected)
    cut = torch.nn.functional.pad(packed, (0, 3, 1, 2))[:, 1:2, :128]
    assert torch.equal(byte_fields(cut, n_bits), expected)


@pytest.mark.parametrize("n_bits", [1, 2, 8])
def test_groups_without_a_range(n_bits: int) -> None:
    """Their codes are 0: equal numbers, a range too small for float16, and numbers that are not finite."""
    groups = torch.tensor([[3.3, 3.3, 3.3], [1e-9, 0.0, 2e-9], [float("nan"), 1.0, 2.0], [1e6, 2e6, 3e6]])
    codes, scale, zero = quantize(groups, n_bits)
    assert not codes.any()
    assert scale[[0, 1, 3]].eq(0).all()
    assert torch.equal(zero[[0, 1, 3], 0], torch.tensor([3.3, 0.0, 65504.0]).half())
