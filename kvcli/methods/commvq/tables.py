"""Tables that CommVQ's kernels read, derived from fitted buffers: for the key search, value descent and key scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.launch import power_of_two
from kvcli.methods.commvq.codebook import by_group, pair_table
from kvcli.rope import from_pairs

SWEEP_BITS = 4
"""Value bits that a coordinate-descent step chooses jointly."""

BLOCK_BITS = 128
"""Value bits per block of the descent kernel; tables are padded to whole blocks."""

NO_CENTRE = 2**30
"""Entry of `SearchTables.tables` for padding, above every sum that the search compares."""

_FIXED_POINT_MAX = 2.0**28


@dataclass(frozen=True)
class SearchTables:
    """Tables of the key search; P problems (kv head and group), N and g padded to powers of two, at least 16.

    The search compares fixed-point int32 numbers, see `encode_keys_kernels.py`.

    Attributes:
        channel_weights: float32 [num_kv_heads, head_dim], weight of each channel.
        weights: float32 [P, g] (not padded), weight of each channel pair.
        units: float32 [P, g] (not padded), weight times codebook scale.
        pow2_scales: float32 [P], powers of two that bring `units` to 1 or below.
        fixed_point_scales: float32 [P, R], fixed-point scale of each stage, divided by `pow2_scales`.
        books: float16 [P, R, N, 2g], codebook entries (integers), real parts before imaginary ones.
        tables: int32 [P, R, N, N], |u_a + i*u_b|^2 / 2 in the fixed point of its stage; `NO_CENTRE` at padding.
        codebook_size: N without padding.
    """

    channel_weights: Tensor
    weights: Tensor
    units: Tensor
    pow2_scales: Tensor
    fixed_point_scales: Tensor
    books: Tensor
    tables: Tensor
    codebook_size: int


def search_tables(
    codebook: Tensor, codebook_scale: Tensor, pair_weight: Tensor, norm: float, rotary_dim: int
) -> SearchTables:
    """Derives the tables of the key search.

    Args:
        codebook: int8 [num_kv_heads, groups, R, N, 2g], (re, im) interleaved.
        codebook_scale: float32 [num_kv_heads, groups, g].
        pair_weight: float32 [num_kv_heads, head_dim/2].
        norm: weighted L2 norm of the largest normalised key of a head.
        rotary_dim: channels that RoPE rotates.
    """
    groups, size, pairs = codebook.shape[1], codebook.shape[3], codebook.shape[4] // 2
    pad_n, pad_g = max(16, power_of_two(size)) - size, max(16, power_of_two(pairs)) - pairs
    weights = by_group(pair_weight, groups, 1).flatten(0, 1).contiguous()
    units = weights * codebook_scale.flatten(0, 1)
    pow2_scales = torch.exp2(-units.amax(-1).clamp(1e-30, 1e30).log2().ceil())
    real_scale = codebook_scale.repeat_interleave(2, -1)[:, :, None, None]
    weighted = (codebook * real_scale).flatten(0, 1) * weights.repeat_interleave(2, -1)[:, None, None]
    halves = torch.stack([pair_table(book) for book in weighted.unbind(1)], dim=1) / 2
    # a stage adds at most its shortest centre to the norm of the residual
    words = weighted.norm(dim=-1).amax(-1)
    shortest = (2 * halves.amin((-2, -1))).clamp_min(0).sqrt()
    longest = norm + shortest.cumsum(-1) - shortest
    # twice the largest product, and the largest half of a squared norm: a sum of two products and a half fits 30 bits
    bound = 2 * words * torch.maximum(longest, words)
    scale = torch.exp2((_FIXED_POINT_MAX / bound.clamp_min(1e-30)).log2().floor())
    tables = (halves * scale[:, :, None, None]).round().int()
    tables = torch.nn.functional.pad(tables, (0, pad_n, 0, pad_n), value=NO_CENTRE)
    planes = codebook.flatten(0, 1).unflatten(-1, (-1, 2)).transpose(-1, -2).half()
    books = torch.nn.functional.pad(planes, (0, pad_g, 0, 0, 0, pad_n)).flatten(-2).contiguous()
    channel_weights = from_pairs(pair_weight.unsqueeze(-1).expand(-1, -1, 2), rotary_dim).contiguous()
    scale = scale / pow2_scales.unsqueeze(1)
    return SearchTables(channel_weights, weights, units, pow2_scales, scale, books, tables, size)


@dataclass(frozen=True)
class DescentTables:
    """Tables of the value descent; N is the number of bits N_c, rounded up to whole blocks.

    Attributes:
        metric_root: float32 [num_kv_heads, d, d], of the codec.
        codebook: float16 [N_c, D], in the coordinates of the metric.
        offset: float32 [D], in the same coordinates.
        bias: float32 [N_c], the encoder's.
        shift: float32 [N_c], products of codebook rows and offset.
        gram: float16 [N, N], products of codebook rows divided by `unit`, 0 within a group.
        unit: float32 [1], a power of two; the largest squared norm of a row is 32 to 64 units.
        energies: float32 [N / 4, 16], squared norm of each setting of a group, divided by `unit`.
        effects: float16 [N, 64], what a bit that falls from 1 to 0 adds to the scores of the 16 settings of the four
            groups around it, divided by `unit`.
    """

    metric_root: Tensor
    codebook: Tensor
    offset: Tensor
    bias: Tensor
    shift: Tensor
    gram: Tensor
    unit: Tensor
    energies: Tensor
    effects: Tensor


def descent_tables(metric_root: Tensor, codebook: Tensor, offset: Tensor, bias: Tensor) -> DescentTables:
    """Derives the tables of the value descent.

    Args:
        metric_root: float32 [num_kv_heads, d, d].
        codebook: float16 [N_c, D].
        offset: float16 [D].
        bias: float16 [N_c] of the linear encoder.
    """
    rows, in_metric_offset = in_metric(codebook, metric_root), in_metric(offset.unsqueeze(0), metric_root).squeeze(0)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % BLOCK_BITS))
    gram = padded @ padded.T
    group = torch.arange(SWEEP_BITS, device=rows.device)
    settings = ((torch.arange(2**SWEEP_BITS, device=rows.device) >> group.unsqueeze(1)) & 1).float()
    energies = (settings.T @ padded.unflatten(0, (-1, SWEEP_BITS))).square().sum(-1)
    groups = torch.arange(gram.shape[0], device=rows.device) // SWEEP_BITS
    unit = torch.exp2((gram.diagonal().amax() / 64).clamp(1e-30, 1e30).log2().ceil()).view(1)
    gram = (torch.where(groups.unsqueeze(0) == groups.unsqueeze(1), 0.0, gram) / unit).half()
    near = gram.float().unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).diagonal(dim1=0, dim2=2).movedim(2, 0)
    effects = -2 * (near.unflatten(2, (-1, SWEEP_BITS)) @ settings).flatten(2).flatten(0, 1)
    shift = rows @ in_metric_offset
    stored = rows.half(), in_metric_offset
    return DescentTables(metric_root, *stored, bias.float(), shift, gram, unit, energies / unit, effects.half())


def in_metric(rows: Tensor, metric_root: Tensor) -> Tensor:
    """Rows [n, heads * d] times [heads, d, d], head by head, in float32."""
    split = rows.float().unflatten(-1, metric_root.shape[:2])
    return torch.einsum("nhd,hde->nhe", split, metric_root).flatten(1)


def pack_codebook(codebook: Tensor) -> Tensor:
    """The key codebook as biased bytes, four per 32-bit word.

    Args:
        codebook: int8 [num_kv_heads, groups, R, N, 2g], (re, im) interleaved.

    Returns:
        int32 [num_kv_heads, groups, R, N, g/2]; word w holds (re, im) of pair w, then of pair w + g/2.
    """
    biased = codebook.to(torch.int16) + 128
    halves = biased.unflatten(-1, (2, -1, 2)).transpose(-3, -2).flatten(-3)
    return halves.to(torch.uint8).contiguous().view(torch.int32)
