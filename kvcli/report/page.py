"""The page of `kvcli report`: charts as SVG, which Vega-Lite draws, so the page runs no script and loads nothing.

Text and lines have the colour of the page's text, light or dark. A chart takes the width of a phone; those with much in
them are drawn a second time for wide screens, and the style sheet shows one.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from kvcli.bench.suite import median_of, row_name
from kvcli.commands.sizes import tokens
from kvcli.commands.suite import Records
from kvcli.errors import UsageError
from kvcli.eval.records import UNCOMPRESSED
from kvcli.registry import BASELINE
from kvcli.report.tables import MALFORMED, Row, Section, answers, find_suite, unique_names, without_sinks

NARROW, WIDE = 340, 760
"""Widths of charts in pixels."""

_BLUE, _RED, _GREY = "#4c8fd0", "#e4572e", "#8a8f98"
_ROW_PIXELS = 20
_OWN_COLOURS = """><style>
svg { color: #1d2129 }
@media (prefers-color-scheme: dark) { svg { color: #e4e6ea } }
</style>"""
_INK: dict[str, Any] = {"labelColor": "currentColor", "titleColor": "currentColor", "titleFontWeight": "normal"}
_THEME: dict[str, Any] = {
    "background": "transparent",
    "view": {"stroke": None},
    "title": {"color": "currentColor", "fontSize": 13, "fontWeight": "normal", "anchor": "start"},
    "axis": {**_INK, "gridColor": _GREY, "gridOpacity": 0.25, "domainColor": _GREY, "tickColor": _GREY},
    "legend": {**_INK, "orient": "bottom", "columns": 3, "title": None},
    "text": {"color": "currentColor", "fontSize": 11},
}


class Chart(NamedTuple):
    """Layers of marks of some data; `wide` charts are drawn a second time for wide screens."""

    title: str
    data: list[dict[str, Any]]
    height: float
    encoding: dict[str, Any]
    layers: list[dict[str, Any]]
    wide: bool = False

    def spec(self, width: int) -> dict[str, Any]:
        """It for Vega-Lite."""
        spec = {"title": self.title, "data": {"values": self.data}, "encoding": self.encoding, "layer": self.layers}
        size = {"width": width, "height": self.height, "autosize": {"type": "fit-x", "contains": "padding"}}
        return {**spec, **size, "config": _THEME}

    def svg(self, width: int) -> str:
        """The chart, drawn; text has the colour of the page."""
        import vl_convert

        return str(vl_convert.vegalite_to_svg(self.spec(width)))

    def drawn(self, kind: str) -> bytes:
        """The chart as a file of its own: `svg`, whose text follows a dark theme, or `png` on white, twice as large."""
        import vl_convert

        if kind == "svg":
            return self.svg(WIDE).replace(">", _OWN_COLOURS, 1).encode()
        spec = json.dumps(self.spec(WIDE) | {"background": "white"}).replace("currentColor", "#1d2129")
        return bytes(vl_convert.vegalite_to_png(spec, scale=2))


def axis(field: str, title: str | None = None, kind: str = "quantitative", **more: Any) -> dict[str, Any]:
    """A field of the data."""
    return {"field": field, "type": kind, "title": title, **more}


def layer(mark: str, where: str = "true", encoding: dict[str, Any] | None = None, **style: Any) -> dict[str, Any]:
    """A layer of marks of the rows for which a condition holds."""
    return {"transform": [{"filter": where}], "mark": {"type": mark, **style}, "encoding": encoding or {}}


def log(field: str, title: str, data: Sequence[Row]) -> dict[str, Any]:
    """A logarithmic axis with marks at 1, 2 and 5."""
    least, most = (find(row.get(x) or row[field] for row in data) for find, x in ((min, "low"), (max, "high")))
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    marks = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    shown = {"values": [x for x in marks if least / 2 <= x <= 2 * most], "format": "~g"}
    return axis(field, title, scale={"type": "log", "domain": [0.7 * least, 1.2 * most]}, axis=shown)


def bars(title: str, unit: str, values: Sequence[tuple[str, float | None, Row]]) -> Chart:
    """A bar per name with its value, and with the interval of the row if it has `low` and `high`; fp16's is marked."""
    data = [
        {"name": name, "x": x, "text": f"{x:.3g}", "end": max(x, ends.get("high", x)), **ends}
        for name, x, ends in values
        if x is not None
    ]
    fp16 = f"datum.name == '{BASELINE}' || datum.name == '{UNCOMPRESSED}'"
    most = 1.25 * max(row["end"] for row in data) or 1
    x = axis("x", unit, scale={"domain": [0, most]}, axis={"tickCount": 4})
    colour = {"condition": {"test": fp16, "value": _GREY}, "value": _BLUE}
    y = axis("name", None, "nominal", sort=None, axis={"labelLimit": 150, "grid": False})
    whiskers, ends = {"x": {**x, "field": "low"}, "x2": {"field": "high"}}, {"x": {**x, "field": "end"}}
    layers = [
        layer("rule", fp16, {"y": None}, strokeDash=[3, 3], color=_GREY),
        layer("bar", encoding={"color": colour}, height=0.7 * _ROW_PIXELS),
        layer("rule", "isValid(datum.low)", whiskers, color="currentColor"),
        layer("text", encoding={**ends, "text": {"field": "text"}}, align="left", dx=4),
    ]
    return Chart(title, data, _ROW_PIXELS * len(data), {"x": x, "y": y}, layers)


def loss_by_size(rows: Records) -> list[Chart]:
    """KL against stored bits, with intervals; the Pareto front is joined by a line, and its points are filled."""
    points: list[dict[str, Any]] = []
    best, apart = math.inf, without_sinks(rows).values()
    kept = [x for x in rows if x not in apart and x["memory"] and x["kl_mean"] > 0 and x["method"] != BASELINE]
    for name, row in sorted(unique_names(kept), key=lambda item: (item[1]["memory"]["true_bits"], item[1]["kl_mean"])):
        bits, kl = row["memory"]["true_bits"], row["kl_mean"]
        points.append({"name": name, "bits": bits, "kl": kl, "front": kl < best, **_ends(row["metrics"]["kl_mean"])})
        best = min(best, kl)
    if not points:
        return []
    for point in points:  # a name that others to the right would hide
        close = (x for x in points if 1 < x["bits"] / point["bits"] < 1.3 and 0.8 < x["kl"] / point["kl"] < 1.25)
        point["above"] = not point["front"] and any(close)
    y, bits = log("kl", "KL, nats per token", points), [point["bits"] for point in points]
    sizes = {"type": "log", "base": 2, "domain": [min(bits) / 2.2, 1.4 * max(bits)]}
    x = axis("bits", "bits per key or value, with every scalar", scale=sizes, axis={"values": [1, 2, 4, 8, 16]})
    whiskers, names = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}, {"text": {"field": "name"}}
    layers = [
        layer("line", "datum.front", color=_RED, opacity=0.6),
        layer("rule", "datum.low > 0", whiskers, color=_GREY),
        layer("point", "!datum.front", color=_BLUE, size=40, opacity=1),
        layer("point", "datum.front", color=_RED, size=60, filled=True, opacity=1),
        layer("text", "!datum.front && !datum.above", names, align="left", dx=7),
        layer("text", "datum.above", names, align="left", dx=-3, dy=-10),
        layer("text", "datum.front", names, align="right", dx=-6, dy=8),  # where no better point can be
    ]
    return [Chart("Loss by size; the line is the Pareto front", points, 460, {"x": x, "y": y}, layers, wide=True)]


def loss_by_layer(rows: Records) -> list[Chart]:
    """KL when one layer alone is compressed."""
    alone = [row for row in rows if row["layer"] is not None and row["kl_mean"] > 0]
    data = [
        {"name": x["method"], "layer": x["layer"], "kl": x["kl_mean"], **_ends(x["metrics"]["kl_mean"])} for x in alone
    ]
    if not data:
        return []
    y, layers = (log("kl", "KL, nats per token", data), axis("layer", "layer", axis={"tickMinStep": 1, "grid": False}))
    whiskers = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    encoding = {"x": layers, "y": y, "color": axis("name", None, "nominal")}
    marks = [layer("line", point=True), layer("rule", "datum.low > 0", whiskers, color=_GREY)]
    return [Chart("Loss when one layer alone is compressed", data, 260, encoding, marks, wide=True)]


def grid(title: str, x: tuple[str, str], y: tuple[str, str], cells: list[dict[str, Any]], wide: bool = False) -> Chart:
    """A map of shares, fields `share` and `text`, by two fields with their titles; long names where it is `wide`."""
    bare = {"labelAngle": -90 * wide, "domain": False, "ticks": False}
    opacity = axis("share", scale={"domain": [0, 1], "range": [0, 0.85]}, legend=None)
    encoding = {
        "x": axis(*x, "ordinal", sort=None, axis=bare),
        "y": axis(*y, "ordinal", sort=None, axis={**bare, "labelAngle": 0}),
    }
    layers = [
        layer("rect", encoding={"fillOpacity": opacity}, color=_BLUE, stroke=_GREY, strokeWidth=0.5),
        layer("text", encoding={"text": {"field": "text"}}),
    ]
    return Chart(title, cells, 1.6 * _ROW_PIXELS * len({cell[y[0]] for cell in cells}), encoding, layers, wide)


def needles(rows: Records) -> list[Chart]:
    """Values found by length of the text and depth, a map per method."""
    charts = []
    for name, row in unique_names(rows):
        cells: dict[tuple[int, float], list[float]] = {}
        for unit in row["units"]:
            cells.setdefault((unit["context"], unit["depth"]), []).append(unit["exact"])
        data = [
            {"context": tokens(x), "depth": f"{y:g}", "share": sum(z) / len(z), "text": f"{sum(z):.0f} of {len(z)}"}
            for (x, y), z in sorted(cells.items())
        ]
        charts.append(grid(f"{name}: values found", ("context", "tokens"), ("depth", "depth, %"), data))
    return charts


def quotations(rows: Records) -> list[Chart]:
    """Share of the words of a passage that were quoted, by words between and method."""
    cells = []
    for name, row in unique_names(rows):
        for distance in sorted({unit["distance"] for unit in row["units"]}):
            units = [unit for unit in row["units"] if unit["distance"] == distance]
            quoted, words = (sum(unit[x] for unit in units) for x in ("quoted", "words"))
            text = f"{quoted / len(units):.1f}"
            cells.append({"name": name, "distance": f"{distance}", "share": quoted / words, "text": text})
    title = f"Words quoted of {rows[0]['units'][0]['words']} before the first wrong one"
    return [grid(title, ("distance", "words between"), ("name", ""), cells)]


def by_task(rows: Records) -> list[Chart]:
    """Share of RULER's answers that were found, by task and method, all lengths together."""
    cells = []
    for name, row in unique_names(rows):
        for task in dict.fromkeys(unit["task"] for unit in row["units"]):
            found = [unit["found"] for unit in row["units"] if unit["task"] == task]
            share = sum(found) / len(found)
            cells.append({"name": name, "task": task, "share": share, "text": f"{100 * share:.0f}"})
    return [*figures(rows), grid("Answers found, %", ("task", ""), ("name", ""), cells, wide=True)]


def figures(rows: Records) -> list[Chart]:
    """Every figure of a suite of `kvcli eval`, with its interval."""
    names = dict.fromkeys(name for row in rows for name in row["metrics"])
    charts = []
    for figure in names:
        of = [(name, row["metrics"][figure]) for name, row in unique_names(rows) if figure in row["metrics"]]
        if any(metric["mean"] is not None for _, metric in of):
            title = f"{figure}, {of[0][1]['better']} is better"
            charts.append(bars(title, "", [(name, metric["mean"], _ends(metric)) for name, metric in of]))
    return charts


def times(rows: Records) -> list[Chart]:
    """A chart per figure of a suite of `kvcli bench` and per context, fp16 first."""
    charts = []
    for figure, what, unit, scale in find_suite(rows[0]["suite"]).bars:
        groups: dict[str, dict[str, float]] = {}
        for row in sorted(rows, key=lambda row: int(row["context"])):
            value = median_of(row, figure)
            if value is not None and row.get("status") == "ok":
                batch = f"{row['batch']} x " if row["batch"] > 1 else ""
                dtype = f", {row['dtype']}" if len({x.get("dtype") for x in rows}) > 1 else ""
                group = groups.setdefault(f"{what}, {batch}{tokens(row['context'])} tokens{dtype}", {})
                group[row_name(row)] = value / scale
        charts += [bars(title, unit, [(x, y, {}) for x, y in group.items()]) for title, group in groups.items()]
    return charts


def capacity(rows: Records) -> list[Chart]:
    """What fits into a memory budget: sequences of a length, or tokens of one sequence."""
    groups: dict[str, list[tuple[str, float | None, Row]]] = {}
    for row in rows:
        one = row["question"] == "longest context"
        title = "longest context of one sequence" if one else f"sequences of {tokens(row['context'])} tokens"
        value = row["context" if one else "batch"] if row["status"] == "ok" else None
        groups.setdefault(title, []).append((row["method"], value, {}))
    return [bars(title, "", values) for title, values in groups.items() if any(x is not None for _, x, _ in values)]


CHARTS: dict[str, Callable[[Records], list[Chart]]] = {
    draw.__name__: draw
    for draw in (figures, times, loss_by_size, loss_by_layer, needles, quotations, by_task, capacity)
}
"""What a suite may name as its `chart`."""


def _ends(metric: Row) -> dict[str, float]:
    return {} if metric["low"] is None else {"low": metric["low"], "high": metric["high"]}


def check_installed() -> None:
    """UsageError: what draws charts and pages is not installed."""
    try:
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as error:
        needs = "charts need packages that are not installed: pip install 'kvcli[report]'"
        raise UsageError(f"{needs}; --format md does without") from error


def charts_of(section: Section) -> list[Chart]:
    """The charts of a section; UsageError: a record lacks what they show."""
    try:
        return CHARTS[find_suite(section.suite).chart](section.rows)
    except MALFORMED as error:
        raise UsageError(f"a record of suite {section.suite} lacks what its chart shows: {error}") from error


def pictures(sections: Sequence[Section], kind: str) -> dict[str, bytes]:
    """Every chart as a file, by suite, place and title; UsageError as of `check_installed` and `charts_of`."""
    check_installed()
    made = {}
    for place, section in enumerate(sections, 1):
        for number, chart in enumerate(charts_of(section), 1):
            words = shorten(re.sub(r"[^a-z0-9]+", " ", chart.title.lower()), 40, placeholder="").replace(" ", "-")
            made[f"{section.suite}-{place}-{number}-{words}.{kind}"] = chart.drawn(kind)
    return made


def page(sections: Sequence[Section]) -> str:
    """One HTML page; UsageError: as of `check_installed` and `charts_of`."""
    check_installed()
    from jinja2 import Environment
    from markupsafe import Markup

    shown = []
    for section in sections:
        pairs = [(Markup(x.svg(NARROW)), Markup(x.svg(WIDE)) if x.wide else "") for x in charts_of(section)]
        tables = [x for x in (section.table, answers(section.rows)) if x is not None]
        shown.append({"section": section, "charts": pairs, "tables": tables})
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        Path(__file__).with_name("page.html").read_text()
    )
    return template.render(sections=shown, date=date.today())


def markdown(sections: Sequence[Section]) -> str:
    """The same tables, notes and commands as Markdown."""
    parts = ["# kvcli report"]
    for section in sections:
        notes = "\n".join(f"- {note}" for note in section.notes)
        words = f"## {section.title}", section.about, section.verdict, notes
        parts += [x.replace("<", "&lt;") for x in words]
        for table in filter(None, (section.table, answers(section.rows))):
            parts += [f"{table.title}:".replace("<", "&lt;"), table.markdown().rstrip()]
        commands = "\n".join(f"$ {command}" for command in section.commands)
        parts += [f"```console\n{commands}\n```"] if commands else []
    return "\n\n".join(filter(None, parts)) + "\n"
