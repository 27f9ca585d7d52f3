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
from kvcli.cache.step import Step
from kvcli.errors import CacheError
from kvcli.rope import Rope, Rotation, TokenRotations
from kvcli.seam.patch import RotaryOutput

_MASK_BLOCK = 512
_MASK_FORGOTTEN = "the cache holds padding: pass attention_mask, for earlier and new tokens, with every forward pass"


class Sequences:
    """Lengths, padding and RoPE positions of a batch, and how many of its tokens are codes.

    Args:
        rope: the model's rotary embedding.
        counts: of its tokens and codes.
        num_layers: layers that take part in every forward pass.
        stateful: whether the key codec keeps a state, computed from all tokens up to a row's first encoded one.

    Attributes:
        valid: boolean [batch, slots], False at padding.
        step: while set, passes are its passes: of one token per row, counted by who set it.
    """

    def __init__(self, rope: Rope, counts: TokenCounts, num_layers: int, stateful: bool = False) -> None:
        self.rope, self.counts, self.num_layers, self.stateful = rope, counts, num_layers, stateful
        self._observed: list[int] = []
        self.valid = torch.ones(0, 0, dtype=torch.bool)
        self._positions = torch.zeros(0, 0, dtype=torch.int32)
        self._code_rotations: tuple[Counts, TokenRotations] | None = None
        self._forward: Forward | None = None
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
        rotations = self._code_rotations[1].nbytes if self._code_rotations is not None else 0
        return rotations + self.valid.nbytes + self._positions.nbytes

    def forward(self, rotary: RotaryOutput, query: Tensor, mask: Tensor | None) -> Forward:
        """The forward pass of the model that `rotary` belongs to; the first layer that asks begins it.

        Args:
            rotary: positions [batch or 1, query_len] and RoPE of the new slots, one object per forward pass.
            query: [batch, num_heads, query_len, head_dim].
            mask: None, or boolean [batch or 1, 1, query_len, slots + query_len].

        Returns:
            One object for all layers of the pass.

        Raises:
            CacheError: another batch size than before, a mask that is not causal with padding, or an earlier pass
                that did not reach the last layer.
        """
        if self._forward is None or self._forward.rotation is not rotary.rotation:
            if self.step is None:
                self._forward = self._begin(rotary, query.shape[0], query.shape[2], mask)
            else:
                self._forward = self.step.forward(rotary.rotation)
                self._layers_left = self.num_layers
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
        if self._layers_left == 1 and self._forward is not None:
            self._forward.ranges.check()
        self._layers_left -= 1
        if not self._layers_left:
            self._forward = None

    def rotation(self, start: int, stop: int) -> Rotation:
        """RoPE of tokens [start, stop) of every row, float32; rows that are shorter get position 0 there."""
        return self.rope.rotation(self._positions[:, start:stop].long(), torch.float32)

    def code_rotations(self, counts: Counts, lengths: Tensor | None) -> TokenRotations:
        """RoPE of the first `counts` tokens of each row after its sinks, kept until the counts change.

        Args:
            counts: tokens of each row.
            lengths: the same as int32 [batch]; None when all are equal.

        Returns:
            Tables that kernels and the reference ask for.
        """
        if self._code_rotations is None or self._code_rotations[0] != counts:
            first = self.counts.sink_length
            positions = self._positions[:, first : first + max(counts)]
            self._code_rotations = (counts, TokenRotations(self.rope, positions, lengths))
        return self._code_rotations[1]

    def rotations_of_codes(self, capacity: int) -> TokenRotations:
        """RoPE of tokens [sinks, sinks + capacity) of every row, also of tokens to come that `extend` announced."""
        first = self.counts.sink_length
        return TokenRotations(self.rope, self._positions[:, first : first + capacity])

    @ordinary_tensors
    def extend(self, count: int) -> Tensor:
        """Keeps positions for `count` tokens to come: each row's positions go on from its last one.

        Returns:
            What is added to the index of a token to come to get its position, int64 [batch, 1].
        """
        lengths = row_values(self.lengths, self.valid.device).unsqueeze(1)
        offset = self._positions.gather(1, lengths - 1).long() + 1 - lengths
        index = torch.arange(max(self.lengths) + count, device=lengths.device)
        held = nn.functional.pad(self._positions, (0, max(0, len(index) - self._positions.shape[1])))[:, : len(index)]
        self._positions = torch.where(index < lengths, held, (index + offset).int())
        return offset

    @contextmanager
    def whole_or_refused(self) -> Iterator[None]:
        """A pass of a step and what it encodes, inside the block: if it breaks off, the cache refuses to go on."""
        try:
            yield
        except BaseException:
            self._layers_left = max(1, self._layers_left)
            raise

    @ordinary_tensors
    def end_steps(self, count: int) -> None:
        """Notes that `count` passes of a step, which `counts` knows of, have added a token to each row."""
        self.step, self._code_rotations = None, None
        self.valid = nn.functional.pad(self.valid, (0, count), value=True)

    @ordinary_tensors
    def select(self, rows: Tensor) -> None:
        """Keeps, repeats or reorders rows, [count] indices."""
        self._code_rotations = None
        if not self.lengths:
            return
        rows = rows.to(self.valid.device)
        self.valid, self._positions = self.valid[rows], self._positions[rows]
        order = rows.tolist()
        self._observed = [self._observed[row] for row in order]
        self.counts.select(order)

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
        if any(0 < length < observed for length, observed in zip(lengths, self._observed, strict=True)):
            raise CacheError(
                f"cannot remove {max(removed)} tokens: the method's per-sequence state was computed from some of them; "
                "remove all tokens, or make a new cache"
            )
        self.counts.truncate(removed)
        self._code_rotations = None
        self.valid = self.valid[:, : self.slots - slots].clone()
        self._observed = [min(pair) for pair in zip(lengths, self._observed, strict=True)]
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
            raise CacheError(_MASK_FORGOTTEN)
        if mask is not None:
            real = mask[:, 0, -1, -query_len:].expand(batch, -1)
            counts = tuple(real.sum(1).tolist())
        valid = torch.cat((past, real), dim=1)
        if mask is not None:
            _check_mask(mask, valid, query_len)
        padded = sum(counts) < batch * query_len
        self.valid = valid
        plan = self.counts.append(counts)
        if not self._observed:
            self._observed = [0] * batch
        if self.stateful and not all(plan.coded_keys):
            rows = zip(self.lengths, self._observed, plan.coded_keys, strict=True)
            self._observed = [observed if coded else length for length, observed, coded in rows]
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
        held, needed = self._positions, max(self.lengths)
        if held.shape[0] != positions.shape[0]:
            held = positions.new_zeros(positions.shape[0], 0, dtype=torch.int32)
        if needed > held.shape[1]:
            capacity = positions_capacity(held.shape[1], needed)
            grown = torch.zeros(positions.shape[0], capacity, dtype=torch.int32, device=positions.device)
            grown[:, : held.shape[1]] = held
            held = grown
        self._positions = held
        index = forward.window.index
        if isinstance(index, int):
            held[:, index : index + positions.shape[1]] = positions
        else:
            rows, columns = (index >= 0).nonzero(as_tuple=True)
            held[rows, index[rows, columns]] = positions[rows, columns].int()


def positions_capacity(capacity: int, num_tokens: int) -> int:
    """Tokens that the buffer of positions has room for once it has to hold `num_tokens`."""
    return capacity if num_tokens <= capacity else max(num_tokens, capacity + capacity // 2, 256)


def _check_mask(mask: Tensor, valid: Tensor, query_len: int) -> None:
    """Raises unless every real query sees exactly the real keys up to itself.

    Args:
        mask: boolean [batch or 1, 1, query_len, slots].
        valid: boolean [batch, slots], False at padding; the last `query_len` slots are the queries'.
        query_len: new slots.
    """
    if mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[-1] != valid.shape[1]:
        raise CacheError("the attention mask must be causal with padding; masks of another kind are not supported")
    first, key = valid.shape[1] - query_len, valid.unsqueeze(1)
    wrong = torch.zeros((), dtype=torch.bool, device=mask.device)
    # block by block of queries: only the keys among the block itself need a triangle
    for start in range(0, query_len, _MASK_BLOCK):
        stop = min(start + _MASK_BLOCK, query_len)
        rows, begin, end = mask[:, 0, start:stop], first + start, first + stop
        triangle = torch.ones(stop - start, stop - start, dtype=torch.bool, device=mask.device).tril()
        differs = (rows[..., begin:end] != (key[..., begin:end] & triangle)).any(-1)
        differs = differs | (rows[..., :begin] != key[..., :begin]).any(-1) | rows[..., end:].any(-1)
        wrong = wrong | (differs & valid[:, begin:end]).any()
    if bool(wrong):
        raise CacheError(
            "the attention mask must be causal with padding; this one hides or shows other tokens; after a padded "
            "prompt, pass attention_mask with every forward pass"
        )
