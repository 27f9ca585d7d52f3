"""Kernels of KLT's tokens: a launch encodes keys or values, and a launch decodes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import Tiles, cdiv, power_of_two, row_major
from kvcli.kernels.operands import in_thread_order
from kvcli.kernels.words import INTERPRETED, as_decoded
from kvcli.methods.klt.fields import BANDS, GAINS_PER_OCTAVE, MOST_BYTES, UNIT_GAIN
from kvcli.methods.klt.trellis import LEAD, SHORT

# tuned on one H100, torch 2.11, triton 3.6, for heads of 128 channels
_WIDE_TILE = {"BLOCK_T": 16, "num_warps": 4, "num_stages": 1}
_TILES = Tiles(hopper={"BLOCK_T": 64, "num_warps": 4, "num_stages": 1}, smaller=_WIDE_TILE)

_SEARCH_PROGRAMS = 1056
"""Of which each has memory for the search of a block of tokens."""

_BANDS = tl.constexpr(BANDS)
_MOST_BYTES = tl.constexpr(MOST_BYTES)
_LEAD, _SHORT = tl.constexpr(LEAD), tl.constexpr(SHORT)
COLUMNS = tl.constexpr(6)
FIELDS = tl.constexpr((BANDS + 1) * 6)
"""Numbers of a head in `Tables.fields`."""
_UNIT = tl.constexpr(float(UNIT_GAIN))
_PER_OCTAVE = tl.constexpr(float(GAINS_PER_OCTAVE))


@triton.jit
def gains(b_g):
    """Gains as numbers, float32, from how they are stored, uint8."""
    b_g = b_g.to(tl.float32)
    return tl.where(b_g > 0, tl.exp2((b_g - _UNIT) / _PER_OCTAVE), 0.0)


@triton.jit
def head_bytes(packed, fields, W: tl.constexpr):
    """Where the bytes of a head begin in the token that `packed` points to, and how many a channel of each band has.

    `fields` points to the head's row of `Tables.fields`.
    """
    first = tl.multiple_of(tl.load(fields + _BANDS * COLUMNS), W & -W)
    return packed + first, tl.load(fields + _BANDS * COLUMNS + 1)


@triton.jit
def head_bands(fields, FP32_DOT: tl.constexpr):
    """What `band_columns` and `band_rows` need of each band: a tuple of three numbers each."""
    FIRST: tl.constexpr = 0 if FP32_DOT or INTERPRETED else 3
    bands = ()
    for f in tl.static_range(_BANDS):
        p_field = fields + f * COLUMNS + FIRST
        bands = bands + ((tl.load(p_field), tl.load(p_field + 1), tl.load(p_field + 2)),)
    return bands


@triton.jit
def lane_words(p_word, lane, mask, PLANE: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr):
    """Byte PLANE of COUNT neighbouring channels of a band as one number, int16 or int32; bytes beyond W are 0.

    p_word points to byte 0 of channel `lane` and tokens, of one shape with it; `mask` is a scalar. W is even.
    """
    if W % COUNT == 0:
        words = _load_words(p_word, lane, mask, PLANE, COUNT, W)
    else:  # Triton takes operands that were loaded byte by byte for those of another product
        low = _load_words(p_word, lane, mask, PLANE, 2, W).to(tl.int32) & 0xFFFF
        words = low | (_load_words(p_word + 2, lane + 2, mask, PLANE, 2, W).to(tl.int32) << 16)
    return words


@triton.jit
def _load_words(p_word, lane, mask, PLANE: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr):
    dtype: tl.constexpr = tl.int16 if COUNT == 2 else tl.int32
    p_word = p_word.to(tl.pointer_type(dtype))
    if PLANE > 0:
        p_word = in_thread_order(p_word, PLANE * W // COUNT, COUNT)
    if W % 16 > 0:
        words = tl.load(p_word, mask=mask & (lane < W), other=0)
    elif PLANE > 0:
        words = tl.load(p_word, mask=mask)  # any numbers where there is no such byte, of which no band takes one
    else:
        words = tl.load(p_word)
    return words


@triton.jit
def head_planes(p_word, lane, num_bytes, PLANES: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr):
    """`lane_words` of the head's first PLANES bytes, a tuple."""
    planes = ()
    for i in tl.static_range(PLANES):
        planes = planes + (lane_words(p_word, lane, i < num_bytes, i, COUNT, W),)
    return planes


@triton.jit
def words_before(p_word, lane, COUNT: tl.constexpr, W: tl.constexpr):
    """First bytes of COUNT neighbouring channels four before, and if COUNT is 2, of those two before, in words as
    `lane_words` gives them; those before the first channel are the last ones. W is at least 4.
    """
    before = (_load_before(p_word, lane, 4, COUNT, W),)
    if COUNT == 2:
        before = before + (_load_before(p_word, lane, 2, COUNT, W),)
    return before


@triton.jit
def _load_before(p_word, lane, DISTANCE: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr):
    ALIGNED: tl.constexpr = 4 if COUNT == 4 and W % 4 == 0 else 2
    p_word = in_thread_order(p_word, tl.where(lane < DISTANCE, W - DISTANCE, -DISTANCE), ALIGNED)
    if COUNT == 4 and W % 4 > 0:
        p_half = p_word.to(tl.pointer_type(tl.int16))
        words = tl.load(p_half, mask=lane < W, other=0).to(tl.int32) & 0xFFFF
        words |= tl.load(p_half + 1, mask=lane < W, other=0).to(tl.int32) << 16
    else:
        dtype: tl.constexpr = tl.int32 if COUNT == 4 else tl.int16
        p_word = p_word.to(tl.pointer_type(dtype))
        words = tl.load(p_word, mask=lane < W, other=0) if W % 16 > 0 else tl.load(p_word)
    return words


@triton.jit
def head_subsets(words, before, lane, bands, COUNT: tl.constexpr):
    """Subsets of levels of COUNT neighbouring channels: two words, of bands 2 i and 2 i + 1 at bits 2 i and 2 i + 1.

    Args:
        words: the head's first bytes, as `lane_words` gives them; before: as `words_before` does.
        bands: how many are coded.
    """
    mask = (1 << bands) - 1
    mask |= mask << 8
    if COUNT == 4:
        mask |= mask << 16
    turned = mask & -0x01010102  # where bits of the band before are
    if INTERPRETED:
        bits = words.to(tl.int32) & mask
        four = _turned(before[0].to(tl.int32) & mask, turned, lane < 4, bands)
        if COUNT == 4:
            two = (bits << 16) | ((four >> 16) & 0xFFFF)
            one = (bits << 8) | ((four >> 24) & 0xFF)
        else:
            two = _turned(before[1].to(tl.int32) & mask, turned, lane < 2, bands)
            one = (bits << 8) | ((two >> 8) & 0xFF)
        high = bits ^ one ^ four
        even = (two & 0x55555555) | ((high & 0x55555555) << 1)
        odd = ((two >> 1) & 0x55555555) | (((high >> 1) & 0x55555555) << 1)
        even, odd = even.to(words.dtype), odd.to(words.dtype)
    elif COUNT == 4:
        even, odd = tl.inline_asm_elementwise(
            "{ .reg .b32 b, f, t, o, x, y; and.b32 b, $2, $4; and.b32 f, $3, $4;"
            " shl.b32 x, f, 1; and.b32 x, x, $5; shr.u32 y, f, $7; lop3.b32 x, y, 0x01010101, x, 0xEA;"
            " lop3.b32 f, x, f, $6, 0xE4; prmt.b32 t, b, f, 0x1076; prmt.b32 o, b, f, 0x2107;"
            " lop3.b32 o, b, o, f, 0x96; shl.b32 x, o, 1; lop3.b32 $0, t, x, 0x55555555, 0xE4;"
            " shr.u32 y, t, 1; lop3.b32 $1, y, o, 0x55555555, 0xE4; }",
            "=r,=r,r,r,r,r,r,r",
            [words, before[0], mask, turned, tl.where(lane < 4, -1, 0), bands - 1],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:  # two words in a register
        even, odd = tl.inline_asm_elementwise(
            "{ .reg .b32 b, f, t, o, x, y; and.b32 b, $2, $5; and.b32 f, $3, $5; and.b32 t, $4, $5;"
            " shl.b32 x, f, 1; and.b32 x, x, $6; shr.u32 y, f, $9; lop3.b32 x, y, 0x01010101, x, 0xEA;"
            " lop3.b32 f, x, f, $7, 0xE4;"
            " shl.b32 x, t, 1; and.b32 x, x, $6; shr.u32 y, t, $9; lop3.b32 x, y, 0x01010101, x, 0xEA;"
            " lop3.b32 t, x, t, $8, 0xE4; prmt.b32 o, b, t, 0x2705;"
            " lop3.b32 o, b, o, f, 0x96; shl.b32 x, o, 1; lop3.b32 $0, t, x, 0x55555555, 0xE4;"
            " shr.u32 y, t, 1; lop3.b32 $1, y, o, 0x55555555, 0xE4; }",
            "=r,=r,r,r,r,r,r,r,r,r,r",
            [
                words, before[0], before[1], mask.to(tl.int16), turned.to(tl.int16),
                tl.where(lane < 4, -1, 0).to(tl.int16), tl.where(lane < 2, -1, 0).to(tl.int16), bands - 1,
            ],
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )  # fmt: skip
    return even, odd


@triton.jit
def _turned(bits, turned, wraps, bands):
    """Bits of the trellis in words, int32; of the band before where `wraps`."""
    return tl.where(wraps, ((bits << 1) & turned) | ((bits >> (bands - 1)) & 0x01010101), bits)


@triton.jit
def subset_band(f: tl.constexpr, FP32_DOT: tl.constexpr):
    """What `band_columns` and `band_rows` need for the subsets of band f, in `head_subsets`' words as planes."""
    if FP32_DOT or INTERPRETED:
        band = (f % 2, f // 2 * 2, 3)
    else:
        band = (0x3210 + f % 2 * 0x4444, 0x2200, 3 << (f // 2 * 2) | 3 << (f // 2 * 2 + 16))
    return band


@triton.jit
def _byte_of(x, band, i: tl.constexpr, FP32: tl.constexpr):
    """Byte i of the words of the band's plane among x: its field in float32, or masked and read as float16."""
    plane, bit, levels = band
    words = tl.where(plane == 0, x[0], x[1])
    if len(x) > 2:
        words = tl.where(plane < 2, words, tl.where(plane == 2, x[2], x[3]))
    code = (words.to(tl.int32) >> (8 * i + bit)) & levels
    return code.to(tl.float32) if FP32 else (code << bit).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _operands(band, PLANES: tl.constexpr):
    """Operands of inline assembly: selectors of one register among two, of its bytes 0 and 2, 1 and 3; and the mask."""
    first, even, mask = band
    if PLANES == 2:  # both selections are one
        even += first - 0x3210
    b_none = tl.zeros([1, 1], tl.int32)
    return b_none + first, b_none + even, b_none + (even + 0x1111), b_none + mask


@triton.jit
def band_columns(x, band, FP32_DOT: tl.constexpr):
    """A band as a first operand [tokens, channels], its columns in the order of `channels_as_rows`.

    Codes in float32, or in float16 c * 2^bit / FIELD_SCALE: bytes masked and read as such. A thread has the four
    channels of a word.

    Args:
        x: the head's bytes in two or four planes, int32 [tokens, channels / 4] each.
        band: of `head_bands`.
    """
    if FP32_DOT or INTERPRETED:
        b_0, b_1 = _byte_of(x, band, 0, FP32_DOT), _byte_of(x, band, 1, FP32_DOT)
        b_2, b_3 = _byte_of(x, band, 2, FP32_DOT), _byte_of(x, band, 3, FP32_DOT)
    else:
        first, even, odd, mask = _operands(band, len(x))
        if len(x) == 2:
            b_0, b_2, b_1, b_3 = tl.inline_asm_elementwise(
                "{ .reg .b32 x; prmt.b32 x, $4, $5, $6; and.b32 x, x, $8; mov.b32 {$0, $1}, x;"
                " prmt.b32 x, $4, $5, $7; and.b32 x, x, $8; mov.b32 {$2, $3}, x; }",
                "=h,=h,=h,=h,r,r,r,r,r",
                [x[0], x[1], even, odd, mask],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=1,
            )
        else:
            b_0, b_2, b_1, b_3 = tl.inline_asm_elementwise(
                "{ .reg .b32 a, b, x; prmt.b32 a, $4, $5, $8; prmt.b32 b, $6, $7, $8;"
                " prmt.b32 x, a, b, $9; and.b32 x, x, $11; mov.b32 {$0, $1}, x;"
                " prmt.b32 x, a, b, $10; and.b32 x, x, $11; mov.b32 {$2, $3}, x; }",
                "=h,=h,=h,=h,r,r,r,r,r,r,r,r",
                [x[0], x[1], x[2], x[3], first, even, odd, mask],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=1,
            )
    N: tl.constexpr = x[0].shape[0]
    WORDS: tl.constexpr = x[0].shape[1]
    b_c = tl.reshape(tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3)), [N, 4, WORDS // 4, 2, 2])
    return tl.reshape(tl.permute(b_c, [0, 2, 1, 4, 3]), [N, 4 * WORDS])


@triton.jit
def channels_as_rows(b_x):
    """x [channels, C] as a second operand, rows in the order of `band_columns`."""
    K: tl.constexpr = b_x.shape[0]
    C: tl.constexpr = b_x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(b_x, [4, K // 16, 2, 2, C]), [1, 0, 3, 2, 4]), [K, C])


@triton.jit
def band_rows(x, band, FP32_DOT: tl.constexpr):
    """As `band_columns`, of planes int16 [channels / 2, tokens]: [channels, tokens], first even, then odd channels."""
    if FP32_DOT or INTERPRETED:
        b_even, b_odd = _byte_of(x, band, 0, FP32_DOT), _byte_of(x, band, 1, FP32_DOT)
    else:
        first, even, odd, mask = _operands(band, len(x))  # two registers each, of equal content
        if len(x) == 2:
            b_even, b_odd = tl.inline_asm_elementwise(
                "{ .reg .b32 x; prmt.b32 x, $2, $3, $4; and.b32 $0, x, $8;"
                " prmt.b32 x, $2, $3, $6; and.b32 $1, x, $8; }",
                "=r,=r,r,r,r,r,r,r,r,r",
                [x[0], x[1], even, odd, mask],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            b_even, b_odd = tl.inline_asm_elementwise(
                "{ .reg .b32 a, b, x; prmt.b32 a, $2, $3, $6; prmt.b32 b, $4, $5, $6;"
                " prmt.b32 x, a, b, $8; and.b32 $0, x, $12; prmt.b32 x, a, b, $10; and.b32 $1, x, $12; }",
                "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r",
                [x[0], x[1], x[2], x[3], first, even, odd, mask],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
    return tl.reshape(tl.permute(tl.join(b_even, b_odd), [2, 0, 1]), [2 * x[0].shape[0], x[0].shape[1]])


@triton.jit
def _tokens(length, total, BLOCK_T: tl.constexpr):
    """The program's tokens, counted over sequences: which exist, sequences and places."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    return n < total, n // length, n % length


@triton.jit
def _band(b_x, inverse, f, o_d, o_w, m_w, D: tl.constexpr, W: tl.constexpr):
    """Transformed channels of band f, float32 [tokens, BLOCK_W], of b_x [tokens, BLOCK_D] less its mean."""
    p_rows = inverse + (f * W + o_w)[None, :] * D + o_d[:, None]
    b_rows = tl.load(p_rows, mask=(o_d < D)[:, None] & m_w[None, :], other=0.0)
    return tl.dot(b_x, b_rows, input_precision="tf32x3")  # has the precision of float32


@triton.jit
def _rounded(x, most):
    """x rounded, halves to even, and clamped to 0 and `most`, below 2^22; float32."""
    return (tl.minimum(tl.maximum(x, 0.0), most) + 12582912.0) - 12582912.0  # 1.5 * 2^23


@triton.jit
def _channel(costs, y, most):
    """Least costs of the trellis's 16 states after a channel, and int32, bit n: whether n comes from a state above 7.

    costs: a tuple of float32 [BLOCK_T]; y and `most` as in `trellis.search`.
    """
    errors = ()
    for subset in tl.static_range(4):
        error = y - (4.0 * _rounded((y - subset) * 0.25, most) + subset)
        errors = errors + (error * error,)
    new, ways = (), tl.zeros(y.shape, tl.int32)
    for n in tl.static_range(16):
        low = costs[n // 2] + errors[2 * ((n ^ (n // 2)) % 2) + n // 4 % 2]
        high = costs[n // 2 + 8] + errors[2 * ((n ^ (n // 2) ^ 1) % 2) + n // 4 % 2]
        ways |= tl.where(high < low, 1 << n, 0)
        new = new + (tl.minimum(low, high),)
    return new, ways


@triton.jit
def _from(state):
    """Costs of the states where only one is possible."""
    costs = ()
    for n in tl.static_range(16):
        costs = costs + (tl.where(state == n, 0.0, 1e30),)
    return costs


@triton.jit
def _most(fields, t, W: tl.constexpr):
    return tl.load(fields + t // W * COLUMNS + 2).to(tl.float32)


@triton.jit
def _search(p_y, p_way, fields, count, W: tl.constexpr, BLOCK_T: tl.constexpr):
    """`trellis.search` of BLOCK_T vectors: channel t is at p_y + t BLOCK_T, and its codes are written at p_way.

    A code is the level within the subset, and above its 8 bits that of the trellis. p_way point to int16.
    """
    state, least = tl.zeros([BLOCK_T], tl.int32), tl.full([BLOCK_T], float("inf"), tl.float32)
    if count <= _SHORT:
        for start in range(16):
            b_start = tl.zeros([BLOCK_T], tl.int32) + start
            costs = _from(b_start)
            for t in range(count):
                costs, ways = _channel(costs, tl.load(p_y + t * BLOCK_T), _most(fields, t, W))
            end = tl.zeros([BLOCK_T], tl.float32)
            for n in tl.static_range(16):
                end = tl.where(b_start == n, costs[n], end)
            state = tl.where(end < least, b_start, state)
            least = tl.minimum(least, end)
    else:
        costs = ()
        for _ in tl.static_range(16):
            costs = costs + (tl.zeros([BLOCK_T], tl.float32),)
        for i in range(_LEAD):
            t = count - _LEAD + i
            costs, ways = _channel(costs, tl.load(p_y + t * BLOCK_T), _most(fields, t, W))
        for t in range(_LEAD):
            costs, ways = _channel(costs, tl.load(p_y + t * BLOCK_T), _most(fields, t, W))
            tl.store(p_way + t * BLOCK_T, ways.to(tl.int16))
        for n in tl.static_range(16):
            state = tl.where(costs[n] < least, n, state)
            least = tl.minimum(least, costs[n])
        for i in range(_LEAD):
            ways = tl.load(p_way + (_LEAD - 1 - i) * BLOCK_T).to(tl.int32)
            state = (state >> 1) | ((ways >> state) & 1) << 3
    costs = _from(state)
    for t in range(count):
        costs, ways = _channel(costs, tl.load(p_y + t * BLOCK_T), _most(fields, t, W))
        tl.store(p_way + t * BLOCK_T, ways.to(tl.int16))
    for i in range(count):
        t = count - 1 - i
        ways = tl.load(p_way + t * BLOCK_T).to(tl.int32)
        before = (state >> 1) | ((ways >> state) & 1) << 3
        subset = 2 * ((state ^ before ^ (before >> 3)) & 1) + ((before >> 1) & 1)
        y = (tl.load(p_y + t * BLOCK_T) - subset.to(tl.float32)) * 0.25
        code = _rounded(y, _most(fields, t, W)).to(tl.int32) | ((state & 1) << 8)
        tl.store(p_way + t * BLOCK_T, code.to(tl.int16))
        state = before


@triton.jit
def _encode_block(
    block, i_h, x, inverse, mean, weights, fields, packed, gain, scratch, codes,
    x_batch, x_head, x_time, p_batch, p_time, g_batch, g_head, g_time, length, total,
    D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    TRELLIS: tl.constexpr,
):  # fmt: skip
    """Codes and gains of BLOCK_T tokens of head i_h; `inverse`, `fields`, `scratch` and `codes` are its own."""
    o_d, o_w, o_t = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_T)
    m_d, m_w = o_d < D, o_w < W
    coded = tl.load(fields + _BANDS * COLUMNS + 2)
    n = (block * BLOCK_T + o_t).to(tl.int64)
    m_n, i_b, i_t = n < total, n // length, n % length
    p_x = (x + i_b * x_batch + i_h * x_head + i_t * x_time)[:, None] + o_d[None, :]
    b_x = tl.load(p_x, mask=m_n[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    b_x = b_x - tl.load(mean + i_h * D + o_d, mask=m_d, other=0.0)[None, :]
    b_square = tl.zeros([BLOCK_T], tl.float32)
    for f in tl.static_range(_BANDS):
        b_y = _band(b_x, inverse, f, o_d, o_w, m_w, D, W)
        b_weight = tl.load(weights + i_h * D + f * W + o_w, mask=m_w, other=0.0)
        b_square += tl.sum(b_y * b_y * b_weight[None, :], axis=1)
    b_stored = _rounded(tl.log2(tl.maximum(b_square, 1e-37)) * (0.5 * _PER_OCTAVE) + _UNIT, 255.0)
    b_gain = tl.where(b_stored > 0, tl.exp2((b_stored - _UNIT) / _PER_OCTAVE), 1e-30)
    tl.store(gain + i_b * g_batch + i_h * g_head + i_t * g_time, b_stored.to(tl.uint8), mask=m_n)
    if TRELLIS:
        for f in tl.static_range(_BANDS):
            last = 4 * tl.load(fields + COLUMNS * f + 2) + 3
            b_y = _band(b_x, inverse, f, o_d, o_w, m_w, D, W) / b_gain[:, None] + last.to(tl.float32) * 0.5
            p_y = scratch + (f * W + o_w)[None, :] * BLOCK_T + o_t[:, None]
            tl.store(p_y, tl.minimum(tl.maximum(b_y, -1e4), 1e4), mask=m_w[None, :] & (f < coded))
        tl.debug_barrier()
        _search(scratch + o_t, codes + o_t, fields, coded * W, W, BLOCK_T)
        tl.debug_barrier()
    b_bytes, b_bits = (), tl.zeros([BLOCK_T, BLOCK_W], tl.int32)
    for i in tl.static_range(_MOST_BYTES):
        b_bytes = b_bytes + (tl.zeros([BLOCK_T, BLOCK_W], tl.int32),)
    for f in tl.static_range(_BANDS):
        if TRELLIS:
            p_code = codes + (f * W + o_w)[None, :] * BLOCK_T + o_t[:, None]
            b_code = tl.load(p_code, mask=m_w[None, :] & (f < coded), other=0).to(tl.int32)
            b_bits |= (b_code >> 8) << f
            b_code &= 255
        else:
            levels = tl.load(fields + COLUMNS * f + 2).to(tl.float32)
            b_y = _band(b_x, inverse, f, o_d, o_w, m_w, D, W) / b_gain[:, None] + levels * 0.5
            b_code = _rounded(b_y, levels).to(tl.int32)
        b_code = b_code << tl.load(fields + COLUMNS * f + 1)
        place = tl.load(fields + COLUMNS * f)
        b_new = ()
        for i in tl.static_range(_MOST_BYTES):
            b_new = b_new + (tl.where(place == i, b_bytes[i] | b_code, b_bytes[i]),)
        b_bytes = b_new
    p_head, num_bytes = head_bytes(packed + i_b * p_batch + i_t * p_time, fields, W)
    p_byte = p_head[:, None] + o_w[None, :]
    for i in tl.static_range(_MOST_BYTES):
        b_byte = (b_bytes[i] | b_bits if i == 0 else b_bytes[i]).to(tl.uint8)
        tl.store(p_byte + i * W, b_byte, mask=m_n[:, None] & m_w[None, :] & (i < num_bytes))


@triton.jit(do_not_specialize=["length", "total", "blocks"], do_not_specialize_on_alignment=["packed", "gain"])
def _encode_kernel(
    x, inverse, mean, weights, fields, packed, gain, scratch, codes,
    x_batch, x_head, x_time, p_batch, p_time, g_batch, g_head, g_time, length, total, blocks,
    D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    TRELLIS: tl.constexpr,
):  # fmt: skip
    """Codes and gains of `total` = batch * length tokens of a head, in `blocks` of BLOCK_T; grid (programs, heads).

    x [batch, heads, length, D] float, strides x_*; inverse float32 [heads, D, D], B^-1; mean and weights float32
    [heads, D]; fields int32 [heads, BANDS + 1, 6]; packed uint8 [batch, 1, length, bytes] and gain uint8 [batch, heads,
    length, 1], strides p_* and g_*, are written. If TRELLIS, scratch float32 and codes int16 [heads, programs, D,
    BLOCK_T] are, too.
    """
    i_h = tl.program_id(1).to(tl.int64)
    inverse += i_h * (D * D)
    fields += i_h * FIELDS
    if TRELLIS:
        scratch += (i_h * tl.num_programs(0) + tl.program_id(0)) * (D * BLOCK_T)
        codes += (i_h * tl.num_programs(0) + tl.program_id(0)) * (D * BLOCK_T)
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            _encode_block(
                block, i_h, x, inverse, mean, weights, fields, packed, gain, scratch, codes, x_batch, x_head, x_time,
                p_batch, p_time, g_batch, g_head, g_time, length, total, D, W, BLOCK_D, BLOCK_W, BLOCK_T, True,
            )  # fmt: skip
            tl.debug_barrier()
    else:
        _encode_block(
            tl.program_id(0), i_h, x, inverse, mean, weights, fields, packed, gain, scratch, codes, x_batch, x_head,
            x_time, p_batch, p_time, g_batch, g_head, g_time, length, total, D, W, BLOCK_D, BLOCK_W, BLOCK_T, False,
        )  # fmt: skip


@triton.jit
def _bits_before(p_token, m_n, o_w, DISTANCE: tl.constexpr, bands, W: tl.constexpr):
    """Bits of the trellis of channels so many before o_w, int32 [tokens, BLOCK_W], from a head's first byte on."""
    wraps = tl.where(o_w < DISTANCE, (DISTANCE - o_w + W - 1) // W, 0)
    p_byte = p_token[:, None] + (o_w - DISTANCE + wraps * W)[None, :]
    bits = tl.load(p_byte, mask=m_n[:, None] & (o_w < W)[None, :], other=0).to(tl.int32) & ((1 << bands) - 1)
    turn = wraps[None, :] % bands
    return ((bits << turn) | (bits >> (bands - turn))) & ((1 << bands) - 1)


@triton.jit(do_not_specialize=["length", "total"], do_not_specialize_on_alignment=["packed", "gain"])
def _decode_kernel(
    packed, gain, basis, mean, fields, out,
    p_batch, p_time, g_batch, g_head, g_time, heads, length, total,
    D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    FP32_DOT: tl.constexpr, TRELLIS: tl.constexpr,
):  # fmt: skip
    """out = mean + gain B (c - l / 2), [batch, heads, length, D] float, written; the rest as in `_encode_kernel`.

    basis float32 [heads, D, D], B. FP32_DOT: products in the precision of float32, else of tf32.
    """
    i_h = tl.program_id(1).to(tl.int64)
    m_n, i_b, i_t = _tokens(length, total, BLOCK_T)
    o_d, o_w = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    m_d, m_w = o_d < D, o_w < W
    fields += i_h * FIELDS
    p_head, _ = head_bytes(packed + i_b * p_batch + i_t * p_time, fields, W)
    bands = tl.load(fields + _BANDS * COLUMNS + 2)
    if TRELLIS:
        b_0 = _bits_before(p_head, m_n, o_w, 2, bands, W)
        b_1 = _bits_before(p_head, m_n, o_w, 0, bands, W) ^ _bits_before(p_head, m_n, o_w, 1, bands, W)
        b_1 ^= _bits_before(p_head, m_n, o_w, 4, bands, W)
    b_x = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for f in tl.static_range(_BANDS):
        p_byte = p_head[:, None] + tl.load(fields + COLUMNS * f) * W + o_w[None, :]
        b_c = tl.load(p_byte, mask=m_n[:, None] & m_w[None, :], other=0).to(tl.int32) >> tl.load(
            fields + COLUMNS * f + 1
        )
        last = tl.load(fields + COLUMNS * f + 2)
        b_c &= last
        if TRELLIS:
            b_c = 4 * b_c + 2 * ((b_1 >> f) & 1) + ((b_0 >> f) & 1)
            last = 4 * last + 3
        b_c = tl.where(f < bands, b_c.to(tl.float32) - last.to(tl.float32) * 0.5, 0.0)
        p_basis = basis + i_h * (D * D) + o_d[None, :] * D + (f * W + o_w)[:, None]
        b_b = tl.load(p_basis, mask=m_w[:, None] & m_d[None, :], other=0.0)
        if FP32_DOT:
            b_x = tl.dot(b_c, b_b, b_x, input_precision="tf32x3")
        else:
            b_x = tl.dot(b_c, b_b, b_x, input_precision="tf32")
    b_g = tl.load(gain + i_b * g_batch + i_h * g_head + i_t * g_time, mask=m_n, other=0)
    b_x = b_x * gains(b_g)[:, None]
    b_x = b_x + tl.load(mean + i_h * D + o_d, mask=m_d, other=0.0)[None, :]
    p_out = out + ((i_b * heads + i_h) * length + i_t)[:, None] * D + o_d[None, :]
    tl.store(p_out, as_decoded(b_x, out), mask=m_n[:, None] & m_d[None, :])


def _tile(head_dim: int, device: torch.device) -> dict[str, int]:
    return _TILES.on(device) if head_dim <= 128 else {**_WIDE_TILE, "num_warps": 4 if head_dim <= 256 else 8}


def encode_tokens(
    x: Tensor, inverse: Tensor, mean: Tensor, weights: Tensor, fields: Tensor, packed: Tensor, gain: Tensor,
    trellis: bool,
) -> None:  # fmt: skip
    """Writes packed and gain of `KLTCodes` of x [batch, heads, time, head_dim]; other tensors as in the kernel."""
    x = row_major(x)
    batch, heads, length, head_dim = x.shape
    width = head_dim // BANDS
    if x.numel():
        tile = _tile(head_dim, x.device)
        programs = blocks = cdiv(batch * length, tile["BLOCK_T"])
        scratch = x, x  # not used
        if trellis:
            programs = min(blocks, cdiv(_SEARCH_PROGRAMS, heads))
            shape = (heads, programs, head_dim, tile["BLOCK_T"])
            scratch = torch.empty(shape, device=x.device), torch.empty(shape, dtype=torch.int16, device=x.device)
        _encode_kernel[(programs, heads)](
            x, inverse, mean, weights, fields, packed, gain, *scratch, *x.stride()[:3],
            packed.stride(0), packed.stride(2), *gain.stride()[:3], length, batch * length, blocks, D=head_dim,
            W=width, BLOCK_D=max(16, power_of_two(head_dim)), BLOCK_W=max(16, power_of_two(width)), TRELLIS=trellis,
            **tile,
        )  # fmt: skip


def decode_tokens(
    packed: Tensor, gain: Tensor, basis: Tensor, mean: Tensor, fields: Tensor, dtype: torch.dtype, trellis: bool
) -> Tensor:
    """As `decode` of KLT's codecs, with tf32 products unless the result is float32."""
    batch, heads, length, _ = gain.shape
    head_dim = basis.shape[-1]
    width = head_dim // BANDS
    out = packed.new_empty(batch, heads, length, head_dim, dtype=dtype)
    if out.numel():
        tile = _tile(head_dim, packed.device)
        _decode_kernel[(cdiv(batch * length, tile["BLOCK_T"]), heads)](
            packed, gain, basis, mean, fields, out, packed.stride(0), packed.stride(2), *gain.stride()[:3],
            heads, length, batch * length, D=head_dim, W=width, FP32_DOT=dtype == torch.float32, TRELLIS=trellis,
            BLOCK_D=max(16, power_of_two(head_dim)), BLOCK_W=max(16, power_of_two(width)), **tile,
        )  # fmt: skip
    return out
