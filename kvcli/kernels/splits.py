"""Split-KV attention (FlashDecoding): what programs work on, the scores of each split of the tokens, and the merge.

The grid is (num_splits, batch * num_kv_heads, blocks of query rows). A query row m of a kv head is head m // query_len
of its group at position m % query_len, so that codes are read once for all query heads of a group. Scores are base-2
(scaled by log2(e)), so kernels use exp2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, tokens_per_split
from kvcli.kernels.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait


@triton.jit
def batch_and_head(AXIS: tl.constexpr, num_kv_heads):
    """Index of sequence and kv head together, of the sequence and of the kv head, int64, from one axis of the grid."""
    i_bh = tl.program_id(AXIS).to(tl.int64)
    return i_bh, i_bh // num_kv_heads, i_bh % num_kv_heads


@triton.jit
def split_size(length, per_split, SPLIT: tl.constexpr):
    """Tokens per split of a sequence of `length` tokens: per_split, or fewer, if SPLIT, so that no split is empty that
    could have as many. SPLIT: as `SplitScores.split`.
    """
    if SPLIT > 0:
        per_split = tl.minimum(per_split, tl.cdiv(tl.cdiv(length, SPLIT), tl.num_programs(0)) * SPLIT)
    return per_split


@triton.jit
def split_range(length, per_split):
    """First token of the program's split (axis 0), int64, and how many of a sequence's `length` tokens it has: 0 or
    less beyond the end.
    """
    first = tl.program_id(0).to(tl.int64) * per_split
    return first, tl.minimum(length - tl.program_id(0) * per_split, per_split)


@triton.jit
def query_rows(query, i_b, i_h, o_m, q_batch, q_head, q_time, query_len, HEADS: tl.constexpr):
    """Pointers to query rows o_m [M] of a kv head with HEADS query heads, of query [batch, heads, query_len, D]."""
    head = i_h * HEADS + o_m // query_len
    return query + i_b * q_batch + head * q_head + (o_m % query_len).to(tl.int64) * q_time


@triton.jit
def without_first(scores, n, SKIP: tl.constexpr):
    """Scores [N, M] of tokens n [N], -inf for the first SKIP tokens of a sequence."""
    if SKIP > 0:
        scores = tl.where((n < SKIP)[:, None], float("-inf"), scores)
    return scores


@triton.jit
def capped(scores, SOFT_CAP: tl.constexpr):
    """SOFT_CAP * tanh(scores / SOFT_CAP)."""
    return SOFT_CAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFT_CAP)) - 1.0)


LOG2E = 1.4426950408889634

# tuned on one H200, torch 2.11, triton 3.6
_PROGRAMS_PER_SM = 16
_WARPS = 4


@triton.jit(do_not_specialize=["num_splits", "rows"])
def _merge_splits_kernel(
    split_out, split_lse, out, lse, num_splits, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr
):
    """out = sum_s 2^(lse_s - max) out_s / sum_s 2^(lse_s - max), and the log-sum-exp over all splits.

    Grid (batch * heads * rows, ceil(D / BLOCK_D)); one program: BLOCK_D channels of one query row, BLOCK_S splits at a
    time. Tuned on one H200, torch 2.11, triton 3.6.

    Args:
        split_out: float32 [batch * heads, num_splits, rows, D].
        split_lse: float32 [batch * heads, num_splits, rows], in units of log 2; -inf for splits without tokens.
        out: float32 [batch * heads, rows, D], written; 0 where no split has tokens.
        lse: float32 [batch * heads, rows], written, natural log; -inf where no split has tokens.
    """
    pdl_launch_dependents()
    i_bh = tl.program_id(0).to(tl.int64) // rows
    i_m = tl.program_id(0) % rows
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_s = tl.arange(0, BLOCK_S)
    base = i_bh * num_splits * rows + i_m
    b_max = tl.full([BLOCK_S], float("-inf"), tl.float32)
    pdl_wait()
    for start in range(0, num_splits, BLOCK_S):
        s = start + o_s
        b_max = tl.maximum(b_max, tl.load(split_lse + base + s * rows, mask=s < num_splits, other=float("-inf")))
    highest = tl.max(b_max, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    b_weights = tl.zeros([BLOCK_S], tl.float32)
    b_acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        s = start + o_s
        b_w = tl.exp2(tl.load(split_lse + base + s * rows, mask=s < num_splits, other=float("-inf")) - highest)
        at = (base + s.to(tl.int64) * rows)[:, None] * D + o_d[None, :]
        b_out = tl.load(split_out + at, mask=(s < num_splits)[:, None] & (o_d < D)[None, :], other=0.0)
        b_weights += b_w
        b_acc += b_w[:, None] * b_out
    total = tl.sum(b_weights, 0)
    safe_total = tl.where(total > 0, total, 1.0)
    tl.store(out + tl.program_id(0).to(tl.int64) * D + o_d, tl.sum(b_acc, 0) / safe_total, mask=o_d < D)
    if tl.program_id(1) == 0:
        b_lse = tl.where(total > 0, (highest + tl.log2(safe_total)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + tl.program_id(0), b_lse)


class SplitScores:
    """Scores of `rows` query rows per kv head and `length` tokens, and the largest of each row in each split.

    Args:
        multiple_of: tokens per split are a multiple of this.
        blocks: programs that share a split of a kv head.
        balanced: whether a sequence that is shorter than `length` is divided into as many splits, smaller ones.

    Attributes:
        values: float32 [batch, kv_heads, rows, >= length], in units of log 2; rows begin at multiples of 256 bytes.
        split_max: float32 [batch, kv_heads, num_splits, rows]; -inf where a split holds no token of the sequence.
        tokens_per_split: the last split may have fewer.
        split: what tokens per split of a shorter sequence are a multiple of; 0 if they are as many.
    """

    def __init__(
        self, batch: int, kv_heads: int, rows: int, length: int, multiple_of: int, blocks: int, device: torch.device,
        *, balanced: bool,
    ) -> None:  # fmt: skip
        self.length, self.split = length, multiple_of if balanced else 0
        self.tokens_per_split = tokens_per_split(length, batch * kv_heads * blocks, multiple_of, _PROGRAMS_PER_SM)
        self.num_splits = cdiv(length, self.tokens_per_split)
        self.values = torch.empty(batch, kv_heads, rows, cdiv(length, 64) * 64, device=device)
        self.split_max = torch.empty(batch, kv_heads, self.num_splits, rows, device=device)


def merge_splits(split_out: Tensor, split_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merges attention over splits of the tokens; launched by PDL after the kernel that wrote them.

    Args:
        split_out: float32 [batch * heads, num_splits, rows, channels], normalized within each split.
        split_lse: float32 [batch * heads, num_splits, rows], in units of log 2.
        out: float32 [batch, heads, rows, channels], written.
        lse: float32 [batch, heads, rows], written, natural log.
    """
    num_splits, rows, channels = split_out.shape[1:]
    if num_splits <= 8:
        block_d, block_s = min(256, power_of_two(channels)), 8
    elif num_splits <= 32:
        block_d, block_s = min(128, power_of_two(channels)), 32
    else:
        block_d, block_s = (32, 256) if channels <= 256 else (128, 128)
    _merge_splits_kernel[(split_out.shape[0] * rows, cdiv(channels, block_d))](
        split_out, split_lse, out, lse, num_splits, rows, D=channels, BLOCK_D=block_d, BLOCK_S=block_s,
        num_warps=_WARPS, **pdl_launch_options(),
    )  # fmt: skip
