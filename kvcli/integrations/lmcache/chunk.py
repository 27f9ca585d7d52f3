"""A chunk as bytes and back: header, tokens kept as they are, and the codes of each layer, all of fixed size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvcli.attention.reference import unrotate
from kvcli.errors import ChunkError
from kvcli.integrations.lmcache.format import NO_START, SIZE, ChunkHeader, ChunkLayout
from kvcli.integrations.lmcache.served import Served
from kvcli.methods.base import Codes
from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import Rope, Rotation

_FEW_TOKENS, _FEW_LAYERS = 1, 2
_MORE_TOKENS, _MORE_LAYERS = 8, 4
_BEST_STARTS = 16
_BATCH = 64

_Field = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype of a tensor of codes."""


class ChunkCodec:
    """Encodes chunks of a model; a chunk's bytes depend on it and on the settings alone.

    Bytes: the header; the first `exact_tokens` tokens of all layers, keys then values, in the chunk's dtype; then for
    every layer the fields of its key codes and of its value codes.
    """

    def __init__(self, served: Served) -> None:
        self.served = served

    def stored_bytes(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> int:
        """Bytes of every chunk of a layout, exactly; ChunkError names a layout that cannot be stored."""
        return SIZE + self._payload_bytes(ChunkLayout.read(shapes, dtypes, self.served.spec))

    @torch.inference_mode()
    def encode(self, chunk: Tensor) -> Tensor:
        """The bytes of a chunk, uint8 [stored_bytes] on the CPU.

        The chunk is in one of the forms of `ChunkLayout`, contiguous, on any device; its keys are after RoPE.

        Raises:
            ChunkError: a layout that cannot be stored, or keys or values that are not finite or beyond what codes hold.
        """
        served, start = self.served, NO_START
        with served.on_device():
            layout = ChunkLayout.read([chunk.shape], [chunk.dtype], served.spec)
            codecs, exact = served.codecs(layout), served.exact_tokens
            keys, values = (x.to(served.device) for x in layout.keys_and_values(chunk))
            parts = [_as_bytes(x[:, :, :exact]) for x in (keys, values)]
            if exact:  # what is kept as it is must not widen the range of the tokens that are coded with it
                keys, values = keys.clone(), values.clone()
                for x in (keys, values):
                    x[:, :, :exact] = x[:, :, exact : exact + 1]
            rotation = None
            if any(codec.needs_rotations for codec in codecs):
                start = find_start(keys, codecs, served.rope, served.spec.max_position_embeddings)
                rotation = self._rotation(start, layout)
            for layer_idx, codec in enumerate(codecs):
                layer = slice(layer_idx, layer_idx + 1)
                codec_keys = keys[layer] if rotation is None else codec.encoder_input(keys[layer], rotation, unrotate)
                for what, part, x in (("keys", codec.key, codec_keys), ("values", codec.value, values[layer])):
                    codes = part.encode(x, None)
                    peak, most = float(part.peak(x, codes)), part.max_magnitude
                    if not peak <= most:
                        reach = f"reach {peak:.3g}, but the codes hold numbers up to {most:.0f}"
                        raise ChunkError(f"{what} of layer {layer_idx} {reach}")
                    parts += [_as_bytes(field) for field in codes.tensors().values()]
            payload = torch.cat(parts)
        header = ChunkHeader(served.method.name, served.identity, layout, start, payload.numel())
        packed = header.pack(payload.numpy().data)
        return torch.cat((torch.frombuffer(bytearray(packed), dtype=torch.uint8), payload))

    @torch.inference_mode()
    def decode(self, stored: Tensor, chunk: Tensor) -> ChunkHeader:
        """Decodes what `encode` returned, after which more bytes may follow, into a chunk; returns the header.

        Raises:
            ChunkError: bytes that are damaged, or of another model, method, artifact or layout; the chunk is unchanged.
        """
        served, stored = self.served, stored.flatten().cpu()
        with served.on_device():
            header = ChunkHeader.unpack(stored.numpy().data)
            layout = ChunkLayout.read([chunk.shape], [chunk.dtype], served.spec)
            codecs = served.codecs(layout)
            if header.identity != served.identity:
                raise ChunkError(
                    f"the stored chunk was encoded by method '{header.method}' for another model, artifact or "
                    "settings; give each of them a folder of its own"
                )
            if header.layout != layout:
                raise ChunkError(f"the stored chunk is {header.layout}, but {layout} is asked for")
            if header.payload_bytes != self._payload_bytes(layout):
                raise ChunkError(f"the stored chunk has {header.payload_bytes} bytes of codes, which does not fit it")
            payload, at = stored[SIZE : SIZE + header.payload_bytes].to(served.device), 0

            def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
                """The next tensor, a copy, because a view needs an aligned address."""
                nonlocal at
                begin, at = at, at + math.prod(shape) * dtype.itemsize
                return payload[begin:at].clone().view(dtype).view(shape)

            exact_shape = (layout.num_layers, layout.num_kv_heads, served.exact_tokens, layout.head_dim)
            exact = [take(exact_shape, layout.dtype) for _ in range(2)]
            rotation = None if header.start == NO_START else self._rotation(header.start, layout)
            keys, values = layout.keys_and_values(chunk)
            for layer_idx, codec in enumerate(codecs):
                key_codes, value_codes = (
                    codes_cls(**{name: take(shape, dtype) for name, shape, dtype in fields})
                    for codes_cls, fields in self._codes_fields(codec, layout)
                )
                keys[layer_idx] = codec.decode_keys(key_codes, None, rotation, layout.dtype)[0].to(keys.device)
                values[layer_idx] = codec.value.decode_to(value_codes, None, layout.dtype)[0].to(values.device)
            for x, first in zip((keys, values), exact, strict=True):
                x[:, :, : served.exact_tokens] = first.to(x.device)
        return header

    def _rotation(self, start: int, layout: ChunkLayout) -> Rotation:
        positions = torch.arange(start, start + layout.num_tokens, device=self.served.device)
        return self.served.rope.rotation(positions.unsqueeze(0), torch.float32)

    def _payload_bytes(self, layout: ChunkLayout) -> int:
        exact = 2 * layout.num_layers * layout.num_kv_heads * self.served.exact_tokens * layout.head_dim
        return exact * layout.dtype.itemsize + sum(
            math.prod(shape) * dtype.itemsize
            for codec in self.served.codecs(layout)
            for _, fields in self._codes_fields(codec, layout)
            for _, shape, dtype in fields
        )

    def _codes_fields(self, codec: LayerCodec, layout: ChunkLayout) -> Iterator[tuple[type[Codes], list[_Field]]]:
        """Class and fields of a layer's key codes and of its value codes, of the tokens of a chunk."""
        for part in (codec.key, codec.value):
            encoded_dtype = torch.float32 if part is codec.key and codec.key.space != "post_rope" else layout.dtype
            like = torch.empty(1, layout.num_kv_heads, 0, layout.head_dim, dtype=encoded_dtype)
            group, groups = part.encoded_group(like.to(self.served.device)), layout.num_tokens // part.tokens_per_group
            shapes = {name: (1, x.shape[1], x.shape[2] * groups, *x.shape[3:]) for name, x in group.tensors().items()}
            yield type(group), [(name, shapes[name], x.dtype) for name, x in group.tensors().items()]


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8).cpu()


def find_start(keys: Tensor, codecs: list[LayerCodec], rope: Rope, max_positions: int) -> int:
    """The position of a chunk's first token: the multiple of its length at which keys are coded with the least error.

    LMCache names chunks by a hash of all tokens before them, which says nothing of their number, and has keys after
    RoPE. So every multiple is tried on one token of two layers, the 16 best of them on eight tokens of four layers. A
    wrong start would not make wrong keys, for decoding rotates back by the same angles; it would only cost precision,
    because the codebooks were fitted to keys that were rotated back right. Keys are [layers, num_kv_heads, tokens,
    head_dim].
    """
    length = keys.shape[2]
    starts = torch.arange(0, max(length, max_positions - length + 1), length)
    if len(starts) > _BEST_STARTS:
        errors = _errors(keys, codecs, rope, starts, _FEW_TOKENS, _FEW_LAYERS)
        starts = starts[errors.topk(_BEST_STARTS, largest=False).indices.sort().values]
    return int(starts[_errors(keys, codecs, rope, starts, _MORE_TOKENS, _MORE_LAYERS).argmin()])


def _errors(
    keys: Tensor, codecs: list[LayerCodec], rope: Rope, starts: Tensor, num_tokens: int, num_layers: int
) -> Tensor:
    """Squared error of coding a few tokens at each start, as a share of their energy, summed over layers."""
    group = max(codec.tokens_per_group for codec in codecs)
    tokens = _spread(keys.shape[2] // group, max(1, num_tokens // group)) * group
    tokens = (tokens.unsqueeze(1) + torch.arange(group)).flatten()

    def of_layer(layer_idx: int, some: Tensor) -> Tensor:
        chosen, codec = keys[layer_idx][:, tokens].float(), codecs[layer_idx]
        rotation = rope.rotation((some.unsqueeze(1) + tokens).to(keys.device), torch.float32)
        codes = codec.key.encode(codec.encoder_input(chosen.expand(len(some), -1, -1, -1), rotation, unrotate), None)
        decoded = codec.decode_keys(codes, None, rotation, torch.float32)
        return ((decoded - chosen).square().sum((1, 2, 3)) / chosen.square().sum().clamp_min(1e-30)).cpu()

    layers = _spread(len(codecs), num_layers).tolist()
    return torch.cat([torch.stack([of_layer(i, some) for i in layers]).sum(0) for some in starts.split(_BATCH)])


def _spread(length: int, count: int) -> Tensor:
    """Up to `count` indices below `length`, evenly spread, neither first nor last where there are others."""
    count = min(length, count)
    return (torch.arange(count) * 2 + 1) * length // (2 * count)
