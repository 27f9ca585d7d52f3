"""Which method, with which settings, artifact and recipe: one record for the library, commands, suites and engines.

Imports no torch: what can be checked of a choice is checked before torch is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvcli.artifact.recipe import Recipe
from kvcli.commands.paths import artifact_method
from kvcli.errors import ArtifactError, UsageError
from kvcli.methods.config import BiasOffsetConfig, CacheConfig, SequenceOffsetConfig
from kvcli.registry import get_config, get_method, make_config, parse_name

if TYPE_CHECKING:
    from kvcli.artifact.artifact import Artifact
    from kvcli.methods.layer_codec import LayerCodec
    from kvcli.methods.method import Method
    from kvcli.seam.model import ModelAttention
    from kvcli.spec import ModelSpec


@dataclass(frozen=True)
class MethodChoice:
    """A method and what it was chosen by.

    Attributes:
        method: its name, with or without bits.
        settings: those that were asked for; they come before a recipe's, and these before those of bits or artifact.
        artifact: of a fitted method, or its folder.
        recipe: which named method and artifact.
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    artifact: Artifact | Path | None = None
    recipe: Recipe | None = None

    @classmethod
    def of(
        cls,
        method: str | Self = "",
        *,
        artifact: str | Path | Artifact | None = None,
        recipe: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Self:
        """The choice by a method, an artifact or a recipe, or by several of them that agree; or another with settings.

        Raises:
            UsageError: none of them, another method than the recipe's, or beside a recipe an artifact without a folder.
            ConfigError: a recipe that cannot be read, or another artifact than its own.
            ArtifactError: there is no artifact, or one that has to name its method is damaged.
        """
        if isinstance(method, MethodChoice):
            return replace(method, settings={**method.settings, **(settings or {})})
        settings, artifact = dict(settings or {}), Path(artifact) if isinstance(artifact, str) else artifact
        if recipe is not None:
            read = Recipe.read(recipe)
            if method not in ("", read.method):
                raise UsageError(f"the recipe is for method '{read.method}', not '{method}'")
            if not isinstance(artifact, Path | None):
                raise UsageError("beside a recipe, an artifact is named by its folder")
            return cls(read.method, settings, read.find_artifact(artifact), read)
        if not method:
            if artifact is None:
                raise UsageError("name a method, an artifact or a recipe")
            method = _method_of(artifact)
        return cls(method, settings, artifact)

    @property
    def name(self) -> str:
        """The method without its bits; UsageError: no such method."""
        return parse_name(self.method)[0]

    @property
    def record(self) -> Method:
        """The method's record, which imports torch."""
        return get_method(self.name)

    @property
    def named(self) -> dict[str, Any]:
        """Settings that bits, recipe and request name."""
        return {**parse_name(self.method)[1], **(self.recipe.settings if self.recipe else {}), **self.settings}

    @cached_property
    def fitted(self) -> Artifact | None:
        """The artifact, read and verified; None without one. ArtifactError: it cannot be read."""
        if not isinstance(self.artifact, Path):
            return self.artifact
        from kvcli.artifact.artifact import Artifact

        return Artifact.load(self.artifact)

    @cached_property
    def config(self) -> CacheConfig:
        """All settings: the artifact's, or the method's defaults, with those that are named.

        ConfigError: a setting that does not exist, is out of range, or cannot differ from the artifact's.
        """
        fitted = self.fitted
        return make_config(self.name, self.named) if fitted is None else fitted.config_with(self.named)

    def check(self, *, fit: bool = False) -> None:
        """Checks, without torch, what does not take the artifact's tensors or the model.

        UsageError: no such method, or one that needs an artifact and has none, unless that is made later (`fit`);
        ConfigError: a setting that does not exist or is out of range; ArtifactError: one of another method, or none.
        """
        if self.artifact is None:
            if get_config(self.name).needs_artifact and not fit:
                raise UsageError(
                    f"method '{self.method}' needs an artifact; make one with 'kvcli fit --method {self.method}' and "
                    "'kvcli export'"
                )
            _ = self.config
            return
        if (method := _method_of(self.artifact)) != self.name:
            raise ArtifactError(f"the artifact is for method '{method}', not '{self.method}'")
        unknown = self.named.keys() - get_config(self.name).model_fields
        make_config(self.name, {x: self.named[x] for x in unknown})  # what fits its settings is known when it is read

    def for_pages(self) -> Self:
        """The same, for codes in pages or chunks, where tokens are encoded at once: a `flush_block` has no effect.

        That of a recipe, or of an artifact, is passed over. UsageError: it was asked for.
        """
        if "flush_block" in self.settings:
            raise UsageError("tokens of a paged cache are encoded at once; omit flush_block")
        return self

    def check_model(self, spec: ModelSpec, fingerprint: str | None) -> None:
        """Raises ConfigError or ArtifactError if recipe or artifact are of another model; None: shapes only."""
        if self.recipe is not None and fingerprint is not None:
            self.recipe.check_model(fingerprint)
        if self.fitted is not None:
            self.fitted.check_model(spec, fingerprint or self.fitted.metadata["fingerprint"], self.name)

    def codecs(
        self,
        spec: ModelSpec,
        attention: Callable[[], ModelAttention] | None = None,
        fingerprint: Callable[[], str] | None = None,
    ) -> tuple[CacheConfig, list[LayerCodec]]:
        """The settings, and the codecs of all layers of a model, on the CPU.

        Args:
            spec: of the model.
            attention: how it attends, called where the constant part of keys depends on that; None: it has none.
            fingerprint: of the model, called where there is an artifact or a recipe; None: its weights are not there,
                and only its shapes are compared.

        Raises:
            UsageError, ConfigError, ArtifactError: as `check`, or an artifact or a recipe of another model.
        """
        from kvcli.methods.per_layer import build_codecs

        self.check()
        if self.recipe is not None or self.artifact is not None:
            self.check_model(spec, fingerprint and fingerprint())
        fitted = self.fitted
        codecs = build_codecs(self.record, spec, self.config) if fitted is None else fitted.build_codecs(self.config)
        return self.config if attention is None else choose_offsets(attention, self.config, codecs), codecs


def _method_of(artifact: Artifact | Path) -> str:
    """The method of an artifact; ArtifactError: there is none, or it is damaged."""
    if not isinstance(artifact, Path):
        return artifact.method
    if (known := artifact_method(artifact)) is not None:
        return known
    from kvcli.artifact.artifact import Artifact

    return Artifact.load(artifact).method  # which says what is wrong


def choose_offsets(
    attention: Callable[[], ModelAttention], config: CacheConfig, codecs: list[LayerCodec]
) -> CacheConfig:
    """Gives codecs the constant part of keys that the settings ask for; returns settings that say which that is."""
    if isinstance(config, SequenceOffsetConfig):
        if config.sequence_offset == "auto":
            config = config.model_copy(update={"sequence_offset": "mean" if attention().normalizes_keys else "none"})
        for codec in codecs:
            codec.sequence_offset = config.sequence_offset == "mean"
    if isinstance(config, BiasOffsetConfig) and config.key_offset == "bias":
        for codec, bias in zip(codecs, attention().key_biases(), strict=True):
            codec.key_offset = bias
    return config
