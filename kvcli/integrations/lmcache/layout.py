"""Which part of a chunk's tensor is which layer's keys and values.

LMCache's server holds a chunk in one of two forms, told by their shapes and the model's:

    split   [2, layers, tokens, heads * head_dim]           keys, then values
    fused   [1, layers, tokens, heads * 2 * head_dim]       each head's keys and values side by side; also without the
            [layers, tokens, heads * 2 * head_dim]          first axis

A rank of tensor parallelism holds some of the heads, one of pipeline parallelism some of the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvcli.errors import ChunkError
from kvcli.spec import ModelSpec

Form = Literal["split", "fused"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class ChunkLayout:
    """The form and the shapes of a chunk."""

    form: Form
    num_layers: int
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def read(cls, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], spec: ModelSpec) -> ChunkLayout:
        """The layout of a chunk of a model.

        Args:
            shapes: of the chunk's tensors, one for each group of layers of one kind.
            dtypes: likewise.
            spec: the model's shapes.

        Raises:
            ChunkError: several groups, another dtype, or a shape that is neither form; the message names it.
        """
        named = "; ".join(f"{list(shape)} {dtype}" for shape, dtype in zip(shapes, dtypes, strict=True))
        refused = f"chunks of the layout {named} cannot be stored as codes:"
        if len(shapes) != 1:
            raise ChunkError(f"{refused} the layers are of {len(shapes)} kinds, and kvcli knows models of one")
        if dtypes[0] not in DTYPES:
            raise ChunkError(f"{refused} keys and values are float16, bfloat16 or float32")
        planes, num_layers, num_tokens, width = (1, *shapes[0])[-4:] if len(shapes[0]) in (3, 4) else (0, 0, 0, 0)
        per_head = {1: 2 * spec.head_dim, 2: spec.head_dim}.get(planes, 0)
        heads, rest = divmod(width, per_head) if per_head else (0, 0)
        if rest or not heads or spec.num_kv_heads % heads or not 0 < num_layers <= spec.num_layers or not num_tokens:
            raise ChunkError(
                f"{refused} with {spec.num_layers} layers and {spec.num_kv_heads} kv heads of {spec.head_dim} "
                f"channels they are [2, layers, tokens, heads * {spec.head_dim}] or "
                f"[1, layers, tokens, heads * {2 * spec.head_dim}]"
            )
        return cls("split" if planes == 2 else "fused", num_layers, num_tokens, heads, spec.head_dim, dtypes[0])

    @property
    def num_values(self) -> int:
        """Keys and values in the chunk."""
        return 2 * self.num_layers * self.num_tokens * self.num_kv_heads * self.head_dim

    def keys_and_values(self, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a chunk's tensor, [layers, num_kv_heads, tokens, head_dim] each; writing to them writes to it."""
        heads = (self.num_kv_heads, self.head_dim)
        if self.form == "split":
            keys, values = chunk.view(2, self.num_layers, self.num_tokens, *heads).unbind(0)
        else:
            keys, values = chunk.view(self.num_layers, self.num_tokens, heads[0], 2, heads[1]).unbind(3)
        return keys.transpose(1, 2), values.transpose(1, 2)
