"""The stored context that has most in common with the beginning of a prompt."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from kvcli.contexts.content import read_tokens
from kvcli.contexts.identity import ContextIdentity
from kvcli.contexts.layout import usable_length
from kvcli.contexts.manifest import OPENING_TOKENS, Manifest
from kvcli.contexts.records import Match
from kvcli.contexts.tensor_files import TensorFiles
from kvcli.errors import ContextError
from kvcli.progress import Say


def longest(
    manifests: Iterable[Manifest], files: TensorFiles, wanted: Tensor, identity: ContextIdentity, say: Say
) -> Match | None:
    """The context of which most is of use, the first of several; tokens are compared one by one.

    A manifest repeats its first tokens; the file with all of them is read only where these are the prompt's.

    Args:
        manifests: of the contexts to choose from.
        files: of the store.
        wanted: token ids of the prompt, int64 [tokens].
        identity: of model, method and artifact.
        say: called with a line about every context whose token ids cannot be read.
    """
    opening, best = tuple(wanted[:OPENING_TOKENS].tolist()), None
    for manifest in manifests:
        shorter = min(len(opening), len(manifest.opening))
        if manifest.opening[:shorter] != opening[:shorter] or (best and best.num_tokens >= manifest.num_tokens):
            continue
        if identity.difference(manifest.identity) is not None:
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
