"""Options of commands that attach a method to a model, and what they mean when a context is gone on from.

`--fit` makes the artifact that a method needs, recorded and fitted once per model.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

from pydantic import Field, model_validator

from kvcli.artifact.choice import MethodChoice
from kvcli.artifact.recipe import Recipe
from kvcli.cli.output import Output, Stage
from kvcli.commands import paths
from kvcli.commands.options import IMPL_HELP, Impl, ModelOptions, parse_settings
from kvcli.commands.paths import default_artifact, model_folder, newest_artifact
from kvcli.contexts import index
from kvcli.errors import ArtifactError, CacheError, UsageError
from kvcli.methods.config import CacheConfig
from kvcli.models.builtin_models import BUILTIN_MODELS, copy_folder
from kvcli.models.hub import check_chat, check_model_name
from kvcli.registry import DEFAULT_METHOD, UNFITTED_DEFAULT, get_config, parse_name
from kvcli.storage.ranks import environment

if TYPE_CHECKING:
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
        """A recipe also names the model, where the command line names none."""
        return {"model": Recipe.read(str(values["recipe"])).model, **values} if values.get("recipe") else values

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

    def check(self, context: Path | None = None, store: Path | None = None, *, chat: bool = False) -> None:
        """Checks model, method, settings, artifact and context (a file or a name in the store) without torch.

        KvcliError: one of them does not exist or is out of range, or the artifact is of another method.
        """
        check_model_name(self.model)
        if chat and context is None:
            check_chat(self.model)
        if context is not None and not context.exists():
            place = store or model_folder(self.model, "contexts")
            if str(context) not in index.names(place):
                raise CacheError(f"there is no file {context}, and {index.no_context(place, str(context))}")
        if self.fit:
            if self.method is None or self.artifact is not None:
                raise UsageError("--fit makes the artifact of a --method: name a method, and no --artifact")
            if not get_config(parse_name(self.method)[0]).needs_artifact:
                raise UsageError(f"method '{self.method}' needs no artifact; leave out --fit")
            if environment().count > 1:
                advice = "start 'kvcli calibrate' and 'kvcli fit' with --devices instead"
                raise UsageError(f"--fit is for one process; {advice}")
        if context is None or self.names_method:
            self.choice().check(fit=self.fit)

    @property
    def names_method(self) -> bool:
        """Whether the command line names the method, itself or by a recipe."""
        return self.method is not None or self.recipe is not None

    def choice(self) -> MethodChoice:
        """What is asked for, with the newest artifact of a method that needs one, but none with `fit`.

        Where no method is named: that of the newest artifact for the model, else `UNFITTED_DEFAULT`.

        UsageError: no such method; ConfigError: a recipe or a setting that cannot be read; ArtifactError: no artifact
        of a method that needs one.
        """
        method, artifact = self.method or "", self.artifact
        alone = artifact is None and self.recipe is None and not self.fit
        if alone and not method:
            artifact = default_artifact(self.model)
            method = UNFITTED_DEFAULT if artifact is None else ""
        elif alone and get_config(parse_name(method)[0]).needs_artifact:
            try:
                artifact = newest_artifact(self.model, method)
            except ArtifactError as error:
                raise ArtifactError(f"{error}; or add --fit{fit_time(self.model, method)}") from error
        return MethodChoice.of(method, artifact, self.recipe, self.settings())


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
    """What is attached to the model."""

    choice: MethodChoice
    layers: list[int] | None = None  # that are compressed; None: all
    fit: bool = False  # whether the artifact is found, or made, when the model is there

    @property
    def notes(self) -> dict[str, Any]:
        """What a context notes of it, so that commands find the artifact again; its checksum is in the identity."""
        return {} if self.choice.folder is None else {"artifact": str(self.choice.folder.resolve())}

    def attach(self, loaded: LoadedModel, impl: str, output: Output) -> Session:
        """Attaches the method, says what its attention runs on, if that is not its kernels, and compiles those."""
        from kvcli.attention.attach import attach

        self.fit_missing(loaded, output)
        session = attach(loaded, self.choice, impl=impl, layers=self.layers)
        say_notes(session, output)
        session.warmup(progress=output.progress)
        return session

    def fit_missing(self, loaded: LoadedModel, output: Output) -> None:
        """Finds or makes the artifact, with `fit`."""
        if self.fit:
            self.choice = replace(self.choice, artifact=fitted(self.choice.method, loaded, output))


def fitted(method: str, loaded: LoadedModel, output: Output) -> Path:
    """The folder of an artifact of these very weights: one that is there, else it is made now; resumes.

    It is kept in the user's cache, by method and fingerprint; the recording is deleted.
    """
    from kvcli.artifact.metadata import METADATA, Metadata
    from kvcli.cli import calibrate, fit
    from kvcli.models.fingerprint import differs

    name = f"{method}-{sha256(loaded.fingerprint.encode()).hexdigest()[:12]}"
    folder, work = (paths.FITS / paths.model_folder(loaded.name).name / x for x in (name, f".{name}"))
    there = [folder]
    with suppress(ArtifactError):
        there.insert(0, paths.newest_artifact(loaded.name, method))
    for found in there:
        with suppress(ArtifactError):  # one of another version of kvcli, or none
            if differs(Metadata.read(found / METADATA).fingerprint, loaded.fingerprint) is None:
                output.say(f"using {found}")
                return found
    output.say(f"fitting {method} to {loaded.name}, once{fit_time(loaded.name, method)}; the same command resumes it")
    stage, device = Stage(output.as_json, output.quiet, output.verbose), {"device": str(loaded.model.device)}
    of_model = {"model": loaded.name, "out": work / "samples", **device}
    fisher_tokens = get_config(parse_name(method)[0]).fisher_tokens
    calibrate.run(calibrate.CalibrateOptions(**of_model, fisher_tokens=fisher_tokens), stage, loaded)
    fit.run(fit.FitOptions(method=method, samples=work / "samples", out=work / "run", **device), stage)
    fit.write_artifact([work / "run"], folder, True, stage)
    shutil.rmtree(work, ignore_errors=True)
    return folder


def fit_time(model: str, method: str) -> str:
    """About how long `--fit` takes, in words; empty where the model's config or weights are not on this machine.

    Two cores were seen to take 15 ps for a weight and a token, with gradients four times that and 40 ns for a score.
    """
    from kvcli.cli import calibrate

    config_cls, recorded = get_config(parse_name(method)[0]), calibrate.CalibrateOptions.model_fields["tokens"].default
    folder = copy_folder(BUILTIN_MODELS[model]) if model in BUILTIN_MODELS else Path(model).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text())
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * recorded
        scores = 1024 * config["num_hidden_layers"] * config["num_attention_heads"]
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""
    seconds = 1.5e-11 * weights * recorded + 1e-6 * config_cls.fit_us * values / 2
    seconds += (6e-11 * weights + 4e-8 * scores) * config_cls.fisher_tokens
    return f", roughly {max(1, round(seconds / 60))} min on 2 CPU cores, less on a GPU"


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
    if context is None or options.names_method:
        choice, layers = options.choice(), None
    else:
        identity, noted, folder = context.identity, context.notes.get("artifact"), options.artifact
        stored, layers = dict(identity.config), list(identity.layers)
        if "fitted" in identity.codecs:
            of_cache = CacheConfig.model_fields.keys()
            if folder is None and isinstance(noted, str) and (Path(noted) / "kvcli.json").is_file():
                folder = Path(noted)
            folder = folder or newest_artifact(
                options.model, identity.method, {name: stored[name] for name in stored.keys() - of_cache}
            )
            stored = {name: stored[name] for name in stored.keys() & of_cache}
        choice = MethodChoice.of(identity.method, artifact=folder, settings=stored | options.settings())
    if choice.fitted is not None and options.artifact is None and options.recipe is None:  # which is read now
        output.say(f"using {choice.artifact}")
    return ChosenMethod(choice, layers, options.fit)
