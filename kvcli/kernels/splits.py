"""Attention whose tokens are split over programs: the scores of each split, and the merge of the splits' results.

Scores are kept in units of log 2, so that exp2 serves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, tokens_per_split
from kvcli.kernels.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait

LOG2E = 1.4426950408889634
_PER_SM = 16
_WARPS = 4


@triton.jit
def _merge_splits_kernel(
    part_out, part_lse, out, lse, parts, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr
):
    pdl_launch_dependents()
    i_bh = tl.program_id(0).to(tl.int64) // rows
    i_m = tl.program_id(0) % rows
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_s = tl.arange(0, BLOCK_S)
    base = i_bh * parts * rows + i_m
    top = tl.full([BLOCK_S], float("-inf"), tl.float32)
    pdl_wait()
    for start in range(0, parts, BLOCK_S):
        s = start + o_s
        top = tl.maximum(top, tl.load(part_lse + base + s * rows, mask=s < parts, other=float("-inf")))
    highest = tl.max(top, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([BLOCK_S], tl.float32)
    acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in range(0, parts, BLOCK_S):
        s = start + o_s
        weight = tl.exp2(tl.load(part_lse + base + s * rows, mask=s < parts, other=float("-inf")) - highest)
        at = (base + s.to(tl.int64) * rows)[:, None] * D + o_d[None, :]
        part = tl.load(part_out + at, mask=(s < parts)[:, None] & (o_d < D)[None, :], other=0.0)
        total += weight
        acc += weight[:, None] * part
    whole = tl.sum(total, 0)
    safe = tl.where(whole > 0, whole, 1.0)
    tl.store(out + tl.program_id(0).to(tl.int64) * D + o_d, tl.sum(acc, 0) / safe, mask=o_d < D)
    if tl.program_id(1) == 0:
        value = tl.where(whole > 0, (highest + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + tl.program_id(0), value)


class SplitScores:
    """Scores of all rows and tokens, and the largest of each row in ranges of tokens.

    Args:
        batch: sequences.
        kv_heads: kv heads.
        rows: queries a kv head.
        length: tokens.
        multiple_of: a range is a multiple of this many tokens.
        blocks: programs that share a range of a kv head.
        device: where.

    Attributes:
        values: float32 [batch, kv_heads, rows, >= length], in units of log 2; rows begin at multiples of 256 bytes.
        split_max: float32 [batch, kv_heads, num_splits, rows]; -inf where a range holds no token of the sequence.
        tokens_per_split: tokens of a range.
        length: tokens.
    """

    def __init__(
        self, batch: int, kv_heads: int, rows: int, length: int, multiple_of: int, blocks: int, device: torch.device
    ) -> None:
        self.length = length
        self.tokens_per_split = tokens_per_split(length, batch * kv_heads * blocks, multiple_of, _PER_SM)
        self.values = torch.empty(batch, kv_heads, rows, -(-length // 64) * 64, device=device)
        self.split_max = torch.empty(batch, kv_heads, self.num_splits, rows, device=device)

    @property
    def num_splits(self) -> int:
        """Ranges of tokens."""
        return -(-self.length // self.tokens_per_split)


def merge_splits(part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Joins attention over ranges of tokens, as a kernel that follows the one that left them.

    Args:
        part_out: float32 [batch * heads, parts, rows, channels], normalised in each part.
        part_lse: float32 [batch * heads, parts, rows], in units of log 2.
        out: float32 [batch, heads, rows, channels], written.
        lse: float32 [batch, heads, rows], written, natural.
    """
    parts, rows, channels = part_out.shape[1:]
    block, parts_at_once = (32, 256) if channels <= 256 else (128, 128)
    _merge_splits_kernel[(part_out.shape[0] * rows, cdiv(channels, block))](
        part_out, part_lse, out, lse, parts, rows, D=channels, BLOCK_D=block, BLOCK_S=parts_at_once,
        num_warps=_WARPS, **pdl_launch_options(),
    )  # fmt: skip
