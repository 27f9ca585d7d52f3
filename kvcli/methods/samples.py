"""What a fit reads: recorded queries, keys and values of one attention layer, block by block. It knows no files.

Every pass gives the same blocks in the same order, so what is summed over them does not depend on when or where that is
done. A tensor of one block stays in memory and is treated as any other tensor.
"""

from __future__ import annotations

import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from kvcli.rope import Rotation

BLOCK_TOKENS = 65536
"""Tokens of a block: a layer of the default calibration is a single one."""


class TokenBlocks:
    """A tensor that is read in blocks of tokens, any number of times.

    Args:
        read: begins a pass over the blocks, at least one, which differ in their number of tokens only.
        axis: of the tokens.
        folder: where `stored` makes its file; None: where the system keeps temporary files.
    """

    def __init__(
        self, num_tokens: int, read: Callable[[], Iterable[Tensor]], axis: int = 1, folder: Path | None = None
    ) -> None:
        self.num_tokens, self.axis, self.folder = num_tokens, axis, folder
        self._read = read

    @classmethod
    def of(cls, x: Tensor, axis: int = 1) -> TokenBlocks:
        """A tensor in memory as a single block."""
        return cls(x.shape[axis], lambda: (x,), axis)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._read())

    def map(self, function: Callable[[Tensor], Tensor], axis: int | None = None) -> TokenBlocks:
        """The results of a function on each block, tokens on `axis` (default: as here), computed anew in every pass."""
        axis = self.axis if axis is None else axis
        return TokenBlocks(self.num_tokens, lambda: map(function, self), axis, self.folder)

    def mean(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The mean over all tokens, from the means over a block's tokens that `function` returns."""
        return reduce(add, (function(block) * (block.shape[self.axis] / self.num_tokens) for block in self))

    def at(self, tokens: Tensor) -> Tensor:
        """The tokens of indices int64 [count], in any order and on the CPU, as one tensor."""
        result: Tensor | None = None
        start, last = 0, int(tokens.max()) if len(tokens) else 0
        for block in self:
            stop = start + block.shape[self.axis]
            if result is None:
                shape = list(block.shape)
                shape[self.axis] = len(tokens)
                result = block.new_empty(shape)
            here = ((tokens >= start) & (tokens < stop)).nonzero()[:, 0]
            rows = block.index_select(self.axis, (tokens[here] - start).to(block.device))
            result.index_copy_(self.axis, here.to(block.device), rows)
            if last < stop:
                break
            start = stop
        assert result is not None
        return result

    def first(self, count: int) -> Tensor:
        """The first tokens, as many as there are up to a count."""
        return self.at(torch.arange(min(count, self.num_tokens)))

    def whole(self) -> Tensor:
        """All tokens as one tensor in memory."""
        blocks = list(self)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=self.axis)

    def stored(self) -> StoredBlocks:
        """A mutable copy: in memory if it is one block, else in an unnamed temporary file."""
        return StoredBlocks(self)


class StoredBlocks(TokenBlocks):
    """A copy of blocks that can be changed.

    The file is read and written, not mapped: mapped pages would count as memory of the process.
    """

    def __init__(self, source: TokenBlocks) -> None:
        super().__init__(source.num_tokens, tuple, source.axis, source.folder)
        self._block: Tensor | None = None
        self._file: IO[bytes] | None = None
        self._starts = [0]
        for index, block in enumerate(source):
            if block.shape[self.axis] == self.num_tokens:
                self._block = block
                return
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
                self._first_shape, self._dtype, self._device = block.shape, block.dtype, block.device
            self._starts.append(self._starts[-1] + block.shape[self.axis])
            self._write(index, block)

    def __iter__(self) -> Iterator[Tensor]:
        if self._block is not None:
            yield self._block
            return
        for index in range(len(self._starts) - 1):
            block = torch.empty(self._shape(index), dtype=self._dtype)
            self._read_into(block, self._offset(index))
            yield block.to(self._device)

    def update(self, function: Callable[..., Tensor], *others: TokenBlocks) -> None:
        """Replaces each block by a function of it and of the same block of `others`, which keeps shape and dtype."""
        for index, blocks in enumerate(zip(self, *others, strict=True)):
            if self._file is None:
                self._block = function(*blocks)
            else:
                self._write(index, function(*blocks))

    def at(self, tokens: Tensor) -> Tensor:
        if self._file is None:
            return super().at(tokens)
        # token by token: a pass over the whole file would be far more to read
        outer, inner = self._shape(0)[: self.axis].numel(), self._shape(0)[self.axis + 1 :].numel()
        chosen = torch.empty(outer, len(tokens), inner, dtype=self._dtype)
        for place, token in enumerate(tokens.tolist()):
            index = bisect_right(self._starts, token) - 1
            first, count = token - self._starts[index], self._shape(index)[self.axis]
            for row in range(outer):
                self._read_into(chosen[row, place], self._offset(index) + (row * count + first) * inner)
        shape = list(self._shape(0))
        shape[self.axis] = len(tokens)
        return chosen.view(shape).to(self._device)

    def _shape(self, index: int) -> torch.Size:
        shape = list(self._first_shape)
        shape[self.axis] = self._starts[index + 1] - self._starts[index]
        return torch.Size(shape)

    def _offset(self, index: int) -> int:
        """Elements before a block."""
        return self._starts[index] * (self._first_shape.numel() // self._first_shape[self.axis])

    def _write(self, index: int, block: Tensor) -> None:
        self._seek(self._offset(index)).write(_bytes_of(block.to("cpu", self._dtype).contiguous()))

    def _read_into(self, x: Tensor, offset: int) -> None:
        """Fills a contiguous tensor from an element of the file on."""
        if self._seek(offset).readinto(_bytes_of(x)) < x.nbytes:
            raise OSError("a temporary file is shorter than what was written to it")

    def _seek(self, offset: int) -> Any:
        """The file, at an element."""
        assert self._file is not None
        self._file.seek(offset * self._dtype.itemsize)
        return self._file


def _bytes_of(x: Tensor) -> Any:
    """The memory of a contiguous CPU tensor as a NumPy array of bytes."""
    return x.flatten().view(torch.uint8).numpy()


@dataclass(frozen=True)
class LayerFisher:
    """Fisher information and covariance of one layer's keys and values; see `calibrate.fisher`.

    All are float32 [num_kv_heads, head_dim, head_dim], pre-RoPE. An error d of one head of every key costs about
    E[d^T key d] / 2 nats per token: `key` if errors are larger where keys are, `key_unweighted` if they are not.
    """

    key: Tensor
    key_unweighted: Tensor
    key_covariance: Tensor
    value: Tensor
    value_unweighted: Tensor
    value_covariance: Tensor


class LayerSamples:
    """Queries, keys and values of one attention layer, before RoPE.

    `keys` and `values` are read block by block; `k` and `v` read all of them, which may be more than memory holds.

    Args:
        q: [num_heads, query_tokens, head_dim], the first query_tokens tokens of the recording.
        k: [num_kv_heads, tokens, head_dim], with the bias.
        v: [num_kv_heads, tokens, head_dim], in the same blocks.
        positions: [tokens] int64, position of each token in its sequence.
        query_rotation: rotation of the recorded queries, [1, 1, query_tokens, rotary_dim/2].
        key_bias: [num_kv_heads, head_dim], bias of the model's key projection; None where it has none.
        fisher: Fisher information; None if it was not recorded.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor | TokenBlocks,
        v: Tensor | TokenBlocks,
        positions: Tensor,
        query_rotation: Rotation | None = None,
        key_bias: Tensor | None = None,
        fisher: LayerFisher | None = None,
    ) -> None:
        self.q, self.positions, self.query_rotation = q, positions, query_rotation
        self.key_bias, self.fisher = key_bias, fisher
        self.keys = TokenBlocks.of(k) if isinstance(k, Tensor) else k
        self.values = TokenBlocks.of(v) if isinstance(v, Tensor) else v

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values were recorded."""
        return self.keys.num_tokens

    @property
    def k(self) -> Tensor:
        """All keys in memory, [num_kv_heads, tokens, head_dim]."""
        return self.keys.whole()

    @property
    def v(self) -> Tensor:
        """All values in memory, [num_kv_heads, tokens, head_dim]."""
        return self.values.whole()

    def select(self, tokens: Tensor) -> LayerSamples:
        """Keys and values of some tokens, [count] indices, in memory; queries stay."""
        at = tokens.cpu()
        others = self.query_rotation, self.key_bias, self.fisher
        return LayerSamples(self.q, self.keys.at(at), self.values.at(at), self.positions[tokens], *others)

    def of_heads(self, group: int, groups: int) -> LayerSamples:
        """The samples of one of as many equal groups of consecutive heads."""

        def part(x: Tensor) -> Tensor:
            return x.chunk(groups)[group]

        bias = None if self.key_bias is None else part(self.key_bias)
        fisher = None if self.fisher is None else LayerFisher(*map(part, vars(self.fisher).values()))
        keys, values = self.keys.map(part), self.values.map(part)
        return LayerSamples(part(self.q), keys, values, self.positions, self.query_rotation, bias, fisher)

    def rotated_queries(self) -> Tensor:
        """The queries after RoPE, [num_heads, query_tokens, head_dim]."""
        assert self.query_rotation is not None
        return self.query_rotation.apply(self.q.unsqueeze(0))[0]
