"""A context: what a cache holds, what it depends on and which tokens it is, as a sealed record and blocks.

A store keeps record and blocks apart (`kvcli.contexts`). In a file of its own, a context is one safetensors file: its
metadata has one entry, `kvcli`, the record; each block is a tensor of bytes, named by its digest and followed by zeros
up to a multiple of 8, so that what is in it can be read in place. Equal contexts make equal files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcli._version import __version__
from kvcli.cache.blocks import Tensors, encode, is_plain, join, read_blocks, split
from kvcli.cache.identity import CacheIdentity
from kvcli.cache.record import BLOCK_TOKENS, VALID, WINDOWS, Block, ContextRecord, Place, num_coded, whole_groups
from kvcli.cache.snapshot import Snapshot
from kvcli.errors import CacheError, error_text
from kvcli.storage.atomic import replacing, temporary_path
from kvcli.storage.locks import lock
from kvcli.storage.tensors import SafetensorsHeader

INPUT_IDS = "input_ids"
_ENTRY = "kvcli"
_ALIGNMENT = 8
_NOTES_OF_PARTS = ("tokenizer", "chat_template", "source")


@dataclass(frozen=True)
class Context:
    """A compressed context in memory.

    Attributes:
        input_ids: its tokens, int64 [batch, slots], anything at padding; None if they were not given.
        notes: plain JSON values of whoever saved it; `tokenizer` and `chat_template`, as `text_identity` gives them,
            become part of the identity of what is saved.
    """

    snapshot: Snapshot
    identity: CacheIdentity
    input_ids: Tensor | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    name: str = field(default="this context", compare=False)

    def encode(self, block_tokens: int = BLOCK_TOKENS) -> tuple[ContextRecord, dict[Block, Tensors]]:
        """Its record, and the tensors of its blocks, whose bytes would be another copy in memory.

        Parts of codes are rounded up to whole groups of the method.

        Raises:
            CacheError: `input_ids` are not of the snapshot's slots, or positions that no reader takes.
        """
        snapshot, shape = self.snapshot, list(self.snapshot.tensors[VALID].shape)
        snapshot.check_positions()
        if self.input_ids is not None and list(self.input_ids.shape) != shape:
            raise CacheError(
                f"input_ids are {list(self.input_ids.shape)}, but the cache holds {shape}: give those that it "
                "holds, such as sequences[:, :-1] of what was generated"
            )
        plain = is_plain(snapshot)
        size = whole_groups(snapshot.counts, block_tokens) if plain else 0
        first, coded, last = split(snapshot, size) if plain else (dict(snapshot.tensors), [], {})
        tokens: list[Tensors] = [] if self.input_ids is None else [{INPUT_IDS: self.input_ids.int()}]
        parts = [*tokens, first, *coded, *([last] if plain else [])]
        with ThreadPoolExecutor(4) as threads:
            blocks, start = [*threads.map(lambda part: encode(part)[0], parts)], len(tokens)
        bytes_of, widths = Counter[str](), Counter[str]()
        for name, x in snapshot.tensors.items():
            kind = name.split(".")[2] if name.startswith("layers.") else name.partition(".")[0]
            bytes_of[kind] += x.nbytes
            widths[kind] += x.shape[1] * x.shape[3] if kind in WINDOWS else 0
        text = {kind: self.notes.get(kind, getattr(self.identity, kind)) for kind in ("tokenizer", "chat_template")}
        record = ContextRecord(
            kvcli_version=__version__,
            identity=self.identity.to_dict() | text,
            notes=dict(self.notes),
            counts=snapshot.counts,
            part_tokens=size,
            bytes_of=dict(sorted(bytes_of.items())),
            values_per_token=widths.total(),
            keys_per_token=widths["keys"],
            tokens=blocks[0] if tokens else None,
            first=blocks[start],
            coded=tuple(blocks[start + 1 : start + 1 + len(coded)]),
            last=blocks[-1] if plain else None,
        )
        return record, dict(zip(blocks, parts, strict=True))

    @classmethod
    def decode(
        cls,
        record: ContextRecord,
        place: Callable[[Block], Place],
        device: torch.device | str = "cpu",
        name: str = "this context",
        num_tokens: int | None = None,
    ) -> Context:
        """Reads and verifies what `encode` gave.

        Args:
            place: says where a block is.
            device: to which the snapshot's tensors are copied while the rest is read.
            num_tokens: how many of the first tokens are read, with the blocks that hold them alone; None: all.

        Raises:
            CacheError: a block is missing, truncated or damaged, they do not belong together, or the context was made
                by another version of kvcli.
        """
        counts, removed = record.counts, 0 if num_tokens is None else record.num_tokens - num_tokens
        loaded = counts.without(removed) if removed else counts
        # a part that ends where a block ends has nothing of the last one
        last = record.last if not removed or loaded.attended == counts.attended else None
        coded = record.coded[: num_coded(loaded, record.part_tokens)] if record.part_tokens else ()
        blocks = [block for block in (record.tokens, record.first, *coded, last) if block is not None]
        parts = read_blocks([place(block) for block in blocks], device)
        input_ids = None if record.tokens is None else tokens_in(parts.pop(0), record)
        if record.last is None:
            snapshot = Snapshot(counts, parts[0])
        else:
            snapshot = join(loaded if last is None else counts, parts)
            snapshot = snapshot.prefix(record.num_tokens - removed) if removed and last is not None else snapshot
        if input_ids is not None:
            input_ids = input_ids[:, : input_ids.shape[1] - removed]
            if VALID not in snapshot.tensors or snapshot.tensors[VALID].shape != input_ids.shape:
                raise CacheError("it has the token ids of more or fewer tokens")
        try:
            identity = CacheIdentity.from_dict(record.identity)
        except ValueError as error:
            raise CacheError(f"its identity cannot be read ({error_text(error)})") from error
        # what else was noted, such as a conversation, is of all tokens
        notes = {x: y for x, y in record.notes.items() if not removed or x in _NOTES_OF_PARTS}
        return cls(snapshot, identity, input_ids, notes, name)

    def save(self, path: str | Path) -> int:
        """Writes a file and returns its bytes; it appears when it is complete, and replaces what was there.

        Raises:
            CacheError: another process writes it, or `input_ids` are not of the snapshot's slots.
            OSError: it cannot be written.
        """
        path = Path(path)
        record, blocks = self.encode()
        header: dict[str, Any] = {"__metadata__": {_ENTRY: record.sealed()}}
        stop = 0
        for block in blocks:
            start, stop = stop, stop + block.bytes + -block.bytes % _ALIGNMENT
            header[block.digest] = {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        path.parent.mkdir(parents=True, exist_ok=True)
        busy = CacheError(f"another kvcli process writes {path}; wait until it has ended")
        with lock(temporary_path(path), busy, make_file=True), replacing(path) as temporary:
            with temporary.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for block, part in blocks.items():
                    file.write(encode(part)[1])
                    file.write(bytes(-block.bytes % _ALIGNMENT))
            return temporary.stat().st_size

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> Context:
        """Reads and verifies what `save` wrote; the snapshot's tensors are copied to a device while the rest is read.

        Raises:
            CacheError: missing, of another format version, truncated or damaged.
        """
        path = Path(path)
        header, record = read_header(path)
        remedy = ContextRecord.REMEDY
        try:
            places = {place.block: place for place in _places(path, header, record)}
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        try:
            return cls.decode(record, places.__getitem__, device, str(path))
        except CacheError as error:
            raise CacheError(f"{path} is no context that this kvcli reads: {error}; {remedy}") from error


def read_header(path: Path) -> tuple[SafetensorsHeader, ContextRecord]:
    """The header and the record of a file that `Context.save` wrote; CacheError as `Context.load`, blocks apart."""
    if not path.is_file():
        raise CacheError(f"no context in {path}: there is no such file; make one with 'kvcli compress'")
    try:
        header = SafetensorsHeader.read(path)
        if _ENTRY not in header.metadata:
            raise CacheError(f"{path} is no context: kvcli did not write it")
        return header, ContextRecord.unseal(header.metadata[_ENTRY], str(path))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CacheError:
    wrong = f"{path} is no file that can be read, or it is damaged ({error_text(error)})"
    return CacheError(f"{wrong}; {ContextRecord.REMEDY}")


def tokens_in(tensors: Tensors, record: ContextRecord) -> Tensor:
    """The token ids in their block, int64 [rows, slots] on the host; CacheError if it holds something else."""
    ids = tensors.get(INPUT_IDS)
    rows = len(record.counts.lengths)
    slots = None if ids is None or ids.ndim != 2 else record.num_tokens if record.last is not None else ids.shape[1]
    if ids is None or ids.dtype != torch.int32 or ids.shape != (rows, slots):
        raise CacheError(f"its block of token ids does not hold those of {record.num_tokens} tokens")
    return ids.long().cpu()


def _places(path: Path, header: SafetensorsHeader, record: ContextRecord) -> Iterator[Place]:
    """Where the blocks of a record are in a file; ValueError if it has others, or they are not followed by zeros."""
    if header.entries.keys() != {block.digest for block in record.blocks}:
        raise ValueError("it has other blocks than its metadata says")
    with path.open("rb") as file:
        for block in record.blocks:
            start, stop = (header.nbytes + offset for offset in header.entries[block.digest].data_offsets)
            file.seek(start + block.bytes)
            if not 0 <= stop - start - block.bytes < _ALIGNMENT or any(file.read(stop - start - block.bytes)):
                raise ValueError("its blocks are of other sizes, or not followed by zeros")
            yield Place(block, path, start, header.nbytes + header.data_bytes)
