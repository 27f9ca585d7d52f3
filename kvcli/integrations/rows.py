"""Keys and values of a layer as rows of bytes, one per token or group, for engines that keep these in pages."""

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
    """Codes of a layer's keys or values as rows of `nbytes` bytes, one per token, or per group of tokens.

    Args:
        codec: encodes groups of `tokens_per_group` tokens, each independently of others.
        dtype: of the tokens that it encodes.
    """

    def __init__(self, codec: Codec[Any], dtype: torch.dtype) -> None:
        self.group = codec.tokens_per_group
        shape = 1, codec.spec.num_kv_heads, self.group, codec.spec.head_dim
        example = codec.encode(torch.zeros(shape, dtype=dtype, device=device_of(codec)), None)
        self._like = type(example), {name: (x.dtype, *x.shape[1:]) for name, x in example.tensors().items()}
        self.nbytes = example.nbytes

    def pack(self, codes: Codes) -> Tensor:
        """Codes, each field [1, heads, entries, width] with the same entries per group, as uint8 [groups, nbytes]."""
        count, fields = codes.num_tokens // self.group, []
        for x in codes.tensors().values():
            by_group = x[0].unflatten(1, (count, -1)).transpose(0, 1)
            fields.append(by_group.flatten(1).contiguous().view(torch.uint8))
        return torch.cat(fields, 1)

    def unpack(self, rows: Tensor) -> Codes:
        """The codes of rows, uint8 [groups, nbytes]."""
        make, fields = self._like
        widths = [dtype.itemsize * heads * entries * width for dtype, heads, entries, width in fields.values()]
        parts = {
            name: part.clone().view(dtype).unflatten(1, shape).transpose(0, 1).flatten(1, 2).unsqueeze(0).contiguous()
            for part, (name, (dtype, *shape)) in zip(rows.split(widths, 1), fields.items(), strict=True)
        }
        return make(**parts)


class LayerRows:
    """The rows of a layer's `keys` and `values`.

    Args:
        layer_idx: what messages call the layer.
        dtype: of the model's keys and values.
        ranges: where the largest numbers that are encoded are noted.
    """

    def __init__(self, codec: LayerCodec, layer_idx: int, dtype: torch.dtype, ranges: StepRanges) -> None:
        self.codec = codec
        self.keys = Rows(codec.key, dtype if codec.key.space == "post_rope" else torch.float32)
        self.values = Rows(codec.value, dtype)
        self._notes = (
            Note(ranges, f"keys of layer {layer_idx}", codec.key),
            Note(ranges, f"values of layer {layer_idx}", codec.value),
        )

    def encode_keys(self, keys: Tensor, rotation: Rotation) -> Tensor:
        """Rows of keys after RoPE, [tokens, num_kv_heads, head_dim]; `rotation` is RoPE of the tokens, float32."""
        x = self.codec.encoder_input(keys.transpose(0, 1).unsqueeze(0), rotation, unrotate)
        return _encode(self.keys, self._notes[0], x)

    def encode_values(self, values: Tensor) -> Tensor:
        """Rows of values [tokens, num_kv_heads, head_dim]."""
        return _encode(self.values, self._notes[1], values.transpose(0, 1).unsqueeze(0))


def _encode(rows: Rows, note: Note, x: Tensor) -> Tensor:
    codes = note.codec.encode(x, None)
    if (peak := note.peak(x.dtype)) is not None:
        torch.maximum(peak, note.codec.peak(x, codes), out=peak)
    return rows.pack(codes)


def check_codecs(method: str, codecs: Sequence[LayerCodec], *, groups: bool = False) -> None:
    """Checks that codes of a token depend on it alone, or keys on their group if `groups`, and are as wide as values.

    Raises:
        UsageError: a method whose codes depend on more than the token.
        UnsupportedModelError: keys and values of different widths.
    """
    for codec in codecs:
        alone = (codec.value if groups and not codec.needs_rotations else codec).tokens_per_group == 1
        if not alone or codec.new_state(1, device_of(codec.key)) is not None:
            hint = "say sequence_offset='none'" if codec.sequence_offset else "choose one that codes each token alone"
            raise UsageError(f"codes of method '{method}' depend on other tokens; {hint}")
        if codec.key.spec.value_dim != codec.key.spec.head_dim:
            raise UnsupportedModelError("keys and values of different widths are not supported in pages")


def device_of(codec: nn.Module) -> torch.device:
    """The device of a codec's buffers; the CPU if it has none."""
    return next((x.device for x in codec.buffers()), torch.device("cpu"))
