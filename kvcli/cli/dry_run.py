"""`--dry-run`: what a command would need, from configs and settings alone; nothing is loaded or written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcli.cli.options import ModelOptions
from kvcli.cli.output import Output, duration, size
from kvcli.cli.paths import newest_artifact
from kvcli.errors import ArtifactError, UsageError
from kvcli.registry import BASELINE

if TYPE_CHECKING:
    from pathlib import Path

    from kvcli.calibrate.collect import CollectConfig
    from kvcli.methods.config import CacheConfig
    from kvcli.methods.method import Method
    from kvcli.plan.model import PlannedModel
    from kvcli.plan.stages import MethodPlan, Stage
    from kvcli.samples import Recording
    from kvcli.spec import ModelSpec

_CHARACTERS = 4

DRY_RUN = "say what the run will need, and do nothing"
"""Help of every `--dry-run`."""


def planned_model(options: ModelOptions) -> PlannedModel:
    """The model that options name, without its weights; a GPU that is planned for need not be there.

    Raises:
        ModelError: no such model.
        UsageError: no such device.
    """
    import torch

    from kvcli.plan.model import PlannedModel, model_config

    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device '{name}' is not known; plan for cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"memory is planned for cpu and cuda, not for '{name}'")
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = default if options.dtype == "auto" else getattr(torch, options.dtype)
    config = model_config(options.model, options.base_config, options.model_revision)
    return PlannedModel(options.model, config, dtype, device)


def method_plan(
    planned: PlannedModel, name: str, settings: Mapping[str, Any], artifact: Path | None = None, impl: str = "auto"
) -> MethodPlan:
    """What a method needs on a model; the settings of its newest artifact are taken where there is one.

    Args:
        planned: the model.
        name: of the method, with or without bits.
        settings: of the method.
        artifact: folder of an artifact; None: the newest.
        impl: `reference`, `fused` or `auto`.

    Raises:
        UsageError: no such method.
        ConfigError: settings that do not exist or do not fit the model's shapes.
        ArtifactError: an artifact that was named and is none.
    """
    from kvcli.attention.session import make_config
    from kvcli.machine import resident_bytes
    from kvcli.plan.stages import MethodPlan
    from kvcli.registry import parse_method

    method, from_bits = parse_method(name)
    stored = artifact_settings(planned.name, name, method, artifact)
    config = make_config(method, {**from_bits, **settings})
    resolved(config, planned)
    fitted = resolved(make_config(method, {**stored, **settings}), planned) if stored else None
    fused = impl == "fused" or (impl == "auto" and planned.device.type == "cuda")
    return MethodPlan(planned, name, method, config, fitted=fitted, fused=fused, program_bytes=resident_bytes())


def artifact_settings(model: str, name: str, method: Method, artifact: Path | None) -> dict[str, Any]:
    """Settings of an artifact: those that was named, else the newest if there is one.

    Raises:
        ArtifactError: an artifact that was named and is none, or of another method.
    """
    from kvcli.artifact.metadata import read_metadata

    if artifact is None and not method.needs_artifact:
        return {}
    try:
        metadata = read_metadata(artifact or newest_artifact(model, name))
        if metadata["method"] != method.name:
            raise ArtifactError(f"{artifact} is an artifact of method '{metadata['method']}', not of '{method.name}'")
        return dict(metadata["config"])
    except (ArtifactError, KeyError, TypeError, ValueError):
        if artifact is not None:
            raise
        return {}


def resolved(config: CacheConfig, planned: PlannedModel) -> CacheConfig:
    """Settings for a model's shapes.

    Raises:
        UsageError: settings that do not fit the shapes.
    """
    try:
        return config.resolve(planned.spec)
    except ValueError as error:
        raise UsageError(" ".join(str(error).split())) from error


def say_stage(stage: Stage, output: Output, **also: Any) -> None:
    """The result of a dry run: one line, or a record."""
    device = "the process" if stage.host_bytes is None else "the GPU"
    parts = [f"{stage.tokens} tokens", f"peak memory of {device} {size(stage.peak_bytes)}"]
    if stage.host_bytes is not None:
        parts.append(f"of the process {size(stage.host_bytes)} beside the program")
    if stage.disk_bytes:
        parts.append(f"disk {size(stage.disk_bytes)}")
    parts.append("time unknown" if stage.seconds is None else f"about {duration(stage.seconds)}")
    parts += [f"{name.replace('_', ' ')} {size(value)}" for name, value in also.items()]
    output.result({"dry_run": True, **stage.to_dict(), **also}, f"{stage.name}: {', '.join(parts)}")


def dry_compress(
    options: ModelOptions,
    name: str,
    settings: Mapping[str, Any],
    token_counts: Sequence[int],
    output: Output,
    *,
    artifact: Path | None = None,
    chunk: int | None = None,
    impl: str = "auto",
) -> None:
    """The dry run of `kvcli compress`: the largest context decides about memory, all of them about disk.

    Args:
        options: which model, and on what.
        name: of the method, with or without bits.
        settings: of the method.
        token_counts: tokens of each context.
        output: where the result goes.
        artifact: folder of an artifact; None: the newest.
        chunk: prompt tokens per forward pass; None: all.
        impl: `reference`, `fused` or `auto`.

    Raises:
        KvcliError: a model, method, settings or artifact that cannot be used.
    """
    from dataclasses import replace

    plan = method_plan(planned_model(options), name, settings, artifact, impl)
    stages = [plan.compress(count, chunk) for count in token_counts]
    largest = max(stages, key=lambda stage: stage.peak_bytes)
    disk, tokens = sum(stage.disk_bytes for stage in stages), sum(stage.tokens for stage in stages)
    fp16 = tokens * plan.planned.spec.fp16_bytes_per_token()
    say_stage(replace(largest, tokens=tokens, disk_bytes=disk), output, in_fp16=fp16)


def dry_calibrate(options: Any, output: Output) -> None:
    """The dry run of `kvcli calibrate`, of a corpus that is large enough; its options as they are."""
    from kvcli.machine import resident_bytes
    from kvcli.plan.stages import calibrate

    planned = planned_model(options)
    say_stage(calibrate(planned, calibration(planned.spec, options), resident_bytes()), output)


def calibration(spec: ModelSpec, options: Any) -> CollectConfig:
    """What `kvcli calibrate` would record of a corpus that is large enough.

    Args:
        spec: the model's shapes.
        options: with the options of `calibrate` by their names.
    """
    import torch

    from kvcli.calibrate.collect import CollectConfig

    seq_len = min(options.seq_len, options.tokens, spec.max_position_embeddings)
    sequences = torch.empty(max(1, options.tokens // seq_len), seq_len, device="meta")
    return CollectConfig.for_tokens(
        sequences,
        query_tokens=options.query_tokens,
        fisher_tokens=options.fisher_tokens,
        batch_size=options.batch_size,
        layer_window=getattr(options, "layer_window", 0),
    )


def dry_fit(method: Method, config: CacheConfig, recording: Recording, device: str, output: Output) -> None:
    """The dry run of a fit.

    Args:
        method: to fit.
        config: its settings, resolved.
        recording: the samples.
        device: where fitting would compute.
        output: where the result goes.
    """
    from kvcli.machine import resident_bytes
    from kvcli.plan.stages import fit

    if method.allocate is not None:
        config = method.allocate(recording.spec, config, recording.fisher)
    stage = fit(
        recording.spec,
        method,
        config,
        tokens=recording.num_tokens,
        query_tokens=int(recording.manifest["query_sequences"]) * int(recording.manifest["seq_len"]),
        program_bytes=resident_bytes() if device == "cpu" else 0,
    )
    say_stage(stage, output, artifact_bytes=stage.disk_bytes // 2)


def dry_generate(options: Any, prompt: str, output: Output) -> None:
    """The dry run of `kvcli generate`.

    Args:
        options: of the command.
        prompt: the text.
        output: where the result goes.
    """
    from kvcli.artifact.metadata import read_metadata
    from kvcli.cli.values import parse_settings

    name = options.method
    if name is None:
        name = BASELINE if options.artifact is None else read_metadata(options.artifact)["method"]
    lengths = {"sink_length": options.sink_length, "residual_length": options.residual_length}
    given = {setting: value for setting, value in lengths.items() if value is not None}
    planned = planned_model(options)
    plan = method_plan(planned, name, {**parse_settings(options.setting), **given}, options.artifact, options.impl)
    tokens = count_tokens(options.model, prompt, output)
    stage = plan.generate(tokens, options.max_new_tokens)
    say_stage(stage, output, cache_bytes=plan.memory(tokens, options.max_new_tokens).allocated_bytes)


def count_tokens(model: str, text: str, output: Output) -> int:
    """Tokens of a text, by the model's tokenizer where it is here, else one for four characters."""
    from kvcli.models import find_tokenizer

    tokenizer: Any = find_tokenizer(model)
    if tokenizer is None:
        output.say(f"the tokenizer of {model} is not here: a token is taken to have {_CHARACTERS} characters")
        return max(1, len(text) // _CHARACTERS)
    return max(1, len(tokenizer(text)["input_ids"]))
