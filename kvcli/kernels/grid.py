"""The prologue of attention kernels: which sequence, kv head, queries and tokens a program works on.

Their grid is (num_splits, batch * num_kv_heads, blocks of query rows). A query row m of a kv head is head
m // query_len of its group at position m % query_len, so that codes are read once for all query heads of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def batch_and_head(AXIS: tl.constexpr, num_kv_heads):
    """Index of sequence and kv head together, of the sequence and of the kv head, int64, from one axis of the grid."""
    i_bh = tl.program_id(AXIS).to(tl.int64)
    return i_bh, i_bh // num_kv_heads, i_bh % num_kv_heads


@triton.jit
def split_range(length, per_split):
    """First token of the program's split (axis 0), int64, and how many of a sequence's tokens it has: 0 or less beyond
    the sequence's end.

    Args:
        length: tokens of the sequence.
        per_split: tokens per split.
    """
    first = tl.program_id(0).to(tl.int64) * per_split
    return first, tl.minimum(length - tl.program_id(0) * per_split, per_split)


@triton.jit
def query_rows(query, i_b, i_h, o_m, q_batch, q_head, q_time, query_len, HEADS: tl.constexpr):
    """Pointers to query rows o_m [M] of a kv head with HEADS query heads, of query [batch, heads, query_len, D]."""
    head = i_h * HEADS + o_m // query_len
    return query + i_b * q_batch + head * q_head + (o_m % query_len).to(tl.int64) * q_time
