"""Decoding token by token with an attached model; on a GPU, whole steps are replayed as CUDA graphs.

A step is embedding, layers, logits and choice of the next token; encoding what leaves the window is a call of its own
after it. Both read their counts from device tensors (`kvcli.cache.step`), so a graph that was captured once serves all
steps until the codes outgrow its capacity. Before every row holds codes, steps are ordinary forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kvcli.attention.backend import AttentionBackend
from kvcli.attention.compiled import CompiledLayers, CompileError
from kvcli.attention.layer import flush_layer
from kvcli.attention.next_token import NextToken
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.counts import HostCounts, TokenCounts
from kvcli.cache.forward import Forward
from kvcli.cache.step import DeviceCounts, FlushPattern
from kvcli.errors import UsageError

_POLL_STEPS = 8
"""Steps between looks at what was chosen."""

_LEAST_STEPS = 16
"""Steps for which capturing a graph pays."""

_HEADROOM = 1024
"""Fewest tokens by which the capacity of a captured step exceeds what a row holds."""


Mode = Literal["passes", "steps", "graphs"]
"""How tokens are made: ordinary passes, passes whose counts are on the device, or CUDA graphs of those."""


def default_mode(cache: CompressedCache, device: torch.device, *, fused: bool, compiled: bool) -> Mode:
    """How tokens are made unless it is said: as fast as the device, the session's kernels and the model's layers allow.

    Args:
        cache: that is continued.
        device: of the model.
        fused: whether the session's kernels are used.
        compiled: whether layers are compiled, which passes of changing shapes would undo.
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


class LogitsNotFinite(Exception):
    """Logits are NaN or infinite."""


def _cause(error: RuntimeError) -> str:
    """The first line of what went wrong while capturing; ending the capture then fails in turn, and hides it."""
    cause: BaseException = error
    while isinstance(cause.__context__, RuntimeError):
        cause = cause.__context__
    return str(cause).partition("\n")[0]


class Decoder:
    """Makes the tokens after a prompt.

    Args:
        model: the attached model.
        cache: of its session; holds the prompt.
        backends: of each layer.
        choose: the choice of the next token.
        max_new_tokens: tokens to make at most.
        stops: tokens that end a row.
        padding: token of rows that have ended.
        mode: how tokens are made, once every row holds codes.
        compiled: the model's layers, which run compiled in steps; None: as they are.

    Raises:
        UsageError: steps or compiled layers for a cache that they cannot serve.

    Attributes:
        tokens: what was made, int64 [batch, max_new_tokens]; `padding` after the end of a row.
        made: how many tokens per row.
        note: why steps are not captured, or not compiled; None if they are, or were not asked to be.
        graph_bytes: memory that captured graphs took.
        compiled: as given; None once compiling failed.
        stepped: whether there were steps.
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
        self.made = self._seen = self._checked = 0
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
        self.made = 1
        try:
            while not self._look_if_due() and self.made < self.max_new_tokens:
                self._show(on_tokens)
                if self._step is not None or self._can_step():
                    self._by_step()
                    continue
                mask = None if mask is None else torch.cat((mask, mask.new_ones(mask.shape[0], 1)), dim=1)
                positions = None if mask is None else mask.sum(1, keepdim=True) - 1
                self._accept(self._logits(attention_mask=mask, position_ids=positions))
                self.made += 1
            self._look()
            self._show(on_tokens)
        finally:
            self._end_steps()

    def _show(self, on_tokens: Callable[[Tensor], None]) -> None:
        """Hands on what was read; whatever `on_tokens` raises, the cache is whole."""
        new, self._unseen = self._unseen, []
        if new:
            on_tokens(torch.cat(new, dim=1))

    def _look_if_due(self) -> bool:
        """Whether all rows have ended, as far as it is known."""
        if not self._before or len(self._before) >= _POLL_STEPS:
            self._look()
        return self._all_ended

    def _look(self) -> None:
        """Reads the tokens made since the last look; takes back the steps after the last row's end."""
        if self._seen == self.made:
            return
        if not bool(self._finite):
            raise LogitsNotFinite
        if self._step is not None and self.made - self._checked >= _POLL_STEPS:
            self._check_ranges()
        new = self.tokens[:, self._seen : self.made].cpu()
        stops = torch.isin(new, self._stops.cpu())
        first = torch.where(stops.any(1), self._seen + stops.int().argmax(1), -1)
        self._last = torch.where(self._last < 0, first, self._last)
        self._all_ended = bool((self._last >= 0).all())
        surplus = self.made - 1 - int(self._last.max()) if self._all_ended else 0
        if surplus:
            self.cache.sequences.counts.state = self._before[-surplus]
            self._steps -= surplus
            self.made -= surplus
            new = new[:, :-surplus]
        self._before.clear()
        self._seen = self.made
        self._unseen.append(new)

    def _check_ranges(self) -> None:
        """Raises CacheError where what was encoded in steps is beyond what codes hold; the cache refuses to go on."""
        self._checked = self.made
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

    def _can_step(self) -> bool:
        """Whether passes can have their counts on the device: every row holds codes, and enough tokens are left."""
        left = self.max_new_tokens - self.made
        return self.mode != "passes" and can_step(self.cache.sequences.counts, left)

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
            self.made += 1
            self._steps += 1
            made = self.made
            # encoding cannot be taken back: first see whether a row's last token came before this step
            if new.flushes and len(self._stops):
                self._look()
            if new.flushes and self.made == made:
                self._encode(step, new)

    def _encode(self, step: DeviceCounts, counts: HostCounts) -> None:
        """Encodes after a step: by counts on the device where all rows encode as many tokens, else row by row."""
        passes, pattern = self.cache.passes, FlushPattern.of(counts)
        if pattern is None:
            self._encode_layers(passes.encoding(counts))
        else:
            self._call(pattern, lambda: self._encode_layers(passes.encoding(step.encoding(pattern))))

    def _encode_layers(self, forward: Forward) -> None:
        for layer_idx, (layer, backend) in enumerate(zip(self.cache.compressed, self.backends, strict=True)):
            flush_layer(layer.store, forward, backend, layer_idx, 1)

    def _new_step(self) -> None:
        """Makes room in all buffers, and counts of that capacity on the device."""
        sequences = self.cache.sequences
        if self._step is not None:
            self._check_ranges()
        counts, left = sequences.counts, self.max_new_tokens - self.made
        capacity = step_capacity(counts, left)
        sequences.extend(left + counts.layout.ring)
        for layer in self.cache.compressed:
            for codes in (layer.store.key_codes, layer.store.value_codes):
                codes.reserve(capacity + counts.layout.ring)  # tokens can be encoded before they leave the window
        self._graphs.clear()
        # a pool ends with the last of its graphs and cannot be used again
        self._pool = torch.cuda.graph_pool_handle() if self.mode == "graphs" else None
        self.stepped = True
        self._step = DeviceCounts(sequences, capacity, len(self.cache.compressed))
        self.cache.passes.step = self._step

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
            note = f"steps are not captured as CUDA graphs: {_cause(error)}"
            self.mode, self.note = "steps", "; ".join(filter(None, (self.note, note)))
            return
        self._graphs[key] = graph
        self.graph_bytes += torch.cuda.memory_reserved(self.tokens.device) - before

    def _end_steps(self) -> None:
        """Hands the cache back to ordinary passes."""
        if self._step is None:
            return
        self.cache.passes.end_steps(self._steps)
        self._graphs.clear()
        try:
            self._check_ranges()
        finally:
            self._step = None
