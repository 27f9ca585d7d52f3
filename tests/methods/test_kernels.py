"""Fused attention over codes against the reference, on awkward shapes; on a CPU in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcli.attention.exact import ExactTokens
from kvcli.attention.kernels import attend_exact_fused, decoded_attend, partial_attention_fused
from kvcli.attention.reference import attend_exact, partial_attention, reference_attend, take_in, unrotate
from kvcli.attention.rotation_kernels import take_in_fused, unrotate_fused
from kvcli.attention.session import make_config
from kvcli.errors import CacheError, UsageError
from kvcli.kernels import values
from kvcli.kernels.values import Scores
from kvcli.methods.base import EncodedPart, LayerCodec, PartialAttention
from kvcli.methods.commvq.key_kernels import stage_ranges
from kvcli.methods.commvq.keys import CommVQKeyCodes
from kvcli.methods.commvq.values import CommVQValueCodes
from kvcli.methods.kivi import kernels as kivi_kernels
from kvcli.methods.qjl import kernels as qjl_kernels
from kvcli.packing import pack_bits
from kvcli.registry import parse_method
from kvcli.rope import Rope, Rotation, TokenRotations
from kvcli.spec import ModelSpec, RopeSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIRST_POSITION = 7
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}


class Rotary(nn.Module):
    """A rotary module as transformers makes them."""

    attention_scaling = 1.0

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.inv_freq = (1e4 ** -(torch.arange(0, head_dim, 2) / head_dim)).to(DEVICE)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = (positions[..., None].float() * self.inv_freq).repeat(1, 1, 2)
        return angle.cos().to(x.dtype) * self.attention_scaling, angle.sin().to(x.dtype) * self.attention_scaling


def make_codec(name: str, heads: int, kv_heads: int, head_dim: int, **settings: Any) -> tuple[Any, LayerCodec]:
    method, from_bits = parse_method(name)
    rope = RopeSpec("default", 1e4, head_dim)
    spec = ModelSpec("llama", 1, heads * head_dim, heads, kv_heads, head_dim, 4096, 1, rope)
    config = make_config(method, {**from_bits, **settings})
    if method.name == "commvq":
        config = config.resolve(spec)
    return method, method.build(spec, config, 0).to(DEVICE)


def random_codes(codec: LayerCodec, batch: int, length: int) -> tuple[Any, Any]:
    """Codes of CommVQ with random books: no fit is needed to compare two ways of reading them."""
    key, value = codec.key, codec.value
    config, spec = key.config, key.spec
    key.codebook.copy_(torch.randint(-127, 128, key.codebook.shape))
    key.codebook_scale.uniform_(0.001, 0.01)
    value.codebook.normal_()
    value.offset.normal_()
    codes = torch.randint(0, 2**config.bits_per_code, (batch, length, key.num_codes), device=DEVICE)
    norms = 1 if config.key_norm == "joint" else spec.num_kv_heads
    norm = (torch.rand(batch, norms, length, 1, device=DEVICE) * 20).half()
    bits = torch.randint(0, 256, (batch, 1, length, config.value_code_bits // 8), dtype=torch.uint8, device=DEVICE)
    scale = torch.rand(batch, 1, length, 1, device=DEVICE).half()
    keys = CommVQKeyCodes(pack_bits(codes, config.bits_per_code).unsqueeze(1), norm)
    return keys, CommVQValueCodes(bits, scale)


def make_part(codec: LayerCodec, heads: int, batch: int, length: int, lengths: list[int] | None) -> EncodedPart:
    spec = codec.key.spec
    state = codec.key.new_state(batch, torch.device(DEVICE))
    keys = torch.randn(batch, spec.num_kv_heads, length, spec.head_dim, device=DEVICE)
    if state is not None:
        queries = torch.randn(batch, heads, length, spec.head_dim, device=DEVICE)
        codec.key.observe(state, queries, keys, torch.full((batch,), float(length), device=DEVICE))
        codec.key.settle(state, list(range(batch)))
    if hasattr(codec.key, "codebook"):
        key_codes, value_codes = random_codes(codec, batch, length)
    else:
        key_codes, value_codes = codec.key.encode(keys, state), codec.value.encode(torch.randn_like(keys))
    rotations = None
    if codec.key.space == "pre_rope":
        positions = torch.arange(FIRST_POSITION, FIRST_POSITION + length, device=DEVICE).expand(batch, -1)
        rotations = TokenRotations(Rope(Rotary(spec.head_dim)), positions)
    counts = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return EncodedPart(key_codes, state, value_codes, rotations, counts)


def assert_same(found: PartialAttention, expected: PartialAttention, dtype: torch.dtype) -> None:
    assert found[0].isfinite().all()
    error = (found[0] - expected[0]).norm() / expected[0].norm()
    assert error < TOLERANCE[dtype], f"error {error:.1e}"
    seen = expected[1].isfinite()
    assert torch.equal(seen, found[1].isfinite())
    assert torch.allclose(found[1][seen], expected[1][seen], atol=1e-4 if dtype == torch.float32 else 2e-2)


CASES = [
    # method, heads, kv heads, head_dim, batch, length, queries, lengths, settings
    ("kivi-2", 4, 1, 128, 1, 96, 1, None, {}),
    ("kivi-2", 3, 3, 64, 3, 64, 1, [64, 32, 0], {}),
    ("kivi-4", 8, 1, 96, 1, 64, 2, None, {}),
    ("kivi-1", 3, 1, 80, 1, 64, 1, None, {"group_size": 16}),
    ("kivi-8", 2, 1, 64, 1, 128, 1, None, {"group_size": 64}),
    ("kivi-2", 2, 1, 128, 1, 128, 1, None, {"group_size": 128}),
    ("squat-2", 4, 1, 64, 1, 64, 1, None, {}),
    ("squat-pre-2", 4, 1, 128, 1, 64, 1, None, {}),
    ("squat-pre-2", 4, 2, 64, 2, 96, 3, [96, 32], {}),
    ("squat-pre-4", 2, 2, 64, 1, 64, 1, None, {}),
    ("qjl", 4, 1, 128, 1, 65, 1, None, {}),
    ("qjl", 8, 1, 64, 2, 63, 1, [63, 1], {"num_outliers": 0}),
    ("qjl", 3, 1, 96, 1, 1, 2, None, {"sketch_dim": 48, "initial_sketch_dim": 48, "outlier_sketch_dim": 16}),
    ("commvq-1", 4, 1, 128, 1, 65, 1, None, {}),
    ("commvq-2", 6, 2, 64, 2, 63, 2, [63, 20], {}),
    ("commvq-1", 3, 3, 64, 1, 1, 1, None, {}),
    ("commvq-1", 4, 2, 128, 1, 40, 1, None, {"pairs_per_group": 16, "codebook_size": 256, "num_residuals": 2}),
    ("commvq-1", 2, 1, 128, 1, 40, 1, None, {"codebook_size": 256, "num_residuals": 6}),  # two passes over the keys
    ("commvq-2", 2, 2, 64, 3, 33, 1, [0, 33, 5], {"pairs_per_group": 16, "key_norm": "per_head"}),
    ("commvq-2", 4, 4, 128, 1, 34, 1, None, {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:7])))
def test_fused_attention_equals_the_reference(case: Any, dtype: torch.dtype) -> None:
    name, heads, kv_heads, head_dim, batch, length, queries, lengths, settings = case
    torch.manual_seed(0)
    method, codec = make_codec(name, heads, kv_heads, head_dim, **settings)
    part = make_part(codec, heads, batch, length, lengths)
    query = torch.randn(batch, heads, queries, head_dim, device=DEVICE).to(dtype)
    found = method.attend_forms["fused"](codec, query, part, head_dim**-0.5)
    assert_same(found, reference_attend(codec, query.float(), part, head_dim**-0.5), dtype)


@pytest.mark.parametrize("name", ["kivi-2", "squat-pre-2", "qjl"])
def test_largest_scores_of_ranges(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large a maximum would cost precision only, and be seen by no other test."""
    torch.manual_seed(0)
    method, codec = make_codec(name, 4, 2, 64)
    part = make_part(codec, 4, 2, 192, [192, 96])
    seen: list[Scores] = []

    def spy(scores: Scores, *rest: Any) -> PartialAttention:
        seen.append(scores)
        return values.value_sum(scores, *rest)

    kernels = qjl_kernels if name == "qjl" else kivi_kernels
    monkeypatch.setattr(kernels, "value_sum", spy)
    method.attend_forms["fused"](codec, torch.randn(2, 4, 1, 64, device=DEVICE).half(), part, 0.125)
    for row, length in enumerate((192, 96)):
        for index in range(seen[0].parts):
            found = seen[0].values[row, :, :, index * seen[0].span : min((index + 1) * seen[0].span, length)]
            expected = found.amax(-1) if found.shape[-1] else torch.full_like(found.sum(-1), float("-inf"))
            assert torch.equal(seen[0].tops[row, :, index], expected)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["kivi-2", "kivi-4", "squat-2", "squat-pre-2", "qjl", "commvq-1", "commvq-2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_fused_attention_over_many_ranges(name: str, dtype: torch.dtype, batch: int) -> None:
    torch.manual_seed(0)
    method, codec = make_codec(name, 32, 8, 128)
    # farther on, rounding of the model's own float32 angles shows: one product against a product of two
    length = 992 if dtype == torch.float32 else 5984
    part = make_part(codec, 32, batch, length, None if batch == 1 else [length, 512, 0])
    query = torch.randn(batch, 32, 1, 128, device=DEVICE).to(dtype)
    found = method.attend_forms["fused"](codec, query, part, 128**-0.5)
    assert_same(found, reference_attend(codec, query.float(), part, 128**-0.5), dtype)


@pytest.mark.parametrize("name", ["kivi-2", "commvq-1"])
def test_extreme_scales_neither_overflow_nor_vanish(name: str) -> None:
    torch.manual_seed(0)
    method, codec = make_codec(name, 2, 1, 64)
    part = make_part(codec, 2, 1, 64, None)
    for factor in (1e-4, 1e3):
        values = part.value_codes
        scaled = {k: (x.float() * factor).half() if k in ("scale", "zero") else x for k, x in values.tensors().items()}
        changed = EncodedPart(part.key_codes, part.key_state, type(values)(**scaled), part.rotations, None)
        query = 8 * torch.randn(1, 2, 1, 64, device=DEVICE).half()
        found = method.attend_forms["fused"](codec, query, changed, 0.125)
        assert_same(found, reference_attend(codec, query.float(), changed, 0.125), torch.float16)


@pytest.mark.parametrize("name", ["kivi-2", "squat-pre-2", "qjl"])
def test_many_queries_are_attended_by_decoding(name: str) -> None:
    torch.manual_seed(0)
    _, codec = make_codec(name, 4, 2, 64)
    part = make_part(codec, 4, 2, 64, [64, 32])
    query = torch.randn(2, 4, 20, 64, device=DEVICE)
    assert_same(decoded_attend(codec, query, part, 0.125), reference_attend(codec, query, part, 0.125), torch.float32)


@pytest.mark.parametrize(("name", "group"), [("kivi-2", 48), ("squat-2", 48), ("squat-pre-2", 32), ("commvq-1", 1)])
def test_blocks_hold_whole_groups(name: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a group does not divide the block, and where a large batch makes blocks small."""
    torch.manual_seed(0)
    settings = {"group_size": group, "residual_length": group} if group == 48 else {}
    head_dim = 96 if group == 48 else 64
    _, codec = make_codec(name, 4, 2, head_dim, **settings)
    assert codec.tokens_per_group == group
    part = make_part(codec, 4, 2, 192, [192, 96])
    query = torch.randn(2, 4, 20, head_dim, device=DEVICE)
    expected = reference_attend(codec, query, part, 0.125)
    monkeypatch.setattr("kvcli.attention.reference._TOKEN_BLOCK", 100)
    assert_same(reference_attend(codec, query, part, 0.125), expected, torch.float32)
    monkeypatch.setattr("kvcli.attention.kernels._BLOCK_TOKENS", 100)
    monkeypatch.setattr("kvcli.attention.kernels._LEAST_BLOCK", 40)
    assert_same(decoded_attend(codec, query, part, 0.125), expected, torch.float32)


@pytest.mark.parametrize(("length", "most", "size"), [(192, 100, 96), (192, 10, 48), (48, 8192, 48), (0, 100, 96)])
def test_blocks_cover_all_tokens(length: int, most: int, size: int) -> None:
    _, codec = make_codec("kivi-2", 4, 2, 96, group_size=48, residual_length=48)
    blocks = codec.blocks(length, most)
    assert [token for start, stop in blocks for token in range(start, stop)] == list(range(length))
    assert all(stop - start == size for start, stop in blocks)


def test_the_largest_scale_of_a_range_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights times scales are kept in the range of float16 by the largest scale, here one of the last."""
    torch.manual_seed(0)
    monkeypatch.setattr("kvcli.kernels.values._SCAN", 64)
    method, codec = make_codec("kivi-2", 4, 2, 128)
    part = make_part(codec, 4, 1, 64, None)
    part.value_codes.scale[:, :, -3:] *= 1e4
    query = torch.zeros(1, 4, 1, 128, device=DEVICE, dtype=torch.bfloat16)
    found = method.attend_forms["fused"](codec, query, part, 1.0)
    assert_same(found, reference_attend(codec, query, part, 1.0), torch.bfloat16)


def scattered(length: int, gap: int, sinks: int, decoded: int) -> ExactTokens:
    """Random tokens of 2 rows and 2 heads of 80 channels, as a cache holds them; NaN where nothing may be read."""
    buffer = torch.randn(2, 2, length - decoded + gap + 3, 80, device=DEVICE)
    buffer[:, :, sinks : sinks + gap] = float("nan")
    between = torch.randn(2, 2, decoded, 80, device=DEVICE) if decoded else None
    return ExactTokens(buffer, length, sinks, gap, between)


@pytest.mark.parametrize(("masked", "joined", "queries"), [(False, True, 1), (True, True, 5), (True, False, 40)])
@pytest.mark.parametrize(
    ("gaps", "sinks", "decoded"), [((0, 0), 0, (0, 0)), ((5, 0), 4, (0, 9)), ((0, 70), 3, (66, 1))]
)
def test_exact_tokens_in_one_launch(
    masked: bool, joined: bool, queries: int, gaps: tuple[int, int], sinks: int, decoded: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 6, queries, 80, device=DEVICE)
    key, value = (scattered(70, gap, sinks, count) for gap, count in zip(gaps, decoded, strict=True))
    visible = torch.rand(2, queries, 70, device=DEVICE) > 0.3 if masked else None
    if visible is not None:
        visible[0, 0] = False  # a query that sees nothing
    encoded = (torch.randn(2, 6, queries, 80, device=DEVICE), torch.randn(2, 6, queries, device=DEVICE))
    arguments = (query, key, value, visible, 0.1)
    found = attend_exact_fused(*arguments, encoded if joined else None)
    assert torch.allclose(found, attend_exact(*arguments, encoded if joined else None), atol=1e-5)
    plain = (query, key.joined(), value.joined(), visible, 0.1)
    assert_same(partial_attention_fused(*plain), partial_attention(*plain), torch.float32)


def test_positions_that_jump_are_refused() -> None:
    positions = torch.tensor([[3, 4, 5, 9, 10]], device=DEVICE)
    with pytest.raises(CacheError, match="consecutive"):
        TokenRotations(Rope(Rotary(64)), positions).tiles(2)
    lengths = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    assert TokenRotations(Rope(Rotary(64)), positions, lengths).tiles(2).cos.shape == (1, 1, 3, 32)


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("kivi-2", {"group_size": 8}, "groups of 8 tokens"),
        ("qjl", {"sketch_dim": 40, "initial_sketch_dim": 40}, "a sketch of 40 rows"),
        ("commvq-1", {"value_code_bits": 8}, "8 value bits"),
    ],
)
def test_other_shapes_are_refused_by_name(name: str, settings: dict[str, Any], named: str) -> None:
    method, codec = make_codec(name, 2, 1, 64, **settings)
    part = make_part(codec, 2, 1, 32, None)
    with pytest.raises(UsageError, match=f"{named}.*--impl reference"):
        method.attend_forms["fused"](codec, torch.randn(1, 2, 1, 64, device=DEVICE), part, 1.0)


@pytest.mark.parametrize(
    ("stages", "size", "expected"),
    [
        (11, 64, [(0, 11)]),
        (21, 64, [(0, 21)]),
        (8, 256, [(0, 4), (4, 4)]),
        (200, 2, [(0, 100), (100, 100)]),  # sums of bytes must fit 16 bits
    ],
)
def test_passes_hold_their_tables_in_a_cache(stages: int, size: int, expected: list[tuple[int, int]]) -> None:
    config = make_config(parse_method("commvq")[0], {"num_residuals": stages, "codebook_size": size})
    assert stage_ranges(config, 128) == expected


@pytest.mark.parametrize(
    ("name", "head_dim", "group"), [("kivi-2", 128, 32), ("kivi-4", 96, 32), ("kivi-1", 80, 16), ("kivi-8", 64, 64)]
)
def test_dequantization_in_a_kernel(name: str, head_dim: int, group: int) -> None:
    torch.manual_seed(0)
    _, codec = make_codec(name, 4, 2, head_dim, group_size=group)
    for part, length in ((codec.key, 3 * group), (codec.value, 65)):
        codes = part.encode(torch.randn(3, 2, length, head_dim, device=DEVICE)).slice(group, length)
        expected = part.decode(codes)
        part.fused = True
        assert torch.allclose(part.decode_to(codes, None, torch.float32), expected, atol=1e-6)
        assert torch.equal(part.decode_to(codes, None, torch.float16), expected.half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "length", "head_dim"), [(1, 1, 64), (3, 33, 80), (2, 65, 128), (20, 1, 64)])
def test_new_tokens_are_rotated_and_put_in_their_place(
    batch: int, length: int, head_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    positions = torch.randint(0, 500, (batch, length), device=DEVICE)
    rotation = Rope(Rotary(head_dim)).rotation(positions, dtype)
    query, key, value = (
        torch.randn(batch, length, heads, head_dim, device=DEVICE).to(dtype).transpose(1, 2) for heads in (6, 2, 2)
    )
    found, expected = torch.zeros(2, 2, batch, 2, length + 9, head_dim, dtype=dtype, device=DEVICE)
    places = [[x[:, :, 4 : 4 + length] for x in both] for both in (found, expected)]
    ours = take_in_fused(rotation, query, key, value, *places[0])
    exact = Rotation(rotation.cos.float(), rotation.sin.float())
    theirs = take_in(exact, query, key, value, *places[1])
    tolerance = {"atol": 1e-6, "rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5}
    assert torch.allclose(ours, theirs, **tolerance)
    assert torch.allclose(found, expected, **tolerance)


@pytest.mark.parametrize(
    ("batch", "length", "head_dim", "rotary_dim"), [(1, 1, 64, 64), (3, 33, 80, 80), (2, 65, 128, 128), (2, 9, 64, 32)]
)
def test_the_rotation_of_old_keys_is_taken_off(batch: int, length: int, head_dim: int, rotary_dim: int) -> None:
    torch.manual_seed(0)
    positions = torch.randint(0, 500, (batch, length), device=DEVICE)
    plain = Rope(Rotary(rotary_dim)).rotation(positions, torch.float32)
    rotation = Rotation(1.3 * plain.cos, 1.3 * plain.sin)  # as with YaRN's attention scaling
    keys = torch.randn(batch, 3, length + 5, head_dim, device=DEVICE)[:, :, 5:]
    rotated = rotation.apply(keys).bfloat16()
    assert torch.allclose(unrotate_fused(rotation, rotated), unrotate(rotation, rotated), atol=1e-6)
    assert (unrotate_fused(rotation, rotated) - keys).norm() < 5e-3 * keys.norm()
