"""Tables that CommVQ's kernels read, derived from fitted buffers: for the key search, value descent and key scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.launch import TINY, power_of_two
from kvcli.methods.commvq.codebook import by_group, times_i
from kvcli.rope import from_pairs

SWEEP_BITS = 4
"""Value bits that a coordinate-descent step chooses jointly."""

BLOCK_BITS = 128
"""Value bits per block of the descent kernel; tables are padded to whole blocks."""

TERM_MAX = 32767
"""Largest term of the sums that the search compares, two of which fit 16 bits."""

_CENTRING_ROUNDS = 4


@dataclass(frozen=True)
class SearchTables:
    """Tables of the key search; P problems (kv head and group), N and g padded to powers of two, at least 16.

    Padding repeats the last codeword. The search compares terms that are multiplied by `pow2_scales`, see
    `search_kernels.py`: <u_a, i*u_b> is row term a + column term b + entry (a, b) of a table whose range is small.

    Attributes:
        channel_weights: float32 [num_kv_heads, head_dim], weight of each channel.
        weights: float32 [P, g] (not padded), weight of each channel pair.
        units: float32 [P, g] (not padded), weight times codebook scale.
        pow2_scales: float32 [P], powers of two that bring `units` to 1 or below.
        books: float16 [P, R, N, 2g], codebook entries (integers), real parts before imaginary ones.
        terms: float32 [P, R, 3, N], |u|^2 / 2 with row terms and with column terms added, and alone.
        tables: int32 [P, R, N, N], the table above its least entry in units of `steps`, 0 to `TERM_MAX`; twice, in the
            low and the high half of each word.
        steps: float32 [P, R].
        codebook_size: N without padding.
    """

    channel_weights: Tensor
    weights: Tensor
    units: Tensor
    pow2_scales: Tensor
    books: Tensor
    terms: Tensor
    tables: Tensor
    steps: Tensor
    codebook_size: int


def search_tables(codebook: Tensor, codebook_scale: Tensor, pair_weight: Tensor, rotary_dim: int) -> SearchTables:
    """Derives the tables of the key search from buffers of `CommVQKeyCodec`; RoPE rotates `rotary_dim` channels."""
    groups, size, pairs = codebook.shape[1], codebook.shape[3], codebook.shape[4] // 2
    pad_n, pad_g = max(16, power_of_two(size)) - size, max(16, power_of_two(pairs)) - pairs
    weights = by_group(pair_weight, groups, 1).flatten(0, 1).contiguous()
    units = weights * codebook_scale.flatten(0, 1)
    pow2_scales = torch.exp2(-units.amax(-1).clamp(1e-30, 1e30).log2().ceil())
    padded = torch.cat((codebook, codebook[:, :, :, -1:].expand(-1, -1, -1, pad_n, -1)), dim=3).flatten(0, 1)
    words = padded * (units * pow2_scales.sqrt().unsqueeze(-1)).repeat_interleave(2, -1)[:, None, None]
    half_norms = words.square().sum(-1) / 2
    row_terms, column_terms, table = _centred(words @ times_i(words).transpose(-1, -2))
    least = table.amin((-2, -1), keepdim=True)
    steps = ((table.amax((-2, -1), keepdim=True) - least) / TERM_MAX).clamp_min(TINY)
    entries = ((table - least) / steps).round().int()
    planes = padded.unflatten(-1, (-1, 2)).transpose(-1, -2).half()
    return SearchTables(
        channel_weights=from_pairs(pair_weight.unsqueeze(-1).expand(-1, -1, 2), rotary_dim).contiguous(),
        weights=weights,
        units=units,
        pow2_scales=pow2_scales,
        books=torch.nn.functional.pad(planes, (0, pad_g)).flatten(-2).contiguous(),
        terms=torch.stack((half_norms + row_terms, half_norms + column_terms, half_norms), dim=2),
        tables=entries | (entries << 16),
        steps=steps.flatten(1),
        codebook_size=size,
    )


def _centred(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [..., N], columns [..., N] and a table [..., N, N] of small range whose sum is `table`.

    Large codewords of rare tokens, or a mean that all codewords share, would otherwise decide how finely the costs of
    all tokens are told apart.
    """
    rows, columns = table.new_zeros(table.shape[:-1]), table.new_zeros(table.shape[:-1])
    for _ in range(_CENTRING_ROUNDS):
        middle = (table.amax(-1) + table.amin(-1)) / 2
        rows, table = rows + middle, table - middle.unsqueeze(-1)
        middle = (table.amax(-2) + table.amin(-2)) / 2
        columns, table = columns + middle, table - middle.unsqueeze(-2)
    return rows, columns, table


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
    """Derives the tables of the value descent from buffers of `CommVQValueCodec`, `bias` that of the linear encoder."""
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
    """The key codebook int8 [num_kv_heads, groups, R, N, 2g], (re, im) interleaved, as biased bytes.

    int32 [num_kv_heads, groups, R, N, g/2]; word w holds (re, im) of pair w, then of pair w + g/2.
    """
    biased = codebook.to(torch.int16) + 128
    halves = biased.unflatten(-1, (2, -1, 2)).transpose(-3, -2).flatten(-3)
    return halves.to(torch.uint8).contiguous().view(torch.int32)
