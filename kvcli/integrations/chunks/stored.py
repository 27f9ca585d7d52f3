"""Chunks that an engine hands over, to a store and back: those that cannot be stored or read are left out."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from kvcli.contexts.chunks import Chunk, ChunkStore
from kvcli.errors import ChunkError, KvcliError
from kvcli.integrations.chunks.codec import ChunkCodec, LayerOf
from kvcli.integrations.chunks.format import ChunkLayout
from kvcli.progress import Say

_READERS = 8
"""Threads that read and check the files of a call."""


def encode_each(
    codec: ChunkCodec,
    layout: ChunkLayout,
    layer: LayerOf,
    starts: Sequence[int] | None,
    names: Sequence[str],
    kind: str,
    say: Say,
) -> list[Chunk]:
    """Chunks as a store takes them, of arguments of `ChunkCodec.encode`; `say`: which cannot be stored."""
    try:
        stored, errors = codec.encode(layout, layer, starts, with_errors=True)
    except ChunkError as error:
        if len(names) == 1:
            say(f"a chunk is not stored: {error}")
            return []

        def some(part: slice, layer_idx: int) -> tuple[Tensor, Tensor]:
            keys, values = layer(layer_idx)
            return keys[part], values[part]

        made, middle = list[Chunk](), len(names) // 2
        for part in (slice(middle), slice(middle, None)):
            begin = None if starts is None else starts[part]
            made += encode_each(codec, layout, partial(some, part), begin, names[part], kind, say)
        return made
    return [
        Chunk(name, row.numpy().tobytes(), kind, layout.plain_bytes, (float(lost[0]), float(lost[1])))
        for name, row, lost in zip(names, stored, [] if errors is None else errors, strict=True)
    ]


def put_chunks(store: ChunkStore, chunks: Sequence[Chunk], used: Mapping[str, float], say: Say) -> bool:
    """Whether all chunks, which were `used` then, are in the store now; `say` is told of errors."""
    try:
        store.put(chunks, used)
    except (OSError, KvcliError) as error:
        say(f"{len(chunks)} chunks are not stored: {error}")
        return False
    return all(store.has(x.key) for x in chunks)


def get_chunks(
    store: ChunkStore, names: Sequence[str], check: Callable[[Tensor], object], say: Say
) -> Iterator[Tensor | None]:
    """The bytes of chunks, uint8, in their order, while the next ones are being read; None where there are none.

    `check` raises a ChunkError for bytes that are damaged, whose chunk is removed.
    """

    def get(name: str) -> Tensor | None:
        content = store.get(name)
        if content is None:
            return None
        data = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        try:
            check(data)
        except ChunkError as error:
            say(f"a stored chunk is removed: {error}")
            with suppress(OSError, KvcliError):
                store.remove([name])
            return None
        return data

    coming = deque[Future[Tensor | None]]()
    with ThreadPoolExecutor(_READERS) as readers:
        for name in names:
            coming.append(readers.submit(get, name))
            if len(coming) > 2 * _READERS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
