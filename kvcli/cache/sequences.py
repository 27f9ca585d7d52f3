"""The sequences of a batch, shared by all layers of a cache: lengths, padding, RoPE positions, counts of codes.

Slots are columns of the batch as transformers sees it, padding included. Tokens are counted per sequence without
padding: token i of a row is its i-th real token, wherever padding stands. Everything kvcli stores is by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kvcli.cache.counts import Counts, TokenCounts
from kvcli.cache.forward import Forward, ordinary_tensors, row_values
from kvcli.cache.mask import MASK_FORGOTTEN, check_mask, check_mask_of_layer
from kvcli.cache.step import Step
from kvcli.errors import CacheError
from kvcli.rope import NoRope, Rope, Rotation, TokenRotations
from kvcli.seam.layer import RotaryOutput


class Sequences:
    """Lengths, padding and RoPE positions of a batch, and how many of its tokens are codes.

    Args:
        rope: the model's rotary embedding.
        counts: of its tokens and codes.
        num_layers: layers that take part in every forward pass.
        stateful: whether the key codec keeps a state, computed from all tokens up to a row's first encoded one.

    Attributes:
        valid: boolean [batch, slots], False at padding.
        positions: RoPE positions of the tokens of each row, int32 [batch, capacity].
        observed: tokens of each row that the key codec's state was computed from.
        step: while set, passes are its passes: of one token per row, counted by who set it.
    """

    def __init__(self, rope: Rope, counts: TokenCounts, num_layers: int, stateful: bool = False) -> None:
        self.rope, self.counts, self.num_layers, self.stateful = rope, counts, num_layers, stateful
        self.observed: list[int] = []
        self.valid = torch.ones(0, 0, dtype=torch.bool)
        self.positions = torch.zeros(0, 0, dtype=torch.int32)
        self._code_rotations: dict[tuple[bool, torch.device], TokenRotations] = {}
        self._counts_of_rotations: Counts = ()
        self._forward: Forward | None = None
        self._mask: Tensor | None = None
        self._layers_left = 0
        self.step: Step | None = None

    @property
    def lengths(self) -> Counts:
        """Tokens of each row; empty before the first token."""
        return self.counts.lengths

    @property
    def slots(self) -> int:
        """Columns seen so far, padding included."""
        return self.valid.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of positions, padding marks and cached rotations of encoded tokens."""
        rotations = sum(x.nbytes for x in self._code_rotations.values())
        return rotations + self.valid.nbytes + self.positions.nbytes

    def forward(self, rotary: RotaryOutput, query: Tensor, mask: Tensor | None) -> Forward:
        """The forward pass of the model that `rotary` belongs to; the first layer that asks begins it.

        Args:
            rotary: positions [batch or 1, query_len] and RoPE of the new slots, one object per forward pass.
            query: [batch, num_heads, query_len, head_dim].
            mask: None, or boolean [batch or 1, 1, query_len, slots + query_len].

        Returns:
            One object for all layers of the pass.

        Raises:
            CacheError: another batch size than before, a mask that is not causal with padding, in any layer, or an
                earlier pass that did not reach the last layer.
        """
        if self._forward is None or self._forward.rotation is not rotary.rotation:
            if self.step is None:
                self._forward = self._begin(rotary, query.shape[0], query.shape[2], mask)
            else:
                self._forward = self.step.forward(rotary.rotation)
                self._layers_left = self.num_layers
            self._mask = mask
        elif mask is not self._mask:
            check_mask_of_layer(self.layer, mask, self._mask, None if self.step else self.valid, query.shape[2])
        return self._forward

    @property
    def layer(self) -> int:
        """The layer whose turn it is in the forward pass."""
        return self.num_layers - self._layers_left

    def layer_done(self) -> None:
        """Notes that a layer has taken part in the forward pass; the last one ends it.

        Raises:
            CacheError: numbers beyond what codes hold were encoded; the cache refuses to go on until it is reset.
        """
        if self._layers_left == 1 and self._forward is not None and self.step is None:  # a step is not waited for
            self._forward.ranges.check()
        self._layers_left -= 1
        if not self._layers_left:
            self._forward = self._mask = None

    def rotation(self, start: int, stop: int) -> Rotation:
        """RoPE of tokens [start, stop) of every row, float32; rows that are shorter get position 0 there."""
        return self.rope.rotation(self.positions[:, start:stop].long(), torch.float32)

    def code_rotations(
        self, counts: Counts, lengths: Tensor | None, rotated: bool, device: torch.device
    ) -> TokenRotations:
        """RoPE of the first `counts` tokens of each row after its sinks, kept until the counts change.

        Args:
            counts: tokens of each row.
            lengths: the same as int32 [batch]; None when all are equal.
            rotated: of layers that rotate, or the rotation by 0 of those that do not.
            device: of the layers, and of `lengths`.

        Returns:
            Tables that kernels and the reference ask for.
        """
        if self._counts_of_rotations != counts:
            self._code_rotations, self._counts_of_rotations = {}, counts
        if (rotated, device) not in self._code_rotations:
            first = self.counts.sink_length
            positions = self.positions[:, first : first + max(counts)].to(device)
            self._code_rotations[rotated, device] = TokenRotations(self._rope(rotated), positions, lengths)
        return self._code_rotations[rotated, device]

    def rotations_of_codes(self, capacity: int, rotated: bool = True) -> TokenRotations:
        """RoPE of tokens [sinks, sinks + capacity) of every row, also of tokens to come that `extend` announced."""
        first = self.counts.sink_length
        return TokenRotations(self._rope(rotated), self.positions[:, first : first + capacity])

    def _rope(self, rotated: bool) -> Rope:
        inv_freq = self.rope.inv_freq
        return self.rope if rotated else NoRope(2 * len(inv_freq), inv_freq.device)

    def _forget_rotations(self) -> None:
        self._code_rotations, self._counts_of_rotations = {}, ()

    @ordinary_tensors
    def extend(self, count: int) -> Tensor:
        """Keeps positions for `count` tokens to come: each row's positions go on from its last one.

        Returns:
            What is added to the index of a token to come to get its position, int64 [batch, 1].
        """
        lengths = row_values(self.lengths, self.valid.device).unsqueeze(1)
        offset = self.positions.gather(1, lengths - 1).long() + 1 - lengths
        index = torch.arange(max(self.lengths) + count, device=lengths.device)
        held = nn.functional.pad(self.positions, (0, max(0, len(index) - self.positions.shape[1])))[:, : len(index)]
        self.positions = torch.where(index < lengths, held, (index + offset).int())
        return offset

    @contextmanager
    def whole_or_refused(self) -> Iterator[None]:
        """A pass of a step and what it encodes, inside the block: if it breaks off, the cache refuses to go on."""
        try:
            yield
        except BaseException:
            self.break_off()
            raise

    def break_off(self) -> None:
        """Notes that a pass which has added tokens raised: the cache refuses further use until it is reset."""
        self._layers_left = max(1, self._layers_left)

    @ordinary_tensors
    def end_steps(self, count: int) -> None:
        """Notes that `count` passes of a step, which `counts` knows of, have added a token to each row."""
        self.step = None
        self._forget_rotations()
        self.valid = nn.functional.pad(self.valid, (0, count), value=True)

    @ordinary_tensors
    def select(self, rows: Tensor) -> None:
        """Keeps, repeats or reorders rows, [count] indices."""
        self._forget_rotations()
        if not self.lengths:
            return
        rows = rows.to(self.valid.device)
        self.valid, self.positions = self.valid[rows], self.positions[rows]
        order = rows.tolist()
        self.observed = [self.observed[row] for row in order]
        self.counts.select(order)

    def check_at_rest(self) -> None:
        """Raises CacheError unless all layers hold the same tokens, one or more, and none are being made."""
        if not self.lengths:
            raise CacheError("the cache holds no token")
        if self.step is not None:
            raise CacheError("tokens are being made on this cache; wait until they are")
        self._check_all_layers_done()

    def tokens_in_last(self, slots: int) -> list[int]:
        """How many tokens of each row are in the last slots."""
        counts: list[int] = self.valid[:, self.slots - slots :].sum(1).tolist()
        return counts

    def check_rollback(self) -> None:
        """Raises CacheError where `crop` could not remove tokens of the passes to come."""
        group = self.counts.tokens_per_group
        if group > 1:
            raise CacheError(
                f"speculative decoding needs a method that encodes each token by itself, not {group} tokens together"
            )
        if self.stateful:
            raise CacheError(
                "speculative decoding needs a method without per-sequence state; this one computes its state from all "
                "tokens up to the first encoded ones, rejected drafts among them"
            )

    def crop(self, slots: int, removed: list[int]) -> list[int]:
        """Removes the last slots, which hold `removed` tokens of each row.

        Returns:
            The rows that hold no token any more.

        Raises:
            CacheError: tokens that were encoded together would be cut apart, a codec's state was computed from some of
                them, or a pass did not reach the last layer; nothing has changed then.
        """
        self._check_all_layers_done()
        lengths = [length - count for length, count in zip(self.lengths, removed, strict=True)]
        self.counts.coded_without(removed)
        if any(0 < length < observed for length, observed in zip(lengths, self.observed, strict=True)):
            raise CacheError(
                f"cannot remove {max(removed)} tokens: the method's per-sequence state was computed from some of them; "
                "remove all tokens, or make a new cache"
            )
        self.counts.truncate(removed)
        self._forget_rotations()
        self.valid = self.valid[:, : self.slots - slots].clone()
        self.observed = [min(pair) for pair in zip(lengths, self.observed, strict=True)]
        return [row for row, length in enumerate(lengths) if not length]

    def _begin(self, rotary: RotaryOutput, batch: int, query_len: int, mask: Tensor | None) -> Forward:
        self._check_all_layers_done()
        if self.lengths and batch != len(self.lengths):
            raise CacheError(f"the cache holds {len(self.lengths)} sequences, but a batch of {batch} came in")
        device = rotary.positions.device
        past = self.valid if self.lengths else torch.ones(batch, 0, dtype=torch.bool, device=device)
        real = torch.ones(batch, query_len, dtype=torch.bool, device=device)
        counts = (query_len,) * batch
        if mask is None and sum(self.lengths) < past.numel():
            raise CacheError(MASK_FORGOTTEN)
        if mask is not None:
            mask = mask.to(device)
            real = mask[:, 0, -1, -query_len:].expand(batch, -1)
            counts = tuple(real.sum(1).tolist())
        valid = torch.cat((past, real), dim=1)
        if mask is not None:
            check_mask(mask, valid, query_len)
        padded = sum(counts) < batch * query_len
        self.valid = valid
        plan = self.counts.append(counts)
        if not self.observed:
            self.observed = [0] * batch
        if self.stateful and not all(plan.coded_keys):
            rows = zip(self.lengths, self.observed, plan.coded_keys, strict=True)
            self.observed = [observed if coded else length for length, observed, coded in rows]
        forward = Forward(self, rotary.rotation, counts, real if padded else None, plan, device)
        self._layers_left = self.num_layers
        self._keep_positions(rotary.positions.expand(batch, -1), forward)
        return forward

    def _check_all_layers_done(self) -> None:
        """Raises when layers hold different tokens."""
        if self._layers_left > 0:
            raise CacheError(
                "a forward pass over this cache did not reach the last layer, or was refused in it; call cache.reset()"
            )

    @ordinary_tensors
    def _keep_positions(self, positions: Tensor, forward: Forward) -> None:
        held, needed = self.positions, max(self.lengths)
        if held.shape[0] != positions.shape[0]:
            held = positions.new_zeros(positions.shape[0], 0, dtype=torch.int32)
        if needed > held.shape[1]:
            capacity = positions_capacity(held.shape[1], needed)
            grown = torch.zeros(positions.shape[0], capacity, dtype=torch.int32, device=positions.device)
            grown[:, : held.shape[1]] = held
            held = grown
        self.positions = held
        index = forward.window.index
        if isinstance(index, int):
            held[:, index : index + positions.shape[1]] = positions
        else:
            rows, columns = (index >= 0).nonzero(as_tuple=True)
            held[rows, index[rows, columns]] = positions[rows, columns].int()


def positions_capacity(capacity: int, num_tokens: int) -> int:
    """Tokens that the buffer of positions has room for once it has to hold `num_tokens`."""
    return capacity if num_tokens <= capacity else max(num_tokens, capacity + capacity // 2, 256)
