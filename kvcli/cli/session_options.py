"""Options of commands that attach a method to a model, and what they mean when a context is gone on from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

from pydantic import Field, model_validator

from kvcli.artifact.recipe import Recipe
from kvcli.cli.fitting import check_fit, fit_time, fitted
from kvcli.cli.output import Output
from kvcli.commands.options import IMPL_HELP, Impl, ModelOptions, parse_settings
from kvcli.commands.paths import artifact_method, default_artifact, model_folder, newest_artifact
from kvcli.contexts import index
from kvcli.errors import ArtifactError, CacheError, suggestion
from kvcli.methods.config import CacheConfig
from kvcli.models.hub import check_model_name
from kvcli.progress import Reporter
from kvcli.registry import DEFAULT_METHOD, UNFITTED_DEFAULT, check_settings, get_config, parse_name

if TYPE_CHECKING:
    from kvcli.artifact.artifact import Artifact
    from kvcli.attention.generation import SamplingConfig
    from kvcli.attention.session import Session
    from kvcli.cache.context import Context
    from kvcli.models.load import LoadedModel


PREFILL_CHUNK = 4096
"""Tokens per forward pass of what is kept for later, where nothing else is asked for."""

_WINDOW = "tokens in full precision; default: the method's or the artifact's"


class SessionOptions(ModelOptions):
    """Model, method, artifact and settings."""

    method: str | None = Field(
        None,
        description=f"compression method, with or without bits ({DEFAULT_METHOD}, {DEFAULT_METHOD}-1); "
        f"see 'kvcli methods'; default: that of the newest artifact for the model, else {UNFITTED_DEFAULT}",
    )
    artifact: Path | None = Field(None, description="artifact, with its method; default: newest for model and method")
    fit: bool = Field(False, description="make the artifact that --method needs if there is none, and keep it")
    sink_length: int | None = Field(None, ge=0, description=f"first {_WINDOW}")
    residual_length: int | None = Field(None, ge=0, description=f"last {_WINDOW}")
    setting: list[str] = Field([], description="setting of the method, NAME=VALUE; repeatable")
    recipe: Path | None = Field(None, description="recipe of 'kvcli tune', in place of method, artifact and settings")
    impl: Impl = Field("auto", description=IMPL_HELP)

    @model_validator(mode="before")
    @classmethod
    def _follow_recipe(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A recipe stands for model, method, artifact and settings; the command line may change model and settings."""
        if not values.get("recipe"):
            return values
        recipe = Recipe.read(str(values["recipe"]))
        if values.get("method") not in (None, recipe.method):
            raise ValueError(f"the recipe names its method, {recipe.method}; omit --method")
        settings = [f"{name}={json.dumps(value)}" for name, value in recipe.settings.items()]
        chosen = {"method": recipe.method, "setting": [*settings, *values.get("setting", [])]}
        artifact = recipe.find_artifact(values.get("artifact"))
        return {"model": recipe.model, **values, **chosen, **({} if artifact is None else {"artifact": artifact})}

    def load(self, output: Reporter) -> LoadedModel:
        """As of every command; ConfigError: the recipe is of another model."""
        loaded = super().load(output)
        if self.recipe is not None:
            Recipe.read(self.recipe).check_model(loaded.fingerprint)
        return loaded

    def for_context(self, context: Context | None) -> Self:
        """The same options; model and dtype are the context's where the command line names none.

        CacheError: a dtype that no model of kvcli is loaded in.
        """
        if context is None:
            return self
        model, dtype = context.identity.model, context.identity.dtype
        if dtype not in get_args(ModelOptions.model_fields["dtype"].annotation):
            raise CacheError(f"{context.name} was made with a model in {dtype}, in which kvcli loads none")
        of_context = {"model": model, "dtype": dtype}
        missing = {name: x for name, x in of_context.items() if name not in self.model_fields_set and x}
        return self.model_copy(update=missing)

    def settings(self) -> dict[str, Any]:
        """The settings that the command line names; ConfigError: one that is not NAME=VALUE."""
        lengths = {"sink_length": self.sink_length, "residual_length": self.residual_length}
        return {**parse_settings(self.setting), **{name: x for name, x in lengths.items() if x is not None}}

    def check(self, context: Path | None = None, store: Path | None = None) -> None:
        """Checks model, method, settings, artifact and context (a file or a name in the store) without torch.

        KvcliError: one of them does not exist or is out of range, or the artifact is of another method.
        """
        check_model_name(self.model)
        settings = self.settings()
        if context is not None and not context.exists():
            place = store or model_folder(self.model, "contexts")
            names = index.names(place)
            if str(context) not in names:
                raise CacheError(
                    f"there is no file {context} and no context '{context}' in {place}"
                    f"{suggestion(str(context), names)}; 'kvcli contexts list' shows those that are there"
                )
        if self.fit:
            check_fit(self.method, self.artifact)
        if context is None or self.method is not None:
            named, folder = self.find_method()
            artifact = folder and artifact_method(folder)
            if artifact and self.method is not None and artifact != parse_name(self.method)[0]:
                raise ArtifactError(f"the artifact is for method '{artifact}', not '{self.method}'")
            name, from_bits = parse_name(named or artifact or UNFITTED_DEFAULT)
            if folder is not None:  # what fits its settings is known when it is loaded
                settings = {x: settings[x] for x in settings.keys() - get_config(name).model_fields}
            check_settings(name, {**from_bits, **settings})
        elif self.artifact is not None:
            artifact_method(self.artifact)

    def find_method(self) -> tuple[str | None, Path | None]:
        """The method, if it was not the artifact that names it, and the artifact's folder, if there is one.

        Where neither is asked for: the newest artifact for the model, else `UNFITTED_DEFAULT`. With `fit`, no folder.

        UsageError: no such method; ArtifactError: no artifact of a method that needs one.
        """
        if self.artifact is not None:
            return self.method, self.artifact
        if self.method is None:
            folder = default_artifact(self.model)
            return (UNFITTED_DEFAULT if folder is None else None), folder
        if self.fit or not get_config(parse_name(self.method)[0]).needs_artifact:
            return self.method, None
        try:
            return self.method, newest_artifact(self.model, self.method)
        except ArtifactError as error:
            raise ArtifactError(f"{error}; or add --fit{fit_time(self.model, self.method)}") from error


class SamplingOptions(SessionOptions):
    """And how tokens are chosen."""

    takes_several_gpus: ClassVar[bool] = True

    max_new_tokens: int = Field(64, ge=1, lt=2**31, description="tokens to generate at most")
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="temperature; 0: the most probable token")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the most probable tokens of this mass")
    top_k: int = Field(0, ge=0, description="sample from this many tokens; 0: all")
    repetition_penalty: float = Field(1.0, gt=0, allow_inf_nan=False, description="penalty of repeated tokens; 1: none")

    def sampling(self) -> SamplingConfig:
        from kvcli.attention.generation import SamplingConfig

        return SamplingConfig(self.max_new_tokens, self.temperature, self.top_p, self.top_k, self.repetition_penalty)


@dataclass
class ChosenMethod:
    """What is attached to the model.

    Attributes:
        name: of the method, with or without bits.
        settings: those that are not the method's defaults or the artifact's.
        layers: that are compressed; None: all.
        fit: whether artifact and folder are found, or made, when the model is there.
    """

    name: str
    artifact: Artifact | None
    settings: dict[str, Any] = field(default_factory=dict)
    layers: list[int] | None = None
    folder: Path | None = None
    fit: bool = False

    @property
    def notes(self) -> dict[str, Any]:
        """What a context notes of it, so that commands find the artifact again; its checksum is in the identity."""
        return {} if self.folder is None else {"artifact": str(self.folder.resolve())}

    def attach(self, loaded: LoadedModel, impl: str, output: Output) -> Session:
        """Attaches the method, says what its attention runs on, if that is not its kernels, and compiles those."""
        from kvcli.attention.attach import attach

        self.fit_missing(loaded, output)
        session = attach(loaded, self.name, artifact=self.artifact, impl=impl, layers=self.layers, **self.settings)
        say_notes(session, output)
        session.warmup(progress=output.progress)
        return session

    def fit_missing(self, loaded: LoadedModel, output: Output) -> None:
        """Finds or makes the artifact, with `fit`."""
        from kvcli.artifact.artifact import Artifact

        if self.fit:
            self.folder = fitted(self.name, loaded, output)
            self.artifact = Artifact.load(self.folder)


def say_notes(session: Session, output: Output) -> None:
    """Says what is unusual in how a session attends, and why not by kernels."""
    for note in session.notes:
        output.say(note)
    if session.backend.note is not None:
        output.say(f"{session.backend.impl} backend: {session.backend.note}")


def choose_method(options: SessionOptions, output: Output, context: Context | None = None) -> ChosenMethod:
    """The method: the one asked for, the artifact's, the context's or the default, in this order.

    Method, layers and settings of `context` hold where the options name no others; settings that differ are told
    when it is loaded.

    UsageError: no such method; ConfigError: a setting that is not NAME=VALUE; ArtifactError: none, or a damaged one.
    """
    from kvcli.artifact.artifact import Artifact

    settings = options.settings()
    if context is None or options.method is not None:
        name, folder = options.find_method()
        if folder is None:
            return ChosenMethod(name or UNFITTED_DEFAULT, None, settings, fit=options.fit)
        if options.artifact is None:
            output.say(f"using {folder}")
        artifact = Artifact.load(folder)
        return ChosenMethod(name or artifact.method, artifact, settings, folder=folder)
    identity, stored, folder = context.identity, dict(context.identity.config), options.artifact
    if "fitted" not in identity.codecs:
        return ChosenMethod(identity.method, None, {**stored, **settings}, list(identity.layers), folder)
    artifact_path = context.notes.get("artifact")
    if folder is None and isinstance(artifact_path, str) and (Path(artifact_path) / "kvcli.json").is_file():
        folder = Path(artifact_path)
    if folder is None:
        fitted = {name: x for name, x in stored.items() if name not in CacheConfig.model_fields}
        folder = newest_artifact(options.model, identity.method, fitted)
    output.say(f"using {folder}")
    settings = {name: x for name, x in stored.items() if name in CacheConfig.model_fields} | settings
    return ChosenMethod(identity.method, Artifact.load(folder), settings, list(identity.layers), folder)
