"""What is measured: a method with its settings, or the uncompressed model, behind the caches of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import DynamicCache

from kvcli.attention.attach import attach
from kvcli.attention.session import Session
from kvcli.eval.records import UNCOMPRESSED
from kvcli.models import LoadedModel
from kvcli.registry import BASELINE

NewCache = Callable[[], Any]
"""Makes an empty cache, to be passed to the model as `past_key_values`."""


@dataclass(frozen=True)
class Case:
    """A row to be measured.

    Attributes:
        label: name of the row.
        method: name of the method, with or without bits.
        artifact: folder of its artifact, for fitted methods.
        settings: of the method.
        impl: `auto`, `fused` or `reference`.
        compressed: False for the model with transformers' own cache.
    """

    label: str
    method: str
    artifact: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    impl: str = "auto"
    compressed: bool = True

    def attach(self, loaded: LoadedModel, layers: Collection[int] | None = None) -> Session:
        """Attaches the method to a model; see `kvcli.attach`.

        Args:
            loaded: the model.
            layers: layers to compress; default all.
        """
        return attach(loaded, self.method, artifact=self.artifact, impl=self.impl, layers=layers, **dict(self.settings))

    @contextmanager
    def caches(self, loaded: LoadedModel) -> Iterator[NewCache]:
        """Attaches the method for the block, and yields what makes its caches."""
        if not self.compressed:
            yield DynamicCache
            return
        with self.attach(loaded) as session:
            yield session.new_cache


REFERENCE = Case(UNCOMPRESSED, BASELINE, compressed=False)
"""The model itself."""
