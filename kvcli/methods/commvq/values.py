"""CommVQ's value codec (arXiv 2506.18879): an encoder to bits and an additive codebook, over all kv heads jointly."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from kvcli.kernels.launch import FP16_BELOW_MAX, FP16_MAX
from kvcli.methods.base import CachedFromBuffers, Codes, ValueCodec
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.tables import SWEEP_BITS, DescentTables, descent_tables, in_metric
from kvcli.methods.packing import byte_fields, pack_bits, packed_size, stream_to_fields, unpack_bits
from kvcli.spec import ModelSpec

_BLOCK_BITS = 64
"""Value bits for which a sweep reads and writes the residual once."""


@dataclass(frozen=True)
class CommVQValueCodes(Codes):
    """Bits and scales of values.

    Attributes:
        packed: uint8 [batch, 1, time, ceil(N_c / 8)], the bits s of each token.
        scale: float16 [batch, 1, time, 1], the factor of the decoded unit value.
    """

    packed: Tensor
    scale: Tensor


class CommVQValueCodec(ValueCodec[CommVQValueCodes]):
    """Values as scale * (s C + offset) with s = E(v) in {0, 1}^N_c (CommVQ Eq. 9, 10).

    Deviations: `offset` is a codebook row that every token uses, which costs no bits; `scale` is the factor that
    minimises the squared error given the bits (`value_trainer` fast), or the one that restores the token's norm
    (`value_trainer` paper). The encoder is deterministic: no noise is drawn outside training.

    Buffers:
        metric_root: float32 [num_kv_heads, d, d], symmetric square root T of the metric of errors: the bits are those
            of the smallest |T (v - v_hat)|^2.
        codebook: float16 [N_c, D].
        offset: float16 [D].
        encoder_*: float16 weights of the encoder: linear (fast), or linear, GELU, linear (paper).
    """

    calibrated_range = True
    max_magnitude = FP16_BELOW_MAX

    def __init__(self, spec: ModelSpec, config: CommVQConfig) -> None:
        super().__init__()
        self.spec, self.config = spec, config
        width, bits = spec.kv_dim, config.value_code_bits
        self.metric_root: Tensor = nn.Buffer(torch.eye(spec.head_dim).repeat(spec.num_kv_heads, 1, 1))
        self.codebook: Tensor = nn.Buffer(torch.zeros(bits, width, dtype=torch.float16))
        self.offset: Tensor = nn.Buffer(torch.zeros(width, dtype=torch.float16))
        widths = [width, bits] if config.value_trainer == "fast" else [width, config.value_hidden, bits]
        self._encoder_layers = len(widths) - 1
        for layer, (inputs, outputs) in enumerate(pairwise(widths)):
            self.register_buffer(f"encoder_weight_{layer}", torch.zeros(outputs, inputs, dtype=torch.float16))
            self.register_buffer(f"encoder_bias_{layer}", torch.zeros(outputs, dtype=torch.float16))
        self._descent_tables: CachedFromBuffers[DescentTables] = CachedFromBuffers()

    def bits_per_token(self) -> float:
        return 8.0 * packed_size(self.config.value_code_bits, 1) + 16

    def descent_tables(self) -> DescentTables:
        """Tables of the encode kernels, recomputed when a buffer changes."""
        buffers = self.metric_root, self.codebook, self.offset, self.get_buffer("encoder_bias_0")
        return self._descent_tables.get(lambda: descent_tables(*buffers), *buffers)

    def make_kernel_tables(self) -> None:
        if self.config.value_trainer == "fast":  # the kernels encode with a linear encoder alone
            self.descent_tables()

    def in_metric(self, rows: Tensor) -> Tensor:
        """Rows [n, D] of all heads times `metric_root`, float32: plain distances are those of the metric."""
        return in_metric(rows, self.metric_root)

    def normalise(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values [batch, heads, time, d] as unit rows [batch * time, D] in the coordinates of the metric.

        Their root mean square is 1, or 0 for a zero value. Also returns their divisors, float32 [batch * time, 1].
        """
        rows = self.in_metric(values.transpose(1, 2).flatten(2).flatten(0, 1))
        rms = rows.square().mean(-1, keepdim=True).sqrt()
        return torch.where(rms > 1e-12, rows / rms.clamp_min(1e-30), 0.0), rms

    def peak(self, x: Tensor, codes: CommVQValueCodes) -> Tensor:
        """The largest factor of a unit value that was stored."""
        return codes.scale.abs().amax().float()

    def encode(self, x: Tensor, state: None = None) -> CommVQValueCodes:
        if self.fused and self.config.value_trainer == "fast":
            from kvcli.methods.commvq.encode_values_kernels import encode_values

            encoder, tables = self.get_buffer("encoder_weight_0"), self.descent_tables()
            return CommVQValueCodes(*encode_values(x, encoder, tables, self.config.value_sweeps))
        batch, _, time, _ = x.shape
        rows, rms = self.normalise(x)
        bits = self.assign(rows)
        scale = rms * self._unit_gain(rows, self._decode_unit(bits))
        packed = pack_bits(bits.view(batch, 1, time, bits.shape[-1]), 1)
        return CommVQValueCodes(packed, scale.clamp(-FP16_MAX, FP16_MAX).half().view(batch, 1, time, 1))

    def assign(self, rows: Tensor) -> Tensor:
        """The bits of unit rows [T, D] in the coordinates of the metric: float32 zeros and ones [T, N_c]."""
        bits = (self.logits(rows) > 0).float()
        if self.config.value_trainer == "fast":
            codebook, target = self.in_metric(self.codebook), rows - self.in_metric(self.offset.unsqueeze(0))
            for _ in range(self.config.value_sweeps):
                sweep(target, codebook, bits)
        return bits

    def unit_error(self, rows: Tensor, bits: Tensor | None = None) -> float:
        """Squared error of unit rows [T, D] with bits [T, N_c], or those of `assign`, as a share of their energy."""
        decoded = self._decode_unit((self.assign(rows) if bits is None else bits).float())
        return float((decoded * self._unit_gain(rows, decoded) - rows).square().sum() / rows.square().sum())

    def _decode_unit(self, bits: Tensor) -> Tensor:
        """Decoded bits [T, N_c] in the coordinates of the metric, [T, D], before the factor of each row."""
        return bits @ self.in_metric(self.codebook) + self.in_metric(self.offset.unsqueeze(0))

    def _unit_gain(self, rows: Tensor, decoded: Tensor) -> Tensor:
        """The factor of decoded rows: least squares, or the one that restores the norm of rows [T, D]."""
        energy = decoded.square().sum(-1, keepdim=True).clamp_min(1e-12)
        if self.config.value_trainer == "fast":
            return (rows * decoded).sum(-1, keepdim=True) / energy
        return (rows.square().sum(-1, keepdim=True) / energy).sqrt()

    def logits(self, rows: Tensor) -> Tensor:
        """The encoder E before its threshold: unit rows [T, D] to [T, N_c]."""
        hidden = rows
        for layer in range(self._encoder_layers):
            weight, bias = (self.get_buffer(f"encoder_{name}_{layer}").float() for name in ("weight", "bias"))
            hidden = nn.functional.linear(nn.functional.gelu(hidden) if layer else hidden, weight, bias)
        return hidden

    def unpack(self, codes: CommVQValueCodes) -> Tensor:
        """The bits as float32 [batch, time, N_c]."""
        return unpack_bits(codes.packed.squeeze(1), 1, self.config.value_code_bits).float()

    def decode(self, codes: CommVQValueCodes, state: None = None) -> Tensor:
        rows = self.unpack(codes) @ self.codebook.float() + self.offset.float()
        rows = rows * codes.scale.squeeze(1).float()
        return rows.unflatten(-1, (self.spec.num_kv_heads, self.spec.head_dim)).transpose(1, 2)

    def decode_to(self, codes: CommVQValueCodes, state: None, dtype: torch.dtype) -> Tensor:
        if not self.fused:
            return super().decode_to(codes, state, dtype)
        from kvcli.methods.commvq.decode_kernels import decode_values

        return decode_values(codes.packed, codes.scale, self.codebook, self.offset, self.spec.head_dim, dtype)

    def weighted_sum(self, weights: Tensor, codes: CommVQValueCodes) -> Tensor:
        spec = self.spec
        if weights.shape[1] * weights.shape[2] >= spec.kv_dim:  # then all bits of a token cost more than its values
            return super().weighted_sum(weights, codes)
        # sum of w * scale * (bits @ codebook + offset) = (sum of w * scale * bits) @ codebook + sum(w * scale) * offset
        scaled = weights * codes.scale.float().transpose(-1, -2)
        sums = scaled.flatten(1, 2) @ byte_fields(codes.packed.squeeze(1), 1)
        rows = stream_to_fields(self.codebook.float().T, 1).T.unflatten(-1, (spec.num_kv_heads, spec.head_dim))
        out = sums.unflatten(1, weights.shape[1:3]) @ rows.transpose(0, 1)
        offset = self.offset.float().view(spec.num_kv_heads, 1, spec.head_dim)
        return out + scaled.sum(-1, keepdim=True) * offset


def sweep(target: Tensor, codebook: Tensor, bits: Tensor) -> Tensor:
    """One coordinate-descent sweep: each group of `SWEEP_BITS` bits takes its best joint setting given all others.

    The residual, which is wide, is read and written once per block of bits; within a block its products with the rows
    are kept up to date instead.

    Rows `target` [T, D] are approximated by bits @ codebook [N_c, D]; bits [T, N_c], zeros and ones, are changed in
    place. The squared error never rises. Returns the residual target - bits @ codebook, [T, D].
    """
    residual = target - bits @ codebook
    places = torch.arange(SWEEP_BITS, device=bits.device)
    settings = (torch.arange(2**SWEEP_BITS, device=bits.device).unsqueeze(-1) >> places & 1).to(bits.dtype)
    for rows, current in zip(codebook.split(_BLOCK_BITS), bits.split(_BLOCK_BITS, dim=1), strict=True):
        before, products = current.clone(), residual @ rows.T
        gram, group = rows @ rows.T, torch.arange(len(rows), device=rows.device) // SWEEP_BITS
        # products with what a group's own bits leave of the residual do not depend on them
        products.addmm_(current, torch.where(group.unsqueeze(1) == group, gram, 0.0))
        padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % SWEEP_BITS)).unflatten(0, (-1, SWEEP_BITS))
        energies = (settings @ padded).square().sum(-1)
        for energy, start in zip(energies, range(0, len(rows), SWEEP_BITS), strict=True):
            stop = min(start + SWEEP_BITS, len(rows))
            choices, old = settings[: 2 ** (stop - start), : stop - start], current[:, start:stop]
            scores = torch.addmm(energy[: len(choices)], products[:, start:stop], choices.T, alpha=-2)
            chosen = choices.index_select(0, scores.argmin(-1))
            if stop < len(rows):
                products[:, stop:].addmm_(old - chosen, gram[start:stop, stop:])
            old.copy_(chosen)
        residual.addmm_(before.sub_(current), rows)
    return residual
