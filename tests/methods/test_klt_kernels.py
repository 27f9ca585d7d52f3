"""KLT's kernels beside the reference: tokens encoded and decoded, queries of tiles, attention over codes."""

import dataclasses
from typing import Any

import pytest
import torch
from factories import make_spec
from parts import DEVICE, assert_same, make_codec, make_part
from torch import Tensor

from kvcli.attention.reference import attend_codes
from kvcli.kernels import splits
from kvcli.kernels.launch import Tiles
from kvcli.kernels.words import FIELD_SCALE
from kvcli.methods.klt import token_kernels
from kvcli.methods.klt.attend_kernels import fused_attend, tile_queries, unsupported
from kvcli.methods.klt.codec import KLTCodes, KLTKey, KLTValue
from kvcli.methods.klt.fields import SCALAR, TRELLIS, Code
from kvcli.rope import OFFSET_BLOCK, ROPE_TILE, Rotation, TokenRotations

METHODS = pytest.mark.parametrize("method", ["klt-2", "klt-tcq-2"])


@pytest.mark.parametrize("code", [SCALAR, TRELLIS], ids=["scalar", "trellis"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "batch", "time", "dtype", "blocks"),
    [
        (2, 64, 2, 37, torch.float32, 1),
        (6, 64, 2, 37, torch.float32, 1),
        (1, 128, 1, 70, torch.float16, 2),
        (4, 80, 1, 17, torch.bfloat16, 1),
        (2, 96, 3, 5, torch.float32, 1),
        (1, 256, 1, 70, torch.float16, 2),
        (4, 16, 1, 37, torch.float32, 2),
        (2, 24, 1, 20, torch.float32, 1),
        (4, 40, 1, 20, torch.float32, 1),
    ],
)
@pytest.mark.parametrize("kind", [KLTKey, KLTValue])
def test_token_kernels(
    heads: int, head_dim: int, batch: int, time: int, dtype: torch.dtype, blocks: int, code: Code, kind: type[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Kernels encode and decode as the reference, `blocks` of tokens at once, in the tiles of a GPU of Hopper and, with
    heads of 16 and 40 channels, of others; where two gains or levels are equally good, either may be taken.
    """
    monkeypatch.setattr(token_kernels, "_PROGRAMS", blocks * heads)
    if head_dim in (16, 40):
        monkeypatch.setattr(token_kernels, "_TILES", Tiles(token_kernels._WIDE_TILE, token_kernels._WIDE_TILE))
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.zeros(*shape, **how).fill_(77))
    spec = make_spec(head_dim, heads)
    joint = 3 if heads == 6 else 1
    fields = [code.all_fields(1 + head // joint % 4)[5 * (head // joint)] for head in range(heads)]
    codec = kind(spec, fields, code, joint).to(DEVICE)
    codec.randomize_(torch.Generator(DEVICE).manual_seed(0))
    codec.mean.normal_()
    x = torch.randn(batch, heads, time, head_dim, device=DEVICE).to(dtype)
    x[:, :, 3] *= 1e3
    x[:, :, 4] = 0 if dtype != torch.float32 else codec.mean
    reference = codec.encode(x)
    expected = codec.decode(reference)
    size = expected.abs().amax(-1, keepdim=True).clamp_min(1)
    codec.fused = True
    ours = codec.encode(x)
    assert (ours.gain == reference.gain).float().mean() > 0.99
    assert (ours.packed == reference.packed).float().mean() > 0.99
    assert ((codec.decode_to(reference, None, torch.float32) - expected).abs() <= 1e-4 * size).all()
    assert_written_between_others(codec, x, ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("programs", [0, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "joint"), [(4, 2, 1), (4, 2, 2), (9, 3, 3), (8, 4, 2)])
@METHODS
def test_attention_of_several_blocks_per_program(
    dtype: torch.dtype, programs: int, heads: int, kv_heads: int, joint: int, method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows that begin in other tiles than the first, splits of several blocks, an offset, and heads with a transform of
    their own, of two, or of three, whose queries are more than the 8 of the smaller blocks.
    """
    monkeypatch.setattr(splits, "_PROGRAMS_PER_SM", programs)
    torch.manual_seed(0)
    _, codec = make_codec(method, heads, kv_heads, 64, joint_heads=joint)
    codec.key_offset.normal_().mul_(4)
    codec.value.mean.normal_()
    part, query = make_part(codec, heads, 2, 280, None), torch.randn(2, heads, 1, 64, device=DEVICE)
    positions = torch.tensor([[700], [250]], device=DEVICE) + torch.arange(280, device=DEVICE)
    assert part.rotations is not None
    part = dataclasses.replace(part, rotations=TokenRotations(part.rotations.rope, positions))
    ours = fused_attend(codec, query.to(dtype), part, 0.125)
    assert_same(ours, attend_codes(codec, query.to(dtype).float(), part, 0.125), dtype)


def test_queries_are_turned_to_the_tiles_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to the last one, where the first token is in the middle of a tile; beyond it nothing is written."""
    _, codec = make_codec("klt-2", 4, 2, 64)
    part = make_part(codec, 4, 2, 3 * ROPE_TILE, None)
    assert part.rotations is not None
    begin = int(part.rotations.positions[0, 0]) % ROPE_TILE
    lengths = torch.tensor([2 * ROPE_TILE - begin + 1, 3], dtype=torch.int32, device=DEVICE)
    query = torch.randn(2, 2, 3, 64, device=DEVICE)
    every, _ = tile_queries(codec.key, codec.offset, query, part.rotations, 1.0)
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(shape, float("nan"), **how))
    out, _ = tile_queries(codec.key, codec.offset, query, part.rotations, 1.0, lengths)
    for row, tiles in enumerate((3, -(-(begin + 3) // ROPE_TILE))):
        assert torch.equal(out[row, :, :tiles], every[row, :, :tiles])
        assert out[row, :, tiles:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 300.0, 1e6])
@pytest.mark.parametrize("joint", [1, 2])
@METHODS
def test_queries_of_tiles(dtype: torch.dtype, size: float, joint: int, method: str) -> None:
    """Products with codes have the precision of the dtype, those with an offset of any size that of float32; each head
    of a group has those of all queries of the group with its share of the transform.
    """
    torch.manual_seed(0)
    _, codec = make_codec(method, 8, 4, 64, joint_heads=joint)
    assert codec.key_offset is not None
    codec.key_offset.normal_().mul_(size)
    part, half = make_part(codec, 8, 2, 280, None), dtype != torch.float32
    rows = torch.tensor([1.0, 50.0, 1e-3], device=DEVICE)[:, None]
    query = (torch.randn(2, 4, 3, 64, device=DEVICE) * rows).to(dtype)
    assert part.rotations is not None
    out, numbers = tile_queries(codec.key, codec.offset, query, part.rotations, 0.125)
    tiles, tables = part.rotations.rope_tiles(), codec.key.tables
    back = Rotation(tiles.cos.double(), -tiles.sin.double())
    turned = 0.125 * torch.stack(
        [back.at_each_position(x) for x in query.double().split(1, 2)], 3
    )  # [.., tiles, rows, 64]
    within = part.rotations.offsets(ROPE_TILE)
    blocks = Rotation(within.cos[:, :, ::OFFSET_BLOCK].double(), within.sin[:, :, ::OFFSET_BLOCK].double())
    offsets = blocks.at_each_position(codec.key_offset.double()[None, :, None])[0]

    def of_shares(x: Tensor) -> Tensor:  # of each query of a group, for every head of it
        x = x.unflatten(1, (-1, joint)).transpose(2, 3).flatten(3, 4)
        return x.repeat_interleave(joint, 1)

    size = of_shares(turned.norm(dim=-1, keepdim=True))
    wrong = (numbers[..., 2:] - of_shares(turned @ offsets.mT.unsqueeze(1))).abs()
    assert (wrong <= 2**-20 * size * offsets.norm(dim=-1).amax())[:, ::joint].all()  # the first head has them
    basis = codec.key.basis.double().view(-1, joint, 64, joint, 64)
    products = (
        torch.einsum("bgatrd,gadpk->bgptark", turned.unflatten(1, (-1, joint)), basis).flatten(4, 5).flatten(1, 2)
    )
    products = products * tables.levels.sign()[:, None, None]
    bound = (2**-8 if half else 2**-20) * products.abs().amax(-1, keepdim=True)
    subsets = torch.arange(0, 8, 2, device=DEVICE).repeat_interleave(16)  # where they are read
    shift = subsets if codec.key.code.trellis else tables.bit[:, None, None]
    factors = numbers[..., :1] / FIELD_SCALE.value * torch.exp2(shift) if half else numbers[..., :1]
    assert ((out.double() * factors - products).abs() <= bound).all()
    zero = (products * tables.levels[:, None, None] / 2).sum(-1)
    assert ((numbers[..., 1] - zero).abs() <= 30 * bound[..., 0]).all()


def test_bands_of_an_odd_number_of_channels_are_left_to_the_reference() -> None:
    for head_dim, said in ((24, "bands of 3 channels, an odd number"), (32, None)):
        assert unsupported(make_codec("klt-2", 4, 2, head_dim)[1]) == said
    said = "bands of 2 channels, an odd number or fewer than 4"
    assert unsupported(make_codec("klt-tcq-2", 4, 2, 16)[1]) == said
    assert unsupported(make_codec("klt-2", 4, 2, 16)[1]) is unsupported(make_codec("klt-tcq-2", 4, 2, 32)[1]) is None


def test_fused_attention_does_not_depend_on_autocast() -> None:
    torch.manual_seed(0)
    _, codec = make_codec("klt-2", 4, 2, 64)
    part, query = make_part(codec, 4, 1, 70, None), torch.randn(1, 4, 1, 64, device=DEVICE)
    expected = fused_attend(codec, query, part, 0.125)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        ours = fused_attend(codec, query, part, 0.125)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def assert_written_between_others(codec: KLTValue, x: Tensor, codes: KLTCodes) -> None:
    count = x.shape[2]
    longer = codes.map(lambda field: field.new_full((*field.shape[:2], count + 16, *field.shape[3:]), 77))
    codec.encode_into(x, None, longer.slice(7, count + 7))
    for field, written in zip(longer.tensors().values(), codes.tensors().values(), strict=True):
        assert torch.equal(field[:, :, 7 : count + 7], written)
        assert (field[:, :, :7] == 77).all()
        assert (field[:, :, count + 7 :] == 77).all()
