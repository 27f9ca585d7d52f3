"""The forward passes over one cache: which one is running, and what all of its layers need to know, computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.cache.counts import HostCounts
from kvcli.cache.ranges import Ranges
from kvcli.cache.record import Counts
from kvcli.cache.sequences import Sequences
from kvcli.cache.step import DeviceCounts
from kvcli.cache.window import WindowTokens
from kvcli.errors import CacheError
from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import Rotation, TokenRotations
from kvcli.seam.layer import RotaryOutput

MASK_FORGOTTEN = "the cache holds padding: pass attention_mask, for earlier and new tokens, with every forward pass"

_BLOCK = 512
"""Queries whose mask is checked at once."""


class CodeRun(NamedTuple):
    """Tokens [start, stop) of those attended to as codes.

    Attributes:
        lengths: how many of them each row has, int32 [batch]; None when all have all.
        rotations: their RoPE, if `LayerCodec.needs_rotations`.
    """

    start: int
    stop: int
    lengths: Tensor | None
    rotations: TokenRotations | None


@dataclass
class Forward:
    """Per-forward state shared by all layers; each property is computed by the first layer that needs it.

    Attributes:
        rotation: RoPE of the new slots, in the model's dtype.
        new: new real tokens of each row.
        real: None when no new slot is padding, else boolean [batch, query_len].
        counts: what the pass does in all layers, counted on the host or in tensors of the device.
        ranges: the largest numbers that are encoded.
    """

    sequences: Sequences
    rotation: Rotation
    new: Counts
    real: Tensor | None
    counts: HostCounts | DeviceCounts
    device: torch.device
    ranges: Ranges = field(default_factory=Ranges)
    _elsewhere: dict[torch.device, Forward] = field(default_factory=dict, init=False)
    _code_runs: dict[bool, list[CodeRun]] = field(default_factory=dict, init=False)

    def on(self, device: torch.device) -> Forward:
        """The same pass for layers on a device, one object for all of them."""
        if device == self.device:
            return self
        if device not in self._elsewhere:
            real = None if self.real is None else self.real.to(device)
            self._elsewhere[device] = replace(self, rotation=self.rotation.to(device), real=real, device=device)
        return self._elsewhere[device]

    @cached_property
    def window(self) -> WindowTokens:
        """The tokens of the windows, from the append to the flush."""
        return self.counts.window(self.real, self.device)

    @cached_property
    def code_lengths(self) -> Tensor | None:
        """Tokens of each row that are attended to as codes, int32 [batch]; None when all have as many."""
        return self.counts.code_lengths(self.device)

    @cached_property
    def no_rotation(self) -> Rotation:
        """The rotation by 0 of the new slots, of layers that do not rotate."""
        return Rotation.none(self.rotation)

    @cached_property
    def code_run(self) -> list[CodeRun]:
        """The tokens that layers attend to as codes which take no RoPE."""
        return [CodeRun(0, self.counts.max_codes, self.code_lengths, None)]

    def code_runs(self, codec: LayerCodec) -> list[CodeRun]:
        """The tokens that a layer attends to as codes, in runs of consecutive positions.

        All layers of the pass share tables of RoPE, and no other pass: with few layers or heads they are larger than
        codes.
        """
        if codec.rotated not in self._code_runs:
            counts, lengths, runs = self.counts, self.code_lengths, list[CodeRun]()
            for i, (start, stop) in enumerate(self.sequences.runs(counts.max_codes)):
                of_run = None
                if stop == counts.max_codes and lengths is not None:  # rows differ behind all documents
                    of_run = lengths - start if start else lengths
                if isinstance(counts, DeviceCounts):
                    rotations = counts.rotations[codec.rotated][i]
                else:
                    first = counts.layout.sinks
                    positions = self.sequences.positions[:, first + start : first + stop].to(self.device)
                    rotations = TokenRotations(self.sequences.rope_of(codec.rotated), positions, of_run)
                runs.append(CodeRun(start, stop, of_run, rotations))
            self._code_runs[codec.rotated] = runs
        return self._code_runs[codec.rotated]

    def key_rotations(self, codec: LayerCodec) -> list[Rotation]:
        """RoPE of the keys that are encoded, float32, for codecs that work before RoPE."""
        return self._key_rotations if codec.rotated else [Rotation.none(x) for x in self._key_rotations]

    @cached_property
    def _key_rotations(self) -> list[Rotation]:
        sinks, positions, rope = self.counts.layout.sinks, self.sequences.positions, self.sequences.rope
        rotations = (rope.rotation(x.positions(positions, sinks).long(), torch.float32) for x in self.counts.keys)
        return [rotation.to(self.device) for rotation in rotations]


class Passes:
    """The forward passes over a cache, one after another; each goes through all layers.

    Attributes:
        step: while set, passes have these counts, which who set it keeps.
        new_ranges: makes what notes the largest numbers of a pass.
    """

    def __init__(self, sequences: Sequences, num_layers: int) -> None:
        self.sequences, self.num_layers = sequences, num_layers
        self.step: DeviceCounts | None = None
        self.new_ranges: Callable[[], Ranges] = Ranges
        self._forward: Forward | None = None
        self._mask: Tensor | None = None
        self._layers_left = 0

    def forward(self, rotary: RotaryOutput, query: Tensor, mask: Tensor | None) -> Forward:
        """The forward pass that `rotary` belongs to, one object for all layers on a device; the first one begins it.

        Args:
            rotary: positions [batch or 1, query_len] and RoPE of the new slots, one object per forward pass.
            query: [batch, num_heads, query_len, head_dim].
            mask: None, or boolean [batch or 1, 1, query_len, slots + query_len].

        Raises:
            CacheError: another batch size than before, a mask that is not causal with padding, in any layer, or an
                earlier pass that did not reach the last layer.
        """
        forward = self._forward
        if forward is None or forward.rotation is not rotary.rotation:
            forward = self._forward = self._begin(rotary, query.shape[0], query.shape[2], mask)
            self._mask = mask
        elif mask is not self._mask:
            self._check_other_mask(mask, query.shape[2])
        return forward if query.device == forward.device else forward.on(query.device)

    def _check_other_mask(self, mask: Tensor | None, query_len: int) -> None:
        """Raises CacheError unless a mask, another object than the first layer's, hides what that does."""
        if self.step is not None:  # nothing may be read from the device
            if mask is None or self._mask is None or mask.device == self._mask.device:
                raise CacheError(f"layer {self.layer} attends with a mask of its own, which is not supported")
        elif mask is None:
            if not bool(self.sequences.valid.all()):
                raise CacheError(MASK_FORGOTTEN)
        else:
            try:
                check_mask(mask, self.sequences.valid.to(mask.device), query_len)
            except CacheError as error:
                raise CacheError(f"layer {self.layer}: {error}") from error

    def encoding(self, counts: HostCounts | DeviceCounts) -> Forward:
        """A pass without new tokens that encodes what counts say, after one of a step or of a prompt."""
        sequences, rotation = self.sequences, Rotation(torch.empty(0), torch.empty(0))
        new, device = (0,) * len(sequences.lengths), sequences.valid.device
        ranges = self.new_ranges() if self.step is None else self.step.ranges
        return Forward(sequences, rotation, new, None, counts, device, ranges)

    def _begin(self, rotary: RotaryOutput, batch: int, query_len: int, mask: Tensor | None) -> Forward:
        sequences, step, device = self.sequences, self.step, rotary.positions.device
        if step is not None:
            self._layers_left = self.num_layers
            return Forward(sequences, rotary.rotation, (step.width,) * batch, None, step, device, step.ranges)
        self.check_complete()
        if sequences.lengths and batch != len(sequences.lengths):
            raise CacheError(f"the cache holds {len(sequences.lengths)} sequences, but a batch of {batch} came in")
        past = sequences.valid if sequences.lengths else torch.ones(batch, 0, dtype=torch.bool, device=device)
        if mask is None and sum(sequences.lengths) < past.numel():
            raise CacheError(MASK_FORGOTTEN)
        real = torch.ones(batch, query_len, dtype=torch.bool, device=device)
        new = (query_len,) * batch
        if mask is not None:
            mask = mask.to(device)
            real = mask[:, 0, -1, -query_len:].expand(batch, -1)
            new = tuple(real.sum(1).tolist())
        valid = torch.cat((past, real), dim=1)
        if mask is not None:
            check_mask(mask, valid, query_len)
        padded = sum(new) < batch * query_len
        if sequences.rope.switch is not None:
            length = int(rotary.positions.max()) + 1 if rotary.known else int(valid.sum(1).max())
            sequences.begin(length, query_len)
        counts = sequences.append(new, valid)
        self._layers_left = self.num_layers
        forward = Forward(sequences, rotary.rotation, new, real if padded else None, counts, device, self.new_ranges())
        positions = rotary.positions.expand(batch, -1)
        if not rotary.known:  # they count on from what the cache holds
            positions = (valid.cumsum(1) - 1)[:, -query_len:].clamp(min=0)
        sequences.keep_positions(positions, forward.window.index)
        return forward

    @property
    def layer(self) -> int:
        """The layer whose turn it is in the forward pass."""
        return self.num_layers - self._layers_left

    def layer_done(self) -> None:
        """Notes that a layer has taken part in the forward pass; the last one checks `ranges` and ends it."""
        if self._layers_left == 1 and self._forward is not None and self.step is None:  # a step is not waited for
            self._forward.ranges.check()
        self._layers_left -= 1
        if not self._layers_left:
            self._forward = self._mask = None

    @contextmanager
    def complete_or_refused(self) -> Iterator[None]:
        """A pass of a step and what it encodes, inside the block: if it breaks off, the cache refuses to go on."""
        try:
            yield
        except BaseException:
            self.break_off()
            raise

    def break_off(self) -> None:
        """Notes that a pass which has added tokens raised: the cache refuses further use until it is reset."""
        self._layers_left = max(1, self._layers_left)

    def check_complete(self) -> None:
        """Raises CacheError when layers hold different tokens."""
        if self._layers_left > 0:
            raise CacheError(
                "a forward pass over this cache did not reach the last layer, or was refused in it; call cache.reset()"
            )

    def check_at_rest(self) -> None:
        """Raises CacheError unless all layers hold the same tokens, one or more, and none are being made."""
        if not self.sequences.lengths:
            raise CacheError("the cache holds no token")
        if self.step is not None:
            raise CacheError("tokens are being made on this cache; wait until they are")
        self.check_complete()


def check_mask(mask: Tensor, valid: Tensor, query_len: int) -> None:
    """Raises CacheError unless every real query sees exactly the real keys up to itself.

    Args:
        mask: boolean [batch or 1, 1, query_len, slots].
        valid: boolean [batch, slots], False at padding.
        query_len: new slots, the last.
    """
    if mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[-1] != valid.shape[1]:
        raise CacheError("the attention mask must be causal with padding; masks of another kind are not supported")
    first, key = valid.shape[1] - query_len, valid.unsqueeze(1)
    wrong = torch.zeros((), dtype=torch.bool, device=mask.device)
    # block by block of queries: only the keys among the block itself need a triangle
    for start in range(0, query_len, _BLOCK):
        stop = min(start + _BLOCK, query_len)
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
