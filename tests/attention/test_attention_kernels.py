"""What surrounds attention over codes in kernels: long chunks, window tokens, rotation; against the reference."""

from __future__ import annotations

import pytest
import torch
from parts import DEVICE, Rotary, assert_same, make_codec, make_part

from kvcli.attention import decoded, reference, rope_kernels, window_kernels
from kvcli.cache.window import WindowTokens
from kvcli.errors import CacheError
from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import Rope, Rotation, TokenRotations


@pytest.mark.parametrize("name", ["kivi-2", "squat-pre-2", "qjl"])
def test_many_queries_are_attended_by_decoding(name: str) -> None:
    torch.manual_seed(0)
    _, codec = make_codec(name, 4, 2, 64)
    part = make_part(codec, 4, 2, 64, [64, 32])
    query = torch.randn(2, 4, 20, 64, device=DEVICE)
    assert_same(
        decoded.attend_decoded(codec, query, part, 0.125),
        reference.attend_codes(codec, query, part, 0.125),
        torch.float32,
    )


@pytest.mark.parametrize(("name", "group"), [("kivi-2", 48), ("squat-2", 48), ("squat-pre-2", 32), ("commvq-1", 1)])
def test_blocks_hold_whole_groups(name: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a group does not divide the block, and where a large batch makes blocks small."""
    torch.manual_seed(0)
    settings = {"group_size": group, "residual_length": group} if group == 48 else {}
    head_dim = 96 if group == 48 else 64
    _, codec = make_codec(name, 4, 2, head_dim, **settings)
    assert codec.tokens_per_group == group
    part = make_part(codec, 4, 2, 192, [192, 96])
    query = torch.randn(2, 4, 20, head_dim, device=DEVICE)
    expected = reference.attend_codes(codec, query, part, 0.125)
    monkeypatch.setattr("kvcli.attention.reference._BLOCK_TOKENS", 100)
    assert_same(reference.attend_codes(codec, query, part, 0.125), expected, torch.float32)
    monkeypatch.setattr("kvcli.attention.decoded._block_tokens", lambda codec, query: 50)
    assert_same(decoded.attend_decoded(codec, query, part, 0.125), expected, torch.float32)


@pytest.mark.parametrize(
    ("batch", "queries", "most"), [(1, 1, 2**18), (2, 63, 2**17), (1, 64, 2**20), (2**9, 64, 2048), (2**11, 64, 1024)]
)
def test_blocks_of_a_batch(batch: int, queries: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decoded at once does not grow with the batch, until blocks would be too small."""
    asked: list[int] = []
    _, codec = make_codec("kivi-2", 1, 1, 32)
    monkeypatch.setattr(LayerCodec, "blocks", lambda self, length, most: asked.append(most) or [])
    query = torch.empty(batch, 1, queries, 32, device=DEVICE, dtype=torch.float16)
    decoded.attend_decoded(codec, query, make_part(codec, 1, 1, 32, None), 1.0)
    assert asked == [most]


@pytest.mark.parametrize(("length", "most", "size"), [(192, 100, 96), (192, 10, 48), (48, 8192, 48), (0, 100, 96)])
def test_blocks_cover_all_tokens(length: int, most: int, size: int) -> None:
    _, codec = make_codec("kivi-2", 4, 2, 96, group_size=48, residual_length=48)
    blocks = codec.blocks(length, most)
    assert [token for start, stop in blocks for token in range(start, stop)] == list(range(length))
    assert all(stop - start == size for start, stop in blocks)


def scattered(length: int, gap: int, sinks: int, decoded: int) -> WindowTokens:
    """Random tokens of 2 rows and 2 heads of 80 channels, as a cache holds them; NaN where nothing may be read."""
    buffer = torch.randn(2, 2, length - decoded + gap + 3, 80, device=DEVICE)
    buffer[:, :, sinks : sinks + gap] = float("nan")
    between = torch.randn(2, 2, decoded, 80, device=DEVICE) if decoded else None
    return WindowTokens(buffer, length, sinks, gap, between)


@pytest.mark.parametrize(("masked", "joined", "queries"), [(False, True, 1), (True, True, 5), (True, False, 40)])
@pytest.mark.parametrize(
    ("gaps", "sinks", "decoded"), [((0, 0), 0, (0, 0)), ((5, 0), 4, (0, 9)), ((0, 70), 3, (66, 1))]
)
def test_window_tokens_in_one_launch(
    masked: bool, joined: bool, queries: int, gaps: tuple[int, int], sinks: int, decoded: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 6, queries, 80, device=DEVICE)
    key, value = (scattered(70, gap, sinks, count) for gap, count in zip(gaps, decoded, strict=True))
    visible = torch.rand(2, queries, 70, device=DEVICE) > 0.3 if masked else None
    if visible is not None:
        visible[0, 0] = False  # a query that sees nothing
    encoded = (torch.randn(2, 6, queries, 80, device=DEVICE), torch.randn(2, 6, queries, device=DEVICE))
    arguments = (query, key, value, visible, 0.1)
    actual = window_kernels.attend_window(*arguments, encoded if joined else None)
    assert torch.allclose(actual, reference.attend_window(*arguments, encoded if joined else None), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "length", "head_dim"), [(1, 1, 64), (3, 33, 80), (2, 65, 128), (20, 1, 64)])
def test_new_tokens_are_rotated_and_appended(batch: int, length: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    positions = torch.randint(0, 500, (batch, length), device=DEVICE)
    rotation = Rope(Rotary(head_dim)).rotation(positions, dtype)
    query, key, value = (
        torch.randn(batch, length, heads, head_dim, device=DEVICE).to(dtype).transpose(1, 2) for heads in (6, 2, 2)
    )
    actual, expected = torch.zeros(2, 2, batch, 2, length + 9, head_dim, dtype=dtype, device=DEVICE)
    places = [[x[:, :, 4 : 4 + length] for x in both] for both in (actual, expected)]
    ours = rope_kernels.rotate_and_append(rotation, query, key, value, *places[0])
    float32 = Rotation(rotation.cos.float(), rotation.sin.float())
    theirs = reference.rotate_and_append(float32, query, key, value, *places[1])
    tolerance = {"atol": 1e-6, "rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5}
    assert torch.allclose(ours, theirs, **tolerance)
    assert torch.allclose(actual, expected, **tolerance)
    assert ours.transpose(1, 2).is_contiguous()  # as SDPA then lays out its output, which is not copied again


@pytest.mark.parametrize(
    ("batch", "length", "head_dim", "rotary_dim"), [(1, 1, 64, 64), (3, 33, 80, 80), (2, 65, 128, 128), (2, 9, 64, 32)]
)
def test_inverse_rope_of_old_keys(batch: int, length: int, head_dim: int, rotary_dim: int) -> None:
    torch.manual_seed(0)
    positions = torch.randint(0, 500, (batch, length), device=DEVICE)
    plain = Rope(Rotary(rotary_dim)).rotation(positions, torch.float32)
    rotation = Rotation(1.3 * plain.cos, 1.3 * plain.sin)  # as with YaRN's attention scaling
    keys = torch.randn(batch, 3, length + 5, head_dim, device=DEVICE)[:, :, 5:]
    rotated = rotation.apply(keys).bfloat16()
    assert torch.allclose(rope_kernels.unrotate(rotation, rotated), reference.unrotate(rotation, rotated), atol=1e-6)
    assert (rope_kernels.unrotate(rotation, rotated) - keys).norm() < 5e-3 * keys.norm()


def test_positions_that_jump_are_refused() -> None:
    positions = torch.tensor([[3, 4, 5, 9, 10]], device=DEVICE)
    with pytest.raises(CacheError, match="consecutive"):
        TokenRotations(Rope(Rotary(64)), positions).tiles(2)
    lengths = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    assert TokenRotations(Rope(Rotary(64)), positions, lengths).tiles(2).cos.shape == (1, 1, 3, 32)
