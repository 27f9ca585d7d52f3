"""CommVQ's key search against its reference codec: on a GPU if there is one, else in Triton's interpreter."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from encoders import DEVICE, both, many, relative_error
from factories import clustered, fitted_keys, make_spec
from torch import Tensor

from kvcli.methods.commvq.attend_kernels import unsupported
from kvcli.methods.commvq.codebook import times_i
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.encode_keys_kernels import _norms
from kvcli.methods.commvq.method import METHOD
from kvcli.methods.commvq.search_kernels import _argmin, search, search_tile
from kvcli.rope import from_pairs


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
    for time, batch, dtype in ((many(33), 1, torch.float32), (17, 2, torch.bfloat16), (1, 1, torch.float16)):
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


def test_a_mean_that_all_codewords_share_does_not_coarsen_the_search() -> None:
    codec = commvq_keys(32)
    codec.codebook //= 8
    steps = codec.search_tables().steps
    codec.codebook += 100
    assert (codec.search_tables().steps < 1.2 * steps).all()


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


def test_no_tokens() -> None:
    for codes in both(commvq_keys(16), torch.zeros(3, 2, 0, 16, device=DEVICE)):
        assert codes.num_tokens == 0
        assert len(codes.packed) == 3


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "changes", "reason"),
    [
        (64, 64, {}, None),
        (128, 128, {"pairs_per_group": 8}, None),
        (256, 256, {"codebook_size": 256}, None),
        (80, 80, {}, "CommVQ keys of head_dim 80 in groups of 40 pairs"),
        (96, 96, {}, "CommVQ keys of head_dim 96 in groups of 48 pairs"),
        (32, 32, {}, "CommVQ keys of head_dim 32 in groups of 16 pairs"),
        (64, 64, {"pairs_per_group": 4}, "CommVQ keys of head_dim 64 in groups of 4 pairs"),
        (128, 64, {}, "keys that are rotated in part of their channels"),
        (64, 64, {"value_code_bits": 24}, "24 value bits; choose a multiple of 16"),
    ],
)
def test_unsupported_shapes_are_known_before_the_first_token(
    head_dim: int, rotary_dim: int, changes: dict[str, Any], reason: str | None
) -> None:
    spec = make_spec(head_dim, rotary_dim=rotary_dim)
    assert unsupported(METHOD.build(spec, CommVQConfig(**changes), 0)) == reason
