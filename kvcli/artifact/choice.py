"""Which method, with which settings, artifact and recipe: one record for the library, commands, suites and engines.

Imports no torch: what can be checked of a choice is checked before torch is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvcli.artifact.recipe import Recipe
from kvcli.commands.paths import artifact_method
from kvcli.errors import ArtifactError, ConfigError, UsageError
from kvcli.methods.config import BiasOffsetConfig, CacheConfig, SequenceOffsetConfig
from kvcli.registry import BASELINE, get_config, get_method, make_config, method_name, parse_name

if TYPE_CHECKING:
    from kvcli.artifact.artifact import Artifact
    from kvcli.methods.layer_codec import LayerCodec
    from kvcli.methods.method import Method
    from kvcli.seam.model import ModelAttention
    from kvcli.spec import ModelSpec


@dataclass(frozen=True)
class MethodChoice:
    """A method and what it was chosen by."""

    method: str  # its name, with or without bits
    # that were asked for; they come before a recipe's, and these before those of bits or artifact
    settings: Mapping[str, Any] = field(default_factory=dict)
    artifact: Artifact | Path | None = None  # of a fitted method, or its folder
    recipe: Recipe | None = None  # which named method and artifact
    recipe_file: Path | None = None

    @classmethod
    def of(
        cls,
        method: str | Self = "",
        artifact: str | Path | Artifact | None = None,
        recipe: str | Path | None = None,
        settings: Mapping[str, Any] = {},
    ) -> Self:
        """The choice by a method, an artifact or a recipe, or by several that agree; or another with more settings.

        UsageError: none of them, or another method than the recipe's; ConfigError: a recipe that cannot be read, or
        another artifact than its own; ArtifactError: none in that folder, or a damaged one that has to name its method.
        """
        if isinstance(method, MethodChoice):
            return replace(method, settings={**method.settings, **settings})
        folder = Path(artifact) if artifact and isinstance(artifact, str) else artifact or None
        if recipe:
            read = Recipe.read(recipe)
            if method not in ("", read.method):
                raise UsageError(f"the recipe is for method '{read.method}', not '{method}'")
            if not isinstance(folder, Path | None):
                raise UsageError("beside a recipe, an artifact is named by its folder")
            return cls(read.method, settings, read.find_artifact(folder), read, Path(recipe))
        if not method and folder is None:
            raise UsageError("name a method, an artifact or a recipe")
        return cls(method or cls("", {}, folder).fitted_method, settings, folder)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, of which `of(**values)` makes the same choice; UsageError: an artifact in memory alone."""
        if self.artifact is not None and self.folder is None:
            raise UsageError("an artifact that is in memory alone cannot be named; save it")
        files = {"artifact": self.folder, "recipe": self.recipe_file}
        return {"method": self.method, **{x: str(y or "") for x, y in files.items()}, "settings": {**self.settings}}

    @property
    def name(self) -> str:
        """The method without its bits; UsageError: no such method."""
        return parse_name(self.method)[0]

    @property
    def label(self) -> str:
        """The method with its bits, as records name it."""
        return method_name(self.name, dict(self.config))

    @property
    def is_baseline(self) -> bool:
        """Whether it compresses nothing."""
        return self.name == BASELINE

    @property
    def folder(self) -> Path | None:
        """Where the artifact lies; None without one, or if it is in memory alone."""
        return self.artifact if isinstance(self.artifact, Path) else None

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

    @property
    def fitted_method(self) -> str:
        """The artifact's method, empty without one; ArtifactError: it is not there, or damaged."""
        known = artifact_method(self.artifact) if isinstance(self.artifact, Path) else None
        if known is None and self.fitted is not None:  # which says what is damaged
            known = self.fitted.method
        return known or ""

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
        if self.fitted_method != self.name:
            raise ArtifactError(f"the artifact is for method '{self.fitted_method}', not '{self.method}'")
        unknown = self.named.keys() - get_config(self.name).model_fields
        make_config(self.name, {x: self.named[x] for x in unknown})  # what fits its settings is known when it is read

    def plus(self, common: Mapping[str, Any]) -> Self:
        """The same, with those of some settings that the method has."""
        own = get_config(self.name).model_fields.keys() & common.keys()
        return replace(self, settings={**self.settings, **{x: common[x] for x in own}})

    def for_pages(self) -> Self:
        """The same, checked, for codes in pages or chunks, where tokens are encoded at once.

        A `flush_block` of a recipe or an artifact has no effect. UsageError: it was asked for; others as of `check`.
        """
        if "flush_block" in self.settings:
            raise UsageError("tokens of a paged cache are encoded at once; omit flush_block")
        self.check()
        return replace(self, settings={**self.settings, "flush_block": 0}) if "flush_block" in self.named else self

    def check_model(self, spec: ModelSpec, fingerprint: str | None) -> None:
        """Raises ConfigError or ArtifactError if recipe or artifact are of another model; None: shapes only."""
        if self.recipe is not None and fingerprint is not None:
            self.recipe.check_model(fingerprint)
        if self.fitted is not None:
            self.fitted.check_model(spec, fingerprint or self.fitted.metadata["fingerprint"])

    def codecs(
        self,
        spec: ModelSpec,
        attention: Callable[[], ModelAttention] | None = None,
        fingerprint: Callable[[], str] | None = None,
    ) -> tuple[CacheConfig, list[LayerCodec]]:
        """The settings, and the codecs of all layers of a model, on the CPU.

        Args:
            attention: called for how the model attends, where the constant part of keys depends on that.
            fingerprint: called for the model's, where there is an artifact or a recipe; None: its weights are not
                there, and only its shapes are compared.

        UsageError, ConfigError, ArtifactError: as `check`, or an artifact or a recipe of another model.
        """
        from kvcli.methods.per_layer import build_codecs

        self.check()
        if self.recipe is not None or self.artifact is not None:
            self.check_model(spec, fingerprint and fingerprint())
        fitted = self.fitted
        codecs = build_codecs(self.record, spec, self.config) if fitted is None else fitted.build_codecs(self.config)
        return self.config if attention is None else choose_offsets(attention, self.config, codecs), codecs


def choose(choices: Iterable[MethodChoice], common: Mapping[str, Any]) -> list[MethodChoice]:
    """Choices with those of the common settings that their methods have, checked as by `check(fit=True)`.

    ConfigError: a setting that no method has; others as of `check`.
    """
    found, unknown = [choice.plus(common) for choice in choices], set(common)
    for choice in found:
        choice.check(fit=True)
        unknown -= get_config(choice.name).model_fields.keys()
    if unknown:
        raise ConfigError(f"none of the methods has a setting '{min(unknown)}'")
    return found


def choose_offsets(
    attention: Callable[[], ModelAttention], config: CacheConfig, codecs: list[LayerCodec]
) -> CacheConfig:
    """Gives codecs the constant part of keys that the settings ask for; returns settings that say which that is."""
    if isinstance(config, SequenceOffsetConfig):
        if config.sequence_offset == "auto":
            norms = ("norm" in name for layer in attention().layers for name, _ in layer.module.named_modules())
            config = config.model_copy(update={"sequence_offset": "mean" if any(norms) else "none"})
        for codec in codecs:
            codec.sequence_offset = config.sequence_offset == "mean"
    if isinstance(config, BiasOffsetConfig) and config.key_offset == "bias":
        for codec, layer, bias in zip(codecs, attention().layers, attention().key_biases(), strict=True):
            codec.key_offset = bias
            if config.key_units and (units := layer.key_units(codec.key.spec.head_dim)) is not None:
                codec.key.use_units(units)
    return config
