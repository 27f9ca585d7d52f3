"""`kvcli plan` and `kvcli recommend`."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvcli.artifact.choice import MethodChoice, choose
from kvcli.cli.command import Command, model_argument
from kvcli.cli.output import Output
from kvcli.cli.session_options import PREFILL_CHUNK
from kvcli.commands.options import AUTO_DEVICE, IMPL_HELP, Impl, ModelOptions, parse_settings
from kvcli.commands.paths import newest_artifact
from kvcli.commands.sizes import parse_size, share, size, tokens
from kvcli.commands.tables import DataTable
from kvcli.errors import ArtifactError, UsageError, error_text
from kvcli.models.builtin_models import BUILTIN_MODELS
from kvcli.models.hub import check_model_name
from kvcli.models.shapes import SHAPES, naming_shapes
from kvcli.registry import BASELINE, DEFAULT_METHOD, METHODS, get_method, method_name

if TYPE_CHECKING:
    from kvcli.plan.memory import MethodPlan, PlannedModel


LOSSES = Path(__file__).with_name("losses.json")
"""KL by model and method, the largest model first, and whose is 1 on one scale of all; by `docs/results/tables.py`."""


class CacheOptions(ModelOptions):
    """Options of commands that say what caches of a model take."""

    method: list[str] = Field(
        [],
        description=f"method, such as {DEFAULT_METHOD}-1; repeatable; default: {BASELINE} and all that kvcli compares",
    )
    setting: list[str] = Field([], description="setting of every method that has it, NAME=VALUE; repeatable")
    impl: Impl = Field("auto", description=IMPL_HELP)
    prompt_tokens: int = Field(8192, ge=1, le=2**27, description="length of a prompt")
    max_new_tokens: int = Field(256, ge=1, le=2**20, description="tokens after each prompt")
    batch: int = Field(1, ge=1, le=2**20, description="sequences at once")
    prefill_chunk: int | None = Field(
        None, ge=1, description=f"tokens of a prompt per forward pass; default: plan: all, recommend: {PREFILL_CHUNK}"
    )
    memory: str | None = Field(None, description="what to fit into, as 24GiB; plan: longest prompt and largest batch")


class PlanOptions(CacheOptions):
    """Options of `kvcli plan`."""

    gpus: int = Field(
        1, ge=1, le=2**10, description="engine: GPUs of a node, which divide each layer (tensor parallel)"
    )
    nodes: int = Field(1, ge=1, le=2**16, description="engine: nodes, each with requests of its own")
    requests: int | None = Field(None, ge=1, description="engine: requests at once, for which nodes are counted")
    tokens: int = Field(65536, ge=2, description="calibration: token budget")
    seq_len: int = Field(2048, ge=2, description="calibration: tokens per sequence")
    query_tokens: int = Field(8192, ge=0, description="calibration: tokens whose queries are recorded")
    fisher_tokens: int = Field(32768, ge=0, description="calibration: tokens whose gradients are computed")
    batch_size: int = Field(4, ge=1, description="calibration: sequences per forward pass")


def run(options: PlanOptions, output: Output) -> None:
    """Say what calibrating and generating will take, from a model's config alone; no weights are needed.

    A --memory is a GPU's, also where there is none, unless --device cpu says otherwise.
    """
    memory = parse_size(options.memory)
    in_engine = (options.gpus, options.nodes, options.requests) != (1, 1, None)
    if in_engine and memory is None:
        raise UsageError("say what an engine may use of each GPU, such as --memory 80GiB")
    planned, plans = method_plans(options, options.method)
    from kvcli.calibrate.config import CollectConfig
    from kvcli.plan.memory import calibration

    program = plans[0].program_bytes
    seq_len = min(options.seq_len, options.tokens, planned.spec.max_position_embeddings)
    budgets = options.model_dump(include={"query_tokens", "fisher_tokens", "batch_size"})
    recording = CollectConfig.for_tokens(max(1, options.tokens // seq_len), seq_len, **budgets)
    record: dict[str, Any] = {
        "model": planned.name,
        "device": planned.device.type,
        "dtype": str(planned.dtype).removeprefix("torch."),
        "num_layers": planned.spec.num_layers,
        "other_layers": planned.spec.other_layers,
        "weights_bytes": planned.weights_bytes,
        "quantized": planned.quantized,
        "program_bytes": program or None,
        "memory_bytes": memory,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.max_new_tokens,
        "batch": options.batch,
        "calibrate": calibration(planned, recording, program),
        "methods": [_method_row(plan, plans, options, memory) for plan in plans],
    }
    if in_engine and memory is not None:
        from kvcli.plan.cluster import TIER, Cluster

        cluster, length = Cluster(options.nodes, options.gpus, memory), options.prompt_tokens + options.max_new_tokens
        for row, plan in zip(record["methods"], plans, strict=True):
            row["engine"], row["tier"] = cluster.holds(plan, length, options.requests), cluster.tier(plan)
        record["tier"] = TIER
        record |= options.model_dump(include={"gpus", "nodes", "requests"})
    for line in _lines(record, planned):
        output.say(line)
    model = options.model  # or a shape, of which there is nothing to calibrate
    known = model in BUILTIN_MODELS or "/" in model
    output.result(record, _table(record), ["kvcli", "calibrate", *model_argument(model)] if known else ())


def method_plans(options: CacheOptions, names: Sequence[str]) -> tuple[PlannedModel, list[MethodPlan]]:
    """The model, and what the baseline and methods, or those that kvcli compares, need on it.

    UsageError: no such device, method or setting; ModelError: no such model, or one that no method compresses.
    """
    with naming_shapes(options.model):
        if options.model not in SHAPES:
            check_model_name(options.model)
    settings = parse_settings(options.setting)
    if names:  # before torch is imported
        choose(map(MethodChoice, [BASELINE, *names]), settings)
    import torch

    from kvcli.commands.machine import resident_bytes
    from kvcli.plan.memory import PlannedModel, model_config
    from kvcli.seam.probe import probe

    device_name = None if options.device == AUTO_DEVICE else options.device
    device_name = device_name or ("cuda" if options.memory or torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device_name)  # a GPU that is planned for need not be there
    except RuntimeError as error:
        raise UsageError(f"device '{device_name}' is not known; plan for cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"memory is planned for cpu and cuda, not for '{device_name}'")
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = default if options.dtype == "auto" else getattr(torch, options.dtype)
    config = model_config(options.model, options.base_config, options.model_revision)
    planned = PlannedModel(options.model, config, dtype, device)
    names = list(dict.fromkeys([BASELINE, *(names or [x for name in METHODS for x in get_method(name).bench])]))
    choices = choose(map(MethodChoice, names), settings)
    fused = options.impl == "fused" or (options.impl == "auto" and planned.device.type == "cuda")
    program = resident_bytes() if planned.device.type == "cpu" else 0
    probe(planned.empty)
    return planned, [_method_plan(planned, choice, fused=fused, program_bytes=program) for choice in choices]


def _method_plan(planned: PlannedModel, choice: MethodChoice, *, fused: bool, program_bytes: int) -> MethodPlan:
    """What a method needs on a model; settings that are not named are those of its newest artifact, if there is one."""
    from kvcli.artifact.metadata import METADATA, Metadata
    from kvcli.plan.memory import MethodPlan

    if choice.record.needs_artifact:
        with suppress(ArtifactError):
            stored = Metadata.read(newest_artifact(planned.name, choice.method) / METADATA).config
            choice = replace(choice, settings={**stored, **choice.settings})
    try:
        config = choice.config.resolve(planned.spec)
    except ValueError as error:
        raise UsageError(error_text(error)) from error
    return MethodPlan(planned, method_name(choice.name, dict(config)), choice.record, config, fused, program_bytes)


def _method_row(plan: MethodPlan, plans: list[MethodPlan], options: PlanOptions, memory: int | None) -> dict[str, Any]:
    """What a method needs, as plain JSON values; `plans` are of all methods, the baseline first."""
    lengths, chunk = (options.prompt_tokens, options.max_new_tokens), options.prefill_chunk
    against: list[MethodPlan] = []
    if plan.method.needs_artifact:
        others = [other for other in plans if not other.method.needs_artifact]
        smallest = min(others, key=lambda other: other.cache.memory(options.prompt_tokens).cache_bytes)
        against = [plans[0]] if smallest is plans[0] else [plans[0], smallest]
    return {
        "method": plan.name,
        "memory": plan.memory(*lengths, options.batch, chunk=chunk).to_dict(),
        "artifact_bytes": plan.artifact_bytes,
        "context_bytes": None if plan.planned.state_bytes is None else plan.context_bytes(options.prompt_tokens),
        "peak_bytes": plan.peak_bytes(*lengths, options.batch, chunk=chunk),
        "fits": None if memory is None else plan.limits(memory, *lengths, chunk=chunk),
        "break_even": [plan.break_even(other, options.prompt_tokens) for other in against],
    }


def _lines(record: Mapping[str, Any], planned: PlannedModel) -> list[str]:
    """Model and calibration, a line each."""
    stage = record["calibrate"]
    beside = "" if record["program_bytes"] is None else f", program {size(record['program_bytes'])}"
    texts = [
        f"{record['model']}, {record['dtype']} on {record['device']}: weights {size(record['weights_bytes'])}{beside}",
        f"calibrate {stage['tokens']} tokens: disk {size(stage['disk_bytes'])}, "
        f"memory at most {size(stage['peak_bytes'])}",
    ]
    if record["quantized"]:
        texts.append(
            f"the checkpoint is quantized ({record['quantized']}): its weights, and all peaks, are smaller than these, "
            f"which are of weights in {record['dtype']}"
        )
    if others := record["other_layers"]:
        memory, count = record["methods"][0]["memory"], record["num_layers"]
        texts.append(
            f"{count} of {count + others} layers compressed, those that attend to the whole context, with "
            f"{100 * memory['share']:.0f} % of an uncompressed cache; the others keep transformers' own cache of "
            f"{size(memory['other_bytes'])}, which counts in peaks and on disk only"
        )
        if planned.state_bytes is None:
            texts.append(f"states of {others - len(planned.windows)} layers of other kinds are not counted")
    if tier := record.get("tier"):
        texts.append(
            f"tier bytes: of a token in chunks of {tier['chunk_tokens']}, {BASELINE}: in an engine's files; from MB "
            f"per s: read so fast, they beat computing ({tier['source']}; other models and GPUs: not measured)"
        )
    return texts


def _table(record: Mapping[str, Any]) -> DataTable:
    rows, cells = record["methods"], []
    for row in rows:
        memory, fits, engine = row["memory"], row["fits"], {**(row.get("engine") or {}), **row.get("tier", {})}
        cells.append(
            {
                "method": row["method"],
                "bits": f"{memory['effective_bits']:.2f}",
                "cache": size(memory["allocated_bytes"]),
                "of fp16": share(memory["ratio"], 1),
                "on disk": "-" if row["context_bytes"] is None else size(row["context_bytes"]),
                "artifact": size(row["artifact_bytes"]) if row["artifact_bytes"] else "-",
                "peak": size(row["peak_bytes"]),
                **({"longest": _short_number(fits["context"]), "batch": _short_number(fits["batch"])} if fits else {}),
                **{name.replace("_", " "): _short_number(number) for name, number in engine.items()},
                "pays from": " / ".join(_short_number(pays["context"]) for pays in row["break_even"]) or "-",
            }
        )
    against: list[Mapping[str, Any]] = next((row["break_even"] for row in rows if row["break_even"]), [])
    title = f"{record['batch']} x {tokens(record['prompt_tokens'])} + {record['new_tokens']} tokens"
    if record["memory_bytes"]:
        title += f"; longest, batch: what fits into {size(record['memory_bytes'])}"
    if "nodes" in record:
        title += f"; tokens, requests: what an engine holds on {record['nodes']} x {record['gpus']} such GPUs"
    if against:
        title += f"; pays from: tokens, against {' / '.join(pays['against'] for pays in against)}"
    return DataTable.of(title, cells, ("on disk", "bits", "artifact"))


def _short_number(number: int | None) -> str:
    """A number of tokens or sequences in few characters, rounded down; K is 1024, as options read it."""
    return "-" if number is None else f"{number >> 10}K" if number >= 10 << 10 else str(number)


def recommend(options: CacheOptions, output: Output) -> None:
    """Say which methods fit into a memory, those first that are known to lose least, and how to measure the first.

    The memory is a GPU's, also where there is none, unless --device cpu says otherwise; prompts are read in parts.
    Losses are those of kvcli's own records; nothing is run.
    """
    options = options.model_copy(update={"prefill_chunk": options.prefill_chunk or PREFILL_CHUNK})
    memory = parse_size(options.memory)
    if memory is None:
        raise UsageError("say what has to be fitted into, such as --memory 24GiB")
    tables = json.loads(LOSSES.read_text())
    tables = [table for table in tables if table["model"] == options.model] or tables
    planned, plans = method_plans(options, options.method or [name for table in tables for name in table["kl"]])
    where = f"{planned.name}, {str(planned.dtype).removeprefix('torch.')} on {planned.device.type}"
    smaller = f"; those of the checkpoint ({planned.quantized}) and peaks are smaller" if planned.quantized else ""
    output.say(f"{where}: weights {size(planned.weights_bytes)}{smaller}")
    rows = [_fitting_row(plan, options, memory, tables) for plan in plans]
    rows.sort(key=lambda row: (not row["fits"], math.inf if row["loss"] is None else row["loss"], row["peak_bytes"]))
    about = [f"{x['model']} ({x['tokens']} tokens of {x['text']}, {x['window']} in full precision)" for x in tables]
    output.say(f"loss is KL to the uncompressed model over {tables[0]['scale']}'s, measured on {' and '.join(about)}")
    if tables[0]["model"] != options.model:
        output.say(f"nothing was measured on {options.model}, whose losses will differ: the order is another model's")
    best = next((row for row in rows if row["fits"] and row["loss"] is not None), None)
    record = {"model": options.model, "memory_bytes": memory, "weights_bytes": planned.weights_bytes}
    record |= {"measured": about, "recommended": best and best["method"], "methods": rows}
    title = f"{options.batch} x {tokens(options.prompt_tokens)} + {options.max_new_tokens} tokens in {size(memory)}"
    output.result(record, _fitting_table(title, rows, [table["model"] for table in tables]))
    if best is None:  # after the table, which may be longer than the terminal
        output.say("nothing that was measured fits")
    elif best["method"] == BASELINE:
        output.say("nothing has to be compressed")
    else:
        runnable = options.model in BUILTIN_MODELS or "/" in options.model  # others are shapes alone
        words = [*(model_argument(options.model) if runnable else ["MODEL"]), "--method", best["method"]]
        first = f"'{shlex.join(['kvcli', 'generate', *words, '--fit'])}' and " if best["fit_first"] else ""
        measure = f"{first}'{shlex.join(['kvcli', 'eval', *words])}'"
        output.say(f"of what fits, {best['method']} is known to lose least; {measure} would measure it on this model")


def _fitting_row(plan: MethodPlan, options: CacheOptions, memory: int, tables: list[dict[str, Any]]) -> dict[str, Any]:
    lengths, chunk = (options.prompt_tokens, options.max_new_tokens, options.batch), options.prefill_chunk
    kl = {x["model"]: 0.0 if plan.name == BASELINE else x["kl"].get(plan.name) for x in tables}
    losses = [(x["model"], loss / x["kl"][x["scale"]]) for x in tables if (loss := kl[x["model"]]) is not None]
    fit_first, peak = plan.method.needs_artifact, plan.peak_bytes(*lengths, chunk=chunk)
    with suppress(ArtifactError):
        fit_first = fit_first and not newest_artifact(options.model, plan.name)
    return {
        "method": plan.name,
        "kl": kl,
        **dict(zip(("measured_on", "loss"), losses[0] if losses else (None, None), strict=True)),
        "cache_bytes": plan.memory(*lengths, chunk=chunk).allocated_bytes,
        "peak_bytes": peak,
        "fits": peak <= memory,
        "fit_first": fit_first,
    }


def _fitting_table(title: str, rows: list[dict[str, Any]], models: list[str]) -> DataTable:
    """Methods in 80 columns: models on which losses were measured are numbered in the title."""
    title += f"; losses measured on {', '.join(f'({i}) {name}' for i, name in enumerate(models, 1))}"
    cells = [
        {
            "method": row["method"],
            "loss": "-" if row["loss"] is None else f"{row['loss']:.3f}",
            "on": f"({models.index(row['measured_on']) + 1})" if row["measured_on"] else "-",
            "cache": size(row["cache_bytes"]),
            "peak": size(row["peak_bytes"]),
            **{name.replace("_", " "): "yes" if row[name] else "-" for name in ("fits", "fit_first")},
        }
        for row in rows
    ]
    return DataTable.of(title, cells, ("cache", "on"))


EXAMPLE = "kvcli plan llama-3.1-8b --memory 24GiB --prompt-tokens 32K"
PLAN = Command("plan", PlanOptions, run, EXAMPLE, ("model",))
RECOMMEND = Command(
    "recommend", CacheOptions, recommend, "kvcli recommend llama-3.1-8b --memory 24GiB --prompt-tokens 64K", ("model",)
)
