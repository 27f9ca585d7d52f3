"""The stored context that has most in common with the beginning of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from kvcli.contexts.content import read_tokens
from kvcli.contexts.identity import ContextIdentity
from kvcli.contexts.layout import usable_length
from kvcli.contexts.manifest import OPENING_TOKENS, Manifest, last_used, manifest_names, manifest_path, opening_of
from kvcli.contexts.records import Match
from kvcli.contexts.tensor_files import TensorFiles
from kvcli.errors import ContextError
from kvcli.progress import Say


def names_to_read(folder: Path, wanted: Tensor) -> list[str]:
    """Names of contexts that may begin as a prompt does; the most recently used first.

    Their manifests have the checksum of the same first 16 tokens, or of fewer if that is all they have. Of a prompt of
    fewer tokens, nothing is known.

    Args:
        folder: of the manifests.
        wanted: token ids of the prompt, int64 [tokens].
    """
    names = sorted(manifest_names(folder), key=partial(last_used, folder), reverse=True)
    if len(wanted) < OPENING_TOKENS:
        return names
    first = wanted[:OPENING_TOKENS].tolist()
    openings = [opening_of(first[:count]).encode() for count in range(1, OPENING_TOKENS + 1)]
    return [name for name in names if _has_any(manifest_path(folder, name), openings)]


def longest(
    manifests: Iterable[Manifest], files: TensorFiles, wanted: Tensor, identity: ContextIdentity, say: Say
) -> Match | None:
    """The context of which most is of use, the first of several; tokens are compared one by one.

    Args:
        manifests: of the contexts to choose from.
        files: of the store.
        wanted: token ids of the prompt, int64 [tokens].
        identity: of model, method and artifact.
        say: called with a line about every context whose token ids cannot be read.
    """
    best: Match | None = None
    for manifest in manifests:
        if best is not None and best.num_tokens >= manifest.num_tokens:
            continue
        if identity.difference(manifest.identity, manifest.notes) is not None:
            continue
        try:
            common = common_tokens(read_tokens(files, manifest), wanted)
        except ContextError as error:
            say(f"context '{manifest.name}' is passed over: {error}")
            continue
        length = usable_length(manifest.counts, manifest.block_tokens, common)
        if length > (best.num_tokens if best else 0):
            best = Match(manifest, length)
    return best


def common_tokens(first: Tensor, second: Tensor) -> int:
    """How many tokens two sequences [tokens] begin with alike."""
    shorter = min(len(first), len(second))
    different = (first[:shorter] != second[:shorter]).nonzero()
    return int(different[0]) if len(different) else shorter


def _has_any(path: Path, digests: Sequence[bytes]) -> bool:
    """Whether a file, if it is there, has one of some texts."""
    try:
        text = path.read_bytes()
    except OSError:
        return False
    return any(digest in text for digest in digests)
