"""KLT: fields of bits and how heads share them, and the search of a trellis."""

import itertools
import math
from functools import cache

import pytest
import torch
from factories import make_spec

from kvcli.methods.klt import trellis
from kvcli.methods.klt.codec import KLTKey
from kvcli.methods.klt.fields import BANDS, SCALAR, TRELLIS, Code, Fields, share

CODES = pytest.mark.parametrize("code", [SCALAR, TRELLIS], ids=["scalar", "trellis"])


@cache
def fit_bytes(fields: Fields, first: int = 8) -> bool:
    """Whether fields fill bytes, of the first of which so many bits are left, by trying every set for that byte."""
    if not fields:
        return not first or first == 8
    for count in range(len(fields) + 1):
        for chosen in itertools.combinations(range(len(fields)), count):
            if sum(fields[i] for i in chosen) == first:
                others = tuple(x for i, x in enumerate(fields) if i not in chosen)
                if not others or fit_bytes(others):
                    return True
    return False


@cache
def allocations(code: Code, num_bytes: int) -> list[Fields]:
    """Every number of bits from 0 to 8 of 8 bands, most first, that fits so many bytes."""
    descending = itertools.combinations_with_replacement(range(8, -1, -1), BANDS)
    found = []
    for bits in descending:
        fields = tuple(x - code.trellis for x in bits if x > code.trellis)
        bands = sum(x > 0 for x in bits)
        if sum(bits) == 8 * num_bytes and bands > code.trellis and fit_bytes(fields, 8 - code.trellis * bands):
            found.append(bits)
    return found


@CODES
@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4])
def test_fields_fill_bytes_and_none_crosses_one(code: Code, num_bytes: int) -> None:
    ways = {(*fields, *[0] * (BANDS - len(fields))) for fields in code.all_fields(num_bytes)}
    assert ways == {*allocations(code, num_bytes)}
    for fields in code.all_fields(num_bytes):
        taken = [*range(len(fields) * code.trellis)]
        for bits, (byte, first) in zip(fields, code.places(fields), strict=True):
            own = bits - code.trellis
            assert first + own <= 8
            taken += [8 * byte + bit for bit in range(first, first + own)]
        assert sorted(taken) == [*range(8 * num_bytes)]


@pytest.mark.parametrize("fields", [(), (4,), (3, 5), (6, 5, 5), (9, 7), (8, 0), (16,), (2,) * 12])
def test_fields_that_do_not_fill_bytes_are_refused(fields: Fields) -> None:
    with pytest.raises(ValueError, match=r"do not fill whole bytes, at most 8 of them, most bits first"):
        SCALAR.places(fields)
    with pytest.raises(ValueError, match="do not fill whole bytes"):
        KLTKey(make_spec(), [(4, 4), fields])


def test_fields_that_do_not_fit_beside_the_bits_of_a_trellis_are_refused() -> None:
    assert SCALAR.places((8, 8))
    for fields in ((8, 8), (8,)):
        with pytest.raises(ValueError, match=r"do not fill whole bytes.*in a trellis two or more"):
            TRELLIS.places(fields)


@CODES
@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_the_best_fields_have_the_least_error_of_all(code: Code, num_bytes: int, spread: float) -> None:
    costs = torch.randn(BANDS, generator=torch.Generator().manual_seed(num_bytes), dtype=torch.float64)
    costs = costs.mul(spread).exp().sort(descending=True).values
    error, fields = code.best_fields(costs, num_bytes)
    table = torch.tensor(code.distortion, dtype=torch.float64)
    errors = table[torch.tensor(allocations(code, num_bytes))] @ costs
    assert error == pytest.approx(float(errors.min()))
    padded = torch.tensor([*fields, *[0] * (BANDS - len(fields))])
    assert error == pytest.approx(float(table[padded] @ costs))


@pytest.mark.parametrize("bits", [1.0, 1.34, 2.0, 2.25, 3.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_heads_share_bits_with_the_least_error(bits: float, seed: int) -> None:
    """Against all numbers of bytes of 3 heads."""
    generator = torch.Generator().manual_seed(seed)
    costs = [
        (torch.randn(BANDS, generator=generator, dtype=torch.float64) * 2 + 2 * head).exp().sort(descending=True).values
        for head in range(3)
    ]
    chosen = share(SCALAR, costs, bits)
    total = round(3 * bits)
    assert sum(map(sum, chosen)) == 8 * total
    errors = [[SCALAR.best_fields(x, count)[0] for count in range(1, 5)] for x in costs]
    ways = [ways for ways in itertools.product(range(4), repeat=3) if sum(ways) + 3 == total]
    least = min(sum(of_head[way] for of_head, way in zip(errors, ways_, strict=True)) for ways_ in ways)
    ours = sum(SCALAR.best_fields(x, sum(fields) // 8)[0] for x, fields in zip(costs, chosen, strict=True))
    assert ours == pytest.approx(least)
    assert [SCALAR.best_fields(x, sum(fields) // 8)[1] for x, fields in zip(costs, chosen, strict=True)] == chosen


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_of_heads_share_bits_evenly_with_the_least_error(groups: int) -> None:
    """Against all numbers of bytes of two layers of 4 heads, of which groups of heads have equally many."""
    generator = torch.Generator().manual_seed(0)
    costs = torch.randn(8, BANDS, generator=generator, dtype=torch.float64).mul(3).exp().sort(-1, True).values
    chosen = share(SCALAR, [*costs], 2.2, 4 // groups, groups)
    counts = [sum(fields) // 8 for fields in chosen]
    total = 8 + (round(2.2 * 8) - 8) // groups * groups
    assert sum(counts) == total
    errors = [[SCALAR.best_fields(x, count)[0] for count in range(1, 5)] for x in costs]

    def even(layer: tuple[int, ...]) -> bool:
        return len({sum(layer[first : first + 4 // groups]) for first in range(0, 4, 4 // groups)}) == 1

    layers = [way for way in itertools.product(range(1, 5), repeat=4) if even(way)]
    by_layer = [
        {n: min(cost(way, errors[first : first + 4]) for way in layers if sum(way) == n) for n in {*map(sum, layers)}}
        for first in (0, 4)
    ]
    least = min(x + by_layer[1][total - n] for n, x in by_layer[0].items() if total - n in by_layer[1])
    assert even(tuple(counts[:4]))
    assert even(tuple(counts[4:]))
    assert cost(tuple(counts), errors) == pytest.approx(least)


def cost(counts: tuple[int, ...], errors: list[list[float]]) -> float:
    return sum(of_head[count - 1] for of_head, count in zip(errors, counts, strict=True))


@pytest.mark.parametrize("bits", range(1, 9))
def test_steps_and_errors_are_those_of_a_normal_variable(bits: int) -> None:
    """By integration; no other step has a smaller error."""
    x = torch.linspace(-8, 8, 160_001, dtype=torch.float64)
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])

    def error(step: float) -> float:
        half = (2**bits - 1) / 2
        decoded = ((x / step + half).round().clamp(0, 2 * half) - half) * step
        return float(((x - decoded).square() * density).sum())

    step, least = SCALAR.steps[bits], SCALAR.distortion[bits]
    assert error(step) == pytest.approx(least, rel=0.01)
    assert min(error(step * factor) for factor in (0.94, 0.97, 1.03, 1.06)) > 0.998 * error(step)


@pytest.mark.parametrize("bits", range(1, 9))
def test_steps_and_errors_of_a_trellis_are_those_of_normal_variables(bits: int) -> None:
    x = torch.randn(128, 200, generator=torch.Generator().manual_seed(0))

    def error(step: float) -> float:
        middle = (2 ** (bits + 1) - 1) / 2
        chosen, levels = trellis.search(x / step + middle, torch.full_like(x, 2 ** (bits - 1) - 1))
        decoded = (4 * levels + trellis.subsets(chosen) - middle) * step
        return float((decoded - x).square().mean())

    step, least = TRELLIS.steps[bits], TRELLIS.distortion[bits]
    assert error(step) == pytest.approx(least, rel=0.07)
    assert min(error(0.9 * step), error(1.1 * step)) > error(step)
    assert least < 0.87 * SCALAR.distortion[bits]


@pytest.mark.parametrize("channels", [1, 2, 3, 5, 8, 12])
def test_a_search_of_few_channels_finds_the_least_error_of_all_ways(channels: int) -> None:
    y = 4 * torch.rand(channels, 100, generator=torch.Generator().manual_seed(0)) + 2
    bits, levels = trellis.search(y, torch.ones_like(y))
    found = (4 * levels + trellis.subsets(bits) - y).square().sum(0)
    least = torch.full_like(found, float("inf"))
    for way in itertools.product((0, 1), repeat=channels):
        subset = trellis.subsets(torch.tensor(way)[:, None])
        level = ((y - subset) / 4).round().clamp(0, 1)
        least = torch.minimum(least, (4 * level + subset - y).square().sum(0))
    torch.testing.assert_close(found, least)


def test_the_state_that_is_found_is_nearly_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.randn(64, 2000, generator=torch.Generator().manual_seed(0)) / TRELLIS.steps[2] + 3.5
    errors = []
    for lead in (trellis.LEAD, 64):  # with 64, every state is tried
        monkeypatch.setattr(trellis, "LEAD", lead)
        bits, levels = trellis.search(y, torch.ones_like(y))
        errors.append(float((4 * levels + trellis.subsets(bits) - y).square().mean()))
    assert errors[1] < errors[0] < 1.015 * errors[1]


def test_bits_and_levels_are_chosen_together() -> None:
    """Every way to 12 channels from one state, so that the search itself is exact."""
    y = 6 * torch.rand(12, 20, generator=torch.Generator().manual_seed(1)) - 1
    bits, levels = trellis.search(y, torch.full_like(y, 1.0))
    assert ((levels >= 0) & (levels <= 1)).all()
    assert ((bits == 0) | (bits == 1)).all()
    found = (4 * levels + trellis.subsets(bits) - y).square().sum(0)
    for way in itertools.product((0, 1), repeat=8):  # no other bits of 8 channels after the fourth are better
        other = torch.cat((bits[:4], torch.tensor(way)[:, None].expand(-1, 20)))
        subset = trellis.subsets(other)
        level = ((y - subset) / 4).round().clamp(0, 1)
        same = (other[-4:] == bits[-4:]).all(0)  # the state at the start is another one
        assert ((4 * level + subset - y).square().sum(0)[same] >= found[same] - 1e-4).all()
