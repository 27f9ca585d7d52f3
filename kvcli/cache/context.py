"""A context: what a cache holds, what it depends on and which tokens it is, in one file.

The file is of safetensors. Its metadata has one entry, `kvcli`, so that equal contexts make equal files: the sha256 of
what follows, a space, and a JSON object with the format version, the identity, the counts of the snapshot, notes and
the BLAKE3 of every tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvcli._version import __version__
from kvcli.cache.digests import combined, pieces_of, tensor_digests
from kvcli.cache.identity import CacheIdentity
from kvcli.cache.snapshot import VALID, Snapshot, SnapshotCounts
from kvcli.errors import CacheError
from kvcli.storage.atomic import replacing, temporary_path
from kvcli.storage.locks import lock
from kvcli.storage.reads import Part, memory_for, read_parts
from kvcli.storage.tensors import SafetensorsHeader

FORMAT_VERSION = 3
INPUT_IDS = "input_ids"
_ENTRY = "kvcli"
_REMEDY = "make it again with 'kvcli compress'"


@dataclass(frozen=True)
class Context:
    """A compressed context in memory.

    Attributes:
        snapshot: what the cache held.
        identity: what it depends on.
        input_ids: its tokens, int64 [batch, slots], anything at padding; None if they were not given.
        notes: plain JSON values of whoever saved it.
        name: for messages.
    """

    snapshot: Snapshot
    identity: CacheIdentity
    input_ids: Tensor | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    name: str = field(default="this context", compare=False)

    def check(self, ours: CacheIdentity) -> None:
        """Checks that a cache can go on from it.

        Args:
            ours: of the cache.

        Raises:
            CacheError: it cannot; the message says what differs.
        """
        if (reason := ours.difference(self.identity)) is not None:
            raise CacheError(f"{self.name} was made {reason}")

    def save(self, path: str | Path) -> int:
        """Writes the file; it appears under its name when it is complete, and replaces what was there.

        Args:
            path: where to.

        Returns:
            Bytes of the file.

        Raises:
            CacheError: another process writes it, or `input_ids` are not of the snapshot's slots.
            OSError: it cannot be written.
        """
        path, tensors = Path(path), dict(self.snapshot.tensors)
        if self.input_ids is not None:
            shape = tuple(tensors[VALID].shape)
            if self.input_ids.shape != shape:
                raise CacheError(
                    f"input_ids are {list(self.input_ids.shape)}, but the cache holds {list(shape)}: give those that "
                    "it holds, such as sequences[:, :-1] of what was generated"
                )
            tensors[INPUT_IDS] = self.input_ids.to("cpu", torch.int64)
        tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        fields = {
            "format_version": FORMAT_VERSION,
            "kvcli_version": __version__,
            "identity": self.identity.to_dict(),
            "counts": self.snapshot.counts.to_dict(),
            "notes": dict(self.notes),
            "tensors": tensor_digests(tensors),
        }
        text = json.dumps(fields)
        path.parent.mkdir(parents=True, exist_ok=True)
        busy = CacheError(f"another kvcli process writes {path}; wait until it has ended")
        with lock(temporary_path(path), busy, make_file=True), replacing(path) as temporary:
            save_file(tensors, temporary, metadata={_ENTRY: f"{_text_sha256(text)} {text}"})
            return temporary.stat().st_size

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> Context:
        """Reads and verifies a file.

        Args:
            path: what `save` wrote.
            device: of the snapshot's tensors, to which they are copied while the rest is read.

        Raises:
            CacheError: missing, of another format version, truncated or damaged.
        """
        path = Path(path)
        if not path.is_file():
            raise CacheError(f"no context in {path}: there is no such file; make one with 'kvcli compress'")
        try:
            header = SafetensorsHeader.read(path)
            fields = _sealed_fields(path, header.metadata)
            tensors, digests = _read_tensors(path, header, torch.device(device))
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise CacheError(f"{path} is no file that can be read, or it is damaged ({reason}); {_REMEDY}") from error
        if fields["tensors"] != digests:
            raise CacheError(f"{path} is damaged: the BLAKE3 of its content differs; {_REMEDY}")
        input_ids = None if (found := tensors.pop(INPUT_IDS, None)) is None else found.cpu()
        try:
            identity = CacheIdentity.from_dict(fields["identity"])
            counts = SnapshotCounts.from_dict(fields["counts"])
            if not isinstance(fields["notes"], dict) or (
                input_ids is not None
                and (input_ids.dtype != torch.int64 or VALID not in tensors or input_ids.shape != tensors[VALID].shape)
            ):
                raise ValueError("notes or tokens of another form")
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            reason = " ".join(str(error).split())
            raise CacheError(f"{path} holds no context that this kvcli reads ({reason}); {_REMEDY}") from error
        return cls(Snapshot(counts, tensors), identity, input_ids, fields["notes"], str(path))


def _read_tensors(
    path: Path, header: SafetensorsHeader, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, by name, and what `tensor_digests` says of them.

    Raises:
        OSError: it cannot be read.
        ValueError: its header is damaged.
    """
    data = memory_for(path, header.nbytes + header.data_bytes, device)[header.nbytes :]
    tensors, parts, counts = header.views(data), [], []
    for entry in header.entries.values():
        pieces = pieces_of(data[slice(*entry.data_offsets)])
        # the memory begins where the file does
        parts += [Part(path, int(piece.storage_offset()), piece) for piece in pieces]
        counts.append(len(pieces))
    read = iter(read_parts(parts))
    digests = {
        name: combined(entry.dtype, entry.shape, list(islice(read, count)))
        for (name, entry), count in zip(header.entries.items(), counts, strict=True)
    }
    return tensors, digests


def _sealed_fields(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object in a file's metadata.

    Raises:
        CacheError: there is none, it is of another format version, or it was changed.
    """
    if _ENTRY not in metadata:
        raise CacheError(f"{path} is no context: kvcli did not write it")
    seal, _, text = metadata[_ENTRY].partition(" ")
    if seal != _text_sha256(text):
        raise CacheError(f"{path} is damaged: its metadata was changed after it was written; {_REMEDY}")
    try:
        fields = json.loads(text)
        version = fields.get("format_version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise CacheError(f"{path} is damaged: its metadata cannot be read; {_REMEDY}") from error
    if version != FORMAT_VERSION:
        raise CacheError(f"{path} has format version {version}; this kvcli reads version {FORMAT_VERSION}; {_REMEDY}")
    if missing := {"identity", "counts", "notes", "tensors"} - fields.keys():
        raise CacheError(f"{path} is damaged: its metadata has no {min(missing)}; {_REMEDY}")
    return dict(fields)


def _text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
