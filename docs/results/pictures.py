"""The pictures of docs, from the records here, from what `kvcli plan` computes and from the layout of a page.

A picture ends with a digest of all that it was drawn from: it is stale where that differs, whatever fonts there are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvcli.artifact.choice import MethodChoice
from kvcli.bench.layer import unfitted_codec
from kvcli.cache.ranges import StepRanges
from kvcli.cli.plan import CacheOptions, method_plans
from kvcli.models.shapes import shape_spec
from kvcli.paged.attention import Page
from kvcli.paged.pages import LayerEncoder
from kvcli.paged.rings import RESIDUAL_LENGTH
from kvcli.report.page import WIDE, Chart, axis, bars, layer, log, loss_by_size
from kvcli.rope import unrotate

FOLDER = Path(__file__).resolve().parent
SHAPE, CONTEXT = "llama-3.1-8b", 131072
COLOURS = ["#4c8fd0", "#7fb3e6", "#e4572e", "#f2a07b", "#5f9e6e", "#9bc7a5", "#b08fc7", "#c9b458", "#8a8f98"]


def records(name: str) -> list[dict[str, Any]]:
    """The records of a file, in order."""
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def loss() -> Chart:
    """KL over bits on SmolLM2."""
    (chart,) = loss_by_size(records("quality-smollm2-135m"))
    return chart._replace(
        title="SmolLM2-135M: loss by size. Lower left is better; the line is the Pareto front", height=400
    )


def speed() -> Chart:
    """Time of one layer's attention of one token over the context."""
    shown = {"fp16": "fp16, SDPA", "fa3": "fp16, FlashAttention 3", **dict.fromkeys(("kivi-2", "kivi-4", "klt-2"))}
    shown |= dict.fromkeys(("commvq-1", "commvq-2"))
    data = [
        {"name": shown[row["method"]] or row["method"], "tokens": row["context"], "us": row["p50_us"]}
        for row in records("attention-h100")
        if row["method"] in shown
    ]
    names = [name or method for method, name in shown.items()]
    colour = axis("name", None, "nominal", scale={"domain": names, "range": ["#8a8f98", "#5b626e", *COLOURS]})
    contexts = [8192, 32768, CONTEXT]
    labels = {"values": contexts, "labelExpr": "datum.value / 1024 + 'K'", "grid": False}
    x = axis("tokens", "tokens of context", scale={"type": "log", "base": 2, "domain": [7000, 150000]}, axis=labels)
    encoding = {"x": x, "y": log("us", "microseconds", data), "color": colour}
    title = "One layer of Llama-3.1-8B, one new token, H100: lower is faster"
    return Chart(
        title, data, 320, encoding, [layer("line", strokeWidth=2), layer("point", filled=True, size=40, opacity=1)]
    )


def capacity() -> Chart:
    """Tokens of a cache that fit into a GiB."""
    names = ["fp8", "kivi-4", "kivi-2", "klt-2.25", "commvq-2", "commvq-1"]
    options = CacheOptions(model=SHAPE, prompt_tokens=CONTEXT, device="cuda", dtype="bfloat16")
    _, plans = method_plans(options, names)
    tokens = [(plan.name, CONTEXT / (plan.memory(CONTEXT, 0, 1).allocated_bytes / 2**30) / 1024) for plan in plans]
    title = "Tokens of Llama-3.1-8B's cache in one GiB, in K, at 128K: longer is better"
    return bars(title, "K tokens per GiB", [(name, x, {}) for name, x in tokens])


def page() -> Chart:
    """The bytes of a page."""
    spec, choice = shape_spec(SHAPE), MethodChoice.of("kivi-2")
    ranges = StepRanges(2, torch.device("cpu"))
    encoder = LayerEncoder(unfitted_codec(choice, spec, 0), 0, torch.bfloat16, ranges, unrotate)
    made = Page(encoder, torch.bfloat16, 128, choice.config.sink_length)
    keys, values, sinks = made.views(torch.zeros(1, made.nbytes, dtype=torch.uint8))
    parts = [
        (f"{kind} {'codes' if name == 'packed' else name + 's'}", x.nbytes / 1024)
        for kind, codes in (("key", keys), ("value", values))
        for name, x in codes.tensors().items()
    ]
    parts.append(("exact sinks", sinks.nbytes / 1024))
    token = 4 * spec.kv_dim / 1024
    ring = RESIDUAL_LENGTH + encoder.codec.key.tokens_per_group - 1
    exact = [("keys and values in 16 bits", 128 * token)]
    rows = [("a page", parts), (f"a request's ring, {ring} tokens", [("exact recent tokens", ring * token)])]
    title = f"128 tokens of one layer of Llama-3.1-8B in a page of kivi-2, {made.nbytes // 1024} KiB, and in 16 bits"
    return strips(title, "KiB", [*rows, ("in 16 bits", exact)])


def life() -> Chart:
    """Where a token is, by how many tokens came after it."""
    recent = RESIDUAL_LENGTH
    kivi = [("exact: in a ring", float(recent)), ("exact: its group is open", 32.0), ("codes, in its page", 96.0)]
    alone = [("exact: in a ring", float(recent)), ("codes, in its page", 128.0)]
    rows = [
        ("keys of kivi", kivi),
        ("values; klt, commvq", alone),
        ("sinks (first 4)", [("exact, in the first page", 160.0)]),
    ]
    return strips(
        "Where a token of a request is, by the number of tokens after it", "tokens after it", rows, told=False
    )


def strips(
    title: str, unit: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, told: bool = True
) -> Chart:
    """Bars of named parts one after another, with their widths unless these are not `told`."""
    data, names = list[dict[str, Any]](), list[str]()
    for row, parts in rows:
        start = 0.0
        for name, width in parts:
            names += [name] if name not in names else []
            data.append({"row": row, "part": name, "start": start, "end": start + width, "text": f"{width:g}" * told})
            start += width
    y = axis("row", None, "nominal", sort=None, axis={"grid": False, "domain": False, "ticks": False})
    colour = axis("part", None, "nominal", sort=names, scale={"domain": names, "range": COLOURS})
    x = axis("start", unit, axis={"tickCount": 6})
    ends = {"x": x, "x2": {"field": "end"}}
    middle = {"x": axis("middle", unit), "text": {"field": "text"}}
    for cell in data:
        cell["middle"] = (float(cell["start"]) + float(cell["end"])) / 2
    layers = [
        layer("rect", encoding={**ends, "color": colour}, height=26, stroke="white"),
        layer("text", encoding=middle),
    ]
    return Chart(title, data, 34 * len(rows), {"y": y}, layers)


PICTURES: dict[str, Callable[[], Chart]] = {
    "pareto": loss,
    "attention": speed,
    "capacity": capacity,
    "page": page,
    "life": life,
}


def digest(chart: Chart) -> str:
    """Of all that a chart is drawn from."""
    return hashlib.sha256(json.dumps(chart.spec(WIDE), sort_keys=True).encode()).hexdigest()


def stale() -> dict[Path, Chart]:
    """The pictures that are not of what there is now."""
    charts = {FOLDER / f"{name}.svg": make() for name, make in PICTURES.items()}
    return {path: chart for path, chart in charts.items() if not path.exists() or digest(chart) not in path.read_text()}


def draw(path: Path, chart: Chart) -> None:
    """Writes a picture."""
    path.write_text(f"{chart.drawn('svg').decode().rstrip()}\n<!-- of {digest(chart)} -->\n")
