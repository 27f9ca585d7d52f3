"""What surrounds attention over codes in kernels: long chunks, window tokens, rotation; against the reference."""

import pytest
import torch
from parts import DEVICE, Rotary, make_codec

from kvcli.attention import decoded, reference, window_kernels
from kvcli.cache.window import WindowLayout, WindowTokens
from kvcli.errors import CacheError
from kvcli.rope import Rope, Rotation, TokenRotations, unrotate


@pytest.mark.parametrize(
    ("batch", "queries", "most"), [(1, 1, 2**18), (2, 63, 2**17), (1, 64, 2**20), (2**9, 64, 2048), (2**11, 64, 1024)]
)
def test_blocks_of_a_batch(batch: int, queries: int, most: int) -> None:
    """What is decoded at once does not grow with the batch, until blocks would be too small."""
    _, codec = make_codec("kivi-2", 1, 1, 32)
    query = torch.empty(batch, 1, queries, 32, device=DEVICE, dtype=torch.float16)
    assert decoded._block_tokens(codec, query) == most


@pytest.mark.parametrize(("length", "most", "size"), [(192, 100, 96), (192, 10, 48), (48, 8192, 48), (0, 100, 96)])
def test_blocks_cover_all_tokens(length: int, most: int, size: int) -> None:
    _, codec = make_codec("kivi-2", 4, 2, 96, group_size=48, residual_length=48)
    blocks = codec.blocks(length, most)
    assert [token for start, stop in blocks for token in range(start, stop)] == list(range(length))
    assert all(stop - start == size for start, stop in blocks)


def window_of(lengths: list[int], attended: list[int], sinks: int, ring: int, index: list[list[int]]) -> WindowTokens:
    """Windows of rows that hold so many tokens; each with the token index of its new slots, -1 at padding."""
    longest = max(length - codes for length, codes in zip(lengths, attended, strict=True))
    rows, new = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (attended, index))
    return WindowTokens(WindowLayout(sinks, ring), longest, rows, new)


def buffers(window: WindowTokens, lengths: list[int], heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Window buffers of random keys and values, of a window that counts per row; NaN where no token is."""
    layout = window.layout
    made = torch.full((2, len(lengths), heads, layout.capacity, dim), float("nan"), dtype=dtype, device=DEVICE)
    for row, (length, codes) in enumerate(zip(lengths, window.attended.tolist(), strict=True)):
        tokens = [t for t in range(length) if t < layout.sinks or t >= layout.sinks + codes]
        slots = layout.slots(torch.tensor(tokens, device=DEVICE))
        made[:, row, :, slots] = torch.randn(2, heads, len(tokens), dim, device=DEVICE).to(dtype)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("length", "attended", "sinks", "ring", "queries", "heads", "head_dim"),
    [
        (1, 0, 0, 8, 1, 8, 128),
        (70, 0, 4, 66, 1, 6, 80),
        (70, 9, 4, 61, 5, 8, 128),
        (200, 133, 3, 64, 1, 2, 64),
        (200, 131, 0, 80, 40, 6, 80),
        (5, 1, 4, 1, 1, 2, 64),
    ],
)
def test_windows_of_equal_rows(
    length: int, attended: int, sinks: int, ring: int, queries: int, heads: int, head_dim: int, joined: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Numbers give bit for bit what one number per row gives, and what the reference gives."""
    torch.manual_seed(0)
    first = length - queries
    window = WindowTokens(WindowLayout(sinks, ring), length - attended, attended, first)
    per_row = window_of([length] * 2, [attended] * 2, sinks, ring, [list(range(first, length))] * 2)
    query = torch.randn(2, heads, queries, head_dim, device=DEVICE).to(dtype)
    key, value = buffers(per_row, [length] * 2, 2, head_dim, dtype)
    codes = (torch.randn(query.shape, device=DEVICE), torch.randn(query.shape[:3], device=DEVICE)) if joined else None
    actual, expected = (x.attend_window(query, key, value, window, 0.1, codes) for x in (window_kernels, reference))
    assert torch.equal(actual, window_kernels.attend_window(query, key, value, per_row, 0.1, codes))
    assert torch.equal(expected, reference.attend_window(query, key, value, per_row, 0.1, codes))
    assert actual.isfinite().all()
    assert torch.allclose(actual, expected, atol=1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(("sinks", "ring"), [(0, 67), (4, 63), (4, 64), (3, 130)])
def test_windows_of_ragged_rows(sinks: int, ring: int, queries: int) -> None:
    """Each row's tokens up to each query, none of what another token left behind; padding sees nothing."""
    torch.manual_seed(0)
    lengths, attended = [sinks + ring, 2, 300], [0, 0, 300 - sinks - min(ring, 65)]
    index = [[max(-1, length - queries + i) for i in range(queries)] for length in lengths]
    index[1][0] = -1
    window = window_of(lengths, attended, sinks, ring, index)
    query = torch.randn(3, 6, queries, 80, device=DEVICE)
    key, value = buffers(window, lengths, 2, 80, torch.float32)
    actual = window_kernels.attend_window(query, key, value, window, 0.1, None)
    assert actual[1, 0].eq(0).all()
    for row, (length, codes) in enumerate(zip(lengths, attended, strict=True)):
        for i, token in enumerate(index[row]):
            seen = [t for t in range(token + 1) if t < sinks or t >= sinks + codes]
            slots = [t if t < sinks else sinks + (t - sinks) % ring for t in seen]
            parts = (x[row : row + 1] for x in (query[:, :, i : i + 1], key[:, :, slots], value[:, :, slots]))
            expected = reference.partial_attention(*parts, None, 0.1)[0]
            assert torch.allclose(actual[row, i], expected[0, :, 0], atol=1e-5), (row, i, length)
    plain = reference.attend_window(query, key.nan_to_num(0.0), value.nan_to_num(0.0), window, 0.1, None)
    assert torch.allclose(actual, plain, atol=1e-5)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize(
    ("lengths", "attended", "heads", "kv_heads", "head_dim", "dtype"),
    [
        ([140, 140], [100, 100], 3, 1, 80, torch.float32),
        ([140, 140, 140], [75, 75, 75], 9, 3, 64, torch.float16),
        ([140, 40, 90], [101, 0, 33], 6, 2, 80, torch.float32),
        *([([140, 90], [100, 33], 8, 2, 128, torch.bfloat16)] if DEVICE == "cuda" else []),
    ],
)
def test_windows_with_decoded_tokens(
    lengths: list[int], attended: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
    soft_cap: float | None,
) -> None:  # fmt: skip
    """Each row attends to its own number of these, however they lie in memory, and to none beyond."""
    torch.manual_seed(0)
    queries, rows, codes_dtype = 20, len(lengths), torch.float16 if dtype == torch.bfloat16 else dtype
    index = [list(range(length - queries, length)) for length in lengths]
    window = window_of(lengths, attended, 4, 66, index)
    query = torch.randn(rows, heads, queries, head_dim, device=DEVICE).to(dtype)
    key, value = buffers(window, lengths, kv_heads, head_dim, dtype)
    tokens = torch.randn(2, rows, kv_heads, 130, head_dim, device=DEVICE).to(codes_dtype)
    visible = torch.arange(max(attended), device=DEVICE) < torch.tensor(attended, device=DEVICE)[:, None]
    part = reference.partial_attention(query, *tokens[:, :, :, : max(attended)], visible[:, None], 0.1, soft_cap)
    expected = reference.attend_window(query, key.nan_to_num(0.0), value.nan_to_num(0.0), window, 0.1, part, soft_cap)
    if len(set(lengths)) == 1:
        window = WindowTokens(window.layout, window.length, attended[0], index[0][0])
    for row, count in enumerate(attended):
        tokens[:, row, :, count:] = float("nan")
    keys, values = tokens[0, :, :, : max(attended)], tokens[1].transpose(1, 2).contiguous().transpose(1, 2)
    actual = window_kernels.attend_window(query, key, value, window, 0.1, None, soft_cap, decoded=(keys, values))
    assert torch.allclose(actual, expected, atol=1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "length", "head_dim", "rotary_dim", "sinks", "first", "padded"),
    [
        (1, 1, 64, 64, 0, 0, False),
        (2, 65, 128, 128, 0, 0, False),
        (3, 33, 80, 80, 4, 2, False),
        (3, 33, 80, 24, 4, 2, False),
        (20, 1, 64, 64, 4, 150, False),
        (20, 1, 64, 64, 3, 150, True),
        (20, 1, 64, 16, 3, 150, True),
        (3, 33, 80, 80, 3, 150, True),
        (2, 65, 128, 128, 3, 150, True),
        (2, 65, 128, 0, 3, 150, True),
    ],
)
def test_new_tokens_are_rotated_and_appended(
    batch: int, length: int, head_dim: int, rotary_dim: int, dtype: torch.dtype, sinks: int, first: int, padded: bool
) -> None:
    torch.manual_seed(0)
    positions = torch.randint(0, 500, (batch, length), device=DEVICE)
    rotation = Rope(Rotary(rotary_dim)).rotation(positions, dtype)
    query, key, value = (
        torch.randn(batch, length, heads, head_dim, device=DEVICE).to(dtype).transpose(1, 2) for heads in (6, 2, 2)
    )
    window = WindowTokens(WindowLayout(sinks, 67), first + length, 0, first)
    if padded:
        index = first + 7 * torch.arange(batch).unsqueeze(1) + torch.arange(length)
        index[0, : length // 2 + 1] = -1
        window = window_of([1] * batch, [0] * batch, sinks, 67, index.tolist())
    actual, expected = torch.zeros(2, 2, batch, 2, sinks + 67, head_dim, dtype=dtype, device=DEVICE)
    ours = window_kernels.rotate_and_append(rotation, query, key, value, *actual, window)
    float32 = Rotation(rotation.cos.float(), rotation.sin.float())
    theirs = reference.rotate_and_append(float32, query, key, value, *expected, window)
    tolerance = {"atol": 1e-6, "rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5}
    assert torch.allclose(ours, theirs, **tolerance)
    assert torch.allclose(actual, expected, **tolerance)
    assert ours.transpose(1, 2).is_contiguous()  # as SDPA then lays out its output, which is not copied again
    for row in range(batch):
        tokens = window.index[row].tolist() if padded else range(first, first + length)
        for column, token in list(enumerate(tokens))[-67:]:
            slot = token if token < sinks else sinks + (token - sinks) % 67
            assert token < 0 or torch.equal(expected[1][row, :, slot], value[row, :, column])


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
    assert torch.allclose(window_kernels.unrotate(rotation, rotated), unrotate(rotation, rotated), atol=1e-6)
    assert (window_kernels.unrotate(rotation, rotated) - keys).norm() < 5e-3 * keys.norm()
    turned = Rope(Rotary(rotary_dim)).rotation(positions // 16 * 16, torch.float32)
    for rows in {1, batch}:
        offset = torch.randn(rows, 3, 1, head_dim, device=DEVICE), turned
        less, expected = (each(rotation, rotated, offset) for each in (window_kernels.unrotate, unrotate))
        assert torch.allclose(less, expected, atol=1e-5)
        assert (less - unrotate(rotation, rotated)).abs().amax() > 1


def test_positions_that_jump_are_refused() -> None:
    positions = torch.tensor([[3, 4, 5, 9, 10]], device=DEVICE)
    with pytest.raises(CacheError, match="consecutive"):
        TokenRotations(Rope(Rotary(64)), positions).tiles(2)
    lengths = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    assert TokenRotations(Rope(Rotary(64)), positions, lengths).tiles(2).cos.shape == (1, 1, 3, 32)
