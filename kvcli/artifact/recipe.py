"""Recipes: YAML files with a method and its settings for one model, and what they were measured to lose."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from kvcli._version import __version__
from kvcli.commands.options import read_yaml
from kvcli.commands.paths import artifact_record
from kvcli.errors import ConfigError, UsageError, explain
from kvcli.registry import make_config, parse_name
from kvcli.storage.atomic import replacing


class Recipe(BaseModel):
    """One recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    format_version: Literal[1] = 1
    kvcli_version: str = __version__
    model: str
    fingerprint: str
    method: str
    settings: dict[str, Any] = {}  # of the method; bits may be lists, a number for each layer
    artifact: str | None = None  # folder of a fitted method's artifact
    artifact_sha256: str | None = None  # the seal of its metadata
    measured: dict[str, Any] = {}  # bits, loss with its interval, and on which text, as plain values

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Reads and checks a file, without torch; ConfigError: it is no recipe, or of a method that is not known."""
        content = read_yaml(path)
        try:
            recipe = cls.model_validate(content)
            name, bits = parse_name(recipe.method)
            make_config(name, {**bits, **recipe.settings})
        except ValidationError as error:
            raise ConfigError(f"{path} is no recipe of this kvcli: {explain(error, cls.model_fields)}") from error
        except UsageError as error:
            raise ConfigError(f"{path}: {error}") from error
        if "measured" not in recipe.model_fields_set:  # the last one of a file
            raise ConfigError(f"{path} was cut off: it does not say what was measured")
        return recipe

    def save(self, path: Path) -> None:
        """Writes the file, lists of numbers in lines of their own; ConfigError: `read` would refuse it."""
        import yaml

        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=120)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
            self.read(temporary)

    def check_model(self, fingerprint: str) -> None:
        """ConfigError, with the name of the recipe's model, for another model."""
        from kvcli.models.fingerprint import differs

        try:
            reason = differs(fingerprint, self.fingerprint)
        except ValueError as error:
            raise ConfigError(f"the recipe's fingerprint of {self.model} cannot be read") from error
        if reason is not None:
            raise ConfigError(f"the recipe was made for {self.model}, not for this model: {reason}")

    def find_artifact(self, folder: str | Path | None = None) -> Path | None:
        """The artifact's folder, by default the recipe's, None without one; ConfigError: it holds another one."""
        folder = folder or self.artifact
        if (folder and artifact_sha256(folder)) != self.artifact_sha256:
            hint = "; its 'artifact' has to name the folder that does" if self.artifact_sha256 else ", which has none"
            raise ConfigError(f"{folder} does not hold the artifact of the recipe{hint}")
        return Path(folder) if folder else None


def artifact_sha256(folder: str | Path) -> str | None:
    """The seal of an artifact's metadata, which name its tensors by checksum; None: there is no artifact."""
    seal = artifact_record(folder).get("sha256")
    return None if seal is None else str(seal)
