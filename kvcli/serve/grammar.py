"""Answers that are JSON of a schema, by llguidance: at each place only tokens are chosen that can go on with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvcli.errors import ModelError, UsageError

_WHITESPACE = r"( |\n {0,16})?"
"""Between parts of JSON: without a limit, small models write nothing else."""


class Grammar:
    """One answer in the making."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, logits: Tensor) -> Tensor:
        """Logits [1, vocab_size], of other tokens minus infinity."""
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
        bits = (words.unsqueeze(1) >> torch.arange(32, dtype=torch.int32)).flatten()[: logits.shape[1]] & 1
        return logits.masked_fill(bits.to(logits.device) == 0, -torch.inf)

    def take(self, token: int) -> bool:
        """Goes on with a token, and returns whether nothing can follow; ModelError: it cannot be the next one."""
        if not self._matcher.consume_token(token):
            raise ModelError(f"the answer cannot be JSON of its schema: {self._matcher.get_error()}")
        return bool(self._matcher.is_stopped())


class JsonGrammars:
    """Grammars of the tokens of a model.

    Args:
        vocab_size: of its logits.
        ends: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, list(ends)

    def of(self, schema: dict[str, Any], count: int) -> list[Grammar]:
        """So many grammars; UsageError: a schema, or a tokenizer, that llguidance does not take, or it is missing."""
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise UsageError("response_format needs llguidance: pip install 'kvcli[serve]'") from error
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": _WHITESPACE})
        matcher = LLMatcher(self._of_llguidance, grammar)
        if matcher.get_error():
            raise UsageError(f"the schema is not understood: {matcher.get_error()}")
        return [Grammar(matcher.deep_copy()) for _ in range(count)]

    @cached_property
    def _of_llguidance(self) -> Any:
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._ends or None)
        except Exception as error:
            raise UsageError(f"llguidance does not take this tokenizer: {error}") from error
