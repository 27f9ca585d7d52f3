"""How CommVQ's bits are shared among layers."""

import dataclasses

import pytest
import torch
from factories import make_spec
from torch import Tensor

from kvcli.methods.commvq.allocate import allocate, distortion, key_spectrum, square_root, value_spectrum
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.method import METHOD
from kvcli.methods.samples import LayerFisher

LAYERS = 6
SPEC = dataclasses.replace(make_spec(16), num_layers=LAYERS)
CONFIG = CommVQConfig(codebook_size=16).resolve(SPEC)


def positive(seed: int, size: int = 16) -> Tensor:
    x = torch.randn(2, size, size, generator=torch.Generator().manual_seed(seed))
    return x @ x.mT


def fishers(*costs: float) -> list[LayerFisher]:
    other = positive(5)
    return [LayerFisher(positive(1) * c, other, positive(2), positive(3) * c, other, positive(4)) for c in costs]


def total_bits(config: CommVQConfig) -> int:
    stage = 2 * config.bits_per_code
    if not config.layer_residuals:
        return LAYERS * (config.num_residuals * stage + config.value_code_bits)
    return sum(config.layer_residuals) * stage + sum(config.layer_value_bits)


@pytest.mark.parametrize("bits", [0.0, 3.0, 20.0, 200.0])
def test_distortion_is_that_of_reverse_water_filling(bits: float) -> None:
    variances = torch.tensor([4.0, 0.0, 1.0, 1e-3, 0.5], dtype=torch.float64)
    low, high = 1e-80, 10.0
    for _ in range(400):  # bisection on the logarithm of the level
        level = (low * high) ** 0.5
        rate = float((variances / level).clamp_min(1).log2().sum() / 2)
        low, high = (level, high) if rate > bits else (low, level)
    expected = float(torch.minimum(variances, torch.tensor(low).double()).sum() / 2)
    assert float(distortion(variances, torch.tensor([bits]))[0]) == pytest.approx(expected, rel=1e-6)


def test_costly_layers_get_more_bits_and_the_total_stays() -> None:
    config = allocate(SPEC, CONFIG, fishers(1, 1e-4, 1, 1e4, 1, 1))
    for counts in (config.layer_residuals, config.layer_value_bits):
        assert counts[3] > counts[0] > counts[1]
        assert abs(counts[0] - counts[4]) <= counts[4] / 3  # the last step goes to the first of equal layers
    assert total_bits(CONFIG) - 16 < total_bits(config) <= total_bits(CONFIG)
    assert config.resolve(SPEC) == config
    shapes = [METHOD.build(SPEC, config, i).key.codebook.shape[2] for i in range(LAYERS)]
    assert shapes == list(config.layer_residuals)
    assert METHOD.nominal_bits(SPEC, config)[0] == pytest.approx(sum(shapes) * 4 / 8 / LAYERS)


def test_no_choice_of_steps_is_better() -> None:
    """Moving one step from anywhere to anywhere never lowers the cost."""
    layers = fishers(1, 0.3, 5, 0.1, 2, 1)
    config = allocate(SPEC, CONFIG, layers)
    stage = 2 * CONFIG.bits_per_code
    assert stage == 16  # so that steps of keys and of values can be exchanged
    counts = [*config.layer_residuals, *(x // 16 for x in config.layer_value_bits)]
    spectra = [key_spectrum(x, SPEC) for x in layers] + [value_spectrum(x) for x in layers]

    def cost(index: int, steps: int) -> float:
        return float(distortion(spectra[index], torch.tensor([16 * steps]))[0])

    for source in range(len(counts)):
        for target in range(len(counts)):
            if source != target and counts[source] > 1 and counts[target] < 8:
                saved = cost(target, counts[target]) - cost(target, counts[target] + 1)
                lost = cost(source, counts[source] - 1) - cost(source, counts[source])
                assert saved <= lost * (1 + 1e-9)


def test_without_costs_or_when_asked_all_layers_are_equal() -> None:
    assert allocate(SPEC, CONFIG, None) == CONFIG
    uniform = CONFIG.model_copy(update={"allocation": "uniform"})
    assert allocate(SPEC, uniform, fishers(*[1.0] * LAYERS)) == uniform


def test_rescaling_that_the_model_does_not_see_changes_nothing() -> None:
    """Keys and values times invertible factors, and their costs times the inverses."""
    layers = fishers(1, 0.3, 5, 0.1, 2, 1)
    factors = torch.exp2(torch.randint(-6, 7, (2, 8), generator=torch.Generator().manual_seed(0)).float()).repeat(1, 2)
    mixing = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)).double() + 4 * torch.eye(16)
    inverse = torch.linalg.inv(mixing)

    def rescaled(x: LayerFisher) -> LayerFisher:
        outer = factors.unsqueeze(-1) * factors.unsqueeze(-2)
        value = inverse @ x.value.double() @ inverse.mT
        covariance = mixing.mT @ x.value_covariance.double() @ mixing
        changed = {"key": x.key / outer, "key_covariance": x.key_covariance * outer}
        return dataclasses.replace(x, **changed, value=value.float(), value_covariance=covariance.float())

    assert allocate(SPEC, CONFIG, [rescaled(x) for x in layers]) == allocate(SPEC, CONFIG, layers)


def test_square_root() -> None:
    matrix = positive(0)
    assert torch.allclose(square_root(matrix) @ square_root(matrix), matrix, atol=1e-4)


def test_per_layer_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="one number for each of 6 layers"):
        CommVQConfig(layer_residuals=(1, 2), layer_value_bits=(16, 16)).resolve(SPEC)
    with pytest.raises(ValueError, match="layer_residuals are from 1 to 256"):
        CommVQConfig(layer_residuals=(0,) * 6, layer_value_bits=(16,) * 6).resolve(SPEC)
    with pytest.raises(ValueError, match="layer_value_bits are from 1 to 512"):
        CommVQConfig(layer_residuals=(1,) * 6, layer_value_bits=(10**12,) * 6).resolve(SPEC)
    with pytest.raises(ValueError, match="one number for each of 6 layers"):
        CommVQConfig(layer_residuals=(1,) * 6).resolve(SPEC)
