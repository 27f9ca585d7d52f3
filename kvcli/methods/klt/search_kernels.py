"""The search of a trellis in a kernel: a thread has the costs of a vector's 16 states."""

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.methods.klt.field_kernels import COLUMNS
from kvcli.methods.klt.trellis import LEAD

_LEAD = tl.constexpr(LEAD)


@triton.jit
def rounded(x, most):
    """x rounded, halves to even, and clamped to 0 and `most`, below 2^22; float32."""
    return (tl.minimum(tl.maximum(x, 0.0), most) + 12582912.0) - 12582912.0  # 1.5 * 2^23


@triton.jit
def _channel(costs, y, most):
    """Least costs of the trellis's 16 states after a channel, and int32, bit n: whether n comes from a state above 7.

    costs: a tuple of float32 [BLOCK_T]; y and `most` as in `trellis.search`.
    """
    errors = ()
    for subset in tl.static_range(4):
        error = y - (4.0 * rounded((y - subset) * 0.25, most) + subset)
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
def search(p_y, p_way, fields, count, W: tl.constexpr, BLOCK_T: tl.constexpr):
    """`trellis.search` of BLOCK_T vectors: channel t is at p_y + t BLOCK_T, and its codes are written at p_way.

    A code is the level within the subset, and above its 8 bits that of the trellis. p_way point to int16. Returned is
    float32 [BLOCK_T], the sum of y times its level, both counted from the middle of the levels.
    """
    state, least = tl.zeros([BLOCK_T], tl.int32), tl.full([BLOCK_T], float("inf"), tl.float32)
    if count <= _LEAD:
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
    product = tl.zeros([BLOCK_T], tl.float32)
    for i in range(count):
        t = count - 1 - i
        ways = tl.load(p_way + t * BLOCK_T).to(tl.int32)
        before = (state >> 1) | ((ways >> state) & 1) << 3
        subset = 2 * ((state ^ before ^ (before >> 3)) & 1) + ((before >> 1) & 1)
        y, most = tl.load(p_y + t * BLOCK_T), _most(fields, t, W)
        level = rounded((y - subset.to(tl.float32)) * 0.25, most)
        middle = 2.0 * most + 1.5
        product += (y - middle) * (4.0 * level + subset.to(tl.float32) - middle)
        tl.store(p_way + t * BLOCK_T, (level.to(tl.int32) | ((state & 1) << 8)).to(tl.int16))
        state = before
    return product
