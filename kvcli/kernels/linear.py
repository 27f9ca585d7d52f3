"""Kernels of a decode step around attention, one launch each: products with weights, gated products, norms.

For few rows of input, a product takes as long as its weights take to be read. A program takes some rows of the weights
and all of the input, so that no sum is split; with one row of input, products are added without tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, has_hopper_shared_memory, power_of_two
from kvcli.kernels.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait

MOST_ROWS = 16
"""Rows of an input that the products take."""

# BLOCK_N, BLOCK_K in 16 bits and stages of one row and of more; tuned on one H200, torch 2.11, triton 3.6
_TILES = ((8, 512, 3), (64, 256, 4))
_GATED_TILES = ((4, 1024, 3), (64, 128, 3))


@triton.jit
def _linear_kernel(
    x, w0, w1, w2, b0, b1, b2, y0, y1, y2, n0, n1, n2, rows, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """y = x w^T + b for three weights [n, K], of which the last may have no rows, and x [rows, K]; sums in float32.

    Grid (sum of ceil(n / BLOCK_N)). ROWS is 1 or `MOST_ROWS`. Tuned on one H200 (torch 2.11, triton 3.6).
    """
    pdl_launch_dependents()
    block = tl.program_id(0)
    w, b, y, n = w0, b0, y0, n0
    first, second = tl.cdiv(n0, BLOCK_N), tl.cdiv(n1, BLOCK_N)
    if block >= first + second:
        w, b, y, n = w2, b2, y2, n2
        block -= first + second
    elif block >= first:
        w, b, y, n = w1, b1, y1, n1
        block -= first
    i, k, m = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    m_n, m_m = i[:, None] < n, m[None, :] < rows
    w += i[:, None].to(tl.int64) * K + k[None, :]
    if ROWS == 1:  # weights are there before the input is
        b_first = tl.load(w, mask=m_n & (k[None, :] < K), other=0.0).to(tl.float32)
    pdl_wait()
    if ROWS == 1:
        parts = b_first * tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
            b_w = tl.load(w + start, mask=m_n & (k[None, :] < K - start), other=0.0).to(tl.float32)
            parts += b_w * tl.load(x + start + k, mask=k < K - start, other=0.0).to(tl.float32)[None, :]
        acc = tl.sum(parts, axis=1)[:, None]
    else:
        x += m[None, :] * K + k[:, None]
        acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            b_w = tl.load(w + start, mask=m_n & (k[None, :] < K - start), other=0.0)
            b_x = tl.load(x + start, mask=m_m & (k[:, None] < K - start), other=0.0)
            acc = tl.dot(b_w, b_x, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(b + i, mask=i < n, other=0.0).to(tl.float32)[:, None]
    tl.store(y + m[None, :] * n + i[:, None], acc.to(y.dtype.element_ty), mask=m_n & m_m)


@triton.jit
def _gated_kernel(
    x, w_gate, w_up, y, n, rows, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """y = act(x w_gate^T) * (x w_up^T) for weights [n, K] and x [rows, K], each rounded as modules of their own do.

    Grid (ceil(n / BLOCK_N)). ROWS as above. SILU: else GELU by tanh. Tuned on one H200 (torch 2.11, triton 3.6).
    """
    pdl_launch_dependents()
    i, k, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    m_n, m_m = i[:, None] < n, m[None, :] < rows
    w_gate += i[:, None].to(tl.int64) * K + k[None, :]
    w_up += i[:, None].to(tl.int64) * K + k[None, :]
    if ROWS == 1:
        b_first_gate = tl.load(w_gate, mask=m_n & (k[None, :] < K), other=0.0).to(tl.float32)
        b_first_up = tl.load(w_up, mask=m_n & (k[None, :] < K), other=0.0).to(tl.float32)
    pdl_wait()
    if ROWS == 1:
        b_x = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        gates, ups = b_first_gate * b_x, b_first_up * b_x
        for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
            m_w = m_n & (k[None, :] < K - start)
            b_gate = tl.load(w_gate + start, mask=m_w, other=0.0).to(tl.float32)
            b_up = tl.load(w_up + start, mask=m_w, other=0.0).to(tl.float32)
            b_x = tl.load(x + start + k, mask=k < K - start, other=0.0).to(tl.float32)[None, :]
            gates += b_gate * b_x
            ups += b_up * b_x
        gate, up = tl.sum(gates, axis=1)[:, None], tl.sum(ups, axis=1)[:, None]
    else:
        x += m[None, :] * K + k[:, None]
        gate, up = tl.zeros((BLOCK_N, ROWS), tl.float32), tl.zeros((BLOCK_N, ROWS), tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            m_w = m_n & (k[None, :] < K - start)
            b_gate, b_up = tl.load(w_gate + start, mask=m_w, other=0.0), tl.load(w_up + start, mask=m_w, other=0.0)
            b_x = tl.load(x + start, mask=m_m & (k[:, None] < K - start), other=0.0)
            gate = tl.dot(b_gate, b_x, gate, input_precision="ieee")
            up = tl.dot(b_up, b_x, up, input_precision="ieee")
    gate = gate.to(y.dtype.element_ty).to(tl.float32)
    inner = gate if SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    small = tl.exp(-tl.abs(inner))  # which does not overflow
    gate = (gate * tl.where(inner < 0, small, 1.0) / (1 + small)).to(y.dtype.element_ty).to(tl.float32)
    up = up.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + m[None, :] * n + i[:, None], (gate * up).to(y.dtype.element_ty), mask=m_n & m_m)


@triton.jit
def _rms_norm_kernel(
    x, added, w, total, y, n, eps, BLOCK: tl.constexpr, OFFSET: tl.constexpr, LATE: tl.constexpr, ADD: tl.constexpr
):
    """y = x / sqrt(mean(x^2) + eps) * (OFFSET + w) for rows of x [rows, n], in float32; LATE: w after rounding.

    If ADD, x is total = x + added, which is written, rounded. Grid (rows). Tuned on one H200 (torch 2.11, triton 3.6).
    """
    pdl_launch_dependents()
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * n + i
    b_w = tl.load(w + i, mask=i < n, other=0.0).to(tl.float32) + OFFSET
    pdl_wait()
    b_x = tl.load(x + at, mask=i < n, other=0.0).to(tl.float32)
    if ADD:
        b_x += tl.load(added + at, mask=i < n, other=0.0).to(tl.float32)
        b_x = b_x.to(y.dtype.element_ty)
        tl.store(total + at, b_x, mask=i < n)
        b_x = b_x.to(tl.float32)
    b_x *= tl.rsqrt(tl.sum(b_x * b_x) / n + eps)
    if LATE:
        b_x = b_x.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + at, (b_x * b_w).to(y.dtype.element_ty), mask=i < n)


def _tile(x: Tensor, tiles: tuple[tuple[int, int, int], ...]) -> dict[str, int]:
    """The tile for an input, of as many bytes in float32 as in 16 bits; smaller where shared memory is."""
    one_row, less = x.numel() == x.shape[-1], not has_hopper_shared_memory(x.device)
    n, k, stages = tiles[not one_row]
    rows = {"ROWS": 1 if one_row else MOST_ROWS, "BLOCK_N": n >> less, "BLOCK_K": 2 * k // x.element_size()}
    return {**rows, "STAGES": stages - less, "num_warps": 4}


def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Products of x [..., K], at most `MOST_ROWS` rows, with one to three weights [n, K], in one launch.

    Args:
        biases: [n] for every weight or for none.

    Returns:
        [..., n] for each weight, in x's dtype.
    """
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    outputs = [x.new_empty(*x.shape[:-1], len(w)) for w in weights]
    options = _tile(x, _TILES)
    rest, sizes = 3 - len(weights), [len(w) for w in weights]
    padded = [[*tensors, *[tensors[0]] * rest] for tensors in (weights, outputs)]
    given = [b if b is not None else x for b in (*biases, *[None] * rest)]
    _linear_kernel[(sum(cdiv(n, options["BLOCK_N"]) for n in sizes),)](
        x, *padded[0], *given, *padded[1], *sizes, *[0] * rest, rows, width,
        BIAS=biases[0] is not None, **options, **pdl_launch_options(),
    )  # fmt: skip
    return outputs


def gated(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(x gate^T) * (x up^T) of x [..., K], at most `MOST_ROWS` rows, and weights [n, K]; `silu` or `gelu_tanh`."""
    rows, n = x.numel() // x.shape[-1], len(gate)
    output = x.new_empty(*x.shape[:-1], n)
    options = _tile(x, _GATED_TILES)
    _gated_kernel[(cdiv(n, options["BLOCK_N"]),)](
        x, gate, up, output, n, rows, x.shape[-1],
        SILU=activation == "silu", **options, **pdl_launch_options(),
    )  # fmt: skip
    return output


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, late: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) of the last axis, in float32; `late`: rounded before the weight."""
    return _rms_norm(x, None, weight, eps, offset, late)[1]


def add_rms_norm(
    x: Tensor, added: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, late: bool = False
) -> tuple[Tensor, Tensor]:
    """x + added, which counts its changes (`_version`), and `rms_norm` of it, in one launch.

    Both are contiguous, of one shape and dtype.
    """
    return _rms_norm(x, added, weight, eps, offset, late)


def _rms_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, offset: float, late: bool
) -> tuple[Tensor, Tensor]:
    output, n = torch.empty_like(x), x.shape[-1]
    with torch.inference_mode(False):
        total = x if added is None else torch.empty_like(x)
    _rms_norm_kernel[(x.numel() // n,)](
        x, x if added is None else added, weight, total, output, n, eps,
        BLOCK=power_of_two(n), OFFSET=offset, LATE=late, ADD=added is not None,
        num_warps=8 if n > 1024 else 4 if n > 256 else 1, **pdl_launch_options(),
    )  # fmt: skip
    return total, output
