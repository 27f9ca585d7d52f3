"""What the content of a cache depends on, so that a stored one is only gone on with where it means the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from itertools import chain
from typing import Any

import torch
from blake3 import blake3
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from kvcli.errors import UsageError, error_text, explain
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.models.fingerprint import differs
from kvcli.registry import get_method
from kvcli.storage.manifest import json_sha256

_ROUNDING = (1e-4, 0.0)
"""By how much RoPE frequencies may differ between machines: relative, absolute."""

_BUFFER_ROUNDING = (1e-3, 1e-4)
"""By how much buffers that are computed and not fitted may."""

_OTHER_WEIGHTS = "weights differ beside those of its key and value projections, or other adapters (LoRA) are active"


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class CacheIdentity:
    """Model, method, settings and codecs of a cache, as plain JSON values.

    Attributes:
        model: name of the model, for people; it is not compared.
        fingerprint: of the model that artifacts are for, see `kvcli.models.fingerprint`.
        weights: of all weights and active adapters, see `kvcli.models.weights`.
        model_config: what `config_values` there gives; values that only one of two identities has are not compared.
        rope: what `Rope.frequencies` gives.
        config: its settings, those of the cache included.
        layers: indices of the layers that the method compresses.
        codecs: `fitted`, a checksum of the codecs' buffers, where they come from an artifact; else `sample`, two
            numbers of each buffer.
        tokenizer: sha256 of the vocabulary; None where it is not known, which is equal to any.
        chat_template: sha256 of the chat template, or empty without one; None where it is not known.
        reading: in which passes the tokens were read, and for whom, if that matters; None where it does not, which is
            content with any.
        page_size: tokens of a page, of what an engine keeps in pages; 0 for the cache of a session.
    """

    model: str
    fingerprint: str
    weights: str
    dtype: str
    rope: Mapping[str, float | list[float]]
    method: str
    config: Mapping[str, Any]
    layers: Sequence[int]
    codecs: Mapping[str, str | list[float]]
    tokenizer: str | None = None
    chat_template: str | None = None
    reading: str | None = None
    model_config: Mapping[str, Any] = field(default_factory=dict)
    page_size: int = 0

    def difference(self, other: CacheIdentity) -> str | None:
        """Why what another cache holds means something else here: a clause after "it was made"; None if it does not."""
        if (reason := self._other_model(other)) is not None:
            return reason
        if not _close(_numbers(self.rope), _numbers(other.rope), _ROUNDING):
            return "with other RoPE frequencies"
        if self.method != other.method:
            return f"with method '{other.method}', not '{self.method}'"
        ours, theirs = (identity.settings().model_dump(mode="json") for identity in (self, other))
        for name, value in ours.items():
            if value != theirs[name]:
                return f"with {name} {theirs[name]}, which is {value} here"
        if list(self.layers) != list(other.layers):
            here, there = (
                ", ".join(map(str, x)) if len(x) <= 8 else f"{len(x)} of them" for x in (self.layers, other.layers)
            )
            return f"with layers {there} compressed, not {here}"
        if self.codecs.keys() != other.codecs.keys():
            return f"{'with' if 'fitted' in other.codecs else 'without'} an artifact"
        if self.codecs.get("fitted") != other.codecs.get("fitted"):
            return "with another artifact"
        if not _close(self.codecs.get("sample", []), other.codecs.get("sample", []), _BUFFER_ROUNDING):
            return "with codecs of other projections or tables"
        if self.page_size != other.page_size:
            return f"in pages of {other.page_size} tokens" if other.page_size else "by a session, not in pages"
        for name in ("tokenizer", "chat_template"):
            if len({getattr(self, name), getattr(other, name)} - {None}) > 1:
                return f"with another {name.replace('_', ' ')}"
        return "by other passes" if self.reading not in (None, other.reading) else None

    def _other_model(self, other: CacheIdentity) -> str | None:
        alike = self.weights == other.weights or self.dtype != other.dtype
        reason = differs(self.fingerprint, other.fingerprint) or (None if alike else _OTHER_WEIGHTS)
        if reason is not None:
            return f"with another model, {other.model}: {reason}"
        for name in sorted(self.model_config.keys() & other.model_config.keys()):
            if (ours := self.model_config[name]) != (theirs := other.model_config[name]):
                what = f"{theirs}, which is {ours} here" if len(f"{theirs}{ours}") <= 40 else "of other values"
                return f"with another model, {other.model}: with a {name} in its config of {what}"
        if self.dtype != other.dtype:
            return f"with the model in {other.dtype}, which is in {self.dtype} here"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        optional = {"reading", "model_config", "page_size"}
        return {name: x for name, x in asdict(self).items() if x or name not in optional}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CacheIdentity:
        """From what `to_dict` gave, also through JSON; ValueError for other names, types, methods or settings."""
        try:
            identity = cls(**values)
            if identity.difference(identity) is not None:
                raise ValueError("the identity of a cache is not its own")
        except ValidationError as error:
            raise ValueError(" ".join(explain(error, cls.__dataclass_fields__).split())) from error
        except (TypeError, KeyError, OverflowError, AttributeError, RuntimeError) as error:
            raise ValueError(error_text(error)) from error
        return identity

    def settings(self) -> CacheConfig:
        """The method's settings, new ones by default; ValueError for a method or setting that is not known."""
        try:
            return get_method(self.method).config_cls(**self.config)
        except UsageError as error:
            raise ValueError(str(error)) from error
        except ValidationError as error:
            raise ValueError(f"settings of method '{self.method}' that this kvcli does not know") from error


def codecs_identity(codecs: Sequence[LayerCodec], fitted: bool) -> dict[str, Any]:
    """The field `codecs` of an identity; buffers that come from an artifact are the same bit for bit everywhere."""
    buffers = {f"{i}.{name}": x for i, codec in enumerate(codecs) for name, x in sorted(codec.state_dict().items())}
    if not fitted:
        two = (x.detach().flatten()[[0, x.numel() // 2]].float().tolist() for x in buffers.values() if x.numel())
        return {"sample": list(chain.from_iterable(two))}
    forms = {}
    for name, x in buffers.items():
        data = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        digest = blake3(data, max_threads=blake3.AUTO).hexdigest()
        forms[name] = f"{x.dtype} {list(x.shape)} {digest}"
    return {"fitted": json_sha256(forms)}


def _numbers(rope: Mapping[str, Any]) -> list[float]:
    return [*rope["inv_freq"], rope["scaling"]]


def _close(first: Any, second: Any, rounding: tuple[float, float]) -> bool:
    """Whether numbers agree up to rounding."""
    a, b = (torch.tensor(x, dtype=torch.float64) for x in (first, second))
    return len(first) == len(second) and torch.allclose(a, b, *rounding)
