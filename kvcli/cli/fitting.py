"""`--fit`: the artifact that a method needs, recorded and fitted once per model, and how long that takes."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.cli.output import Output, Stage
from kvcli.commands import paths
from kvcli.errors import ArtifactError, UsageError
from kvcli.models.builtin_models import BUILTIN_MODELS, copy_folder
from kvcli.registry import get_config, parse_name
from kvcli.storage.ranks import environment

if TYPE_CHECKING:
    from kvcli.models.load import LoadedModel


def check_fit(method: str | None, artifact: Path | None) -> None:
    """UsageError: there is nothing to fit, an artifact is named, or several processes run."""
    if method is None or artifact is not None:
        raise UsageError("--fit makes the artifact of a --method: name a method, and no --artifact")
    if not get_config(parse_name(method)[0]).needs_artifact:
        raise UsageError(f"method '{method}' needs no artifact; leave out --fit")
    if environment().count > 1:
        raise UsageError("--fit is for one process; start 'kvcli calibrate' and 'kvcli fit' with --devices instead")


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
    return f", roughly {max(1, round(seconds / 60))} minutes on 2 CPU cores, a few on a GPU"
