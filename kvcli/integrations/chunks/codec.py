"""Chunks as bytes and back: header, tokens kept as they are, and the codes of each layer, all of fixed size.

Where an engine does not say at which position of its context a chunk begins, it is found by the keys.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.errors import ChunkError
from kvcli.integrations.chunks.format import NO_START, SIZE, ChunkHeader, ChunkLayout
from kvcli.integrations.chunks.served import Served
from kvcli.methods.base import Codes
from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import Rope, Rotation, unrotate

_SAMPLED_LAYERS = 4
_FEW_TOKENS, _FEW_LAYERS = 1, 2
_MORE_TOKENS, _MORE_LAYERS = 8, 4
_BEST_STARTS = 16
_BATCH = 64

_Field = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype of a tensor of codes."""


class Encoded(NamedTuple):
    """Chunks as bytes, uint8 [chunks, stored_bytes] on the CPU, and what is lost.

    `errors` are of keys and of values, float [chunks, 2]: squared error as a share of their energy, in a sample of
    layers, without the tokens that are kept as they are; None if nobody asked.
    """

    stored: Tensor
    errors: Tensor | None


LayerOf = Callable[[int], tuple[Tensor, Tensor]]
"""Keys, after RoPE, and values of a layer, counted from 0, [chunks, num_kv_heads, tokens, head_dim] of any strides."""


class ChunkCodec:
    """Encodes chunks of a model; a chunk's bytes depend on it, its start and the settings alone.

    Bytes: the header; the first `exact_tokens` tokens of all layers, keys then values, in the chunk's dtype; then for
    every layer the fields of its key codes and of its value codes.

    `layers` are those that a chunk has, in this order; None: as many of a model's first layers as there are.
    """

    def __init__(self, served: Served, layers: Sequence[int] | None = None) -> None:
        self.served, self.layers = served, layers

    def stored_bytes(self, layout: ChunkLayout) -> int:
        """Bytes of every chunk of a layout, exactly; ChunkError names a layout that cannot be stored."""
        return SIZE + self._payload_bytes(layout)

    @torch.inference_mode()
    def encode(
        self, layout: ChunkLayout, layer: LayerOf, starts: Sequence[int] | None = None, *, with_errors: bool = False
    ) -> Encoded:
        """The bytes of chunks.

        Args:
            layout: of each chunk.
            layer: as `LayerOf`, on any device; layers are asked for one after the other.
            starts: position of each chunk's first token, where it is known.
            with_errors: measure what is lost.

        ChunkError: a layout that cannot be stored, or keys or values that are not finite or beyond what codes hold.
        """
        served = self.served
        with served.on_device():
            codecs, count = served.codecs(layout, self.layers), len(layer(0)[0])
            rotation, begins = None, [NO_START] * count
            if any(codec.needs_rotations for codec in codecs):
                longest = served.spec.max_position_embeddings
                begins = list(starts or find_starts(lambda i: self._coded(layer(i)[0]), codecs, served.rope, longest))
                rotation = self._rotation(begins, layout)
            sampled = set(spread(len(codecs), _SAMPLED_LAYERS).tolist()) if with_errors else set()
            squared, energy = (torch.zeros(count, 2, device=served.device) for _ in range(2))
            exact = list[tuple[Tensor, ...]]()
            parts = list[Tensor]()
            for layer_idx, codec in enumerate(codecs):
                both = layer(layer_idx)
                exact.append(tuple(part[:, :, : served.exact_tokens].to(served.device) for part in both))
                x, v = (self._coded(part) for part in both)
                inputs = x if rotation is None else codec.encoder_input(x, rotation, unrotate)
                codes = codec.key.encode(inputs, None), codec.value.encode(v, None)
                pairs = zip(("keys", "values"), (codec.key, codec.value), (inputs, v), codes, strict=True)
                for what, part, given, encoded in pairs:
                    peak, most = float(part.peak(given, encoded)), part.max_magnitude
                    if not peak <= most:
                        reach = f"reach {peak:.3g}, but the codes hold numbers up to {most:.0f}"
                        raise ChunkError(f"{what} of layer {layer_idx} {reach}")
                    parts += [_as_bytes(field) for field in encoded.tensors().values()]
                if layer_idx in sampled:
                    decoded = self._decoded(codec, codes, rotation, torch.float32)
                    for i, (true, ours) in enumerate(zip((x, v), decoded, strict=True)):
                        of_layer = true[:, :, served.exact_tokens :].float()
                        squared[:, i] += (ours[:, :, served.exact_tokens :] - of_layer).square().sum((1, 2, 3))
                        energy[:, i] += of_layer.square().sum((1, 2, 3))
            first = [_as_bytes(torch.stack(x, dim=1)) for x in zip(*exact, strict=True)]
            payloads = torch.cat((*first, *parts), dim=1).cpu()
        rows = []
        for payload, start in zip(payloads, begins, strict=True):
            header = ChunkHeader(served.method.name, served.identity, layout, start, payload.numel())
            packed = header.pack(payload.numpy().data)
            rows.append(torch.cat((torch.frombuffer(bytearray(packed), dtype=torch.uint8), payload)))
        return Encoded(torch.stack(rows), (squared / energy.clamp_min(1e-30)).cpu() if with_errors else None)

    def check(self, stored: Tensor, layout: ChunkLayout) -> ChunkHeader:
        """The header of what `encode` returned, of one chunk of this layout, uint8 [bytes]; more bytes may follow.

        ChunkError: bytes that are damaged, or of another model, method, artifact or layout.
        """
        header = ChunkHeader.unpack(stored.numpy().data)
        if header.identity != self.served.identity:
            raise ChunkError(
                f"the stored chunk was encoded by method '{header.method}' for another model, artifact or "
                "settings; give each of them a folder of its own"
            )
        if header.layout != layout:
            raise ChunkError(f"the stored chunk is {header.layout}, but {layout} is asked for")
        if header.payload_bytes != self._payload_bytes(layout):
            raise ChunkError(f"the stored chunk has {header.payload_bytes} bytes of codes, which does not fit it")
        return header

    @torch.inference_mode()
    def decode(self, stored: Sequence[Tensor], layout: ChunkLayout) -> Iterator[tuple[Tensor, Tensor]]:
        """What `encode` was given, layer by layer, of chunks uint8 [bytes] each that were checked.

        Keys and values are in the chunk's dtype on the served device.
        """
        served = self.served
        with served.on_device():
            codecs = served.codecs(layout, self.layers)
            end = SIZE + self._payload_bytes(layout)
            payload, at = torch.stack([x[SIZE:end] for x in stored]).to(served.device), 0
            starts = [ChunkHeader.read(x.numpy().data).start for x in stored]

            def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
                """The next tensor of all chunks, a copy, because a view needs an aligned address."""
                nonlocal at
                begin, at = at, at + math.prod(shape) * dtype.itemsize
                return payload[:, begin:at].contiguous().view(-1).view(dtype).view(len(payload), *shape[1:])

            exact_shape = (1, layout.num_layers, layout.num_kv_heads, served.exact_tokens, layout.head_dim)
            exact = [take(exact_shape, layout.dtype) for _ in range(2)]
            rotation = None if NO_START in starts else self._rotation(starts, layout)
            for layer_idx, codec in enumerate(codecs):
                codes = [
                    codes_cls(**{name: take(shape, dtype) for name, shape, dtype in fields})
                    for codes_cls, fields in self._codes_fields(codec, layout)
                ]
                keys, values = self._decoded(codec, codes, rotation, layout.dtype)
                for x, first in zip((keys, values), exact, strict=True):
                    x[:, :, : served.exact_tokens] = first[:, layer_idx]
                yield keys, values

    def _coded(self, x: Tensor) -> Tensor:
        """What is coded of keys or values: another token in place of those that are kept, lest they widen the range."""
        exact, x = self.served.exact_tokens, x.to(self.served.device)
        return torch.cat((x[:, :, exact : exact + 1].expand(-1, -1, exact, -1), x[:, :, exact:]), dim=2) if exact else x

    @staticmethod
    def _decoded(
        codec: LayerCodec, codes: Sequence[Codes], rotation: Rotation | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [chunks, num_kv_heads, tokens, head_dim]."""
        return codec.decode_keys(codes[0], None, rotation, dtype), codec.value.decode_to(codes[1], None, dtype)

    def _rotation(self, starts: Sequence[int], layout: ChunkLayout) -> Rotation:
        first = torch.tensor(starts, device=self.served.device).unsqueeze(1)
        positions = first + torch.arange(layout.num_tokens, device=self.served.device)
        return self.served.rope.rotation(positions, torch.float32)

    def _payload_bytes(self, layout: ChunkLayout) -> int:
        exact = 2 * layout.num_layers * layout.num_kv_heads * self.served.exact_tokens * layout.head_dim
        return exact * layout.dtype.itemsize + sum(
            math.prod(shape) * dtype.itemsize
            for codec in self.served.codecs(layout, self.layers)
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
    """[chunks, bytes]."""
    return x.contiguous().flatten(1).view(torch.uint8)


def find_starts(keys: Callable[[int], Tensor], codecs: list[LayerCodec], rope: Rope, max_positions: int) -> list[int]:
    """The positions of chunks' first tokens: multiples of their length at which keys are coded with the least error.

    Engines name chunks by a hash of all tokens before them, which says nothing of their number, and have keys after
    RoPE. So every multiple is tried on one token of two layers, the 16 best of them on eight tokens of four layers. A
    wrong start would not make wrong keys, for decoding rotates back by the same angles; it would only cost precision,
    because the codebooks were fitted to keys that were rotated back right. `keys` are of a layer, [chunks,
    num_kv_heads, tokens, head_dim].
    """
    few, more = (
        {i: keys(i) for i in spread(len(codecs), num_layers).tolist()} for num_layers in (_FEW_LAYERS, _MORE_LAYERS)
    )
    count, _, length, _ = next(iter(few.values())).shape
    found = []
    for chunk in range(count):
        starts = torch.arange(0, max(length, max_positions - length + 1), length)
        if len(starts) > _BEST_STARTS:
            errors = _errors(few, chunk, codecs, rope, starts, _FEW_TOKENS)
            starts = starts[errors.topk(_BEST_STARTS, largest=False).indices.sort().values]
        found.append(int(starts[_errors(more, chunk, codecs, rope, starts, _MORE_TOKENS).argmin()]))
    return found


def _errors(
    keys: dict[int, Tensor], chunk: int, codecs: list[LayerCodec], rope: Rope, starts: Tensor, num_tokens: int
) -> Tensor:
    """Squared error of coding a few tokens at each start, as a share of their energy, summed over layers."""
    group = max(codec.tokens_per_group for codec in codecs)
    length = next(iter(keys.values())).shape[2]
    tokens = spread(length // group, max(1, num_tokens // group)) * group
    tokens = (tokens.unsqueeze(1) + torch.arange(group)).flatten()

    def of_layer(layer_idx: int, some: Tensor) -> Tensor:
        chosen, codec = keys[layer_idx][chunk][:, tokens].float(), codecs[layer_idx]
        rotation = rope.rotation((some.unsqueeze(1) + tokens).to(chosen.device), torch.float32)
        codes = codec.key.encode(codec.encoder_input(chosen.expand(len(some), -1, -1, -1), rotation, unrotate), None)
        decoded = codec.decode_keys(codes, None, rotation, torch.float32)
        return ((decoded - chosen).square().sum((1, 2, 3)) / chosen.square().sum().clamp_min(1e-30)).cpu()

    return torch.cat([torch.stack([of_layer(i, some) for i in keys]).sum(0) for some in starts.split(_BATCH)])


def spread(length: int, count: int) -> Tensor:
    """Up to `count` indices below `length`, evenly spread, neither first nor last where there are others."""
    count = min(length, count)
    return (torch.arange(count) * 2 + 1) * length // (2 * count)
