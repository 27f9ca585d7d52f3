"""What the content of a cache depends on, so that a stored one is only gone on with where it means the same.

This module does not know how a cache is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from blake3 import blake3
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from kvcli.errors import UsageError, explain
from kvcli.fingerprint import differs
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.registry import get_method
from kvcli.storage.manifest import json_sha256

_ROUNDING = (1e-4, 0.0)
"""By how much RoPE frequencies may differ between machines: relative, absolute."""

_BUFFER_ROUNDING = (1e-3, 1e-4)
"""By how much buffers that are computed and not fitted may."""


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class CacheIdentity:
    """Model, method, settings and codecs of a cache, as plain JSON values.

    Attributes:
        model: name of the model, for people; it is not compared.
        fingerprint: of the model, see `kvcli.fingerprint`.
        dtype: of the model, such as `bfloat16`.
        rope: what `Rope.frequencies` gives.
        method: name of the method.
        config: its settings, those of the cache included.
        layers: indices of the layers that the method compresses.
        codecs: `fitted`, a checksum of the codecs' buffers, where they come from an artifact; else `sample`, two
            numbers of each buffer.
        tokenizer: sha256 of the vocabulary; None where it is not known, which is equal to any.
        chat_template: sha256 of the chat template, or empty without one; None where it is not known.
    """

    model: str
    fingerprint: str
    dtype: str
    rope: Mapping[str, float | list[float]]
    method: str
    config: Mapping[str, Any]
    layers: Sequence[int]
    codecs: Mapping[str, str | list[float]]
    tokenizer: str | None = None
    chat_template: str | None = None

    def difference(self, other: CacheIdentity) -> str | None:
        """Why what another cache holds means something else here.

        Args:
            other: of the other cache.

        Returns:
            A clause that goes on from "it was made"; None if there is no difference.

        Raises:
            ValueError: an identity that cannot be read.
        """
        reason = differs(self.fingerprint, other.fingerprint)
        if reason is not None:
            return f"with another model, {other.model}: {reason}"
        if self.dtype != other.dtype:
            return f"with the model in {other.dtype}, which is in {self.dtype} here"
        if not _close(_numbers(self.rope), _numbers(other.rope), _ROUNDING):
            return "with other RoPE frequencies"
        if self.method != other.method:
            return f"with method '{other.method}', not '{self.method}'"
        ours, theirs = (identity.settings().model_dump(mode="json") for identity in (self, other))
        for name, value in ours.items():
            if value != theirs[name]:
                return f"with {name} {theirs[name]}, which is {value} here"
        if list(self.layers) != list(other.layers):
            return f"with layers {_ranges(other.layers)} compressed, not {_ranges(self.layers)}"
        if self.codecs.keys() != other.codecs.keys():
            return f"{'with' if 'fitted' in other.codecs else 'without'} an artifact"
        if self.codecs.get("fitted") != other.codecs.get("fitted"):
            return "with another artifact"
        if not _close(self.codecs.get("sample", []), other.codecs.get("sample", []), _BUFFER_ROUNDING):
            return "with codecs of other projections or tables"
        for name in ("tokenizer", "chat_template"):
            if len({getattr(self, name), getattr(other, name)} - {None}) > 1:
                return f"with another {name.replace('_', ' ')}"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CacheIdentity:
        """From what `to_dict` gave, also if it went through JSON.

        Raises:
            ValueError: values of other names, types or ranges; an unknown method or setting.
        """
        try:
            identity = cls(**values)
            if identity.difference(identity) is not None:
                raise ValueError("the identity of a cache is not its own")
        except ValidationError as error:
            raise ValueError(" ".join(explain(error, cls.__dataclass_fields__).split())) from error
        except (TypeError, KeyError, OverflowError, AttributeError, RuntimeError) as error:
            raise ValueError(" ".join(str(error).split())) from error
        return identity

    def settings(self) -> CacheConfig:
        """The method's settings; those that are newer than the identity have their defaults.

        Raises:
            ValueError: this kvcli does not know the method, or a setting.
        """
        try:
            return get_method(self.method).config_cls(**self.config)
        except UsageError as error:
            raise ValueError(str(error)) from error
        except ValidationError as error:
            raise ValueError(f"settings of method '{self.method}' that this kvcli does not know") from error


def codecs_identity(codecs: Sequence[LayerCodec], fitted: bool) -> dict[str, Any]:
    """What identifies the codecs of all layers.

    Args:
        codecs: one per layer.
        fitted: whether their buffers come from an artifact, and are thus the same bit for bit everywhere.

    Returns:
        The field `codecs` of an identity.
    """
    buffers = {f"{i}.{name}": x for i, codec in enumerate(codecs) for name, x in sorted(codec.state_dict().items())}
    if fitted:
        hosted = {name: x.detach().cpu().contiguous() for name, x in buffers.items()}
        content = {name: x.flatten().view(torch.uint8).numpy().data for name, x in hosted.items()}
        forms = {name: f"{x.dtype} {list(x.shape)}" for name, x in hosted.items()}
        digests = {name: blake3(data, max_threads=blake3.AUTO).hexdigest() for name, data in content.items()}
        return {"fitted": json_sha256({name: f"{forms[name]} {digest}" for name, digest in digests.items()})}
    return {"sample": [number for x in buffers.values() if x.numel() for number in _sample(x)]}


def _sample(x: Tensor) -> list[float]:
    """Two numbers of a buffer."""
    return x.detach().flatten()[[0, x.numel() // 2]].float().tolist()


def _numbers(rope: Mapping[str, Any]) -> list[float]:
    return [*rope["inv_freq"], rope["scaling"]]


def _close(first: Any, second: Any, rounding: tuple[float, float]) -> bool:
    """Whether numbers agree up to rounding."""
    if len(first) != len(second):
        return False
    a, b = (torch.tensor(x, dtype=torch.float64) for x in (first, second))
    return torch.allclose(a, b, *rounding)


def _ranges(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= 8 else f"{len(numbers)} of them"
