"""CommVQ's key codec (arXiv 2506.18879): residual stages of RoPE-commutative codebooks on pre-RoPE keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvcli.kernels.launch import FP16_BELOW_MAX, FP16_MAX, norm_unit
from kvcli.methods.base import CachedFromBuffers, Codes, KeyCodec, Space
from kvcli.methods.commvq.codebook import by_group, greedy_codes, times_i
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.tables import SearchTables, pack_codebook, search_tables
from kvcli.methods.packing import pack_bits, packed_size, unpack_bits
from kvcli.rope import Rotation, from_pairs, to_pairs
from kvcli.spec import ModelSpec

_ENCODE_TOKENS = 8192


@dataclass(frozen=True)
class CommVQKeyCodes(Codes):
    """Codes and norms of keys.

    Attributes:
        packed: uint8 [batch, 1, time, ceil(kv heads * groups * R * 2 log2 N / 8)]; codes in the order head, group,
            stage, each a * N + b.
        norm: float16 [batch, 1 or num_kv_heads, time, 1], L2 norm of the weighted key over all heads, or over one,
            divided by `norm_unit` of its channels.
    """

    packed: Tensor
    norm: Tensor


class CommVQKeyCodec(KeyCodec[CommVQKeyCodes, None]):
    """Keys as norm * sum over stages of (u_a + i*u_b), before RoPE (CommVQ section 4.2; Eq. 21 for the bits).

    Norms and distances are those of weighted keys: channel pair j times `pair_weight[j]`, a real factor, which commutes
    with RoPE. Weights that undo any scaling of a model's channel pairs make codes independent of it.

    Deviations: the codebook is stored in int8 with a float32 scale per channel pair; the paper stores float16. The
    paper weights no channels, and codes all pairs of a head together, `pairs_per_group` head_dim/2.

    Buffers:
        codebook: int8 [num_kv_heads, groups, R, N, 2g], (re, im) interleaved, in units of `codebook_scale`; channel
            pairs are split as by `codebook.by_group`.
        codebook_scale: float32 [num_kv_heads, groups, g], for keys of weighted norm sqrt(D); a factor of a pair
            commutes with rotation, and -127..127 is closed under multiplication by i.
        pair_weight: float32 [num_kv_heads, head_dim/2].

    Attributes:
        num_codes: codes per token, over heads, groups and stages.
        norm_width: channels under one norm; a normalised key has the weighted L2 norm sqrt(norm_width).
        norm_factor: stored norm to factor of the codebook's unit keys, which have that norm, too.
    """

    space: Space = "pre_rope"
    calibrated_range = True
    max_magnitude = FP16_BELOW_MAX

    def __init__(self, spec: ModelSpec, config: CommVQConfig) -> None:
        super().__init__()
        self.spec, self.config = spec, config
        self.num_groups = spec.head_dim // 2 // config.pairs_per_group
        self.num_codes = spec.num_kv_heads * self.num_groups * config.num_residuals
        self.norm_width = spec.kv_dim if config.key_norm == "joint" else spec.head_dim
        self.norm_factor = norm_unit(self.norm_width) * self.norm_width**-0.5
        shape = (config.num_residuals, config.codebook_size, 2 * config.pairs_per_group)
        self.codebook: Tensor = nn.Buffer(torch.zeros(spec.num_kv_heads, self.num_groups, *shape, dtype=torch.int8))
        self.codebook_scale: Tensor = nn.Buffer(torch.ones(*self.codebook.shape[:2], config.pairs_per_group))
        self.pair_weight: Tensor = nn.Buffer(torch.ones(spec.num_kv_heads, spec.head_dim // 2))
        self._search_tables: CachedFromBuffers[SearchTables] = CachedFromBuffers()
        self._packed_codebook: CachedFromBuffers[Tensor] = CachedFromBuffers()

    def bits_per_token(self) -> float:
        norms = 1 if self.config.key_norm == "joint" else self.spec.num_kv_heads
        return 8.0 * packed_size(self.num_codes, self.config.bits_per_code) + 16 * norms

    def search_tables(self) -> SearchTables:
        """Tables of the encode kernels, recomputed when a buffer changes."""
        buffers = self.codebook, self.codebook_scale, self.pair_weight
        return self._search_tables.get(lambda: search_tables(*buffers, self.spec.rope.rotary_dim), *buffers)

    def kernel_codebook(self) -> Tensor:
        """The codebook as attention kernels read it, see `pack_codebook`; recomputed when it changes."""
        return self._packed_codebook.get(lambda: pack_codebook(self.codebook), self.codebook)

    def make_kernel_tables(self) -> None:
        self.search_tables()
        self.kernel_codebook()

    def randomize_(self, generator: torch.Generator) -> None:
        """Random codebooks, scaled so that a decoded key has entries of about unit size."""
        limit = torch.iinfo(self.codebook.dtype).max
        self.codebook.random_(-limit, limit + 1, generator=generator)
        self.codebook_scale.fill_(0.25 / limit)

    def normalise(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Weights keys [batch, heads, time, head_dim], divides them by their norm and returns it too, as it is stored.

        The quotient has root mean square 1 and is 0 for a zero key.
        """
        keys = keys.float() * self.channel_weight()
        axes = (1, 3) if self.config.key_norm == "joint" else (3,)
        norm = keys.square().sum(axes, keepdim=True).sqrt()
        stored = (norm / norm_unit(self.norm_width)).clamp(max=FP16_MAX).half()
        # norms below half of the smallest float16, times the unit, are stored as 0 and decode to 0
        unit = torch.where(stored > 0, keys / norm.clamp_min(1e-30), 0.0)
        return unit * self.norm_width**0.5, stored

    def channel_weight(self) -> Tensor:
        """`pair_weight` of each channel: [num_kv_heads, 1, head_dim]."""
        return from_pairs(self.pair_weight.unsqueeze(-1).expand(-1, -1, 2), self.spec.rope.rotary_dim).unsqueeze(1)

    def problems(self, unit: Tensor) -> Tensor:
        """Normalised keys [batch, heads, time, d] as coding problems [heads * groups, batch * time, 2g]."""
        pairs = by_group(to_pairs(unit, self.spec.rope.rotary_dim), self.num_groups, 3).flatten(-2)
        return pairs.permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1, 2)

    def group_weight(self) -> Tensor:
        """`pair_weight` for each problem and real channel: [heads * groups, 1, 2g]."""
        return by_group(self.pair_weight, self.num_groups, 1).flatten(0, 1).unsqueeze(1).repeat_interleave(2, -1)

    def books(self) -> Tensor:
        """The codebooks of all problems and stages: float32 [heads * groups, R, N, 2g]."""
        return (self.codebook * self.codebook_scale.repeat_interleave(2, -1)[:, :, None, None]).flatten(0, 1)

    def kernel_note(self, device: torch.device) -> str | None:
        from kvcli.methods.commvq.search_kernels import search_note

        return search_note(self.config.codebook_size, self.config.pairs_per_group, device)

    def peak(self, x: Tensor, codes: CommVQKeyCodes) -> Tensor:
        """The largest norm of weighted keys that was stored."""
        return codes.norm.amax().float()

    def encode(self, x: Tensor, state: None = None) -> CommVQKeyCodes:
        if self.fused:
            from kvcli.methods.commvq.encode_keys_kernels import encode_keys

            joint = self.config.key_norm == "joint"
            return CommVQKeyCodes(*encode_keys(x, self.search_tables(), joint, self.spec.rope.rotary_dim))
        batch, heads, time, _ = x.shape
        books = self.books() * self.group_weight().unsqueeze(1)
        unit, norm = self.normalise(x)
        rows = self.problems(unit)
        codes = torch.cat([greedy_codes(part, books) for part in rows.split(_ENCODE_TOKENS, dim=1)], dim=1)
        codes = codes.unflatten(1, (batch, time)).unflatten(0, (heads, -1)).permute(2, 3, 0, 1, 4).flatten(2)
        return CommVQKeyCodes(pack_bits(codes, self.config.bits_per_code).unsqueeze(1), norm)

    def unpack(self, codes: CommVQKeyCodes) -> tuple[Tensor, Tensor]:
        """Indices a and b, each int64 [heads * groups, batch, time, R]."""
        flat = unpack_bits(codes.packed.squeeze(1), self.config.bits_per_code, self.num_codes)
        code = flat.long().unflatten(-1, (-1, self.config.num_residuals)).permute(2, 0, 1, 3)
        bits = self.config.bits_per_code // 2
        return code >> bits, code & (self.config.codebook_size - 1)

    def decode(self, codes: CommVQKeyCodes, state: None = None) -> Tensor:
        return from_pairs(self.unit_pairs(codes), self.spec.rope.rotary_dim) * self.gain(codes)

    def decode_rotated(
        self, codes: CommVQKeyCodes, state: None, rotation: Rotation, offset: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        if self.fused and supports_keys(self):
            from kvcli.methods.commvq.decode_kernels import decode_keys

            book = self.kernel_codebook(), self.codebook_scale, self.config.bits_per_code
            return decode_keys(codes.packed, codes.norm, *book, self.norm_factor, rotation, offset, dtype)
        return super().decode_rotated(codes, state, rotation, offset, dtype)

    def unit_pairs(self, codes: CommVQKeyCodes) -> Tensor:
        """Decoded keys without their norms: float32 [batch, num_kv_heads, time, head_dim/2, 2], (re, im) last."""
        batch, time = codes.packed.shape[0], codes.packed.shape[2]
        table = self.books().flatten(0, 2)
        start = torch.arange(0, len(table), self.config.codebook_size, device=table.device)
        start = start.view(-1, 1, 1, self.config.num_residuals)
        # the sum over stages of u_a + i * u_b
        indices = ((rows + start).flatten(0, 2) for rows in self.unpack(codes))
        first, second = (nn.functional.embedding_bag(rows, table, mode="sum") for rows in indices)
        keys = (first + times_i(second)).view(self.spec.num_kv_heads, self.num_groups, batch, time, -1, 2)
        return keys.permute(2, 0, 3, 4, 1, 5).flatten(3, 4)

    def scores(self, query: Tensor, codes: CommVQKeyCodes, state: None, rotation: Rotation | None) -> Tensor:
        pairs, rotary_dim = self.unit_pairs(codes), self.spec.rope.rotary_dim
        if rotation is not None:
            turn = torch.complex(rotation.cos, rotation.sin)
            rotated = torch.view_as_complex(pairs[..., : rotary_dim // 2, :].contiguous()) * turn
            rest = pairs[..., rotary_dim // 2 :, :]
            pairs = torch.view_as_real(rotated)
            if rest.shape[3]:
                pairs = torch.cat((pairs, rest), dim=3)
        products = to_pairs(query, rotary_dim).flatten(-2) @ pairs.flatten(-2).transpose(-1, -2)
        return products * self.gain(codes).transpose(-1, -2)

    def gain(self, codes: CommVQKeyCodes) -> Tensor:
        """The factor of the codebook's unit keys: float32 [batch, 1 or heads, time, 1]."""
        return codes.norm.float() * self.norm_factor


def supports_keys(key: CommVQKeyCodec) -> bool:
    """Whether the kernel that decodes keys supports a codec's shapes."""
    from kvcli.methods.commvq.codeword_kernels import MAX_STAGES

    return key.config.pairs_per_group % 2 == 0 and key.config.num_residuals <= MAX_STAGES
