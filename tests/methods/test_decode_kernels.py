"""Decode kernels against the codecs' own decoding, on awkward shapes; on a CPU in Triton's interpreter."""

from typing import Any

import pytest
import torch
from parts import DEVICE, FIRST_POSITION, Rotary, make_codec, make_part, random_codes
from torch import Tensor

from kvcli.methods.commvq.keys import supports_keys
from kvcli.methods.head_groups import KeyGroups
from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import Rope, Rotation

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def rotation_at(batch: int, length: int, rotary_dim: int) -> Rotation:
    positions = FIRST_POSITION + 3 * torch.arange(length, device=DEVICE) + torch.arange(batch, device=DEVICE)[:, None]
    return Rope(Rotary(rotary_dim)).rotation(positions, torch.float32)


def assert_decoded(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the rounding of the dtype, in relation to each token's size."""
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    error = (actual.float() - expected).abs().amax(-1) / expected.abs().amax(-1).clamp_min(1e-6)
    assert error.max() < ROUNDING[dtype], f"error {error.max():.1e}"


def decoded_keys(codec: LayerCodec, codes: Any, state: Any, rotation: Rotation, dtype: torch.dtype) -> list[Tensor]:
    """By the kernel and, in float32, without it."""
    results = []
    for fused, as_dtype in ((True, dtype), (False, torch.float32)):
        codec.use_kernels(fused)
        results.append(codec.decode_keys(codes, state, rotation, as_dtype))
    return results


COMMVQ_KEYS = [
    # head_dim, batch, length, bits, offset, dtype, settings
    *[(128, 1, 65, 1, False, dtype, {}) for dtype in DTYPES],
    (64, 3, 64, 2, True, torch.float16, {"key_norm": "per_head"}),
    (80, 1, 63, 1, True, torch.bfloat16, {}),
    (96, 3, 17, 1, False, torch.float32, {"pairs_per_group": 16}),
    (128, 1, 1, 1, True, torch.float16, {"pairs_per_group": 2, "codebook_size": 256, "num_residuals": 3}),
    (64, 1, 5, 1, False, torch.float32, {"num_residuals": 37, "codebook_size": 2}),
    (64, 2, 33, 1, True, torch.bfloat16, {"value_groups": 3}),
]


@pytest.mark.parametrize("case", COMMVQ_KEYS, ids=lambda case: "-".join(map(str, case)))
def test_commvq_keys(case: Any) -> None:
    head_dim, batch, length, bits, offset, dtype, settings = case
    torch.manual_seed(0)
    _, codec = make_codec(f"commvq-{bits}", 6, 3, head_dim, **settings)
    assert supports_keys(codec.key.parts[0] if isinstance(codec.key, KeyGroups) else codec.key)
    if offset:
        codec.key_offset.normal_()
    keys, _ = random_codes(codec, batch, length + 3)
    rotation = rotation_at(batch, length, head_dim)
    assert_decoded(*decoded_keys(codec, keys.slice(3, length + 3), None, rotation, dtype), dtype)


def test_commvq_keys_that_are_rotated_in_part() -> None:
    torch.manual_seed(0)
    _, codec = make_codec("commvq-1", 2, 1, 64)
    codec.key.spec = codec.key.spec.__class__(
        **{**vars(codec.key.spec), "rope": codec.key.spec.rope.__class__("default", 1e4, 16)}
    )
    keys, _ = random_codes(codec, 1, 20)
    codec.key_offset.normal_()
    assert_decoded(*decoded_keys(codec, keys, None, rotation_at(1, 20, 16), torch.float32), torch.float32)


def test_commvq_keys_of_odd_groups_are_decoded_without_the_kernel() -> None:
    torch.manual_seed(0)
    _, codec = make_codec("commvq-1", 2, 1, 64, pairs_per_group=1)
    assert not supports_keys(codec.key)
    keys, _ = random_codes(codec, 1, 20)
    assert_decoded(*decoded_keys(codec, keys, None, rotation_at(1, 20, 64), torch.float16), torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "batch", "length", "bits"),
    [(128, 1, 1, 65, 128), (64, 3, 3, 64, 384), (80, 1, 1, 63, 72), (96, 2, 3, 1, 24), (64, 3, 1, 129, 200)],
)
def test_commvq_values(head_dim: int, kv_heads: int, batch: int, length: int, bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    _, codec = make_codec("commvq-1", kv_heads, kv_heads, head_dim, value_code_bits=bits)
    _, values = random_codes(codec, batch, length + 3)
    codes = values.slice(3, length + 3)
    codec.use_kernels(True)
    assert_decoded(codec.value.decode_to(codes, None, dtype), codec.value.decode(codes), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "batch", "length", "settings"),
    [
        (128, 1, 65, {}),
        (64, 3, 64, {"num_outliers": 0}),
        (80, 1, 63, {"sketch_dim": 72, "initial_sketch_dim": 72, "outlier_sketch_dim": 20, "group_size": 16}),
        (96, 3, 1, {"sketch_dim": 5, "initial_sketch_dim": 5, "group_size": 16}),
    ],
)
def test_qjl_keys(head_dim: int, batch: int, length: int, settings: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    _, codec = make_codec("qjl", 4, 2, head_dim, **settings)
    part = make_part(codec, 4, batch, length, None)
    codec.use_kernels(True)
    actual = codec.key.decode_to(part.key_codes, part.key_state, dtype)
    assert_decoded(actual, codec.key.decode(part.key_codes, part.key_state), dtype)


TURBOQUANT = [
    # head_dim, batch, length, bits
    (64, 1, 1, 1),
    (80, 3, 63, 3),
    (128, 1, 65, 2),
    (128, 2, 32, 3),
    (256, 1, 20, 4),
    (20, 1, 7, 3),  # the last byte holds 4 bits
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", TURBOQUANT, ids=lambda case: "-".join(map(str, case)))
def test_turboquant(case: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Keys and values, which have other rotations, of parts of longer buffers; a token is 0."""
    head_dim, batch, length, bits = case
    torch.manual_seed(0)
    _, codec = make_codec(f"turboquant-{bits}", 4, 2, head_dim)
    x = torch.randn(batch, 2, length + 5, head_dim, device=DEVICE)
    x[:, 1, 3] = 0
    codec.key.use_units(torch.linspace(1, 2, head_dim, device=DEVICE))
    for part in (codec.key, codec.value):
        codes = part.encode(x, None).slice(3, length + 3)
        part.fused = True
        assert_decoded(part.decode_to(codes, None, dtype), part.decode(codes, None), dtype)


def test_turboquant_reads_rotations_with_any_strides() -> None:
    torch.manual_seed(0)
    _, codec = make_codec("turboquant-3", 2, 1, 64)
    key = codec.key
    codes = key.encode(torch.randn(1, 1, 5, 64, device=DEVICE), None)
    expected, key.fused = key.decode(codes, None), True
    for rotation in (key.rotation.contiguous(), key.rotation.T.contiguous().T):
        key.rotation = rotation
        assert_decoded(key.decode_to(codes, None, torch.float32), expected, torch.float32)


def test_signs_of_residuals_are_decoded_without_the_kernel() -> None:
    torch.manual_seed(0)
    _, codec = make_codec("turboquant-3", 2, 1, 64, key_variant="prod")
    x = torch.randn(1, 1, 5, 64, device=DEVICE)
    expected = codec.key.encode(x, None)
    codec.use_kernels(True)
    codes = codec.key.encode(x, None)
    assert all(torch.equal(a, b) for a, b in zip(vars(codes).values(), vars(expected).values(), strict=True))
    assert_decoded(codec.key.decode_to(codes, None, torch.float16), codec.key.decode(codes, None), torch.float16)


@pytest.mark.parametrize("name", ["commvq-1", "qjl", "turboquant-3"])
def test_no_tokens(name: str) -> None:
    _, codec = make_codec(name, 2, 1, 64)
    part = make_part(codec, 2, 1, 32, None)
    codec.use_kernels(True)
    empty, rotation = part.key_codes.slice(0, 0), rotation_at(1, 0, 64)
    assert codec.decode_keys(empty, part.key_state, rotation, torch.float16).shape == (1, 1, 0, 64)
    assert codec.value.decode_to(part.value_codes.slice(0, 0), None, torch.float16).shape == (1, 1, 0, 64)


def test_decoded_float16_is_clamped() -> None:
    torch.manual_seed(0)
    _, codec = make_codec("commvq-1", 2, 1, 64)
    keys, values = random_codes(codec, 1, 5)
    keys.norm.fill_(60000.0)
    values.scale.fill_(60000.0)
    codec.use_kernels(True)
    decoded = codec.decode_keys(keys, None, rotation_at(1, 5, 64), torch.float16)
    assert decoded.isfinite().all()
    assert decoded.abs().max() == 65504
    decoded = codec.value.decode_to(values, None, torch.float16)
    assert decoded.isfinite().all()
    assert decoded.abs().max() == 65504
