"""Decoding token by token with an attached model; on a GPU, whole steps are replayed as CUDA graphs.

A step (`kvcli.attention.steps`) is embedding, layers, logits and choice of the next token. Before every row holds
codes, tokens are made by ordinary forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.backend import AttentionBackend
from kvcli.attention.generation import Mode, NextToken
from kvcli.attention.steps import Steps
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.step import DeviceCounts
from kvcli.errors import UsageError
from kvcli.seam.versions import with_cache

_POLL_STEPS = 8
"""Steps between looks at what was chosen."""

LEAST_STEPS = 16
"""Steps for which capturing a graph pays."""


def default_mode(cache: CompressedCache, device: torch.device, *, fused: bool, width: int = 1) -> Mode:
    """How tokens are made unless it is said: as fast as the device, the session's kernels and the model allow."""
    return "graphs" if device.type == "cuda" and fused and cache.step_obstacle(width) is None else "passes"


class LogitsNotFinite(Exception):
    """Logits are NaN or infinite."""


class Decoder:
    """Makes the tokens after a prompt.

    Args:
        cache: of its session; holds the prompt.
        stops: tokens that end a row; `padding` follows.
        mode: how tokens are made, once every row holds codes.
        modules: makes the blocks in which steps run (`Session.fused_modules`).

    Raises:
        UsageError: steps for a cache that they cannot serve.

    Attributes:
        steps: how tokens are made, once every row holds codes; `stepped`: whether any was made so.
        tokens: int64 [batch, max_new_tokens], of which `num_tokens` per row are made; `padding` after the end of a row.
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
        modules: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        if mode != "passes" and (obstacle := cache.step_obstacle()) is not None:
            raise UsageError(obstacle)
        device, batch = model.device, len(cache.sequences.lengths)
        self.model, self.cache, self.choose = model, cache, choose
        self.max_new_tokens, self.padding = max_new_tokens, padding
        self._modules = modules
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
        self.steps = Steps(cache, backends, mode, device)
        # states of other layers cannot be taken back
        self._poll_steps = 1 if cache.other_layers and len(self._stops) else _POLL_STEPS
        self._before: list[Any] = []
        self._made = 0
        self.stepped = False

    def run(
        self,
        logits: Tensor,
        mask: Tensor | None,
        on_tokens: Callable[[Tensor], None],
        read_again: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    ) -> None:
        """Makes tokens until every row has ended, or as many as were asked for.

        Args:
            logits: of the prompt's last token, [batch, vocab_size].
            mask: int64 [batch, slots], if the cache holds padding.
            on_tokens: given new tokens [batch, count] on the host, some steps at a time.
            read_again: given the tokens made so far, [batch, count], and a mask of all, reads the prompt and these into
                the emptied cache and returns logits; called where all are rotated differently from then on.

        Raises:
            LogitsNotFinite: the next token would be arbitrary.
        """
        self._accept(logits)
        self.num_tokens = 1
        try:
            while True:
                if len(self._before) in (0, self._poll_steps):
                    self._look()
                left = self.max_new_tokens - self.num_tokens
                if self._all_ended or not left:
                    break
                self._show(on_tokens)
                steady = left >= LEAST_STEPS and not self.cache.sequences.changes_within(left)
                if self.steps.counts is not None or (self.steps.mode != "passes" and steady and self.cache.can_step):
                    self._by_step()
                    continue
                mask = None if mask is None else torch.cat((mask, mask.new_ones(mask.shape[0], 1)), dim=1)
                if read_again is not None and self.cache.sequences.changes_within(1):
                    self._accept(read_again(self.tokens[:, : self.num_tokens], mask))
                    self.num_tokens += 1
                    continue
                positions = None if mask is None else mask.sum(1, keepdim=True) - 1
                self._accept(self._logits(attention_mask=mask, position_ids=positions))
                self.num_tokens += 1
            self._look()
            self._show(on_tokens)
        finally:
            self.steps.end(self._made)

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
        if self.steps.counts is not None and self.num_tokens - self._checked >= _POLL_STEPS:
            self._checked = self.num_tokens
            self.steps.check_ranges()
        new = self.tokens[:, self._seen : self.num_tokens].cpu()
        stops = torch.isin(new, self._stops.cpu())
        first = torch.where(stops.any(1), self._seen + stops.int().argmax(1), -1)
        self._last = torch.where(self._last < 0, first, self._last)
        self._all_ended = bool((self._last >= 0).all())
        surplus = self.num_tokens - 1 - int(self._last.max()) if self._all_ended else 0
        if surplus:
            self.cache.sequences.counts.state = self._before[-surplus]
            self._made -= surplus
            self.num_tokens -= surplus
            new = new[:, :-surplus]
        self._before.clear()
        self._seen = self.num_tokens
        self._unseen.append(new)

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
        output = self.model(input_ids=self._token, **positions, **with_cache(self.cache))
        logits: Tensor = output.logits[:, -1]
        return logits

    def _step_logits(self, step: DeviceCounts) -> Tensor:
        """The same in a step, whose counts say what is attended to."""
        # transformers takes a mask of four axes as it is; without one it makes one, and only while a graph is captured
        with self._modules():
            return self._logits(position_ids=step.positions(), attention_mask=self._mask)

    def _by_step(self) -> None:
        """One more token per row."""
        self.steps.prepare(self.max_new_tokens - self.num_tokens)
        self.stepped = True
        step: Any = self.steps.counts
        self._before.append(self.cache.sequences.counts.state)
        with self.cache.passes.complete_or_refused():
            new = self.steps.append()
            self.steps.run(lambda: self._accept(self._step_logits(step)))
            self.num_tokens += 1
            self._made += 1
            made = self.num_tokens
            # encoding cannot be taken back: first see whether a row's last token came before this step
            if new.flushes and len(self._stops):
                self._look()
            if new.flushes and self.num_tokens == made:
                self.steps.encode(new)
