"""Attention over KIVI's codes, and SQuat's: keys per channel, before or after RoPE, values per token.

Scores: a group of tokens shares a scale and a zero a channel, so sum_c q_c (code_c scale_c + zero_c) is a product of
the codes with q_c scale_c, plus one number a group and query. No key is dequantized. Keys stored before RoPE are:
`rotated_kernels.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, row_major, unsupported_shape
from kvcli.kernels.pdl import pdl_launch_dependents
from kvcli.kernels.splits import LOG2E, SplitScores
from kvcli.kernels.words import EVICT_FIRST, fields_as_fp16, pow2_above
from kvcli.methods.base import LayerCodec
from kvcli.methods.encoded import EncodedTokens, PartialAttention
from kvcli.methods.scalar.per_channel import PerChannelKey
from kvcli.methods.scalar.per_token import PerTokenCodec
from kvcli.methods.scalar.rotated_score_kernels import rotated_scores_kernel
from kvcli.methods.scalar.value_kernels import value_sum

_WARPS = 1
_STAGES = 1
_REGISTERS: int | None = 128
_ROTATED_STAGES = 3
_ROTATED_REGISTERS: int | None = None


@triton.jit(do_not_specialize=["groups"])
def _scores_kernel(
    query,
    packed,
    scale,
    zero,
    lengths,
    scores,
    tops,
    q_batch,
    q_head,
    q_time,
    p_batch,
    p_head,
    c_batch,
    c_head,
    c_time,
    s_head,
    s_row,
    num_kv_heads,
    query_len,
    groups,
    per_program,
    scaling,
    HEADS: tl.constexpr,
    B: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PACK: tl.constexpr,
    FP32_DOT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    pdl_launch_dependents()
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // num_kv_heads
    i_h = i_bh % num_kv_heads
    # the columns of a product are PACK groups of tokens times the rows of queries: only some are of use to a token, but
    # tensor cores work on eight at once anyway
    o_c = tl.arange(0, BLOCK_M * PACK)
    o_m = tl.program_id(2) * BLOCK_M + o_c % BLOCK_M
    o_w = tl.arange(0, BLOCK_W)
    o_r = tl.arange(0, BLOCK_N * PACK)
    FIELDS: tl.constexpr = 16 // B
    LOW: tl.constexpr = FIELDS // 2
    MASK: tl.constexpr = (1 << B) - 1
    WHOLE: tl.constexpr = W == BLOCK_W and W * FIELDS == D
    m_m = o_m < HEADS * query_len
    m_w = o_w < W
    head = i_h * HEADS + o_m // query_len
    p_query = query + i_b * q_batch + head * q_head + (o_m % query_len).to(tl.int64) * q_time
    if HAS_LENGTHS:
        groups = tl.load(lengths + i_b) // GROUP
    first = tl.program_id(0).to(tl.int64) * per_program
    count = tl.minimum(groups - tl.program_id(0) * per_program, per_program)
    packed += i_b * p_batch + i_h * p_head + first * GROUP * W
    scale += i_b * c_batch + i_h * c_head + first * c_time
    zero += i_b * c_batch + i_h * c_head + first * c_time
    p_scores = scores + i_bh * s_head + o_m.to(tl.int64)[None, :] * s_row + first * GROUP

    # the query by fields of a word, [W, C] each, its largest entry near 1
    b_qs = ()
    b_top = tl.zeros([BLOCK_W, BLOCK_M * PACK], tl.float32)
    for f in tl.static_range(FIELDS):
        m_q = m_m[None, :] & (m_w & (f * W + o_w < D))[:, None]
        b_q = tl.load(p_query[None, :] + (f * W + o_w)[:, None], mask=m_q, other=0.0).to(tl.float32)
        b_top = tl.maximum(b_top, tl.abs(b_q))
        b_qs = b_qs + (b_q,)
    unit = pow2_above(tl.maximum(tl.max(b_top, 0), 1e-30))
    if FP32_DOT:
        unit = tl.full([BLOCK_M * PACK], 1.0, tl.float32)
    b_units = ()
    for f in tl.static_range(FIELDS):
        # codes are masked, not shifted: field f of a byte reads 2^(B f) times too large
        b_units = b_units + (b_qs[f] / (unit * (1 << (B * (f % LOW))))[None, :],)
    back = unit * scaling

    lifted = back if FP32_DOT else back * 16777216.0
    own = (o_r // BLOCK_N)[:, None] == (o_c // BLOCK_M)[None, :]
    b_own = tl.where(own, 0.0, float("-inf"))
    b_best = tl.full([BLOCK_N * PACK, BLOCK_M * PACK], float("-inf"), tl.float32)
    for g in range(0, count, PACK):
        of_column = tl.minimum(g + o_c // BLOCK_M, count - 1) * c_time
        b_zero = tl.zeros([BLOCK_W, BLOCK_M * PACK], tl.float32)
        b_scaled = ()
        for f in tl.static_range(FIELDS):
            at = of_column[None, :] + (f * W + o_w)[:, None]
            if WHOLE:
                b_c = tl.load(scale + at, eviction_policy=EVICT_FIRST)
                b_z = tl.load(zero + at, eviction_policy=EVICT_FIRST).to(tl.float32)
            else:
                m_c = (m_w & (f * W + o_w < D))[:, None]
                b_c = tl.load(scale + at, mask=m_c, other=0.0)
                b_z = tl.load(zero + at, mask=m_c, other=0.0).to(tl.float32)
            b_zero += b_units[f] * (b_z * (1 << (B * (f % LOW))))
            b_c = b_units[f] * b_c.to(tl.float32)
            b_scaled = b_scaled + (b_c if FP32_DOT else b_c.to(tl.float16),)
        zeros = tl.sum(b_zero, 0) * back
        for part in tl.static_range(GROUP // BLOCK_N):
            of_row = tl.minimum(g + o_r // BLOCK_N, count - 1)
            n = of_row * GROUP + part * BLOCK_N + o_r % BLOCK_N
            if WHOLE:
                words = tl.load(packed + n[:, None] * W + o_w[None, :], eviction_policy=EVICT_FIRST)
            else:
                words = tl.load(packed + n[:, None] * W + o_w[None, :], mask=m_w[None, :], other=0)
            high = words >> 8
            # [N, C]
            b_s = tl.zeros([BLOCK_N * PACK, BLOCK_M * PACK], tl.float32)
            for f in tl.static_range(FIELDS):
                if FP32_DOT:
                    b_k = ((words >> (B * f)) & MASK).to(tl.float32) * (1 << (B * (f % LOW)))
                    b_s = tl.dot(b_k, b_scaled[f], b_s, input_precision="ieee")
                else:
                    b_k = fields_as_fp16(words if f < LOW else high, MASK << (B * (f % LOW)))
                    b_s = tl.dot(b_k, b_scaled[f], b_s)
            b_s = b_s * lifted[None, :] + zeros[None, :]
            b_best = tl.maximum(b_best, b_s + b_own)
            m_s = own & (g + o_r // BLOCK_N < count)[:, None] & m_m[None, :]
            tl.store(p_scores + n[:, None], b_s, mask=m_s)
    top = tl.max(tl.reshape(tl.max(b_best, 0), [PACK, BLOCK_M]), 0)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = HEADS * query_len
    tl.store(tops + (i_bh * tl.num_programs(0) + tl.program_id(0)) * rows + o_m, top, mask=o_m < rows)


def fused_attend(codec: LayerCodec, query: Tensor, part: EncodedTokens, scaling: float) -> PartialAttention:
    """Attention over codes of `PerChannelKey` and `PerTokenCodec`; see `kvcli.methods.encoded.AttendCodes`.

    Raises:
        UsageError: a shape the kernels do not support.
    """
    key, value = codec.key, codec.value
    assert isinstance(key, PerChannelKey)
    assert isinstance(value, PerTokenCodec)
    exact = query.dtype == torch.float32
    scores = _scores(key, query, part, scaling, exact)
    out, lse = value_sum(scores, part.value_codes, part.lengths, value.n_bits, value.spec.head_dim, exact)
    return out.view(query.shape), lse.view(query.shape[:3])


def _scores(key: PerChannelKey, query: Tensor, part: EncodedTokens, scaling: float, exact: bool) -> SplitScores:
    """Scores of all rows and tokens."""
    spec, codes = key.spec, part.key_codes
    group, head_dim = key.tokens_per_group, spec.head_dim
    batch, heads, query_len, _ = query.shape
    heads_per_kv = heads // spec.num_kv_heads
    rows = heads_per_kv * query_len
    words = codes.packed.view(torch.int16)
    if group < 16 or group & (group - 1):
        raise unsupported_shape(f"groups of {group} tokens; they must be a power of two, 16 or more")
    columns = 16 if exact else 8
    pack = max(1, columns // power_of_two(rows)) if part.rotations is None else 1
    block_m = columns // pack
    blocks = cdiv(rows, block_m)
    scores = SplitScores(batch, spec.num_kv_heads, rows, part.length, 2 * group, blocks, query.device)
    grid = (scores.num_splits, batch * spec.num_kv_heads, blocks)
    query = row_major(query)
    shapes = {
        "HEADS": heads_per_kv,
        "B": key.n_bits,
        "W": words.shape[-1],
        "D": head_dim,
        "GROUP": group,
        "BLOCK_W": max(16, power_of_two(words.shape[-1])),
        "BLOCK_M": block_m,
        "FP32_DOT": exact,
        "HAS_LENGTHS": part.lengths is not None,
        "num_warps": 4 if exact else _WARPS,
        "num_stages": _STAGES if part.rotations is None else _ROTATED_STAGES,
        "maxnreg": None if exact else _REGISTERS if part.rotations is None else _ROTATED_REGISTERS,
    }
    strides = (*query.stride()[:3], *words.stride()[:2], *codes.scale.stride()[:3])
    sizes = (spec.num_kv_heads, query_len, part.length // group, scores.tokens_per_split // group, scaling * LOG2E)
    written = (scores.values if part.lengths is None else part.lengths, scores.values, scores.split_max)
    if part.rotations is None:
        _scores_kernel[grid](
            query,
            words,
            codes.scale,
            codes.zero,
            *written,
            *strides,
            scores.values.stride(1),
            scores.values.stride(2),
            *sizes,
            BLOCK_N=min(group, 32),
            PACK=pack,
            **shapes,
        )
        return scores
    if spec.rope.rotary_dim != head_dim or words.shape[-1] * 16 != head_dim * key.n_bits:
        raise unsupported_shape("keys before RoPE that are rotated in part of their channels")
    if head_dim // 2 % words.shape[-1]:
        raise unsupported_shape(f"keys before RoPE of head_dim {head_dim} at {key.n_bits} bits")
    tiles, offsets = part.rotations.tiles(group), part.rotations.offsets(group)
    rotated_scores_kernel[grid](
        query,
        words,
        codes.scale,
        codes.zero,
        tiles.cos,
        tiles.sin,
        offsets.cos,
        offsets.sin,
        *written,
        *strides,
        tiles.cos.stride(0) if tiles.cos.shape[0] > 1 else 0,
        scores.values.stride(1),
        scores.values.stride(2),
        *sizes,
        **shapes,
    )
    return scores
