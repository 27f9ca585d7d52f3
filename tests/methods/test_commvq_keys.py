"""CommVQ's key codebook: exact search, exact update, EM that never gets worse, commutation with RoPE."""

import itertools

import pytest
import torch
from factories import clustered, fitted_keys, make_spec, nmse
from torch import Tensor

from kvcli.methods.commvq import codebook as cb
from kvcli.methods.commvq import em
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.fit_keys import fit_keys, set_pair_weight
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.samples import LayerSamples, TokenBlocks
from kvcli.rope import Rotation, to_pairs


def as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


@pytest.mark.parametrize(("size", "width", "count"), [(4, 2, 1), (8, 6, 63), (16, 32, 257)])
def test_nearest_is_the_true_nearest_of_all_centres(size: int, width: int, count: int) -> None:
    torch.manual_seed(0)
    x, book = torch.randn(3, count, width), torch.randn(3, size, width)
    u = as_complex(book)
    every = u.unsqueeze(2) + 1j * u.unsqueeze(1)  # [P, N, N, g]
    distance = (as_complex(x)[:, :, None, None] - every.unsqueeze(1)).abs().square().sum(-1)
    first, second = cb.Search.of(book).nearest(x)
    chosen = distance.flatten(2).gather(2, (first * size + second).unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(chosen, distance.flatten(2).amin(-1), atol=1e-5)
    assert torch.allclose(cb.pair_table(book), every.abs().square().sum(-1), atol=1e-4)


def test_nearest_does_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, book = torch.randn(2, 100, 8), torch.randn(2, 8, 8)
    whole = cb.Search.of(book).nearest(x)
    monkeypatch.setitem(cb._BLOCK_ELEMENTS, "cpu", 1)
    one_by_one = cb.Search.of(book).nearest(x)
    assert all(torch.equal(a, b) for a, b in zip(whole, one_by_one, strict=True))


def test_update_is_the_least_squares_solution() -> None:
    torch.manual_seed(0)
    x, size = torch.randn(2, 500, 6, dtype=torch.float64), 5
    first, second = torch.randint(0, size, (2, 2, 500)).unbind(0)
    updated, dead = cb.update(x, first, second, torch.zeros(2, size, 6, dtype=torch.float64))
    for p in range(2):
        z = torch.zeros(500, size, dtype=torch.complex128)
        z[torch.arange(500), first[p]] += 1
        z[torch.arange(500), second[p]] += 1j
        expected = torch.linalg.lstsq(z, as_complex(x[p])).solution
        assert torch.allclose(as_complex(updated[p]), expected, atol=1e-6)
    assert not dead.any()


def test_update_survives_dead_rows_and_few_vectors() -> None:
    x, book = torch.randn(1, 2, 4), torch.randn(1, 16, 4)
    first, second = cb.Search.of(book).nearest(x)
    updated, dead = cb.update(x, first, second, book)
    assert updated.isfinite().all()
    assert dead.sum() >= 12
    assert torch.equal(updated[dead], book[dead])
    before = (x - cb.Search.of(book).centres(first, second)).square().sum()
    assert (x - cb.Search.of(updated).centres(first, second)).square().sum() <= before


def test_hard_em_never_raises_the_error() -> None:
    x = clustered(2, 600, 8)
    book = x[:, :16].clone()
    book[:, 8:] = 1e3  # rows that nothing will use: they have to be revived
    errors = []
    for _ in range(15):
        errors.append(em.hard_error(TokenBlocks.of(x), book))
        book = em.step(TokenBlocks.of(x), book)
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 0.5 * errors[0]
    assert not cb.update(x, *cb.Search.of(book).nearest(x), book)[1].any()  # all rows live


def test_annealed_em_equals_its_definition_and_converges() -> None:
    x, book = clustered(1, 300, 4), torch.randn(1, 4, 4)
    u = as_complex(book)
    every = (u.unsqueeze(2) + 1j * u.unsqueeze(1)).flatten(1, 2)
    distance = (as_complex(x).unsqueeze(2) - every.unsqueeze(1)).abs().square().sum(-1).sqrt()
    weights = torch.softmax(-distance / 0.5, dim=-1)
    z = torch.zeros(16, 4, dtype=torch.complex64)
    for a, b in itertools.product(range(4), range(4)):
        z[a * 4 + b, a] += 1
        z[a * 4 + b, b] += 1j
    s = weights.sum(1)[0]
    m = weights[0].T.to(torch.complex64) @ as_complex(x)[0]
    expected = torch.linalg.solve(z.conj().T @ (s[:, None] * z), z.conj().T @ m)  # Eq. 33
    assert torch.allclose(as_complex(em.soft_step(TokenBlocks.of(x), book, 0.5))[0], expected, atol=1e-3)
    generator = torch.Generator().manual_seed(0)
    data = TokenBlocks.of(clustered(1, 400, 8))
    annealed = em.fit_annealed(data, 8, 0, generator)
    hard = em.fit_hard(data, 8, 20, 10, torch.Generator().manual_seed(0))
    assert em.hard_error(data, annealed) < 1.3 * em.hard_error(data, hard)


@pytest.mark.parametrize(
    ("bits", "head_dim", "group", "residuals"),
    [(1, 128, 64, 11), (2, 128, 64, 21), (1, 128, 0, 5), (2, 128, 0, 11), (1, 64, 64, 5), (2, 64, 0, 11), (1, 8, 0, 1)],
)
def test_stages_follow_from_bits(bits: int, head_dim: int, group: int, residuals: int) -> None:
    config = CommVQConfig(bits=bits, pairs_per_group=group).resolve(make_spec(head_dim))
    assert config.num_residuals == residuals
    assert config.pairs_per_group == min(head_dim // 2, group or 32)


def test_heads_that_are_no_multiple_of_a_group_are_one_group() -> None:
    assert CommVQConfig().resolve(make_spec(96)).pairs_per_group == 48


def test_paper_configuration_costs_what_the_paper_says() -> None:
    spec = make_spec(128, 8)
    codec = CommVQKeyCodec(spec, CommVQConfig(bits=1, pairs_per_group=64).resolve(spec))
    assert codec.config.num_residuals * 6 / codec.config.pairs_per_group == 1.03125  # Eq. 21
    assert codec.bits_per_token() == 1.03125 * 1024 + 16


@pytest.mark.parametrize("norm", ["joint", "per_head"])
@pytest.mark.parametrize("group", [0, 4, 2])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_decode_finds_the_keys_again(norm: str, group: int, rotary_dim: int) -> None:
    spec = make_spec(rotary_dim=rotary_dim)
    config = CommVQConfig(codebook_size=16, pairs_per_group=group, num_residuals=4, key_norm=norm, key_iterations=8)  # type: ignore[arg-type]
    codec, keys = fitted_keys(spec, config)
    assert max(nmse(codec, keys)) < 0.15
    codes = codec.encode(keys.unsqueeze(0))
    assert codes.packed.shape[-1] == -(-codec.num_codes * 8 // 8)
    assert 8 * codes.nbytes == codec.bits_per_token() * keys.shape[1]


def test_more_stages_mean_less_error() -> None:
    errors = []
    for stages in (1, 2, 4):
        config = CommVQConfig(codebook_size=8, num_residuals=stages, key_iterations=6)
        codec, keys = fitted_keys(make_spec(), config)
        errors.append(sum(nmse(codec, keys)))
    assert errors[0] > errors[1] > errors[2]


def test_decoding_commutes_with_rotation() -> None:
    codec, keys = fitted_keys(make_spec(), CommVQConfig(codebook_size=8, num_residuals=2, key_iterations=4))
    angle = torch.randn(1, 1, keys.shape[1], 8)
    rotation = Rotation(angle.cos(), angle.sin())
    codes = codec.encode(keys.unsqueeze(0))
    decoded = codec.decode(codes)
    # rotate every codeword instead of the sum
    phase = torch.polar(torch.ones_like(angle), angle)[0, 0]
    first, second = codec.unpack(codes)
    books = as_complex(codec.books())
    total = torch.zeros(2, keys.shape[1], 8, dtype=torch.complex64)
    for stage, head in itertools.product(range(2), range(2)):
        rows = books[head, stage]
        total[head] += rows[first[head, 0, :, stage]] * phase + 1j * rows[second[head, 0, :, stage]] * phase
    total *= codec.gain(codes)[0, 0]
    assert torch.allclose(as_complex(to_pairs(rotation.apply(decoded)[0], 16).flatten(-2)), total, atol=1e-4)


def test_zero_and_huge_keys_stay_finite() -> None:
    codec, keys = fitted_keys(make_spec(), CommVQConfig(codebook_size=8, num_residuals=2, key_iterations=4))
    x = torch.stack((torch.zeros_like(keys[:, :5]), keys[:, :5] * 1e6, torch.full_like(keys[:, :5], 1e-12)))
    decoded = codec.decode(codec.encode(x))
    assert decoded.isfinite().all()
    assert not decoded[0].any()


def test_query_weights_follow_the_queries() -> None:
    q = torch.ones(4, 10, 16)
    q[..., 3] = q[..., 11] = 5  # pair 3
    keys = torch.randn(2, 50, 16, generator=torch.Generator().manual_seed(0))
    codec = CommVQKeyCodec(make_spec(), CommVQConfig().resolve(make_spec()))
    samples = LayerSamples(q, keys, keys, torch.arange(50))
    set_pair_weight(codec, samples.keys, samples, "queries")
    weight = codec.pair_weight
    assert weight.shape == (2, 8)
    assert weight.argmax(-1).tolist() == [3, 3]
    weighted = to_pairs(keys, 16) * weight.unsqueeze(1).unsqueeze(-1)
    assert torch.allclose(weighted.square().mean((1, 2, 3)), torch.ones(2))
    assert torch.allclose(weight[:, 3] / weight[:, 0], torch.full((2,), 5.0))


def test_groups_have_pairs_of_all_frequencies() -> None:
    """Pair j is coded by group j % groups: a change of it changes no other group's codes."""
    spec = make_spec(head_dim=32, num_kv_heads=1)
    config = CommVQConfig(pairs_per_group=4, codebook_size=16, num_residuals=2, key_norm="per_head").resolve(spec)
    codec = CommVQKeyCodec(spec, config)
    codec.randomize_(torch.Generator().manual_seed(0))
    keys = torch.randn(1, 1, 64, 32, generator=torch.Generator().manual_seed(1))
    before = codec.unpack(codec.encode(keys))[0]
    for pair in range(16):
        turned = keys.clone()
        turned[..., [pair, pair + 16]] *= -1  # the norm stays
        after = codec.unpack(codec.encode(turned))[0]
        differs = (after != before).flatten(1).any(1)
        assert differs.nonzero().flatten().tolist() == [pair % 4]


def test_groups_share_what_matters() -> None:
    """Where errors of few neighbouring pairs matter, all groups spend bits on them."""
    spec = make_spec(head_dim=32, num_kv_heads=1)
    keys = torch.randn(1, 1500, 32, generator=torch.Generator().manual_seed(0))
    keys[..., 12:16] *= 8
    keys[..., 28:32] *= 8
    errors = []
    for pairs in (16, 4):
        config = CommVQConfig(bits=2, pairs_per_group=pairs, codebook_size=16, key_iterations=6).resolve(spec)
        codec = CommVQKeyCodec(spec, config)
        fit_keys(codec, TokenBlocks.of(keys), config, torch.Generator().manual_seed(0))
        errors.append(nmse(codec, keys)[0])
    assert errors[1] < 1.5 * errors[0]
