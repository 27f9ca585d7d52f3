"""The manifest of a stored context: one JSON file that names its content, with a checksum of its own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcli._version import __version__
from kvcli.cache.snapshot import SnapshotCounts
from kvcli.contexts.layout import num_blocks, whole_groups
from kvcli.contexts.tensor_files import TensorFile
from kvcli.errors import ContextError, UsageError
from kvcli.storage.manifest import read_sealed, write_sealed

FORMAT_VERSION = 3
SUFFIX = ".context.json"
_FORMER_SUFFIX = ".json"
OPENING_TOKENS = 16
"""First tokens of which a manifest has a checksum, so that it need not be parsed for prompts that begin otherwise."""

_SIZES = ("key_code_bytes", "value_code_bytes", "window_bytes", "values_per_token")
_LONGEST = 100
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_LONGEST - 1}}}", re.ASCII)


@dataclass(frozen=True)
class Manifest:
    """What a store knows of a context.

    Attributes:
        name: in its store.
        created: when it was stored, ISO 8601 in UTC.
        identity: what its cache depends on, as `CacheIdentity.to_dict` gave it.
        notes: of whoever made it: `tokenizer` and `chat_template`, checksums; `source`, what it was made from; others.
        counts: of tokens and codes, one row.
        block_tokens: tokens of a block.
        opening: checksum of its first 16 tokens, see `opening_of`.
        key_code_bytes: bytes of the codes of its keys.
        value_code_bytes: of its values.
        window_bytes: of its tokens in full precision.
        values_per_token: numbers in the keys and values of one token, all layers.
        tokens: file of all token ids.
        first: file of what precedes the codes.
        blocks: files of the whole blocks of codes.
        last: file of the rest.
    """

    name: str
    created: str
    identity: Mapping[str, Any]
    notes: Mapping[str, Any]
    counts: SnapshotCounts
    block_tokens: int
    opening: str
    key_code_bytes: int
    value_code_bytes: int
    window_bytes: int
    values_per_token: int
    tokens: TensorFile
    first: TensorFile
    blocks: tuple[TensorFile, ...]
    last: TensorFile

    @property
    def num_tokens(self) -> int:
        """Its length."""
        return self.counts.lengths[0]

    @property
    def files(self) -> list[TensorFile]:
        """All files with its content."""
        return [self.tokens, self.first, *self.blocks, self.last]

    @property
    def nbytes(self) -> int:
        """Bytes of these files, shared ones included; a file that it names twice counts once."""
        return sum({file.digest: file.bytes for file in self.files}.values())

    @property
    def fp16_bytes(self) -> int:
        """Bytes of its tokens uncompressed in 16 bits."""
        return 2 * self.num_tokens * self.values_per_token

    @property
    def bits(self) -> tuple[float, float]:
        """Stored bits per key and per value that is a code, scales and norms included; 0 without codes."""
        counts, half = self.counts, max(1, self.values_per_token // 2)
        keys, values = (max(1, coded[0]) * half for coded in (counts.coded_keys, counts.coded_values))
        return 8 * self.key_code_bytes / keys, 8 * self.value_code_bytes / values

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "format_version": FORMAT_VERSION,
            "kvcli_version": __version__,
            "created": self.created,
            "identity": dict(self.identity),
            "notes": dict(self.notes),
            "counts": self.counts.to_dict(),
            "block_tokens": self.block_tokens,
            "opening": self.opening,
            **{name: getattr(self, name) for name in _SIZES},
            "tokens": self.tokens.to_dict(),
            "first": self.first.to_dict(),
            "blocks": [file.to_dict() for file in self.blocks],
            "last": self.last.to_dict(),
        }


def opening_of(tokens: Sequence[int]) -> str:
    """Checksum of the first 16 tokens, or of all if there are fewer."""
    return hashlib.sha256(" ".join(map(str, tokens[:OPENING_TOKENS])).encode()).hexdigest()


def check_name(name: str) -> None:
    """Raises UsageError unless a name is fit for a context."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' is no name of a context: letters, digits, dots, underscores and hyphens, at most 100, "
            "the first a letter or a digit"
        )


def name_from(text: str) -> str:
    """A name of a context that resembles a text, such as the name of a file."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:_LONGEST]
    return name or "context"


def no_context(folder: Path, name: str) -> ContextError:
    """The error that says that there is no context of this name."""
    if name in former_names(folder):
        return ContextError(former_store(folder))
    return ContextError(f"there is no context '{name}' in {folder}; 'kvcli contexts list' shows those that are there")


def former_names(folder: Path) -> list[str]:
    """Names of contexts that an earlier version of kvcli stored, whose manifests were called NAME.json."""
    paths = [path for path in folder.glob(f"*{_FORMER_SUFFIX}") if not path.name.endswith(SUFFIX) and path.is_file()]
    return sorted(path.name.removesuffix(_FORMER_SUFFIX) for path in paths if b'"block_tokens"' in path.read_bytes())


def former_store(folder: Path) -> str:
    """What to do with a store of an earlier version."""
    return (
        f"{folder} holds contexts of an earlier version of kvcli, whose manifests are called NAME{_FORMER_SUFFIX}; "
        f"rename each to NAME{SUFFIX}"
    )


def manifest_path(folder: Path, name: str) -> Path:
    """Where the manifest of a context is."""
    return folder / f"{name}{SUFFIX}"


def last_used(folder: Path, name: str) -> float:
    """When a context was stored or loaded last, seconds since the epoch; 0 if there is none."""
    try:
        return manifest_path(folder, name).stat().st_mtime
    except OSError:
        return 0.0


def manifest_names(folder: Path) -> list[str]:
    """Names of the contexts of a folder, also of damaged ones; what is no regular file is none of them."""
    names = (path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}") if path.is_file())
    return sorted(name for name in names if _NAME.fullmatch(name))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Makes a context known, after its files were written."""
    write_sealed(manifest_path(folder, manifest.name), manifest.to_dict())


def read_manifest(folder: Path, name: str) -> Manifest:
    """Reads the manifest of a context and checks types and numbers.

    Raises:
        UsageError: no name of a context.
        ContextError: no such context, a damaged manifest, or one of another format version.
    """
    check_name(name)
    path = manifest_path(folder, name)
    if not path.is_file():
        raise no_context(folder, name)
    remedy = f"remove it with 'kvcli contexts rm {name}'"
    values = read_sealed(path, FORMAT_VERSION, remedy, ContextError)
    try:
        manifest = _checked(name, values)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ContextError(f"{path} is damaged ({' '.join(str(error).split())}); {remedy}") from error
    return manifest


def _checked(name: str, values: Mapping[str, Any]) -> Manifest:
    counts = SnapshotCounts.from_dict(values["counts"])
    if len(counts.lengths) != 1:
        raise ValueError("more than one sequence")
    identity, notes, blocks = values["identity"], values["notes"], tuple(map(TensorFile.from_dict, values["blocks"]))
    (block_tokens,) = _numbers([values["block_tokens"]])
    if not block_tokens or whole_groups(counts, block_tokens) != block_tokens:
        raise ValueError("blocks that cut groups of tokens apart")
    if not isinstance(identity, dict) or not isinstance(notes, dict) or len(blocks) != num_blocks(counts, block_tokens):
        raise ValueError("its identity, notes or blocks are of another kind or number")
    sizes = _numbers([values[name] for name in _SIZES])
    return Manifest(
        name=name,
        created=str(values["created"]),
        identity=identity,
        notes=notes,
        counts=counts,
        block_tokens=block_tokens,
        opening=str(values["opening"]),
        **dict(zip(_SIZES, sizes, strict=True)),
        tokens=TensorFile.from_dict(values["tokens"]),
        first=TensorFile.from_dict(values["first"]),
        blocks=blocks,
        last=TensorFile.from_dict(values["last"]),
    )


def _numbers(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("a number that is none")
    return tuple(values)
