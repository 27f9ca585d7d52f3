"""`kvcli plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer
from pydantic import Field

from kvcli.builtin_models import BUILTIN_MODELS
from kvcli.cli.bars import duration
from kvcli.cli.command import command
from kvcli.cli.dry_run import calibration, method_plan, planned_model
from kvcli.cli.next_command import model_argument
from kvcli.cli.options import IMPL_HELP, ModelOptions
from kvcli.cli.output import Output, parse_size, size
from kvcli.cli.tables import DataTable
from kvcli.cli.values import parse_settings
from kvcli.registry import BASELINE, DEFAULT_METHOD

if TYPE_CHECKING:
    from kvcli.plan.stages import MethodPlan

_COLUMNS = (
    "method",
    "bits",
    "cache",
    "of fp16",
    "on disk",
    "artifact",
    "peak",
    "longest",
    "batch",
    "pays from",
)
_OPTIONAL = ("on disk", "bits", "artifact")


class PlanOptions(ModelOptions):
    """Options of `kvcli plan`."""

    method: list[str] = Field(
        default=[],
        description=f"method, such as {DEFAULT_METHOD}-1; repeatable; default: {BASELINE} and all that bench compares",
    )
    setting: list[str] = Field(default=[], description="setting of every method that has it, NAME=VALUE; repeatable")
    impl: str = Field(default="auto", description=IMPL_HELP)
    prompt_tokens: int = Field(default=8192, ge=1, le=2**27, description="length of a prompt")
    max_new_tokens: int = Field(default=256, ge=1, le=2**20, description="tokens after each prompt")
    batch: int = Field(default=1, ge=1, le=2**20, description="sequences at once")
    prefill_chunk: int | None = Field(
        default=None, ge=1, description="prompt tokens of a sequence per forward pass; default: the whole prompt"
    )
    memory: str | None = Field(
        default=None, description="look for the longest prompt and the largest batch that fit, such as 24GiB"
    )
    tokens: int = Field(default=65536, ge=2, description="calibration: token budget")
    seq_len: int = Field(default=2048, ge=2, description="calibration: tokens per sequence")
    query_tokens: int = Field(default=8192, ge=0, description="calibration: tokens whose queries are recorded")
    fisher_tokens: int = Field(default=4096, ge=0, description="calibration: tokens whose gradients are computed")
    batch_size: int = Field(default=4, ge=1, description="calibration: sequences per forward pass")
    probe: bool = Field(
        default=False, description="load the model and time it for some seconds; without it, times are unknown"
    )


def run(options: PlanOptions, output: Output) -> None:
    """Say what calibrating, fitting and generating will take, from a model's config alone; no weights are needed."""
    from kvcli.plan.stages import calibrate

    memory = parse_size(options.memory)
    planned = planned_model(options)
    chosen = names(options)
    check_settings(options, chosen)
    plans = [method_plan(planned, name, settings_of(name, options.setting), impl=options.impl) for name in chosen]
    program = plans[0].program_bytes
    config = calibration(planned.spec, options)
    stage = calibrate(planned, config, program)
    probe = None
    if options.probe:
        from kvcli.plan.probe import probe_model

        output.say("timing the model for some seconds")
        probe = probe_model(options.load(output), config.seq_len)
        stage = replace(stage, seconds=probe.calibration_seconds(config))
    rows = [method_row(plan, plans, options, memory) for plan in plans]
    seconds = None if probe is None else probe.prompt_seconds(options.prompt_tokens * options.batch)
    record = {
        "model": planned.name,
        "device": planned.device.type,
        "dtype": str(planned.dtype).removeprefix("torch."),
        "num_layers": planned.spec.num_layers,
        "other_layers": planned.spec.other_layers,
        "weights_bytes": planned.weights_bytes,
        "quantized": planned.quantized,
        "program_bytes": program if planned.device.type == "cpu" else None,
        "memory_bytes": memory,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.max_new_tokens,
        "batch": options.batch,
        "prompt_seconds": seconds,
        "calibrate": stage.to_dict(),
        "methods": rows,
    }
    for line in lines(record):
        output.say(line)
    model = options.model  # or a shape, of which there is nothing to calibrate
    known = model in BUILTIN_MODELS or "/" in model
    output.result(record, table(record), ["kvcli", "calibrate", *model_argument(model)] if known else ())


def names(options: PlanOptions) -> list[str]:
    """The methods asked for, the baseline first."""
    from kvcli.registry import METHODS, get_method

    chosen = options.method or [name for method in METHODS for name in get_method(method).bench]
    return [BASELINE, *(name for name in dict.fromkeys(chosen) if name != BASELINE)]


def check_settings(options: PlanOptions, chosen: list[str]) -> None:
    """Raises ConfigError for a setting that no method has."""
    from kvcli.bench.layer import MethodCase
    from kvcli.bench.layer import check_settings as check

    check([MethodCase.parse(name, {}) for name in chosen], parse_settings(options.setting))


def settings_of(name: str, texts: list[str]) -> dict[str, Any]:
    """Those of the given settings that a method has."""
    from kvcli.registry import parse_method

    fields = parse_method(name)[0].config_cls.model_fields
    return {setting: value for setting, value in parse_settings(texts).items() if setting in fields}


def method_row(plan: MethodPlan, plans: list[MethodPlan], options: PlanOptions, memory: int | None) -> dict[str, Any]:
    """What a method needs, as plain JSON values.

    Args:
        plan: of the method.
        plans: of all methods, the baseline first.
        options: prompt, new tokens, batch and calibration.
        memory: bytes that all has to fit into; None: not asked.
    """
    from kvcli.plan.limits import break_even, limits
    from kvcli.plan.stages import fit

    spec, batch = plan.planned.spec, options.batch
    lengths, chunk = (options.prompt_tokens, options.max_new_tokens), options.prefill_chunk
    held = plan.memory(*lengths, batch, chunk=chunk)
    stage = plan.generate(*lengths, batch, chunk=chunk)
    context = None if spec.other_layers else plan.compress(options.prompt_tokens, chunk)
    row: dict[str, Any] = {
        "method": plan.name,
        "memory": held.to_dict(),
        "artifact_bytes": plan.artifact_bytes,
        "context_bytes": context and context.disk_bytes,
        "generate": stage.to_dict(),
        "compress": context and context.to_dict(),
        "fit": None,
        "fits": None,
        "break_even": [],
    }
    if plan.method.needs_artifact:
        config = calibration(spec, options)
        row["fit"] = fit(
            spec,
            plan.method,
            plan.config,
            tokens=config.num_sequences * config.seq_len,
            query_tokens=config.query_sequences * config.seq_len,
            program_bytes=plan.program_bytes if plan.on_cpu else 0,
        ).to_dict()
        others = [other for other in plans if not other.method.needs_artifact]
        smallest = min(others, key=lambda other: other.cache.memory(options.prompt_tokens).cache_bytes)
        row["break_even"] = [
            asdict(break_even(plan, other, options.prompt_tokens)) for other in dict.fromkeys((plans[0], smallest))
        ]
    if memory is not None:
        row["fits"] = asdict(limits(plan, memory, *lengths, chunk=chunk))
    return row


def lines(record: Mapping[str, Any]) -> list[str]:
    """Model and calibration, a line each."""
    stage, fits = record["calibrate"], [row["fit"] for row in record["methods"] if row["fit"]]
    beside = "" if record["program_bytes"] is None else f", program {size(record['program_bytes'])}"
    time = "time unknown (--probe)" if stage["seconds"] is None else f"about {duration(stage['seconds'])}"
    made = [
        f"{record['model']}, {record['dtype']} on {record['device']}: weights {size(record['weights_bytes'])}{beside}",
        f"calibrate {stage['tokens']} tokens: disk {size(stage['disk_bytes'])}, peak memory {size(stage['peak_bytes'])}"
        f", {time}",
    ]
    if record["quantized"]:
        made.append(
            f"the checkpoint is quantized ({record['quantized']}): its weights, and all peaks, are smaller than these, "
            f"which are of weights in {record['dtype']}"
        )
    if others := record["other_layers"]:
        held, count = record["methods"][0]["memory"], record["num_layers"]
        made.append(
            f"{count} of {count + others} layers compressed, those that attend to the whole context, with "
            f"{100 * held['share']:.0f} % of an uncompressed cache; the others keep transformers' own cache of "
            f"{size(held['other_bytes'])}, which counts in peaks only"
        )
    if fits:
        most = max(fits, key=lambda fit: fit["peak_bytes"])
        made.append(f"fit: peak memory up to {size(most['peak_bytes'])}")
    if record["prompt_seconds"] is not None:
        made.append(f"the prompt takes about {duration(record['prompt_seconds'])} without compression")
    return made


def table(record: Mapping[str, Any]) -> DataTable:
    """A row per method."""
    rows = record["methods"]
    shown = list(_COLUMNS if record["memory_bytes"] else [x for x in _COLUMNS if x not in ("longest", "batch")])
    cells = []
    for row in rows:
        memory, fits = row["memory"], row["fits"] or {}
        cell = {
            "method": row["method"],
            "bits": f"{memory['effective_bits']:.2f}",
            "cache": size(memory["allocated_bytes"]),
            "of fp16": f"1/{memory['ratio']:.1f}",
            "on disk": "-" if row["context_bytes"] is None else size(row["context_bytes"]),
            "artifact": size(row["artifact_bytes"]) if row["artifact_bytes"] else "-",
            "peak": size(row["generate"]["peak_bytes"]),
            "longest": count(fits.get("context")),
            "batch": count(fits.get("batch")),
            "pays from": " / ".join(count(pays["context"]) for pays in row["break_even"]) or "-",
        }
        cells.append([cell[column] for column in shown])
    against: list[Mapping[str, Any]] = next((row["break_even"] for row in rows if row["break_even"]), [])
    title = f"{record['batch']} x {record['prompt_tokens']} + {record['new_tokens']} tokens"
    if record["memory_bytes"]:
        title += f"; longest, batch: what fits into {size(record['memory_bytes'])}"
    if against:
        title += f"; pays from: tokens, against {' / '.join(pays['against'] for pays in against)}"
    return DataTable(title, shown, cells, optional=[x for x in _OPTIONAL if x in shown])


def count(number: int | None) -> str:
    """A number of tokens or sequences in few characters."""
    if number is None:
        return "-"
    if number < 10_000:
        return str(number)
    return f"{number / 1000:.0f}K" if number < 1_000_000 else f"{number / 1e6:.1f}M"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    example = "kvcli plan llama-3.1-8b --device cuda --memory 24GiB --prompt-tokens 32768"
    command(app, "plan", PlanOptions, example, ("model",))(run)
