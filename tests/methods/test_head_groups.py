"""CommVQ with a value code and a key norm per group of kv heads: as codecs of these heads alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from contract import CodecContract
from factories import CONFIG, clustered, make_spec
from torch import Tensor

from kvcli.errors import UsageError
from kvcli.methods.commvq.allocate import allocate
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.method import METHOD
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import FitReport, Method
from kvcli.methods.samples import LayerFisher, LayerSamples
from kvcli.rope import Rotation

SPEC = make_spec(num_kv_heads=4)
PART = replace(SPEC, num_heads=2, num_kv_heads=2)
GROUPED = CONFIG.model_copy(update={"value_groups": 2})


class TestGroups(CodecContract):
    """The laws of codecs."""

    @pytest.fixture
    def method(self) -> Method:
        return replace(METHOD, example_settings={**METHOD.example_settings, "value_groups": 2})


def samples() -> LayerSamples:
    """Of four kv heads, the last two with a bias."""
    generator = torch.Generator().manual_seed(0)
    keys, values = clustered(4, 2000, 16), clustered(4, 2000, 16, seed=1)
    bias = torch.zeros(4, 16)
    bias[2:] = 5 * torch.randn(2, 16, generator=generator)
    cost = torch.diag_embed(torch.rand(4, 16, generator=generator))
    fisher = LayerFisher(cost, cost, cost, cost.flip(0), cost, cost)
    queries = torch.randn(4, 100, 16, generator=generator)
    return LayerSamples(queries, keys + bias.unsqueeze(1), values, torch.arange(2000), None, bias, fisher)


def fit(spec: Any, config: CommVQConfig, x: LayerSamples, generator: torch.Generator) -> tuple[LayerCodec, FitReport]:
    codec = METHOD.build(spec, config, 0)
    assert METHOD.fit is not None
    with torch.no_grad():
        return codec, METHOD.fit(codec, x, x, config, generator)


@pytest.fixture(scope="module")
def grouped() -> tuple[LayerCodec, FitReport]:
    return fit(SPEC, GROUPED, samples(), torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def alone() -> list[tuple[LayerCodec, FitReport]]:
    """Both groups, each fitted without the other one."""
    generator = torch.Generator().manual_seed(0)
    return [fit(PART, CONFIG, samples().of_heads(group, 2), generator) for group in range(2)]


def test_samples_of_a_group_are_those_of_its_heads() -> None:
    whole, part = samples(), samples().of_heads(1, 2)
    assert whole.key_bias is not None
    assert whole.fisher is not None
    assert part.key_bias is not None
    assert part.fisher is not None
    pairs = [(whole.q, part.q), (whole.k, part.k), (whole.v, part.v), (whole.key_bias, part.key_bias)]
    pairs += zip(vars(whole.fisher).values(), vars(part.fisher).values(), strict=True)
    assert all(torch.equal(ours[2:], theirs) for ours, theirs in pairs)


def test_a_group_is_fitted_to_its_heads_alone(grouped: Any, alone: Any) -> None:
    codec, report = grouped
    for group, (expected, _) in enumerate(alone):
        state = codec.of_rank(group, 2).state_dict()
        torch.testing.assert_close(state, expected.state_dict(), rtol=0, atol=0)
    errors = [x for _, of_group in alone for x in of_group.metrics["key_nmse"]]
    assert report.metrics["key_nmse"] == errors
    assert report.metrics["key_offset"] == ", ".join(of_group.metrics["key_offset"] for _, of_group in alone)
    assert len(report.metrics["value_nmse"]) == 4


def test_reports_of_a_poor_fit_are_those_of_all_groups() -> None:
    few, generators = samples().select(torch.arange(60)), [torch.Generator().manual_seed(0) for _ in range(2)]
    _, report = fit(SPEC, GROUPED.model_copy(update={"codebook_size": 64}), few, generators[0])
    config = CONFIG.model_copy(update={"codebook_size": 64})
    alone = [fit(PART, config, few.of_heads(group, 2), generators[1])[1] for group in range(2)]
    assert report.metrics["dead_key_rows"] == sum(x.metrics["dead_key_rows"] for x in alone) > 0
    assert len(report.warnings) == sum(len(x.warnings) for x in alone) > 0
    assert report.warnings[0] == f"value group 0, {alone[0].warnings[0]}"


def test_what_a_model_holds_and_random_state_are_those_of_all_groups() -> None:
    codec = METHOD.build(SPEC, GROUPED, 0)
    for whole in (codec.key, codec.value):
        whole.make_kernel_tables()
        whole.randomize_(torch.Generator().manual_seed(0))
        assert all(part.codebook.any() for part in whole.parts)
        buffers = sum(x.nbytes for x in whole.buffers())
        assert whole.codebook_bytes() == sum(part.codebook_bytes() for part in whole.parts) > buffers


def test_codes_are_those_of_each_group(grouped: Any, alone: Any) -> None:
    codec, _ = grouped
    x = samples().k[:, :30].unflatten(1, (2, 15)).transpose(0, 1)
    for name in ("key", "value"):
        whole = getattr(codec, name)
        codes = whole.encode(x)
        parts = [getattr(part, name) for part, _ in alone]
        expected = [part.encode(heads) for part, heads in zip(parts, x.chunk(2, 1), strict=True)]
        for ours, theirs in zip(whole.split_codes(codes), expected, strict=True):
            torch.testing.assert_close(vars(ours), vars(theirs), rtol=0, atol=0)
        decoded = torch.cat([part.decode(y) for part, y in zip(parts, expected, strict=True)], dim=1)
        torch.testing.assert_close(whole.decode(codes), decoded, rtol=0, atol=0)
        assert whole.peak(x, codes) == max(part.peak(x, y) for part, y in zip(parts, expected, strict=True))


def test_keys_with_an_offset_are_decoded_and_scored_alike(grouped: Any) -> None:
    codec, _ = grouped
    assert codec.offset is not None
    angles = torch.randn(1, 1, 15, 8)
    rotation, query = Rotation(angles.cos(), angles.sin()), torch.randn(2, 4, 3, 16)
    codes = codec.key.encode(samples().k[:, :30].unflatten(1, (2, 15)).transpose(0, 1) - codec.offset)
    keys = codec.decode_keys(codes, None, rotation, torch.float32)
    torch.testing.assert_close(keys, rotation.apply(codec.key.decode(codes) + codec.offset))
    scores = codec.scores(query, codes, None, rotation)
    torch.testing.assert_close(scores, query @ keys.mT, rtol=1e-4, atol=1e-4)


def test_kernels_encode_each_group(grouped: Any) -> None:
    codec, _ = grouped
    parts, x = [codec.of_rank(group, 2) for group in range(2)], samples().v[None, :, :20]
    codec.use_kernels(True)
    try:
        assert all(part.key.fused and part.value.fused for part in parts)
        for name in ("key", "value"):
            ours = getattr(codec, name).split_codes(getattr(codec, name).encode(x))
            theirs = [getattr(part, name).encode(heads) for part, heads in zip(parts, x.chunk(2, 1), strict=True)]
            for codes, expected in zip(ours, theirs, strict=True):
                torch.testing.assert_close(vars(codes), vars(expected), rtol=0, atol=0)
    finally:
        codec.use_kernels(False)


def test_groups_cost_a_norm_and_a_scale_each() -> None:
    def bits(**changes: Any) -> tuple[float, float]:
        codec = METHOD.build(SPEC, CONFIG.model_copy(update=changes), 0)
        return codec.key.bits_per_token(), codec.value.bits_per_token()

    joint, grouped = bits(), bits(value_groups=4)
    assert [more - less for more, less in zip(grouped, joint, strict=True)] == [48, 48]
    assert bits(value_groups=4, key_norm="per_head")[0] == bits(key_norm="per_head")[0]


@pytest.mark.parametrize("bits", [0.75, 1, 1.3])
def test_bits_are_shared_evenly_in_words_of_a_group(bits: float) -> None:
    config = CommVQConfig(bits=bits, value_groups=4).resolve(SPEC)
    assert config.value_code_bits % 64 == 0
    assert config.value_code_bits == pytest.approx(64 * bits, abs=32)
    spec = replace(SPEC, num_layers=3)
    cost: Tensor = torch.eye(16).repeat(4, 1, 1)
    fisher = [LayerFisher(*[x * cost] * 6) for x in (0.1, 1, 9)]
    shares = allocate(spec, CommVQConfig(bits=2, value_groups=4).resolve(spec), fisher).layer_value_bits
    assert len(set(shares)) > 1
    assert all(share % 64 == 0 for share in shares)


def test_a_layer_whose_costs_are_in_one_group_gets_more_bits() -> None:
    """Of two layers with the same channels, one has the large ones in one head, which gets a quarter of the bits."""
    sizes = torch.cat((torch.full((16,), 100.0), torch.full((48,), 1e-3)))
    even, uneven = (torch.diag_embed(x) for x in (sizes.view(16, 4).T, sizes.view(4, 16)))
    unit = torch.eye(16).repeat(4, 1, 1)
    fisher = [LayerFisher(unit, unit, unit, x, x, unit) for x in (even, uneven)]
    spec = replace(SPEC, num_layers=2)

    def shares(groups: int) -> tuple[int, ...]:
        return allocate(spec, CommVQConfig(bits=2, value_groups=groups).resolve(spec), fisher).layer_value_bits

    joint, grouped = shares(1), shares(4)
    assert abs(joint[0] - joint[1]) <= 16
    assert grouped[1] > 2 * grouped[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"value_groups": 3}, "value_groups 3 does not divide the 4 kv heads"),
        ({"value_groups": 2, "value_code_bits": 63}, "does not divide the value bits"),
        ({"value_groups": 2, "layer_value_bits": (63,), "layer_residuals": (2,)}, "does not divide the value bits"),
    ],
)
def test_groups_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        METHOD.build(SPEC, CommVQConfig(**settings), 0)


@pytest.mark.parametrize(("groups", "ranks"), [(1, 2), (2, 4), (4, 3)])
def test_ranks_that_do_not_divide_groups_are_refused(groups: int, ranks: int) -> None:
    codec = METHOD.build(SPEC, CONFIG.model_copy(update={"value_groups": groups}), 0)
    with pytest.raises(UsageError, match=f"{ranks} ranks cannot divide codes of {4 // groups} kv heads"):
        codec.of_rank(0, ranks)


def test_a_rank_can_have_several_groups() -> None:
    codec = METHOD.build(SPEC, CONFIG.model_copy(update={"value_groups": 4}), 0)
    codec.key_offset = torch.arange(4.0).unsqueeze(1).expand(4, 16)
    part = codec.of_rank(1, 2)
    assert [*part.value.parts] == [*codec.value.parts[2:]]
    assert (part.key.spec.num_heads, part.key.spec.num_kv_heads) == (2, 2)
    assert part.key_offset is not None
    assert part.key_offset[:, 0].tolist() == [2, 3]
