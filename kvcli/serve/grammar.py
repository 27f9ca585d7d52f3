"""Answers that are JSON of a schema, by llguidance: at each place only tokens are chosen that can go on with it."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvcli.errors import UsageError
from kvcli.serve.requests import ApiError

_WHITESPACE = r"( |\n {0,16})?"
"""Between parts of JSON: without a limit, small models write nothing else."""

_MOST_ITEMS, _MOST_PATTERNS = 10_000, 12
"""Of `minItems` and `maxItems` together, which take memory each; of patterns of texts, each of which may double it."""


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
        """Goes on with a token, and returns whether nothing can follow; ApiError: llguidance gives the schema up."""
        if not self._matcher.consume_token(token):
            reason = f"the schema is too complex to be followed: {_error(self._matcher)}"
            raise ApiError(400, reason, "response_format")
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
        _check_size(schema)
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": _WHITESPACE})
        matcher = LLMatcher(self._of_llguidance, grammar)
        if matcher.get_error():
            raise UsageError(f"the schema is not understood: {_error(matcher)}")
        return [Grammar(matcher.deep_copy()) for _ in range(count)]

    @cached_property
    def _of_llguidance(self) -> Any:
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._ends or None)
        except Exception as error:
            raise UsageError(f"llguidance does not take this tokenizer: {error}") from error


def _error(matcher: Any) -> str:
    """Without the state of the parser and the whole schema, which follow."""
    return " ".join(str(matcher.get_error()).partition("<state>")[0].split())[:500]


def _check_size(schema: Any) -> None:
    """Raises UsageError for a schema that would take llguidance all memory."""
    objects = [*_objects(schema)]
    items = sum(abs(x[name]) for x in objects for name in ("minItems", "maxItems") if isinstance(x.get(name), int))
    merging, texts = {"allOf", "anyOf", "oneOf", "$ref"}, {"pattern", "format"}
    copies = sum(len(x[name]) if isinstance(x[name], list) else 1 for x in objects for name in merging & x.keys())
    if items * (1 + copies / 100) > _MOST_ITEMS:  # merged schemas have items of their own
        raise UsageError(f"the schema has {items} minItems and maxItems together, of at most {_MOST_ITEMS}")
    patterns = sum(isinstance(x.get(name), str) for x in objects for name in texts)  # else a property of that name
    parts = merging | texts | {"properties", "patternProperties", "additionalProperties", "items", "prefixItems"}
    several = (x for x in objects if isinstance(x.get("allOf"), list) and x["allOf"][1:])
    mixed = (x for x in objects if merging & x.keys() and sum(not isinstance(x[y], bool) for y in parts & x.keys()) > 1)
    if patterns > _MOST_PATTERNS and any((*several, *mixed)):
        raise UsageError(f"the schema merges texts of {patterns} patterns, of at most {_MOST_PATTERNS}")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in plain JSON."""
    if isinstance(value, dict):
        yield value
    for x in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(x)
