"""A chunk as bytes and back: header, tokens kept as they are, and the codes of each layer, all of fixed size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.reference import unrotate
from kvcli.errors import ChunkError
from kvcli.integrations.lmcache.header import NO_START, SIZE, ChunkHeader
from kvcli.integrations.lmcache.layout import ChunkLayout
from kvcli.integrations.lmcache.served import Served
from kvcli.integrations.lmcache.start import find_start
from kvcli.methods.base import Codec, Codes
from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import Rotation


class ChunkCodec:
    """Encodes chunks of a model; a chunk's bytes depend on it and on the settings alone.

    Bytes: the header; the first `exact_tokens` tokens of all layers, keys then values, in the chunk's dtype; then for
    every layer the fields of its key codes and of its value codes.

    Args:
        served: the model and its codecs.
    """

    def __init__(self, served: Served) -> None:
        self.served = served

    def stored_bytes(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> int:
        """Bytes of every chunk of a layout, exactly.

        Raises:
            ChunkError: a layout that cannot be stored; the message names it.
        """
        return SIZE + self._payload_bytes(ChunkLayout.read(shapes, dtypes, self.served.spec))

    @torch.inference_mode()
    def encode(self, chunk: Tensor) -> Tensor:
        """The bytes of a chunk.

        Args:
            chunk: in one of the forms of `ChunkLayout`, contiguous, on any device; keys after RoPE.

        Returns:
            uint8 [stored_bytes] on the CPU.

        Raises:
            ChunkError: a layout that cannot be stored, or keys or values that are not finite or beyond what codes hold.
        """
        with self.served.on_device():
            return self._encode(chunk)

    def _encode(self, chunk: Tensor) -> Tensor:
        served = self.served
        layout = ChunkLayout.read([chunk.shape], [chunk.dtype], served.spec)
        codecs = served.codecs(layout)
        keys, values = (x.to(served.device) for x in layout.keys_and_values(chunk))
        start, exact = NO_START, served.exact_tokens
        parts = [_as_bytes(x[:, :, :exact]) for x in (keys, values)]
        if exact:  # what is kept as it is must not widen the range of the tokens that are coded with it
            keys, values = (_repeat_from(x, exact) for x in (keys, values))
        rotation = None
        if any(codec.needs_rotations for codec in codecs):
            start = find_start(keys, codecs, served.rope, served.spec.max_position_embeddings)
            rotation = self._rotation(start, layout)
        for layer_idx, codec in enumerate(codecs):
            layer = slice(layer_idx, layer_idx + 1)
            codec_keys = keys[layer] if rotation is None else codec.encoder_input(keys[layer], rotation, unrotate)
            for what, part, x in (("keys", codec.key, codec_keys), ("values", codec.value, values[layer])):
                codes = part.encode(x, None)
                _check_range(f"{what} of layer {layer_idx}", part, x, codes)
                parts += [_as_bytes(field) for field in codes.tensors().values()]
        payload = torch.cat(parts)
        header = ChunkHeader(served.method.name, served.identity, layout, start, payload.numel())
        packed = header.pack(payload.numpy().data)
        return torch.cat((torch.frombuffer(bytearray(packed), dtype=torch.uint8), payload))

    @torch.inference_mode()
    def decode(self, stored: Tensor, chunk: Tensor) -> ChunkHeader:
        """Writes what stored bytes stand for into a chunk.

        Args:
            stored: uint8 on any device, what `encode` returned; more bytes may follow.
            chunk: in the form that was encoded, contiguous, on any device; overwritten.

        Returns:
            The header of the bytes.

        Raises:
            ChunkError: bytes that are damaged, or of another model, method, artifact or layout; the chunk is unchanged.
        """
        with self.served.on_device():
            return self._decode(stored, chunk)

    def _decode(self, stored: Tensor, chunk: Tensor) -> ChunkHeader:
        served = self.served
        stored = stored.flatten().cpu()
        header = ChunkHeader.unpack(stored.numpy().data)
        layout = ChunkLayout.read([chunk.shape], [chunk.dtype], served.spec)
        codecs = served.codecs(layout)
        self._check(header, layout)
        fields = _Fields(stored[SIZE : SIZE + header.payload_bytes].to(served.device))
        exact_shape = (layout.num_layers, layout.num_kv_heads, served.exact_tokens, layout.head_dim)
        exact = [fields.take(exact_shape, layout.dtype) for _ in range(2)]
        rotation = None if header.start == NO_START else self._rotation(header.start, layout)
        keys, values = layout.keys_and_values(chunk)
        for layer_idx, codec in enumerate(codecs):
            key_codes, value_codes = (fields.codes(formats) for formats in self._formats(codec, layout))
            keys[layer_idx] = codec.decode_keys(key_codes, None, rotation, layout.dtype)[0].to(keys.device)
            values[layer_idx] = codec.value.decode_to(value_codes, None, layout.dtype)[0].to(values.device)
        for x, first in zip((keys, values), exact, strict=True):
            x[:, :, : served.exact_tokens] = first.to(x.device)
        return header

    def _check(self, header: ChunkHeader, layout: ChunkLayout) -> None:
        served = self.served
        if header.identity != served.identity:
            raise ChunkError(
                f"the stored chunk was encoded by method '{header.method}' for another model, artifact or settings; "
                "give each of them a folder of its own"
            )
        if header.layout != layout:
            raise ChunkError(f"the stored chunk is {header.layout}, but {layout} is asked for")
        if header.payload_bytes != self._payload_bytes(layout):
            raise ChunkError(f"the stored chunk has {header.payload_bytes} bytes of codes, which does not fit it")

    def _rotation(self, start: int, layout: ChunkLayout) -> Rotation:
        positions = torch.arange(start, start + layout.num_tokens, device=self.served.device)
        return self.served.rope.rotation(positions.unsqueeze(0), torch.float32)

    def _payload_bytes(self, layout: ChunkLayout) -> int:
        exact = 2 * layout.num_layers * layout.num_kv_heads * self.served.exact_tokens * layout.head_dim
        return exact * layout.dtype.itemsize + sum(
            math.prod(shape) * dtype.itemsize
            for codec in self.served.codecs(layout)
            for formats in self._formats(codec, layout)
            for _, shape, dtype in formats.fields
        )

    def _formats(self, codec: LayerCodec, layout: ChunkLayout) -> Iterator[_CodeFormat]:
        """The formats of a layer's key codes and value codes."""
        for part in (codec.key, codec.value):
            encoded_dtype = torch.float32 if part is codec.key and codec.key.space == "pre_rope" else layout.dtype
            like = torch.empty(1, layout.num_kv_heads, 0, layout.head_dim, dtype=encoded_dtype)
            yield _CodeFormat(part, like.to(self.served.device), layout.num_tokens)


class _CodeFormat:
    """The fields of the codes of some tokens: name, shape and dtype of each."""

    def __init__(self, codec: Codec[Any], like: Tensor, num_tokens: int) -> None:
        group = codec.encoded_group(like)
        groups = num_tokens // codec.tokens_per_group
        self.codes_cls: type[Codes] = type(group)
        self.fields = [
            (name, (1, x.shape[1], x.shape[2] * groups, *x.shape[3:]), x.dtype) for name, x in group.tensors().items()
        ]


class _Fields:
    """Tensors one after the other in a buffer of bytes."""

    def __init__(self, data: Tensor) -> None:
        self._data, self._at = data, 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor."""
        size = math.prod(shape) * dtype.itemsize
        part = self._data[self._at : self._at + size]
        self._at += size
        return part.clone().view(dtype).view(shape)  # a copy, because a view needs an aligned address

    def codes(self, formats: _CodeFormat) -> Codes:
        """The next codes."""
        return formats.codes_cls(**{name: self.take(shape, dtype) for name, shape, dtype in formats.fields})


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8).cpu()


def _repeat_from(x: Tensor, first: int) -> Tensor:
    """A copy of x [layers, num_kv_heads, tokens, head_dim] with token `first` in place of those before it."""
    x = x.clone()
    x[:, :, :first] = x[:, :, first : first + 1]
    return x


def _check_range(what: str, codec: Codec[Any], x: Tensor, codes: Codes) -> None:
    peak = float(codec.peak(x, codes))
    if not peak <= codec.max_magnitude:
        raise ChunkError(f"{what} reach {peak:.3g}, but the codes hold numbers up to {codec.max_magnitude:.0f}")
