"""Codes of a layer's keys and values in the pages of an engine, which are bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.cache.ranges import Note, StepRanges
from kvcli.errors import UnsupportedModelError, UsageError
from kvcli.methods.base import Codec, Codes
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.pages import ALIGNMENT
from kvcli.rope import Rotation, Unrotate


@dataclass(frozen=True)
class Field:
    """Codes of groups that go into pages.

    Attributes:
        rows: uint8 [heads, groups, bytes of a group], contiguous.
        start: byte of a page where the field begins.
        head_bytes: how many bytes each head has in a page.
        place: start, heads, head_bytes and bytes of a group, int32 [4], on the device.
    """

    rows: Tensor
    start: int
    head_bytes: int
    place: Tensor


class PageFields:
    """Codes of a layer's keys or values in a page: field after field, each [heads, entries of the page, width].

    Args:
        codec: encodes groups of `tokens_per_group` tokens, each independently of others.
        dtype, device: of the tokens that it encodes.
        page_size: tokens of a page, whole groups.
        start: byte of a page where they begin, a multiple of `ALIGNMENT`.

    Attributes:
        group: tokens per group.
        stop: byte of a page after them.
    """

    def __init__(
        self, codec: Codec[Any], dtype: torch.dtype, device: torch.device, page_size: int, start: int = 0
    ) -> None:
        self.group = codec.tokens_per_group
        shape = 1, codec.spec.num_kv_heads, self.group, codec.spec.head_dim
        example = codec.encode(torch.zeros(shape, dtype=dtype, device=device), None)
        self._make, self._groups, self.stop = type(example), page_size // self.group, start
        self._fields = dict[str, tuple[int, torch.dtype, tuple[int, ...]]]()
        for name, x in example.tensors().items():
            self._fields[name] = self.stop, x.dtype, (x.shape[1], self._groups * x.shape[2], x.shape[3])
            self.stop += -(-x.nbytes * self._groups // ALIGNMENT) * ALIGNMENT
        self._places = dict[str, Tensor]()
        for name, (first, kind, (heads, entries, width)) in self._fields.items():
            size = entries // self._groups * width * kind.itemsize
            place = [first, heads, self._groups * size, size]
            self._places[name] = torch.tensor(place, dtype=torch.int32, device=device)

    def view(self, pages: Tensor) -> Codes:
        """Codes [pages, heads, entries, width] as views of pages uint8 [pages, at least `stop`]."""
        views = {}
        for name, (start, dtype, shape) in self._fields.items():
            stop = start + dtype.itemsize * shape[0] * shape[1] * shape[2]
            views[name] = pages[:, start:stop].view(dtype).unflatten(1, shape)
        return self._make(**views)

    def fields_of(self, codes: Codes, groups: int) -> Iterator[Field]:
        """The fields of the codes of so many groups; ValueError: they are others than those of the pages."""
        for name, x in codes.tensors().items():
            start, dtype, (heads, entries, width) = self._fields[name]
            size = entries // self._groups * width * dtype.itemsize
            if x.dtype != dtype or x.nbytes != heads * groups * size:
                raise ValueError(f"{name}: {x.dtype} {[*x.shape]} for {groups} groups of {size} bytes of {heads} heads")
            if size:
                rows = x.contiguous().view(torch.uint8).view(heads, groups, size)
                yield Field(rows, start, entries * width * dtype.itemsize, self._places[name])


@dataclass(frozen=True)
class NewCodes:
    """Codes of n groups, and where they go.

    Attributes:
        page, place: which page and which of its groups, int64 [n].
        layout: of the pages.
        codes: each field [1, heads, entries of n groups, width].
    """

    page: Tensor
    place: Tensor
    layout: PageFields
    codes: Codes


class LayerEncoder:
    """Encodes new tokens of a layer.

    Args:
        codec: of the layer.
        layer_idx: what messages call the layer.
        dtype: of the model's keys and values.
        ranges: where the largest numbers that are encoded are noted.
        unrotate: of the backend.
    """

    def __init__(
        self, codec: LayerCodec, layer_idx: int, dtype: torch.dtype, ranges: StepRanges, unrotate: Unrotate
    ) -> None:
        self.codec, self._dtype, self._device, self._unrotate = codec, dtype, ranges.device, unrotate
        self._key_dtype = dtype if codec.key.space == "post_rope" else torch.float32
        self._notes = (
            Note(ranges, f"keys of layer {layer_idx}", codec.key),
            Note(ranges, f"values of layer {layer_idx}", codec.value),
        )

    def fields(self, page_size: int) -> tuple[PageFields, PageFields]:
        """Where keys and values are in pages of so many tokens."""
        codec, device = self.codec, self._device
        keys = PageFields(codec.key, self._key_dtype, device, page_size)
        return keys, PageFields(codec.value, self._dtype, device, page_size, keys.stop)

    def encode_keys(self, keys: Tensor, rotation: Rotation | None) -> Codes:
        """Codes of keys after RoPE, [tokens, num_kv_heads, head_dim].

        `rotation` is RoPE of the tokens, float32, if `codec.needs_rotations`.
        """
        x = keys.transpose(0, 1).unsqueeze(0)
        return _encode(self._notes[0], x if rotation is None else self.codec.encoder_input(x, rotation, self._unrotate))

    def encode_values(self, values: Tensor) -> Codes:
        """Codes of values [tokens, num_kv_heads, head_dim]."""
        return _encode(self._notes[1], values.transpose(0, 1).unsqueeze(0))


def _encode(note: Note, x: Tensor) -> Codes:
    peak = note.peak(x.dtype)
    codes: Codes = note.codec.encode(x, None) if peak is None else note.codec.encode_noted(x, peak)
    return codes


def check_codecs(method: str, codecs: Sequence[LayerCodec]) -> None:
    """Checks that codes of a token depend on it alone, or on the group of its key, and that keys are as wide as values.

    Raises:
        UsageError: a method whose codes depend on more than the token.
        UnsupportedModelError: keys and values of different widths.
    """
    for codec in codecs:
        alone = (codec if codec.needs_rotations else codec.value).tokens_per_group == 1
        if not alone or codec.new_state(1, device_of(codec.key)) is not None:
            hint = "say sequence_offset='none'" if codec.sequence_offset else "choose one that codes each token alone"
            raise UsageError(f"codes of method '{method}' depend on other tokens; {hint}")
        if codec.key.spec.value_dim != codec.key.spec.head_dim:
            raise UnsupportedModelError("keys and values of different widths are not supported in pages")


def device_of(codec: nn.Module) -> torch.device:
    """The device of a codec's buffers; the CPU if it has none."""
    return next((x.device for x in codec.buffers()), torch.device("cpu"))
