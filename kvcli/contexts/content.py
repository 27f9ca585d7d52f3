"""The content of a context to and from files: token ids, and the parts of a snapshot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from kvcli.cache.context import Context
from kvcli.cache.identity import CacheIdentity
from kvcli.cache.snapshot import CODES, WINDOWS, Snapshot
from kvcli.contexts.identity import UNREADABLE
from kvcli.contexts.layout import join, num_blocks, split, whole_groups
from kvcli.contexts.manifest import Manifest, opening_of
from kvcli.contexts.records import Match, Stored
from kvcli.contexts.stacking import stack_layers, unstack_layers
from kvcli.contexts.tensor_files import TensorFile, TensorFiles
from kvcli.errors import ContextError

_TOKENS = "token_ids"
_NAME_DIGITS = 12
_NOTES_OF_PARTS = ("tokenizer", "chat_template", "source")


def as_tokens(token_ids: Sequence[int] | Tensor) -> Tensor:
    """Token ids of one row as int64 [tokens] on the CPU.

    Raises:
        ContextError: several rows.
    """
    tokens = torch.as_tensor(token_ids).long().cpu()
    if tokens.ndim == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.ndim != 1:
        raise ContextError(f"a context is one sequence of token ids, not a tensor of shape {list(tokens.shape)}")
    return tokens


def default_name(tokens: Tensor, identity: Mapping[str, Any]) -> str:
    """A name that follows from token ids [tokens] and identity."""
    text = json.dumps(identity, sort_keys=True).encode()
    return hashlib.sha256(text + tokens.numpy().tobytes()).hexdigest()[:_NAME_DIGITS]


def write_content(files: TensorFiles, context: Context, tokens: Tensor, name: str, block_tokens: int) -> Stored:
    """Writes the files of a context, as far as they are not there.

    Returns:
        What its manifest is to say, and the bytes written.
    """
    snapshot = context.snapshot
    block_tokens = whole_groups(snapshot.counts, block_tokens)
    first, blocks, last = split(snapshot, block_tokens)
    made = [files.add({_TOKENS: tokens.int()}), *(files.add(stack_layers(part)) for part in (first, *blocks, last))]
    named = [file for file, _ in made]
    manifest = Manifest(
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        identity=context.identity.to_dict(),
        notes=dict(context.notes),
        counts=snapshot.counts,
        block_tokens=block_tokens,
        opening=opening_of(tokens.tolist()),
        key_code_bytes=_nbytes(snapshot, f"{CODES[0]}."),
        value_code_bytes=_nbytes(snapshot, f"{CODES[1]}."),
        window_bytes=sum(_nbytes(snapshot, kind) for kind in WINDOWS),
        values_per_token=_values_per_token(snapshot),
        tokens=named[0],
        first=named[1],
        blocks=tuple(named[2:-1]),
        last=named[-1],
    )
    new = {file.digest: file.bytes for file, is_new in made if is_new}
    shared = {file.digest: file.bytes for file, is_new in made if file.digest not in new}
    return Stored(manifest, sum(new.values()), sum(shared.values()))


def read_tokens(files: TensorFiles, manifest: Manifest) -> Tensor:
    """Token ids of a context, int64 [tokens].

    Raises:
        ContextError: their file is missing or damaged, or holds something else.
    """
    (tensors,) = files.read([manifest.tokens])
    tokens = tensors.get(_TOKENS)
    if tokens is None or tokens.dtype != torch.int32 or tokens.shape != (manifest.num_tokens,):
        raise ContextError(f"{files.path(manifest.tokens)} does not hold the token ids of {manifest.num_tokens} tokens")
    return tokens.long()


def check_content(files: TensorFiles, manifest: Manifest, whole: set[TensorFile]) -> None:
    """Reads all files of a context.

    Args:
        files: of the store.
        manifest: of the context.
        whole: files that were read already; those of this context are added.

    Raises:
        ContextError: one is missing, truncated or damaged.
    """
    files.verify([file for file in manifest.files if file not in whole])
    read_tokens(files, manifest)
    whole.update(manifest.files)


def read_context(files: TensorFiles, match: Match, device: torch.device | str) -> Context:
    """What a match has in common with a prompt, with its token ids.

    Raises:
        ContextError: a file is missing, truncated or damaged, they do not belong together, or the context was made by
            another version of kvcli.
    """
    manifest = match.manifest
    tokens = read_tokens(files, manifest)[: match.num_tokens]
    snapshot = read_snapshot(files, match, device)
    try:
        identity = CacheIdentity.from_dict(manifest.identity)
    except UNREADABLE as error:
        raise ContextError(f"its identity cannot be read ({' '.join(str(error).split())})") from error
    # what else was noted, such as a conversation, is of all tokens
    notes = {x: y for x, y in manifest.notes.items() if match.is_whole or x in _NOTES_OF_PARTS}
    return Context(snapshot, identity, tokens.unsqueeze(0), notes, f"context '{manifest.name}'")


def read_snapshot(files: TensorFiles, match: Match, device: torch.device | str) -> Snapshot:
    """What a match has in common with a prompt; only the files that hold it are read.

    Raises:
        ContextError: a file is missing, truncated or damaged, or they do not belong together.
    """
    manifest, removed = match.manifest, match.manifest.num_tokens - match.num_tokens
    counts = manifest.counts.without(removed)
    # a part that ends where a block ends has nothing of the last file
    with_last = not removed or counts.attended == manifest.counts.attended
    named = [
        manifest.first,
        *manifest.blocks[: num_blocks(counts, manifest.block_tokens)],
        *([manifest.last] if with_last else []),
    ]
    try:
        first, *parts = map(unstack_layers, files.read(named, device))
    except ValueError as error:
        raise ContextError(f"its files do not belong together ({error})") from error
    snapshot = join(manifest.counts if with_last else counts, [first, *parts])
    return snapshot.prefix(match.num_tokens) if with_last and removed else snapshot


def _nbytes(snapshot: Snapshot, kind: str) -> int:
    """Bytes of the tensors `layers.L.KIND` of all layers; a kind that ends in a dot stands for all of its fields."""
    names = [name for name in snapshot.tensors if name.startswith("layers.")]
    return sum(snapshot.tensors[name].nbytes for name in names if _is_of(name.split(".", 2)[2], kind))


def _is_of(name: str, kind: str) -> bool:
    return name.startswith(kind) if kind.endswith(".") else name == kind


def _values_per_token(snapshot: Snapshot) -> int:
    """Numbers in the keys and values of one token, all layers."""
    windows = (x for name, x in snapshot.tensors.items() if name.count(".") == 2 and name.split(".")[2] in WINDOWS)
    return sum(x.shape[1] * x.shape[3] for x in windows)
