"""`kvcli recommend`."""

from __future__ import annotations

import json
import math
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.cli.command import Command, model_argument
from kvcli.cli.output import Output
from kvcli.cli.plan import CacheOptions, method_plans
from kvcli.cli.session_options import PREFILL_CHUNK
from kvcli.commands.paths import newest_artifact
from kvcli.commands.sizes import parse_size, size
from kvcli.commands.tables import DataTable
from kvcli.errors import ArtifactError, UsageError
from kvcli.models.builtin_models import BUILTIN_MODELS
from kvcli.registry import BASELINE

if TYPE_CHECKING:
    from kvcli.plan.memory import MethodPlan

LOSSES = Path(__file__).with_name("losses.json")
"""KL by model and method, the largest model first, and whose is 1 on one scale of all; by `docs/results/tables.py`."""


def run(options: CacheOptions, output: Output) -> None:
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
    rows = [_row(plan, options, memory, tables) for plan in plans]
    rows.sort(key=lambda row: (not row["fits"], math.inf if row["loss"] is None else row["loss"], row["peak_bytes"]))
    about = [f"{x['model']} ({x['tokens']} tokens of {x['text']}, {x['window']} in full precision)" for x in tables]
    output.say(f"loss is KL to the uncompressed model over {tables[0]['scale']}'s, measured on {' and '.join(about)}")
    if tables[0]["model"] != options.model:
        output.say(f"nothing was measured on {options.model}, whose losses will differ: the order is another model's")
    best = next((row for row in rows if row["fits"] and row["loss"] is not None), None)
    if best is None:
        output.say("nothing that was measured fits")
    elif best["method"] == BASELINE:
        output.say("nothing has to be compressed")
    else:
        runnable = options.model in BUILTIN_MODELS or "/" in options.model  # others are shapes alone
        words = [*(model_argument(options.model) if runnable else ["MODEL"]), "--method", best["method"]]
        first = f"'{shlex.join(['kvcli', 'generate', *words, '--fit'])}' and " if best["fit_first"] else ""
        measure = f"{first}'{shlex.join(['kvcli', 'eval', *words])}'"
        output.say(f"of what fits, {best['method']} is known to lose least; {measure} would measure it on this model")
    record = {"model": options.model, "memory_bytes": memory, "weights_bytes": planned.weights_bytes}
    record |= {"measured": about, "recommended": best and best["method"], "methods": rows}
    title = f"{options.batch} x {options.prompt_tokens} + {options.max_new_tokens} tokens in {size(memory)}"
    output.result(record, _table(title, rows))


def _row(plan: MethodPlan, options: CacheOptions, memory: int, tables: list[dict[str, Any]]) -> dict[str, Any]:
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


def _table(title: str, rows: list[dict[str, Any]]) -> DataTable:
    cells = [
        {
            "method": row["method"],
            "loss": "-" if row["loss"] is None else f"{row['loss']:.3f}",
            "measured on": row["measured_on"] or "-",
            "cache": size(row["cache_bytes"]),
            "peak": size(row["peak_bytes"]),
            **{name.replace("_", " "): "yes" if row[name] else "-" for name in ("fits", "fit_first")},
        }
        for row in rows
    ]
    return DataTable.of(title, cells, ("cache", "measured on"))


EXAMPLE = "kvcli recommend llama-3.1-8b --memory 24GiB --prompt-tokens 64K"
COMMAND = Command("recommend", CacheOptions, run, EXAMPLE, ("model",))
