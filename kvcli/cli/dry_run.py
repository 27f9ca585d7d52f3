"""`--dry-run`: what a command would need, from configs and settings alone; nothing is loaded or written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcli.cli.bars import duration
from kvcli.cli.context_input import check_storable
from kvcli.cli.options import AUTO_DEVICE, ModelOptions
from kvcli.cli.output import Output, size
from kvcli.cli.paths import newest_artifact
from kvcli.cli.token_counts import TokenCounter
from kvcli.errors import ArtifactError, UsageError
from kvcli.registry import BASELINE, DEFAULT_METHOD

if TYPE_CHECKING:
    from pathlib import Path

    from kvcli.cache.context import Context
    from kvcli.calibrate.collect import CollectConfig
    from kvcli.calibrate.shards import Shard
    from kvcli.cli.compress import CompressOptions
    from kvcli.cli.fit import FitOptions
    from kvcli.cli.generate import GenerateOptions
    from kvcli.cli.prompt_sources import Source
    from kvcli.cli.session_options import SessionOptions
    from kvcli.methods.config import CacheConfig
    from kvcli.methods.method import Method
    from kvcli.plan.model import PlannedModel
    from kvcli.plan.stages import MethodPlan, Stage
    from kvcli.samples import Recording
    from kvcli.spec import ModelSpec

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

    asked = None if options.device == AUTO_DEVICE else options.device
    name = asked or ("cuda" if torch.cuda.is_available() else "cpu")
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
    from kvcli.attention.attach import make_config
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


def dry_compress(options: CompressOptions, sources: Sequence[Source], output: Output) -> None:
    """The dry run of `kvcli compress`: the largest context decides about memory, all of them about disk.

    What a store has already is not looked for.

    Args:
        options: of the command.
        sources: what would be compressed.
        output: where the result goes.

    Raises:
        KvcliError: a model, method, settings or artifact that cannot be used.
    """
    from dataclasses import replace

    name, planned = named_method(options, DEFAULT_METHOD), planned_model(options)
    check_storable(options.model, planned.spec)
    plan = method_plan(planned, name, options.settings(), options.artifact, options.impl)
    counter = TokenCounter(options.model, output)
    stages = [plan.compress(counter.source(source), options.prefill_chunk) for source in sources]
    largest = max(stages, key=lambda stage: stage.peak_bytes)
    disk, tokens = sum(stage.disk_bytes for stage in stages), sum(stage.tokens for stage in stages)
    fp16 = tokens * plan.planned.spec.fp16_bytes_per_token()
    say_stage(replace(largest, tokens=tokens, disk_bytes=disk), output, in_fp16=fp16)


def named_method(options: SessionOptions, default: str) -> str:
    """The method that was given, else that of the artifact, else a default.

    Raises:
        ArtifactError: an artifact that was named and is none.
    """
    from kvcli.artifact.metadata import read_metadata

    if options.method is not None:
        return options.method
    return default if options.artifact is None else str(read_metadata(options.artifact)["method"])


def dry_calibrate(options: Any, shard: Shard | None, output: Output) -> None:
    """The dry run of `kvcli calibrate`, of a corpus that is large enough.

    Args:
        options: of the command.
        shard: of the work; None: all of it.
        output: where the result goes.

    Raises:
        UsageError: more shards than forward passes.
    """
    from kvcli.machine import resident_bytes
    from kvcli.plan.stages import calibrate

    planned = planned_model(options)
    say_stage(calibrate(planned, calibration(planned.spec, options), resident_bytes(), shard), output)


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


def dry_fit(method: Method, config: CacheConfig, recording: Recording, options: FitOptions, output: Output) -> None:
    """The dry run of a fit.

    Args:
        method: to fit.
        config: its settings, resolved.
        recording: the samples.
        options: of the command.
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
        block_tokens=options.block_tokens,
        program_bytes=resident_bytes() if options.torch_device() == "cpu" else 0,
    )
    say_stage(stage, output, artifact_bytes=stage.disk_bytes // 2)


def dry_generate(options: GenerateOptions, prompt: str, context: Context | None, output: Output) -> None:
    """The dry run of `kvcli generate`; what a store has of the prompt is not looked for.

    Args:
        options: of the command, with what follows from the context.
        prompt: the text.
        context: that the prompt goes on from.
        output: where the result goes.

    Raises:
        KvcliError: a model, method, settings or artifact that cannot be used.
    """
    planned, held = planned_model(options), 0
    name, settings = named_method(options, BASELINE), options.settings()
    if context is not None:
        identity, held = context.identity, context.snapshot.num_tokens
        if len(identity.layers) < (num_layers := planned.spec.num_layers):
            raise UsageError(
                f"{context.name} compresses {len(identity.layers)} of {num_layers} layers; plans are of all"
            )
        if options.method is None:
            name, settings = identity.method, {**identity.config, **settings}
    plan = method_plan(planned, name, settings, options.artifact, options.impl)
    new = TokenCounter(options.model, output).prompt(prompt, chat=options.chat, begins=not held)
    tokens, chunk = held + new, options.prefill_chunk
    if held:
        chunk = min(new, chunk or new)  # what the context holds is not read
    stage = plan.generate(tokens, options.max_new_tokens, chunk=chunk)
    memory = plan.memory(tokens, options.max_new_tokens, chunk=chunk)
    others = {"other_layers_bytes": memory.other_bytes} if memory.other_layers else {}
    say_stage(stage, output, cache_bytes=memory.allocated_bytes, **others)
