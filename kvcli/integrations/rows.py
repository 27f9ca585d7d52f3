"""Keys and values of a layer as rows of bytes, one per token, for engines whose pages hold tokens in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.attention.reference import unrotate
from kvcli.cache.ranges import Note, StepRanges
from kvcli.errors import UnsupportedModelError, UsageError
from kvcli.methods.base import Codec, Codes
from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import Rotation


class Rows:
    """Codes of a layer's keys or values as rows of `nbytes` bytes, one per token.

    Args:
        codec: encodes each token independently of others.
        dtype: of the tokens that it encodes.
    """

    def __init__(self, codec: Codec[Any], dtype: torch.dtype) -> None:
        shape = 1, codec.spec.num_kv_heads, 1, codec.spec.head_dim
        example = codec.encode(torch.zeros(shape, dtype=dtype, device=device_of(codec)), None)
        self._like = type(example), {name: (x.dtype, x.shape[1], x.shape[3]) for name, x in example.tensors().items()}
        self.nbytes = example.nbytes

    def pack(self, codes: Codes) -> Tensor:
        """Codes, each field [1, heads, tokens, width], as uint8 [tokens, nbytes]."""
        fields = [x[0].transpose(0, 1).flatten(1).contiguous().view(torch.uint8) for x in codes.tensors().values()]
        return torch.cat(fields, 1)

    def unpack(self, rows: Tensor) -> Codes:
        """The codes of rows, uint8 [tokens, nbytes]."""
        make, fields = self._like
        widths = [dtype.itemsize * heads * width for dtype, heads, width in fields.values()]
        parts = {
            name: part.clone().view(dtype).unflatten(1, (heads, width)).transpose(0, 1).unsqueeze(0).contiguous()
            for part, (name, (dtype, heads, width)) in zip(rows.split(widths, 1), fields.items(), strict=True)
        }
        return make(**parts)


class LayerRows:
    """The rows of a layer; `keys` and `values` say how many bytes these take per token.

    Args:
        layer_idx: what messages call the layer.
        dtype: of the model's keys and values.
        ranges: where the largest numbers that are encoded are noted.
    """

    def __init__(self, codec: LayerCodec, layer_idx: int, dtype: torch.dtype, ranges: StepRanges) -> None:
        self.codec, self._ranges = codec, ranges
        self.keys = Rows(codec.key, dtype if codec.key.space == "post_rope" else torch.float32)
        self.values = Rows(codec.value, dtype)
        self._notes = (
            Note(ranges, f"keys of layer {layer_idx}", codec.key),
            Note(ranges, f"values of layer {layer_idx}", codec.value),
        )

    @property
    def nbytes(self) -> int:
        """Bytes per token."""
        return self.keys.nbytes + self.values.nbytes

    def encode(self, keys: Tensor, values: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rows of keys and of values, uint8 [tokens, bytes], of tokens [tokens, num_kv_heads, head_dim].

        Keys are after RoPE; `rotation` is RoPE of the tokens' positions, float32.
        """
        keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (keys, values))
        inputs = self.codec.encoder_input(keys, rotation, unrotate), values
        packed = []
        for x, note, rows in zip(inputs, self._notes, (self.keys, self.values), strict=True):
            codes = note.codec.encode(x, None)
            if (peak := note.peak(x.dtype)) is not None:
                torch.maximum(peak, note.codec.peak(x, codes), out=peak)
            packed.append(rows.pack(codes))
        return packed[0], packed[1]


def check_token_local(method: str, codecs: Sequence[LayerCodec]) -> None:
    """Checks that codes of a token depend on it alone, and that keys are as wide as values.

    Raises:
        UsageError: a method whose codes depend on more than the token.
        UnsupportedModelError: keys and values of different widths.
    """
    for codec in codecs:
        if codec.tokens_per_group > 1 or codec.new_state(1, device_of(codec.key)) is not None:
            hint = "say sequence_offset='none'" if codec.sequence_offset else "choose one that codes each token alone"
            raise UsageError(f"codes of method '{method}' depend on other tokens; {hint}")
        if codec.key.spec.value_dim != codec.key.spec.head_dim:
            raise UnsupportedModelError("keys and values of different widths are not supported in pages")


def device_of(codec: nn.Module) -> torch.device:
    """The device of a codec's buffers; the CPU if it has none."""
    return next((x.device for x in codec.buffers()), torch.device("cpu"))
