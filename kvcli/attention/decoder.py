"""Decoding token by token with an attached model; on a GPU, whole steps are replayed as CUDA graphs.

A step is embedding, layers, logits and choice of the next token; encoding what leaves the window is a call of its own
after it. Both read their counts from device tensors (`kvcli.cache.step`), so a graph that was captured once serves all
steps until the codes outgrow its capacity. Before every row holds codes, steps are ordinary forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.backend import AttentionBackend
from kvcli.attention.compiled import CompiledLayers, CompileError
from kvcli.attention.generation import Mode, NextToken
from kvcli.attention.layer import flush_layer
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.counts import TokenCounts
from kvcli.cache.forward import Forward
from kvcli.cache.step import DeviceCounts, FlushPattern
from kvcli.errors import UsageError

_POLL_STEPS = 8
"""Steps between looks at what was chosen."""

_LEAST_STEPS = 16
"""Steps for which capturing a graph pays."""

_HEADROOM = 1024
"""Fewest tokens by which the capacity of a captured step exceeds what a row holds."""


def default_mode(cache: CompressedCache, device: torch.device, *, fused: bool, compiled: bool) -> Mode:
    """How tokens are made unless it is said: as fast as the device, the session's kernels and the model's layers allow.

    Layers that are `compiled` run in steps, because passes of changing shapes would compile them again and again.
    """
    if cache.step_obstacle is not None:
        return "passes"
    return "graphs" if device.type == "cuda" and fused else "steps" if compiled else "passes"


def can_step(counts: TokenCounts, left: int) -> bool:
    """Whether steps can follow: every row holds codes, and so many tokens that are left are enough to prepare for."""
    return left >= _LEAST_STEPS and min(*counts.attended, *counts.keys.coded) > 0


def step_capacity(counts: TokenCounts, left: int) -> int:
    """Tokens of a row that steps can attend to as codes, where `left` are to come."""
    longest, group = max(counts.attended), counts.tokens_per_group
    return -(-(longest + min(left, max(_HEADROOM, longest // 8))) // group) * group


def begin_steps(cache: CompressedCache, capacity: int, left: int) -> DeviceCounts:
    """Makes room for `left` more tokens per row, `capacity` of all as codes; the next passes count on the device."""
    sequences, ring = cache.sequences, cache.sequences.counts.layout.ring
    sequences.extend(left + ring)
    for layer in cache.compressed:
        for codes in (layer.store.key_codes, layer.store.value_codes):
            codes.reserve(capacity + ring)  # tokens can be encoded before they leave the window
    cache.passes.step = DeviceCounts(sequences, capacity, len(cache.compressed))
    return cache.passes.step


class LogitsNotFinite(Exception):
    """Logits are NaN or infinite."""


class Decoder:
    """Makes the tokens after a prompt.

    Args:
        cache: of its session; holds the prompt.
        stops: tokens that end a row; `padding` follows.
        mode: how tokens are made, once every row holds codes.
        compiled: the model's layers, which run compiled in steps; None: as they are, also once compiling has failed.

    Raises:
        UsageError: steps or compiled layers for a cache that they cannot serve.

    Attributes:
        tokens: int64 [batch, max_new_tokens], of which `num_tokens` per row are made; `padding` after the end of a row.
        note: why steps are not captured, or not compiled; None if they are, or were not asked to be.
    """

    def __init__(
        self,
        model: Any,
        cache: CompressedCache,
        backends: list[AttentionBackend],
        choose: NextToken,
        max_new_tokens: int,
        *,
        stops: Sequence[int] = (),
        padding: int = 0,
        mode: Mode = "passes",
        compiled: CompiledLayers | None = None,
    ) -> None:
        if (mode != "passes" or compiled is not None) and cache.step_obstacle is not None:
            raise UsageError(cache.step_obstacle)
        device, batch = model.device, len(cache.sequences.lengths)
        self.model, self.cache, self.backends, self.choose = model, cache, backends, choose
        self.max_new_tokens, self.padding, self.mode = max_new_tokens, padding, mode
        self.compiled = compiled
        self._stops = torch.tensor(list(stops), dtype=torch.int64, device=device)
        self.tokens = torch.full((batch, max_new_tokens), padding, dtype=torch.int64, device=device)
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        self._ended = torch.zeros(batch, 1, dtype=torch.bool, device=device)
        self.num_tokens = self._seen = self._checked = 0
        self._last = torch.full((batch,), -1)
        self._all_ended = False
        self._unseen: list[Tensor] = []
        self.note: str | None = None
        self.graph_bytes = 0
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._step: DeviceCounts | None = None
        self._before: list[Any] = []
        self._steps = 0
        self.stepped = False

    def run(self, logits: Tensor, mask: Tensor | None, on_tokens: Callable[[Tensor], None]) -> None:
        """Makes tokens until every row has ended, or as many as were asked for.

        Args:
            logits: of the prompt's last token, [batch, vocab_size].
            mask: int64 [batch, slots], if the cache holds padding.
            on_tokens: given new tokens [batch, count] on the host, some steps at a time.

        Raises:
            LogitsNotFinite: the next token would be arbitrary.
        """
        self._accept(logits)
        self.num_tokens = 1
        try:
            while True:
                if not self._before or len(self._before) >= _POLL_STEPS:
                    self._look()
                left = self.max_new_tokens - self.num_tokens
                if self._all_ended or not left:
                    break
                self._show(on_tokens)
                counts = self.cache.sequences.counts
                if self._step is not None or (self.mode != "passes" and can_step(counts, left)):
                    self._by_step()
                    continue
                mask = None if mask is None else torch.cat((mask, mask.new_ones(mask.shape[0], 1)), dim=1)
                positions = None if mask is None else mask.sum(1, keepdim=True) - 1
                self._accept(self._logits(attention_mask=mask, position_ids=positions))
                self.num_tokens += 1
            self._look()
            self._show(on_tokens)
        finally:
            self._end_steps()

    def _show(self, on_tokens: Callable[[Tensor], None]) -> None:
        """Hands on what was read; whatever `on_tokens` raises, the cache is whole."""
        new, self._unseen = self._unseen, []
        if new:
            on_tokens(torch.cat(new, dim=1))

    def _look(self) -> None:
        """Reads the tokens made since the last look; takes back the steps after the last row's end."""
        if self._seen == self.num_tokens:
            return
        if not bool(self._finite):
            raise LogitsNotFinite
        if self._step is not None and self.num_tokens - self._checked >= _POLL_STEPS:
            self._check_ranges()
        new = self.tokens[:, self._seen : self.num_tokens].cpu()
        stops = torch.isin(new, self._stops.cpu())
        first = torch.where(stops.any(1), self._seen + stops.int().argmax(1), -1)
        self._last = torch.where(self._last < 0, first, self._last)
        self._all_ended = bool((self._last >= 0).all())
        surplus = self.num_tokens - 1 - int(self._last.max()) if self._all_ended else 0
        if surplus:
            self.cache.sequences.counts.state = self._before[-surplus]
            self._steps -= surplus
            self.num_tokens -= surplus
            new = new[:, :-surplus]
        self._before.clear()
        self._seen = self.num_tokens
        self._unseen.append(new)

    def _check_ranges(self) -> None:
        """Raises CacheError where what was encoded in steps is beyond what codes hold; the cache refuses to go on."""
        self._checked = self.num_tokens
        with self.cache.passes.complete_or_refused():
            self._step.ranges.check()  # type: ignore[union-attr]

    def _accept(self, logits: Tensor) -> None:
        """Chooses a token of each row from logits [batch, vocab_size] and notes it."""
        self._finite.logical_and_(logits.isfinite().all())
        token = torch.where(self._ended, self.padding, self.choose(logits))
        self._ended.logical_or_(torch.isin(token, self._stops))
        self.tokens.index_copy_(1, self._count, token)
        self._token.copy_(token)
        self._count.add_(1)

    def _logits(self, **positions: Any) -> Tensor:
        """Logits [batch, vocab_size] after the token that was chosen last."""
        output = self.model(input_ids=self._token, past_key_values=self.cache, use_cache=True, **positions)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _step_logits(self, step: DeviceCounts) -> Tensor:
        """The same in a step, whose counts say what is attended to."""
        # transformers takes a mask of four axes as it is; without one it makes one, and only while a graph is captured
        inputs = {"position_ids": step.positions(), "attention_mask": self._mask}
        if self.compiled is not None:
            try:
                with self.compiled.active():
                    return self._logits(**inputs)
            except CompileError as error:
                self.compiled, self.note = None, str(error)
        # a pass of a step that broke off is repeated: it writes the same tokens to the same slots
        return self._logits(**inputs)

    def _by_step(self) -> None:
        """One more token per row."""
        counts = self.cache.sequences.counts
        if self._step is None or max(counts.attended) > self._step.max_codes:
            self._new_step()
        step: Any = self._step
        self._before.append(counts.state)
        with self.cache.passes.complete_or_refused():
            new = counts.append((1,) * len(counts.lengths))
            step.load(new)
            self._call("step", lambda: self._accept(self._step_logits(step)))
            self.num_tokens += 1
            self._steps += 1
            before = self.num_tokens
            # encoding cannot be taken back: first see whether a row's last token came before this step
            if new.flushes and len(self._stops):
                self._look()
            if not new.flushes or self.num_tokens < before:
                return
            passes, pattern = self.cache.passes, FlushPattern.of(new)
            if pattern is None:  # rows encode different numbers of tokens
                self._encode(passes.encoding(new))
            else:
                self._call(pattern, lambda: self._encode(passes.encoding(step.encoding(pattern))))

    def _encode(self, forward: Forward) -> None:
        for layer_idx, (layer, backend) in enumerate(zip(self.cache.compressed, self.backends, strict=True)):
            flush_layer(layer.store, forward, backend, layer_idx, 1)

    def _new_step(self) -> None:
        """Makes room in all buffers, and counts of that capacity on the device."""
        sequences = self.cache.sequences
        if self._step is not None:
            self._check_ranges()
        counts, left = sequences.counts, self.max_new_tokens - self.num_tokens
        capacity = step_capacity(counts, left)
        self._graphs.clear()
        # a pool ends with the last of its graphs and cannot be used again
        self._pool = torch.cuda.graph_pool_handle() if self.mode == "graphs" else None
        self.stepped = True
        self._step = begin_steps(self.cache, capacity, left)

    def _call(self, key: Hashable, function: Callable[[], None]) -> None:
        """Calls a function of tensors on the device: as it is the first time, afterwards as a graph captured then."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        function()
        if self.mode != "graphs":
            return
        torch.cuda.empty_cache()  # capturing does so, too: what it gives back is not what the graph takes
        before = torch.cuda.memory_reserved(self.tokens.device)
        graph = torch.cuda.CUDAGraph()
        try:
            # graphs run one after another and leave nothing in their own memory, so they share it
            with torch.cuda.graph(graph, pool=self._pool):
                function()
        except RuntimeError as error:
            cause: BaseException = error
            while isinstance(cause.__context__, RuntimeError):  # which ending the capture hides by failing in turn
                cause = cause.__context__
            reason = str(cause).partition("\n")[0]
            note = f"steps are not captured as CUDA graphs: {reason}"
            self.mode, self.note = "steps", "; ".join(filter(None, (self.note, note)))
            return
        self._graphs[key] = graph
        self.graph_bytes += torch.cuda.memory_reserved(self.tokens.device) - before

    def _end_steps(self) -> None:
        """Hands the cache back to ordinary passes."""
        if self._step is None:
            return
        self.cache.passes.step = None
        self.cache.sequences.append_slots(self._steps)
        self._graphs.clear()
        try:
            self._check_ranges()
        finally:
            self._step = None
