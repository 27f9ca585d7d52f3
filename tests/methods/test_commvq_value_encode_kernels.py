"""CommVQ's value descent against its reference codec: on a GPU if there is one, else in Triton's interpreter."""

from typing import Any

import pytest
import torch
from encoders import DEVICE, GPU, assert_same, both, many, relative_error
from factories import clustered, make_spec
from torch import Tensor

from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.encode_values_kernels import _SWEEP_TILE, _sweep_kernel
from kvcli.methods.commvq.fit_values import fit_values_fast, fit_values_paper, set_metric
from kvcli.methods.commvq.values import CommVQValueCodec
from kvcli.methods.samples import TokenBlocks


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
@pytest.mark.parametrize(
    ("head_dim", "changes", "structured"),
    [
        (64, {}, False),
        (80, {"bits": 1}, False),
        (80, {"bits": 1, "metric": True}, True),
        (96, {"value_code_bits": 150}, True),
        (16, {"value_sweeps": 0, "metric": True}, False),
        (16, {"value_sweeps": 0, "metric": True}, True),
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


def test_no_tokens() -> None:
    for codes in both(commvq_values(16), torch.zeros(3, 2, 0, 16, device=DEVICE)):
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
