"""CommVQ's encode kernels against its reference codecs: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from encoders import DEVICE, GPU, assert_same, both, many
from factories import clustered, fitted_keys, make_spec
from torch import Tensor

from kvcli.methods.commvq.codebook import times_i
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.fit_values import fit_values_fast, fit_values_paper, set_metric
from kvcli.methods.commvq.values import CommVQValueCodec
from kvcli.rope import from_pairs

pytest.importorskip("triton")

import triton
import triton.language as tl

from kvcli.methods.commvq.encode_keys_kernels import _norms
from kvcli.methods.commvq.encode_values_kernels import _SWEEP_TILE, _sweep_kernel
from kvcli.methods.commvq.search_kernels import _argmin, search, search_tile
from kvcli.token_blocks import TokenBlocks


def relative_error(x: Tensor, expected: Tensor) -> float:
    """Normalised squared error."""
    return float((x.float() - expected.float()).square().sum() / expected.float().square().sum())


def excess(codec: Any, x: Tensor, codes: Any) -> float:
    """By how many steps of the search's table the halved costs of codes exceed the least ones, at most."""
    tables = codec.search_tables()
    books = (codec.books() * codec.group_weight().unsqueeze(1)).double()
    residual = codec.problems(codec.normalise(x)[0]).double()
    steps = (tables.steps / tables.pow2_scales.unsqueeze(1)).double()
    first, second = (index.flatten(1, 2) for index in codec.unpack(codes))
    largest = 0.0
    for stage in range(books.shape[1]):
        book = books[:, stage]
        centres = (book.unsqueeze(2) + times_i(book).unsqueeze(1)).flatten(1, 2)
        code = first[..., stage] * book.shape[1] + second[..., stage]
        chosen = centres.gather(1, code.unsqueeze(-1).expand(-1, -1, centres.shape[-1]))
        costs = (residual - chosen).square().sum(-1) / 2
        least = (torch.cdist(residual, centres, compute_mode="donot_use_mm_for_euclid_dist") ** 2 / 2).amin(-1)
        rounding = 8e-6 * residual.norm(dim=-1) * centres.norm(dim=-1).amax(-1, keepdim=True)
        largest = max(largest, float(((costs - least - rounding) / steps[:, stage, None]).max()))
        residual = residual - chosen
    return largest


def check_keys(codec: Any, x: Tensor) -> None:
    """Nearly all codes equal, the rest near ties; norms equal up to ties of their rounding."""
    reference, ours = both(codec, x)
    assert ours.packed.shape == reference.packed.shape
    assert ours.norm.shape == reference.norm.shape
    assert torch.allclose(ours.norm.float(), reference.norm.float(), rtol=1e-3, atol=0)
    assert (ours.norm == reference.norm).float().mean() > 0.97
    same = [(a == b).float().mean() for a, b in zip(codec.unpack(reference), codec.unpack(ours), strict=True)]
    assert min(same) > 0.98
    assert excess(codec, x, ours) < 2.5
    expected, error = (relative_error(codec.decode(codes), x) for codes in (reference, ours))
    assert abs(error / expected - 1) < 1e-3


def commvq_keys(head_dim: int, rotary_dim: int | None = None, **changes: Any) -> Any:
    settings = {"key_iterations": 2, "num_residuals": 3, "codebook_size": 16, **changes}
    return fitted_keys(make_spec(head_dim, rotary_dim=rotary_dim), CommVQConfig(**settings), tokens=600)[0]


@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [
        (64, {}),
        (128, {"codebook_size": 64, "num_residuals": 2}),
        (80, {"key_norm": "per_head"}),
        (96, {"pairs_per_group": 16}),
        (16, {"pairs_per_group": 4, "codebook_size": 2, "num_residuals": 5}),
        (64, {"rotary_dim": 32, "codebook_size": 8}),
        (48, {"rotary_dim": 24, "pairs_per_group": 8}),
        (32, {"codebook_size": 128, "num_residuals": 2, "pairs_per_group": 8}),
    ],
)
def test_commvq_keys(head_dim: int, changes: dict[str, Any]) -> None:
    codec = commvq_keys(head_dim, **changes)
    for time, batch, dtype in ((many(65), 1, torch.float32), (33, 3, torch.bfloat16), (1, 1, torch.float16)):
        x = clustered(2 * batch, time, head_dim, seed=1).view(batch, 2, time, head_dim)
        check_keys(codec, x.to(DEVICE, dtype).transpose(1, 2).contiguous().transpose(1, 2))


def test_commvq_keys_in_large_tiles() -> None:
    """More tokens than small tiles are for, in a tile that the end of the tokens cuts."""
    codec = commvq_keys(16, codebook_size=4, num_residuals=2)
    check_keys(codec, clustered(2, 580, 16, seed=2).view(1, 2, 580, 16).to(DEVICE))


def test_warps_of_large_tiles_have_tokens_of_their_own() -> None:
    """Eight warps on 64 tokens were an illegal memory access on an H200."""
    for tokens in (1, 32, 512, 513, 10**6):
        tile = search_tile(tokens, 64, 32, torch.device(DEVICE))
        assert tile["BLOCK_T"] < 64 or 16 * tile["num_warps"] <= tile["BLOCK_T"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, which computes with NumPy
def test_commvq_keys_with_infinite_channels() -> None:
    """Such a token's codes are still entries of a codebook smaller than the tile; other tokens do not change."""
    codec = commvq_keys(16, codebook_size=2)
    x = clustered(2, 40, 16).view(1, 2, 40, 16).to(DEVICE)
    expected = both(codec, x)[1]
    x[:, :, 7, 3] = float("inf")
    codes = search(
        x,
        _norms(x, codec.search_tables().channel_weights, joint=True)[1],
        codec.search_tables(),
        joint=True,
        rotary_dim=16,
    )
    assert int(codes.min()) >= 0
    assert int(codes.max()) < 4
    others = torch.arange(40) != 7
    assert torch.equal(both(codec, x)[1].packed[:, :, others], expected.packed[:, :, others])


def test_commvq_keys_near_ties() -> None:
    """Centres whose costs differ by a few steps of the search: products need more than the eleven bits of float16."""
    codec = commvq_keys(32, num_residuals=1)
    codec.pair_weight.fill_(1)
    tables = codec.search_tables()
    margin = 2 * 2.5 * (tables.steps / tables.pow2_scales.unsqueeze(1)).double().unsqueeze(-1)
    words = codec.books()[:, 0].double()
    centres = (words.unsqueeze(2) + times_i(words).unsqueeze(1)).flatten(1, 2)
    rows = clustered(2, 400, 32, seed=3).double()
    for _ in range(20):  # to between the two nearest centres, whichever they are then
        near = torch.cdist(rows, centres).topk(2, largest=False).indices
        first, second = (centres.gather(1, near[..., i : i + 1].expand(-1, -1, 32)) for i in (0, 1))
        apart = first - second
        share = ((rows - (first + second) / 2) * apart).sum(-1, keepdim=True) / apart.square().sum(-1, keepdim=True)
        rows = rows - (share - margin / (2 * apart.square().sum(-1, keepdim=True))) * apart
    rows = rows.float()
    distances = torch.cdist(rows.double(), centres).topk(2, largest=False)
    assert (distances.values.diff() / distances.values[..., 1:]).median() < 2e-4
    x = from_pairs(rows.unflatten(-1, (-1, 2)), 32).unsqueeze(0).to(DEVICE)
    codec.to(DEVICE)
    norms = torch.full((1, 1, 400), 64**0.5, device=DEVICE)  # those by which `search` leaves x as it is
    codes = search(x, norms, codec.search_tables(), joint=True, rotary_dim=32).view(400, 2).T
    assert (codes.cpu() == distances.indices[..., 0]).float().mean() > 0.995


@triton.jit
def _argmin_kernel(x, out, size: tl.constexpr):
    rows, columns = tl.arange(0, 16), tl.arange(0, 16)
    tl.store(out + rows, _argmin(tl.load(x + rows[:, None] * 16 + columns[None, :]), size))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, which computes with NumPy
def test_argmin_is_a_minimum_and_a_valid_index() -> None:
    """One of equal ones; a column beyond the entries, as NaN may choose it, becomes the last one."""
    x = torch.randint(-99, 99, (16, 16), generator=torch.Generator().manual_seed(0)).float().to(DEVICE)
    x[0] = float("nan")
    out = torch.empty(16, dtype=torch.int32, device=DEVICE)
    _argmin_kernel[(1,)](x, out, 11)
    assert 0 <= int(out[0]) < 11
    minima = [{min(column, 10) for column in range(16) if row[column] == min(row)} for row in x.tolist()]
    assert any(10 in columns for columns in minima[1:])
    assert all(int(index) in columns for index, columns in zip(out[1:], minima[1:], strict=True))


def test_commvq_keys_of_uneven_size() -> None:
    """Pairs, heads and tokens far from the average: one fixed-point scale must fit all of them."""
    codec = commvq_keys(32, num_residuals=6)
    codec.pair_weight.copy_(torch.logspace(-2, 2, 16).expand(2, -1))
    x = clustered(2, 80, 32, seed=5).view(1, 2, 80, 32).clone()
    x[:, 0] *= 0.02
    x[:, 0, 7] *= 1e4
    x[:, 1, 9, 3] = 300
    check_keys(codec, x.to(DEVICE))


def test_commvq_keys_of_a_codebook_that_raises_the_residual() -> None:
    """All codewords alike, on the other side of the tokens: each stage makes the residual larger."""
    codec = commvq_keys(32, codebook_size=2, num_residuals=8)
    codec.codebook.fill_(127)
    codec.codebook[..., 0, :] = 126
    codec.codebook_scale.fill_(2 / 127)
    check_keys(codec, -torch.rand(1, 2, 16, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE))


def test_commvq_keys_without_size() -> None:
    codec = commvq_keys(32)
    x = clustered(2, 4, 32).view(1, 2, 4, 32).to(DEVICE)
    x[:, :, 1], x[:, :, 2], x[:, :, 3] = 0, 1e-12, 1e6
    reference, ours = both(codec, x)
    assert codec.decode(ours).isfinite().all()
    assert not codec.decode(ours)[:, :, 1:3].any()
    assert torch.allclose(ours.norm.float(), reference.norm.float(), rtol=1e-3)


def test_tables_follow_the_buffers() -> None:
    """A codec that is fitted or loaded again, in place, must not search with what was derived before."""
    codec, other = commvq_keys(32), commvq_keys(32, key_iterations=4)
    x = clustered(2, 40, 32).view(1, 2, 40, 32).to(DEVICE)
    check_keys(codec, x)
    codec.load_state_dict(other.state_dict())
    check_keys(codec, x)
    codec.pair_weight.mul_(torch.linspace(0.1, 3, 16, device=DEVICE))
    check_keys(codec, x)


def values(heads: int, time: int, head_dim: int, *, batch: int = 1, structured: bool, seed: int = 0) -> Tensor:
    """Values [batch, heads, time, head_dim] with channels of different size, random or around some centres."""
    x = clustered(1, batch * time, heads * head_dim, seed)[0]
    if not structured:
        x = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    x = x.view(batch, time, heads, head_dim) * torch.logspace(-1, 1, head_dim)
    return x.transpose(1, 2)


def commvq_values(head_dim: int, *, structured: bool = True, metric: bool = False, **changes: Any) -> CommVQValueCodec:
    spec = make_spec(head_dim)
    codec = CommVQValueCodec(spec, CommVQConfig(**{"bits": 2, "value_iterations": 3, **changes}).resolve(spec))
    samples = values(2, 1500, head_dim, structured=structured)[0]
    mixed = torch.randn(2, head_dim, head_dim, generator=torch.Generator().manual_seed(1)) + 3 * torch.eye(head_dim)
    mixed /= samples.abs().mean(1).unsqueeze(-1)
    with torch.no_grad():
        blocks = TokenBlocks.of(samples)
        set_metric(codec, blocks, mixed @ mixed.mT if metric else None)
        if codec.config.value_trainer == "fast":
            fit_values_fast(codec, blocks, 3)
        else:
            fit_values_paper(codec, blocks, 3, torch.Generator())
    return codec


def check_values(codec: CommVQValueCodec, x: Tensor, atol: float = 0) -> None:
    """Nearly all bits equal, the rest no worse; scales equal where bits are, up to ties of their rounding."""
    reference, ours = both(codec, x)
    assert ours.packed.shape == reference.packed.shape
    assert ours.scale.shape == reference.scale.shape
    bits = [codec.unpack(codes).flatten(0, 1) for codes in (reference, ours)]
    assert (bits[0] == bits[1]).float().mean() >= 0.99
    rows = codec.normalise(x)[0]
    decoded = [codec.in_metric(b @ codec.codebook.float() + codec.offset.float()) for b in bits]
    expected, error = (relative_error(y, rows) for y in decoded)
    assert error < expected * (1 + 1e-3)
    same = (bits[0] == bits[1]).all(1)
    assert same.float().mean() > 0.5
    scales = [codes.scale.flatten()[same].float() for codes in (reference, ours)]
    assert torch.allclose(*scales, rtol=2e-3, atol=atol)


@pytest.fixture
def wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time per operation, not per element."""
    if not GPU:
        wide = {"BLOCK_T": 256, "BLOCK_O": 128, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
        monkeypatch.setattr("kvcli.methods.commvq.encode_values_kernels._SWEEP_TILE", wide)


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [
        (64, {}),
        (80, {"bits": 1}),
        (80, {"bits": 1, "metric": True}),
        (96, {"value_code_bits": 150}),
        (16, {"value_sweeps": 0, "metric": True}),
    ],
)
def test_commvq_values(head_dim: int, changes: dict[str, Any], structured: bool) -> None:
    codec = commvq_values(head_dim, structured=structured, **changes)
    check_values(codec, values(2, many(250), head_dim, structured=structured, seed=1).to(DEVICE))


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("bits", [4, 6])
def test_commvq_values_with_hardly_any_bits(bits: int) -> None:
    """A single group changes no other one. Some tokens are nearly orthogonal to all that so few bits can represent."""
    x = values(2, 40, 16, structured=True, seed=3).to(DEVICE)
    check_values(commvq_values(16, value_code_bits=bits), x, atol=1e-3)


@pytest.mark.usefixtures("wide_tiles")
def test_commvq_values_of_orthogonal_rows() -> None:
    """Products between groups are noise of rounding, which must not set the scale of anything."""
    codec = commvq_values(16, value_code_bits=24)
    with torch.no_grad():
        codec.codebook.copy_(torch.linalg.qr(torch.randn(32, 24, generator=torch.Generator().manual_seed(0)))[0].T)
        codec.metric_root.copy_(torch.eye(16).expand(2, -1, -1))
        codec.offset.zero_()
    check_values(codec, values(2, 40, 16, structured=False, seed=3).to(DEVICE))


def test_settings_are_chosen_with_more_digits_than_float16_has() -> None:
    """Independent groups: the smallest |c|^2 - 2 <c, residual> of each, unless the next one is as good."""
    generator = torch.Generator().manual_seed(0)
    tokens, count = 50, _SWEEP_TILE["BLOCK_O"]
    settings = (torch.arange(16).unsqueeze(1) >> torch.arange(4)) & 1
    # large numbers that cancel
    left = 1000 + torch.randn(tokens, count, generator=generator)
    energies = 2000 * settings.sum(1) + 5 * torch.rand(count // 4, 16, generator=generator)
    bits = torch.randint(0, 2, (tokens, count), generator=generator).half()
    nothing, unit = torch.zeros(count, count).half(), torch.ones(1)
    tables = (x.to(DEVICE) for x in (left, nothing, unit, energies, torch.zeros(count, 64).half()))
    new_bits = bits.to(DEVICE)
    _sweep_kernel[(1,)](*tables, new_bits, tokens, SWEEPS=1, N=count, **_SWEEP_TILE)
    scores = energies.double() - 2 * left.double().unflatten(1, (-1, 4)) @ settings.T.double()
    least = scores.topk(2, largest=False)
    sure = least.values[..., 1] - least.values[..., 0] > 1e-2
    assert sure.float().mean() > 0.98
    chosen = new_bits.cpu().unflatten(1, (-1, 4))
    assert torch.equal(chosen[sure], settings[least.indices[..., 0]].half()[sure])


@pytest.mark.parametrize(("time", "batch", "dtype"), [(1, 1, torch.float16), (63, 3, torch.bfloat16)])
def test_commvq_values_in_awkward_shapes(time: int, batch: int, dtype: torch.dtype) -> None:
    x = values(2, time, 32, batch=batch, structured=True, seed=2)
    check_values(commvq_values(32), x.to(DEVICE, dtype))


def test_commvq_values_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than are encoded at once."""
    codec = commvq_values(16, value_sweeps=1)
    monkeypatch.setattr("kvcli.methods.commvq.encode_values_kernels._ENCODE_TOKENS", 1030)
    check_values(codec, values(2, 1050, 16, structured=True, seed=3).to(DEVICE))


def test_parts_are_equal_up_to_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small remainder would take as long as a whole part."""
    module, parts = "kvcli.methods.commvq.encode_values_kernels", []
    monkeypatch.setattr(f"{module}._ENCODE_TOKENS", 256)
    monkeypatch.setattr(
        f"{module}._encode_part", lambda codebook, encoder, tables, sweeps, rows, *rest: parts.append(len(rows))
    )
    for tokens, expected in ((290, [192, 98]), (256, [256]), (700, [256, 256, 188])):
        parts.clear()
        both(commvq_values(16), values(2, tokens, 16, structured=True).to(DEVICE))
        assert parts == expected


@pytest.mark.parametrize("bits", [132, 150])
def test_bits_that_fill_a_byte_are_zero(bits: int) -> None:
    codec = commvq_values(16, value_code_bits=bits)
    ours = both(codec, values(2, 40, 16, structured=True).to(DEVICE))[1]
    assert not (ours.packed[..., -1] >> bits % 8).any()


@pytest.mark.parametrize("part", ["key", "value"])
def test_no_tokens(part: str) -> None:
    codec = commvq_keys(16) if part == "key" else commvq_values(16)
    for codes in both(codec, torch.zeros(3, 2, 0, 16, device=DEVICE)):
        assert codes.num_tokens == 0
        assert len(codes.packed) == 3


def test_commvq_values_without_size() -> None:
    codec = commvq_values(16)
    x = values(2, 4, 16, structured=True).clone().to(DEVICE)
    x[:, :, 1], x[:, :, 2], x[:, :, 3] = 0, 1e-30, 1e9
    decoded = codec.decode(both(codec, x)[1])
    assert decoded.isfinite().all()
    assert not decoded[:, :, 1:3].any()


def test_the_papers_encoder_needs_no_kernels() -> None:
    codec = commvq_values(16, value_trainer="paper", value_hidden=16)
    assert_same(*both(codec, values(2, 30, 16, structured=True).to(DEVICE)))
