"""Codes of KLT as operands of products: fields and subsets taken out of the bytes of tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.kernels.operands import in_thread_order
from kvcli.kernels.words import INTERPRETED
from kvcli.methods.klt.fields import BANDS, GAINS_PER_OCTAVE, UNIT_GAIN

_BANDS = tl.constexpr(BANDS)
COLUMNS = tl.constexpr(6)
FIELDS = tl.constexpr((BANDS + 1) * 6)
"""Numbers of a head in `Tables.fields`."""
UNIT = tl.constexpr(float(UNIT_GAIN))
PER_OCTAVE = tl.constexpr(float(GAINS_PER_OCTAVE))


@triton.jit
def gains(b_g):
    """Gains as numbers, float32, from how they are stored, uint8."""
    b_g = b_g.to(tl.float32)
    return tl.where(b_g > 0, tl.exp2((b_g - UNIT) / PER_OCTAVE), 0.0)


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
