"""Contexts of earlier prompts, in memory and on disk, from which prompts that begin alike go on.

What is read of a prompt does not depend on what was kept: passes end at fixed places, see `boundaries`, after each of
which everything is encoded (`Session.flush`). So a context cut to one of them is what reading its tokens alone gives.
"""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kvcli.attention.generation import prefill
from kvcli.attention.session import Session
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.identity import CacheIdentity
from kvcli.cache.others import EndOfPass
from kvcli.progress import Advance
from kvcli.rope import NoRope
from kvcli.serve.store import ServedContexts
from kvcli.text.prompts import common_length

OnLogits = Callable[[int, Tensor], None]

UNIT = 128
"""Fewest tokens of a pass over a prompt, and tokens of a block on disk."""

_LONG = 16
"""Units of a long pass: what is read in short ones is read again, once, when a conversation has grown by so many.

A power of two.
"""

_MOST_ENDS = 8
"""Of whose states a prefix is kept: another question about its text goes on from one of them."""


def boundaries(sinks: int, unit: int, length: int) -> list[int]:
    """Numbers of tokens, up to `length`, after which a prompt is flushed: passes twice as long, long ones, short ones.

    They depend on nothing but the length, so prompts that begin alike and are about as long have most in common.
    """
    places = [unit * 2**k for k in range((_LONG - 1).bit_length())]
    places += range(_LONG * unit, length - sinks + 1, _LONG * unit)
    ends = [sinks + place for place in places if sinks + place <= length]
    return [*ends, *range((ends[-1] if ends else sinks) + unit, length + 1, unit)]


@dataclass
class Prefix:
    """A cache that holds the first tokens of a prompt, and may hold others after them."""

    cache: CompressedCache
    ids: Tensor  # of the prompt, int64 [1, time] on the CPU
    identity: CacheIdentity  # what it depends on, whose it is among it
    # by their tokens, of the last passes, where layers keep states of the whole text: it can be cut to these alone
    ends: dict[int, EndOfPass] = field(default_factory=dict)
    flushed: int = 0  # its tokens up to the last boundary that was read, to which the cache can be cut
    stored: int = 0  # how many of them are on disk, in the context `name`; 0 once it was removed there
    name: str = ""
    source: str = "none"  # where the first `reused` tokens came from: `hot`, `disk` or `none`
    reused: int = 0
    load_s: float = 0.0
    used: float = 0.0
    nbytes: int = 0  # of the cache when it was kept, with the headroom of its buffers

    def forget_disk(self) -> None:
        """Nothing of it is on disk any more."""
        self.stored = 0


class Prefixes:
    """The prefixes of a session's prompts; used by one thread, which waits for no disk but to read.

    Args:
        contexts: on disk.
        hot_bytes: size that caches in memory may have together.
    """

    def __init__(self, session: Session, contexts: ServedContexts, hot_bytes: int) -> None:
        session.check_later_passes()
        self.session, self.contexts, self._hot_bytes = session, contexts, hot_bytes
        self.unit = math.lcm(UNIT, *(part.tokens_per_group for x in session.codecs for part in (x.key, x.value)))
        self.reading = f"flushed every {self.unit}"
        if contexts.store is not None:
            contexts.store.block_tokens = self.unit
        each_length_rotates = session.rope.switch is not None and isinstance(session.rope, NoRope)
        self.reusable, self._whole = not each_length_rotates, bool(session.spec.other_layers)
        self.hot: list[Prefix] = []

    @torch.inference_mode()
    def read(self, ids: Tensor, owner: str, keep: bool, check: Advance, on_logits: OnLogits | None = None) -> Prefix:
        """The cache of a prompt, int64 [1, time], up to its last boundary, from the longest prefix that is there.

        At least as many tokens are left to be read as the settings keep in full precision, and one.

        Args:
            owner: whose prefixes may be used; `keep`: whether this one may be stored.
            check: called after each pass with its number of tokens; what it raises ends the reading.
            on_logits: called with the place of the first token of each pass, and the logits [tokens, vocab_size] of all
                of its tokens; then nothing that is kept is used.
        """
        ends = self._boundaries(ids.shape[1] - max(1, self.session.config.residual_length))
        identity = self.identity_of(owner, ids.shape[1])
        if on_logits is None:
            prefix = self._longest(ids.cpu(), ends, identity, keep)
        else:
            prefix = Prefix(self.session.new_cache(ids.shape[1]), ids.cpu(), identity)
        prefix.reused = prefix.flushed
        for end in ends:
            if end > prefix.flushed:
                device = self.session.model.device
                read = ids[:, :end].to(device)
                logits = prefill(self.session.model, prefix.cache, read, None, None, all_logits=on_logits is not None)
                if on_logits is not None:
                    on_logits(end - logits.shape[1], logits[0])
                self.session.flush(prefix.cache)
                prefix.flushed = end
                if self._whole:
                    prefix.ends = dict([*prefix.ends.items(), (end, prefix.cache.end_of_pass())][-_MOST_ENDS:])
                try:
                    check(end - prefix.reused)
                except Exception:  # what was read so far, and taken out of memory for it, is of use to others
                    if keep:
                        self.keep(prefix)
                    raise
        if keep and prefix.flushed > prefix.stored:
            self._store(prefix)
        elif prefix.source == "hot" and prefix.stored:
            self.contexts.touch(prefix.name, prefix.forget_disk)
        return prefix

    def keep(self, prefix: Prefix) -> None:
        """Keeps a cache in memory if it fits, in place of the least recently used if they need too much together."""
        changed = prefix.cache.sequences.rope.frequencies() != prefix.identity.rope  # all was read anew
        if not self.reusable or not prefix.flushed or changed:
            return
        memory = prefix.cache.memory()
        own, ends = memory.allocated_bytes + memory.other_bytes, prefix.ends
        while len(ends) > 1 and own + sum(end.nbytes for end in ends.values()) > self._hot_bytes:
            del ends[min(ends)]
        prefix.used, prefix.nbytes = time.monotonic(), own + sum(end.nbytes for end in ends.values())
        if prefix.nbytes <= self._hot_bytes:
            self.hot = sorted([*self.hot, prefix], key=lambda x: -x.used)
        while self.hot_bytes > self._hot_bytes:
            self.hot.pop()

    @property
    def note(self) -> str | None:
        """What is kept of prompts of this model otherwise than of others."""
        if not self.reusable:
            return "every prompt is read from its beginning: the model rotates a text of each length differently"
        return f"prompts go on from ends of their last {_MOST_ENDS} passes: layers keep states" if self._whole else None

    @property
    def hot_bytes(self) -> int:
        """Bytes of the caches in memory."""
        return sum(prefix.nbytes for prefix in [*self.hot])

    def _boundaries(self, length: int) -> list[int]:
        return boundaries(self.session.config.sink_length, self.unit, length if self.reusable else 0)

    def _common(self, ends: list[int], flushed: int, length: int, among: Collection[int] | None = None) -> int:
        """The last of the boundaries up to `length` that a prompt has in common with one flushed at `flushed` last."""
        shared = {*ends} & {*(self._boundaries(flushed) if among is None else among)}
        return max((x for x in shared if x <= length), default=0)

    def _longest(self, ids: Tensor, ends: list[int], identity: CacheIdentity, keep: bool) -> Prefix:
        """What is kept of a prompt's first tokens up to one of `ends`: the longest, rather from memory than disk."""
        started = time.monotonic()
        new = Prefix(self.session.new_cache(ids.shape[1]), ids, identity)
        best, length = None, 0
        for prefix in self.hot:
            end = 0
            if prefix.identity == identity:
                places = prefix.ends if self._whole else None
                end = self._common(ends, prefix.flushed, common_length(prefix.ids, ids), places)
            if end > length:
                best, length = prefix, end
        fit = partial(self._common, ends)
        wanted, device = ids[:, : ends[-1] if ends else 0], self.session.model.device
        on_disk = self.contexts.load(wanted, identity, fit, length, device)
        if on_disk is not None:
            match, context = on_disk
            new.flushed = new.stored = match.num_tokens
            new.name, new.source = match.context.name, "disk"
            new.cache = self.session.load_cache(context)
            if self._whole:
                new.ends[new.flushed] = new.cache.end_of_pass()
        elif best is not None:
            new.flushed, new.stored, new.name, new.source = length, min(best.stored, length), best.name, "hot"
            if not keep or best.flushed - length > length // 16:  # others go on from what would be lost
                whole = best.cache.snapshot(device, best.ends.get(length))
                new.cache.restore(whole if self._whole else whole.prefix(length))
                new.ends = {x: end for x, end in best.ends.items() if x == length}  # it cannot be cut to earlier ones
                best.used = time.monotonic()
            else:
                self.hot.remove(best)
                new.cache, new.ends = best.cache, {x: end for x, end in best.ends.items() if x <= length}
                new.cache.crop(length - new.cache.get_seq_length(), best.ends.get(length))
        new.load_s = time.monotonic() - started
        return new

    def _store(self, prefix: Prefix) -> None:
        """Copies a cache up to its last boundary for the thread that writes; does nothing where that is behind."""
        if not self.reusable or self.contexts.is_busy:
            return
        prefix.stored = prefix.flushed
        for place in sorted({min(prefix.ends, default=prefix.flushed), prefix.flushed}):
            ids = prefix.ids[:, :place].clone()
            prefix.name = self.contexts.name(prefix.identity, ids)
            snapshot = prefix.cache.snapshot(end=prefix.ends.get(place))
            self.contexts.put(snapshot, prefix.identity, ids, prefix.forget_disk)

    def identity_of(self, owner: str, length: int) -> CacheIdentity:
        """What contexts of so many tokens of a client are bound to."""
        return self.contexts.identity(self.session, self.reading, owner, length)
