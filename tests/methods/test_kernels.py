"""Fused attention over codes against the reference, on awkward shapes; on a CPU in Triton's interpreter."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from parts import DEVICE, assert_same, exact_attend, make_codec, make_part

from kvcli.attention.backend import choose_backend
from kvcli.attention.decoded import attend_dequantized
from kvcli.attention.reference import attend_codes as reference_attend
from kvcli.kernels.splits import SplitScores
from kvcli.methods.commvq import value_kernels as commvq_values
from kvcli.methods.commvq.attend_kernels import stage_ranges
from kvcli.methods.commvq.codeword_kernels import MAX_STAGES
from kvcli.methods.layer_codec import EncodedTokens, PartialAttention
from kvcli.methods.method import Method
from kvcli.registry import make_config
from kvcli.rope import TokenRotations

CASES = [
    # method, heads, kv heads, head_dim, batch, length, queries, lengths, settings
    ("kivi-2", 4, 1, 128, 1, 96, 1, None, {}),
    ("kivi-2", 3, 3, 64, 3, 64, 1, [64, 32, 0], {}),
    ("kivi-4", 8, 1, 96, 1, 64, 2, None, {}),
    ("kivi-1", 3, 1, 80, 1, 64, 1, None, {"group_size": 16}),
    ("kivi-8", 2, 1, 64, 1, 128, 1, None, {"group_size": 64}),
    ("kivi-2", 2, 1, 128, 1, 128, 1, None, {"group_size": 128}),
    ("qjl", 2, 1, 128, 1, 130, 1, None, {"group_size": 8}),  # 16 groups of channels
    ("qjl", 2, 1, 128, 2, 67, 1, [67, 66], {"group_size": 64}),
    ("squat-2", 4, 1, 64, 1, 64, 1, None, {}),
    ("squat-pre-2", 4, 1, 128, 1, 64, 1, None, {}),
    ("squat-pre-2", 4, 2, 64, 2, 96, 3, [96, 32], {}),
    ("squat-pre-4", 2, 2, 64, 1, 64, 1, None, {}),
    ("qjl", 4, 1, 128, 1, 65, 1, None, {}),
    ("qjl", 8, 1, 64, 2, 63, 1, [63, 1], {"num_outliers": 0}),
    ("qjl", 3, 1, 96, 1, 1, 2, None, {"sketch_dim": 48, "initial_sketch_dim": 48, "outlier_sketch_dim": 16}),
    ("qjl", 8, 4, 64, 3, 33, 22, [33, 20, 1], {}),  # programs that sketch queries of several heads and sequences
    ("klt-2", 4, 2, 64, 1, 300, 1, None, {}),
    ("klt-3", 4, 2, 64, 2, 517, 1, [517, 300], {}),
    ("klt-1", 8, 2, 80, 2, 65, 2, [65, 3], {}),
    ("klt-2", 5, 1, 128, 3, 70, 4, [0, 70, 64], {}),  # more rows than a program takes
    ("klt-4", 2, 2, 96, 1, 64, 1, None, {}),
    ("klt-2", 2, 1, 256, 1, 40, 1, None, {}),
    ("klt-tcq-2", 4, 2, 64, 1, 300, 1, None, {}),
    ("klt-tcq-3", 4, 2, 64, 2, 517, 1, [517, 300], {}),
    ("klt-tcq-1", 8, 2, 80, 2, 65, 2, [65, 3], {}),
    ("klt-tcq-2", 5, 1, 128, 3, 70, 4, [0, 70, 64], {}),
    ("klt-tcq-4", 2, 2, 96, 1, 64, 1, None, {}),
    ("klt-tcq-2", 2, 1, 256, 1, 40, 1, None, {}),
    ("klt-tcq-2", 2, 1, 32, 1, 40, 1, None, {}),
    ("rtn-4", 4, 2, 64, 1, 300, 1, None, {}),
    ("rtn-2", 5, 1, 128, 3, 70, 4, [0, 70, 64], {}),  # more rows than a program takes
    ("rtn-1", 8, 2, 80, 2, 65, 2, [65, 3], {"group_size": 16}),
    ("rtn-8", 2, 2, 96, 1, 64, 1, None, {"group_size": 32}),
    ("oscar-2", 4, 2, 64, 2, 517, 1, [517, 300], {}),
    ("fp8", 4, 2, 64, 2, 517, 3, [517, 300], {}),
    ("fp8", 3, 1, 80, 1, 40, 1, None, {}),
    ("turboquant-3", 4, 2, 64, 2, 517, 1, [517, 300], {}),  # indices in two bytes
    ("turboquant-2", 8, 2, 80, 2, 65, 2, [65, 3], {}),
    ("turboquant-4", 5, 1, 128, 3, 70, 4, [0, 70, 64], {"v_bits": 1}),
    ("turboquant-3", 2, 1, 256, 1, 40, 1, None, {}),
    ("commvq-1", 4, 1, 128, 1, 65, 1, None, {}),
    ("commvq-2", 6, 2, 64, 2, 63, 2, [63, 20], {}),
    ("commvq-1", 3, 3, 64, 1, 1, 1, None, {}),
    ("commvq-1", 4, 2, 128, 1, 40, 1, None, {"pairs_per_group": 16, "codebook_size": 256, "num_residuals": 2}),
    ("commvq-1", 2, 1, 128, 1, 40, 1, None, {"codebook_size": 256, "num_residuals": 6}),  # two passes over the keys
    ("commvq-2", 2, 2, 64, 3, 33, 1, [0, 33, 5], {"pairs_per_group": 16, "key_norm": "per_head"}),
    ("commvq-2", 4, 4, 128, 1, 34, 1, None, {}),
    ("commvq-1", 16, 2, 64, 2, 33, 3, [33, 20], {}),  # more rows than a program takes
    ("commvq-1", 4, 1, 128, 1, 70, 1, None, {"pairs_per_group": 8}),
    ("commvq-1", 5, 1, 128, 1, 130, 2, None, {"pairs_per_group": 64}),
    ("commvq-1", 4, 2, 128, 1, 200, 1, None, {"value_code_bits": 560}),  # 35 words of value bits per token
    ("commvq-1", 2, 2, 64, 3, 130, 1, [130, 70, 64], {"value_code_bits": 144}),
    ("commvq-1", 2, 1, 128, 1, 130, 1, None, {"value_code_bits": 1056}),
    ("commvq-1", 8, 4, 64, 2, 70, 1, [70, 33], {"value_groups": 2}),
    ("commvq-2", 3, 3, 64, 1, 40, 2, None, {"value_groups": 3, "key_norm": "per_head"}),
]


def attend_kernels(method: Method) -> Any:
    """A method's module of attention kernels."""
    assert method.attend_kernels is not None
    return import_module(method.attend_kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:7])))
def test_fused_attention_equals_the_reference(case: Any, dtype: torch.dtype) -> None:
    name, heads, kv_heads, head_dim, batch, length, queries, lengths, settings = case
    torch.manual_seed(0)
    method, codec = make_codec(name, heads, kv_heads, head_dim, **settings)
    part = make_part(codec, heads, batch, length, lengths)
    query = torch.randn(batch, heads, queries, head_dim, device=DEVICE).to(dtype)
    fused = attend_kernels(method).fused_attend(codec, query, part, head_dim**-0.5)
    assert_same(fused, reference_attend(codec, query.float(), part, head_dim**-0.5), dtype)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("kivi-2", [544, 320]),
        ("qjl", [517, 300]),
        ("klt-3", [517, 300]),
        ("commvq-2", [517, 300]),
        ("rtn-4", [517, 300]),
    ],
)
def test_what_no_kernel_wrote_is_not_multiplied(name: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter tells of it, if it is an infinity; a sequence of few tokens has splits without one."""
    empty = torch.empty

    def infinite(*args: Any, **options: Any) -> torch.Tensor:
        x = empty(*args, **options)
        return x.fill_(torch.inf) if x.is_floating_point() else x

    method, codec = make_codec(name, 4, 2, 64)
    part = make_part(codec, 4, 2, lengths[0], lengths)
    query = torch.randn(2, 4, 1, 64, device=DEVICE).half()
    monkeypatch.setattr(torch, "empty", infinite)
    fused = attend_kernels(method).fused_attend(codec, query, part, 0.125)
    assert_same(fused, reference_attend(codec, query.float(), part, 0.125), torch.float16)


@pytest.mark.parametrize("name", ["rtn-4", "fp8", "turboquant-3", "oscar-2"])
def test_tokens_quantized_one_by_one_in_other_surroundings(name: str) -> None:
    """bfloat16, queries that float16 does not hold, and autocast, as decoded blocks have them."""
    method, codec = make_codec(name, 4, 2, 64)
    part, fused = make_part(codec, 4, 2, 70, [70, 33]), attend_kernels(method).fused_attend
    query = torch.randn(2, 4, 1, 64, device=DEVICE).bfloat16()
    assert_same(fused(codec, query, part, 0.125), reference_attend(codec, query.float(), part, 0.125), torch.bfloat16)
    large = 1e5 * query.sign()
    if name in ("rtn-4", "fp8"):
        assert_same(fused(codec, large, part, 1e-6), attend_dequantized(codec, large, part, 1e-6), torch.bfloat16)
    assert fused(codec, large, part, 1e-6)[0].isfinite().all()
    for asked in (query, query.float()):
        expected = fused(codec, asked, part, 0.125)
        with torch.autocast(DEVICE, torch.bfloat16):
            ours = fused(codec, asked, part, 0.125)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_a_value_that_is_no_number_stays_one() -> None:
    method, codec = make_codec("fp8", 2, 1, 64)
    part, query = make_part(codec, 2, 1, 40, None), torch.randn(1, 2, 1, 64, device=DEVICE)
    part.value_codes.x[0, 0, 7, 3] = 0x7F
    out, _ = attend_kernels(method).fused_attend(codec, query, part, 0.125)
    assert out[..., 3].isnan().all()
    assert out.isfinite().sum() == 2 * 63


@pytest.mark.parametrize("name", ["rtn-4", "qjl", "turboquant-3", "klt-2", "commvq-1", "squat-pre-2"])
def test_positions_with_gaps_are_decoded(name: str) -> None:
    """Where kernels need tables of consecutive ones."""
    method, codec = make_codec(name, 4, 2, 64)
    if codec.key.space == "post_rope":
        codec.key_offset = torch.randn(2, 64, device=DEVICE)
    part = make_part(codec, 4, 1, 96, None)
    assert part.rotations is not None
    positions = part.rotations.positions.clone()
    positions[:, 40:] += 300
    gaps = replace(part, rotations=TokenRotations(part.rotations.rope, positions))
    backend = choose_backend(method, [codec], "fused", torch.device(DEVICE))
    query = torch.randn(1, 4, 1, 64, device=DEVICE)
    expected = reference_attend(codec, query, gaps, 0.125)
    assert_same(backend.attend_codes(codec, query, gaps, 0.125), expected, torch.float32)
    assert (expected[0] - backend.attend_codes(codec, query, part, 0.125)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("entries", [(127, -127), (-127, 127), (127, 127), (-127, -127)], ids=str)
@pytest.mark.parametrize("stages", [26, MAX_STAGES, MAX_STAGES + 1])
def test_sums_of_the_largest_codewords(stages: int, entries: tuple[int, int]) -> None:
    """Sums of two bytes per stage come close to what 16 bits hold, with and without a second pass."""
    method, codec = make_codec("commvq-1", 2, 1, 64, codebook_size=2, num_residuals=stages)
    part = make_part(codec, 2, 1, 20, None)
    codec.key.codebook.copy_(torch.tensor(entries).repeat(32))
    query = torch.randn(1, 2, 1, 64, device=DEVICE)
    expected = reference_attend(codec, query, part, 1e-4)
    assert_same(attend_kernels(method).fused_attend(codec, query, part, 1e-4), expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_value_bits_of_several_tiles(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split of several tiles, of which the last is partly filled, filled, or the only one."""
    monkeypatch.setattr(commvq_values, "_PER_SM", 0)
    method, codec = make_codec("commvq-1", 2, 1, 64)
    part = make_part(codec, 2, 3, 200, [200, 192, 3])
    query = torch.randn(3, 2, 1, 64, device=DEVICE).to(dtype)
    fused = attend_kernels(method).fused_attend(codec, query, part, 0.125)
    assert_same(fused, reference_attend(codec, query.float(), part, 0.125), dtype)


@pytest.mark.parametrize("name", ["kivi-2", "squat-pre-2", "qjl", "klt-2", "klt-tcq-2"])
def test_largest_scores_of_splits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large a maximum would cost precision only, and be seen by no other test."""
    torch.manual_seed(0)
    method, codec = make_codec(name, 4, 2, 64)
    part = make_part(codec, 4, 2, 192, [192, 96])
    seen: list[SplitScores] = []
    value_sum = attend_kernels(method).value_sum

    def spy(value: Any, scores: SplitScores, *rest: Any) -> PartialAttention:
        seen.append(scores)
        return value_sum(value, scores, *rest)

    monkeypatch.setattr(attend_kernels(method), "value_sum", spy)
    attend_kernels(method).fused_attend(codec, torch.randn(2, 4, 1, 64, device=DEVICE).half(), part, 0.125)
    for row, length in enumerate((192, 96)):
        for index in range(seen[0].num_splits):
            start, stop = (split * seen[0].tokens_per_split for split in (index, index + 1))
            scores = seen[0].values[row, :, :, start : min(stop, length)]
            expected = scores.amax(-1) if scores.shape[-1] else torch.full_like(scores.sum(-1), float("-inf"))
            assert torch.equal(seen[0].split_max[row, :, index], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["kivi-2", "kivi-4", "squat-2", "squat-pre-2", "qjl", "commvq-1", "commvq-2", "klt-2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_fused_attention_over_many_splits(name: str, dtype: torch.dtype, batch: int) -> None:
    torch.manual_seed(0)
    method, codec = make_codec(name, 32, 8, 128)
    # farther on, rounding of the model's own float32 angles shows: one product against a product of two
    length = 992 if dtype == torch.float32 else 5984
    part = make_part(codec, 32, batch, length, None if batch == 1 else [length, 512, 0])
    query = torch.randn(batch, 32, 1, 128, device=DEVICE).to(dtype)
    fused = attend_kernels(method).fused_attend(codec, query, part, 128**-0.5)
    # not the reference: it takes codes and zeros of values apart, and over many tokens their sums cancel
    assert_same(fused, exact_attend(codec, query, part, 128**-0.5), dtype)


@pytest.mark.parametrize("name", ["kivi-2", "commvq-1"])
def test_extreme_scales_neither_overflow_nor_vanish(name: str) -> None:
    torch.manual_seed(0)
    method, codec = make_codec(name, 2, 1, 64)
    part = make_part(codec, 2, 1, 64, None)
    for factor in (1e-4, 1e3):
        values = part.value_codes
        scaled = {k: (x.float() * factor).half() if k in ("scale", "zero") else x for k, x in values.tensors().items()}
        changed = EncodedTokens(part.key_codes, part.key_state, type(values)(**scaled), part.rotations, None)
        query = 8 * torch.randn(1, 2, 1, 64, device=DEVICE).half()
        fused = attend_kernels(method).fused_attend(codec, query, changed, 0.125)
        assert_same(fused, reference_attend(codec, query.float(), changed, 0.125), torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_zeros_of_a_large_key_bias_keep_small_queries(dtype: torch.dtype) -> None:
    """As in Qwen2.5, a few channels of the keys lie around 300; queries are small there and large elsewhere."""
    torch.manual_seed(0)
    method, codec = make_codec("kivi-2", 4, 2, 128)
    part = make_part(codec, 4, 1, 256, None)
    far = [0, 17, 63, 127]
    part.key_codes.zero[..., far] = torch.tensor([300.0, -250.0, 310.0, -280.0], device=DEVICE).half()
    query = 8 * torch.randn(1, 4, 1, 128, device=DEVICE)
    query[..., far] *= 2.0**-8
    query = query.to(dtype)
    fused = attend_kernels(method).fused_attend(codec, query, part, 128**-0.5)
    assert_same(fused, reference_attend(codec, query.float(), part, 128**-0.5), dtype)


def test_the_largest_scale_of_a_split_counts_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights times scales are kept in the range of float16 by the largest scale, here one of the last."""
    torch.manual_seed(0)
    monkeypatch.setattr("kvcli.methods.scalar.value_kernels._SCAN", 64)
    method, codec = make_codec("kivi-2", 4, 2, 128)
    part = make_part(codec, 4, 1, 64, None)
    part.value_codes.scale[:, :, -3:] *= 1e4
    query = torch.zeros(1, 4, 1, 128, device=DEVICE, dtype=torch.bfloat16)
    fused = attend_kernels(method).fused_attend(codec, query, part, 1.0)
    assert_same(fused, reference_attend(codec, query, part, 1.0), torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "head_dim", "settings", "reason"),
    [
        ("kivi-2", 64, {}, None),
        ("kivi-2", 64, {"group_size": 8}, "groups of 8 tokens"),
        ("squat-2", 96, {"group_size": 24, "residual_length": 24}, "groups of 24 tokens"),
        ("squat-pre-2", 64, {}, None),
        ("squat-pre-1", 72, {"group_size": 128, "residual_length": 128}, "keys before RoPE of head_dim 72 at 1 bits"),
        ("qjl", 64, {}, None),
        ("qjl", 64, {"num_outliers": 0}, None),
        ("qjl", 64, {"sketch_dim": 40, "initial_sketch_dim": 40}, "a sketch of 40 rows"),
        ("qjl", 64, {"outlier_sketch_dim": 24}, "a sketch of 24 rows"),
        ("qjl", 64, {"group_size": 4}, None),
        ("qjl", 64, {"group_size": 2}, "32 groups of channels"),
    ],
)
def test_unsupported_shapes_are_known_before_attention(
    name: str, head_dim: int, settings: dict[str, Any], reason: str | None
) -> None:
    method, codec = make_codec(name, 2, 1, head_dim, **settings)
    told = attend_kernels(method).unsupported(codec)
    assert told is None if reason is None else told.startswith(reason)


@pytest.mark.parametrize(
    ("stages", "size", "expected"),
    [
        (11, 64, [(0, 11)]),
        (21, 64, [(0, 21)]),
        (8, 256, [(0, 4), (4, 4)]),
        (200, 2, [(0, 67), (67, 67), (134, 66)]),  # sums of bytes must fit 16 bits
    ],
)
def test_passes_hold_their_tables_in_a_cache(stages: int, size: int, expected: list[tuple[int, int]]) -> None:
    config = make_config("commvq", {"num_residuals": stages, "codebook_size": size})
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
