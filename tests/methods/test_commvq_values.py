"""CommVQ's value codec: search that never gets worse, closed-form codebooks, both trainers, determinism."""

import itertools

import pytest
import torch
from factories import clustered, make_spec, nmse
from torch import Tensor

from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.fit_values import (
    fit_values_fast,
    fit_values_paper,
    least_squares_codebook,
    principal_bits,
    set_metric,
)
from kvcli.methods.commvq.tables import SWEEP_BITS
from kvcli.methods.commvq.values import CommVQValueCodec, sweep
from kvcli.methods.samples import TokenBlocks


def data(seed: int = 0) -> Tensor:
    """Correlated values [heads, tokens, head_dim] with channels of very different size."""
    return clustered(1, 3000, 32, seed).view(3000, 2, 16).transpose(0, 1) * torch.logspace(-2, 2, 16)


def fitted(**changes: object) -> CommVQValueCodec:
    spec = make_spec()
    codec = CommVQValueCodec(spec, CommVQConfig(**{"bits": 2, "value_iterations": 6, **changes}).resolve(spec))
    with torch.no_grad():
        set_metric(codec, TokenBlocks.of(data()), None)
        if codec.config.value_trainer == "fast":
            fit_values_fast(codec, TokenBlocks.of(data()), codec.config.value_iterations)
        else:
            fit_values_paper(codec, TokenBlocks.of(data()), codec.config.value_steps, torch.Generator().manual_seed(0))
    return codec


def test_sweep_never_raises_the_error_and_finds_joint_optima() -> None:
    torch.manual_seed(0)
    target, book = torch.randn(50, 12), torch.randn(10, 12)  # 10 rows: the last group is short
    bits = torch.randint(0, 2, (50, 10)).float()
    errors = [(target - bits @ book).square().sum().item()]
    for _ in range(6):
        residual = sweep(target, book, bits)
        assert torch.allclose(residual, target - bits @ book, atol=1e-4)
        errors.append(residual.square().sum().item())
    assert all(later <= earlier + 1e-4 for earlier, later in itertools.pairwise(errors))
    small = book[:SWEEP_BITS]
    settings = torch.tensor(list(itertools.product([0.0, 1.0], repeat=SWEEP_BITS)))
    best = (target.unsqueeze(1) - settings @ small).square().sum(-1).amin(1)
    one_group = torch.zeros(50, SWEEP_BITS)
    assert torch.allclose(sweep(target, small, one_group).square().sum(-1), best, atol=1e-4)


def test_codebook_is_the_least_squares_solution() -> None:
    torch.manual_seed(0)
    rows, bits = torch.randn(400, 5), torch.randint(0, 2, (400, 7)).float()
    book, offset = least_squares_codebook([(bits, rows)])
    expected = torch.linalg.lstsq(torch.cat((bits, torch.ones(400, 1)), dim=1), rows).solution
    assert torch.allclose(torch.cat((book, offset[None])), expected, atol=1e-3)


def test_initial_bits_are_a_quantizer_of_the_principal_components() -> None:
    rows = data().transpose(0, 1).flatten(1)
    rows = rows / rows.std(0)
    book, offset, blocks = principal_bits(TokenBlocks.of(rows, axis=0), 64)
    bits = blocks.whole()
    assert book.shape == (64, 32)
    assert bits.shape == (3000, 64)
    assert set(bits.unique().tolist()) == {0, 1}
    error = (rows - bits.float() @ book - offset).square().sum() / (rows - rows.mean(0)).square().sum()
    assert error < 0.15


@pytest.mark.parametrize(("bits", "limit"), [(2, 0.08), (1, 0.2)])
def test_fast_trainer_reaches_a_small_error(bits: int, limit: float) -> None:
    codec = fitted(bits=bits)
    assert max(nmse(codec, data()[:, 1000:])) < limit
    assert codec.bits_per_token() == 32 * bits + 16


def test_sweeps_lower_the_encoding_error() -> None:
    spec, trained = make_spec(), fitted()
    errors = []
    for sweeps in (0, 1, 3):
        codec = CommVQValueCodec(spec, trained.config.model_copy(update={"value_sweeps": sweeps}))
        codec.load_state_dict(trained.state_dict())
        errors.append(sum(nmse(codec, data())))
    assert errors[0] > errors[1] > errors[2]


def metric_error(values: Tensor, fisher: Tensor, metric: Tensor | None) -> float:
    """What coding errors of values cost, with codes fitted in some metric."""
    codec = CommVQValueCodec(make_spec(), CommVQConfig(bits=1, value_iterations=6).resolve(make_spec()))
    with torch.no_grad():
        set_metric(codec, TokenBlocks.of(values), metric)
        fit_values_fast(codec, TokenBlocks.of(values), codec.config.value_iterations)
        error = (codec.decode(codec.encode(values[None])) - values[None])[0]
    return float(torch.einsum("htd,hde,hte->", error, fisher, error))


def test_values_are_coded_so_that_errors_cost_least() -> None:
    values = data()
    mixing = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(3)) + torch.eye(16)
    mixing = mixing / values.std(1).unsqueeze(-1)
    fisher = mixing @ torch.diag(torch.logspace(-2, 2, 16)) @ mixing.mT
    assert metric_error(values, fisher, fisher) < 0.6 * metric_error(values, fisher, None)


def test_mixing_values_as_the_output_projection_undoes_changes_no_cost() -> None:
    values = data() * torch.logspace(2, -2, 16)  # channels that float16 can hold after mixing
    fisher = torch.diag_embed(torch.logspace(-2, 2, 16).expand(2, -1))
    mixing = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)) + 4 * torch.eye(16)
    inverse = torch.linalg.inv(mixing)
    mixed_fisher = inverse @ fisher @ inverse.mT
    expected = metric_error(values, fisher, fisher)
    assert metric_error(values @ mixing, mixed_fisher, mixed_fisher) == pytest.approx(expected, rel=0.05)


def test_paper_trainer_learns() -> None:
    untrained = fitted(value_trainer="paper", value_steps=1, value_hidden=64)
    trained = fitted(value_trainer="paper", value_steps=400, value_hidden=64)
    before, after = (sum(nmse(codec, data())) / 2 for codec in (untrained, trained))
    assert after < 0.35 < before
    codes = trained.encode(data()[None, :, :50])
    values = trained.decode(codes)
    norms = [
        trained.in_metric(x.transpose(1, 2).flatten(2).flatten(0, 1)).norm(dim=-1)
        for x in (values, data()[None, :, :50])
    ]
    assert torch.allclose(*norms, rtol=2e-3)  # the paper's decoding restores each token's norm


@pytest.mark.parametrize("trainer", ["fast", "paper"])
def test_encoding_is_deterministic(trainer: str) -> None:
    codec = fitted(value_trainer=trainer, value_steps=20)
    x = data()[None, :, :70]
    first = codec.encode(x)
    torch.manual_seed(123)
    again = codec.encode(x)
    assert all(torch.equal(a, b) for a, b in zip(first.tensors().values(), again.tensors().values(), strict=True))


def test_zero_values_decode_to_zero() -> None:
    codec = fitted()
    x = torch.zeros(1, 2, 3, 16)
    decoded = codec.decode(codec.encode(x))
    assert not decoded.any()
    huge = codec.decode(codec.encode(torch.full((1, 2, 3, 16), 1e9)))
    assert huge.isfinite().all()


@pytest.mark.parametrize("bits", [1, 2])
def test_more_rounds_never_encode_worse(bits: int) -> None:
    spec, values = make_spec(head_dim=16), clustered(2, 3000, 16)
    errors = []
    for rounds in (1, 2, 6):
        codec = CommVQValueCodec(spec, CommVQConfig(bits=bits).resolve(spec))
        set_metric(codec, TokenBlocks.of(values), None)
        fit_values_fast(codec, TokenBlocks.of(values), rounds)
        errors.append(codec.unit_error(codec.normalise(values.unsqueeze(0))[0]))
    assert errors[2] <= errors[1] * (1 + 1e-6) <= errors[0] * (1 + 1e-5)
