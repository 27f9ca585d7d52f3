"""`kvcli report`: one page of records, and the same tables as Markdown and in docs."""

import html
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import framed
from byte_tokenizer import byte_tokenizer
from console import invoke, refused, result
from factories import load, make_model
from test_records_and_gates import NOISE, kl_record
from test_suites import KIVI, SIZES

from kvcli._version import __version__
from kvcli.commands.sizes import number
from kvcli.eval.intervals import metrics_of
from kvcli.eval.records import verdict
from kvcli.models.load import LoadedModel
from kvcli.report.page import by_task, capacity, loss_by_size, needles, quotations
from kvcli.report.tables import Row, answers, quality, read, sections, unique_names
from kvcli.storage.atomic import append_record

DOCS = ("quality-smollm2-135m", "attention-h100", "generate-h100", "serve-h200")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of all suites of `kvcli eval` but lm-eval's, of a tiny model."""
    model = make_model("llama", vocab_size=260, max_position_embeddings=2048)
    loaded = LoadedModel(**{**vars(load(model)), "tokenizer": byte_tokenizer()})
    path = tmp_path_factory.mktemp("measured") / "rows.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvcli.models.load.load_model", lambda *_, **__: loaded)
        for suite, sizes in SIZES.items():
            result("eval", suite, *KIVI, "--method", "fp8", *sizes, "--out", str(path))
    return path


@pytest.fixture
def committed(repo_root: Path) -> list[str]:
    return [str(repo_root / "docs" / "results" / f"{name}.jsonl") for name in DOCS]


def page(*files: Any) -> str:
    result("report", *map(str, files), "-o", "page.html")
    return Path("page.html").read_text()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_page_has_a_section_and_charts_of_every_suite(measured: Path, committed: list[str]) -> None:
    text = page(measured, *committed)
    assert re.findall(r"<h2>(\w+): ", text) == [*SIZES, "kl", "attention", "generate", "serve"]
    for part in text.split("<section")[1:]:
        assert ">kivi-2" in "".join(re.findall("<svg.*?</svg>", part, re.DOTALL))
    assert all(f">{unit}<" in text for unit in ("microseconds", "GiB", "tokens/s"))
    assert "first token, new prompt, 16 x 2K tokens" in text  # longer ones run into the next chart
    assert "<span>--method</span>" in text  # a line does not end within an option
    assert len(text.encode()) < 2 * 2**20


def test_ruler_is_a_map_by_task_above_a_folded_table(repo_root: Path) -> None:
    file = repo_root / "docs" / "results" / "ruler-qwen2.5-coder-1.5b.jsonl"
    rows = read(file)
    shown = {(x["name"], x["task"]): x["text"] for x in by_task(rows)[-1].data}
    assert len(shown) == len(rows) * 10
    units = next(row for row in rows if row["label"] == "kivi-2")["units"]
    found = [unit["found"] for unit in units if unit["task"] == "niah_multikey_2"]
    assert shown["kivi-2", "niah_multikey_2"] == f"{100 * sum(found) / len(found):.0f}" == "50"
    text = page(file)
    assert re.findall(r"<summary>(.*?)</summary>", text) == [f"{len(rows) * 11} rows"]
    assert text.count(">niah_multikey_2</text>") == 2  # on a phone and a desk


def test_the_shade_of_a_map_is_what_its_text_says(measured: Path, repo_root: Path) -> None:
    rows = read(measured)
    needle, recall = ([row for row in rows if row["suite"] == suite] for suite in ("needle", "recall"))
    for i, unit in enumerate(unit for row in (*needle, *recall) for unit in row["units"]):
        unit |= {"exact": i % 2, "quoted": i % 3}  # a random model finds and quotes nothing
    for cell in needles(needle)[-1].data:
        found, of = map(int, cell["text"].split(" of "))
        assert cell["share"] == found / of
    words = recall[0]["units"][0]["words"]
    for cell in quotations(recall)[0].data:
        assert cell["share"] == pytest.approx(float(cell["text"]) / words, abs=0.05 / words)
    for cell in by_task(read(repo_root / "docs" / "results" / "ruler-qwen2.5-coder-1.5b.jsonl"))[-1].data:
        assert cell["text"] == f"{100 * cell['share']:.0f}"


def test_a_page_loads_nothing_and_its_charts_have_the_colour_of_its_text(measured: Path) -> None:
    text = page(measured)
    assert not re.search(r"<script|<link|<img|@import|url\(|src=|href=\"(?!#)", text)
    assert set(re.findall(r"<text[^>]* fill=\"([^\"]*)\"", text)) == {"currentColor"}
    assert not re.search(r"(fill|stroke)=\"(black|white|#000|#fff)", text)
    assert "prefers-color-scheme: dark" in text


def test_an_option_that_older_records_lack_does_not_part_rows(measured: Path) -> None:
    row = next(row for row in map(json.loads, measured.read_text().splitlines()) if row["suite"] == "kl")
    older = {**row, "options": {x: y for x, y in row["options"].items() if x != "skip_bad_rows"}}
    assert row["options"].keys() > older["options"].keys()
    assert len(sections([row, older])) == 1


def test_tables_of_docs_are_rows_and_columns_of_the_report(committed: list[str], repo_root: Path) -> None:
    """Pages show some columns of them."""
    result("report", *committed, "--format", "md", "-o", "page.md")
    text = Path("page.md").read_text()
    of_report = [_cells(x) for x in re.findall(r"^\|.*?\n\n", text, re.DOTALL | re.MULTILINE)]
    assert len(of_report) == text.count("\n## ") == len(DOCS)
    pages = "".join((repo_root / "docs" / name).read_text() for name in ("quality.md", "benchmarks.md", "serving.md"))
    found = 0
    for name, whole in zip(DOCS, of_report, strict=True):
        for shown in re.findall(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", pages, re.DOTALL):
            columns = _cells(shown)
            assert len(columns["method"]) == len(whole["method"])
            assert {heading: whole[heading] for heading in columns} == columns
            found += 1
    assert found == 4
    assert result("report", *committed, "--format", "md", "-o", "-").stdout == text


def _cells(table: str) -> dict[str, list[str]]:
    """The columns of a table of Markdown by their headings."""
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines())
    return dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))


def test_a_command_that_is_shown_measures_the_same_again(measured: Path, loaded: Any, command_model: Any) -> None:
    rows = [json.loads(line) for line in measured.read_text().splitlines()]
    (section,) = sections([row for row in rows if row["suite"] == "drift"])
    (command,) = section.commands
    again = result(*shlex.split(command)[1:], "--json")["rows"]
    assert [row["units"] for row in again] == [row["units"] for row in section.rows]


def test_what_records_say_is_text(measured: Path) -> None:
    row = next(row for row in map(json.loads, measured.read_text().splitlines()) if row["suite"] == "recall")
    for unit in row["units"]:
        unit["answer"], unit["exact"] = "<script>alert(1)</script> | x", 0.0
    append_record(Path("rows.jsonl"), {**row, "model": "<b>m</b>", "method": "<i>", "label": "<i>"})
    text = page("rows.jsonl")
    assert "<script" not in text
    assert "<b>" not in text
    assert "<i>" not in text
    assert html.escape("alert(1)</script> | x") in text
    result("report", "rows.jsonl", "--format", "md")
    assert "alert(1)&lt;/script> \\| x |" in Path("report.md").read_text()


def test_answers_are_marked_where_they_begin_to_be_wrong(measured: Path) -> None:
    rows = [row for row in map(json.loads, measured.read_text().splitlines()) if row["suite"] == "recall"]
    for row, answer in zip(rows, ("one two  three four", "one\ntwo tree", "x"), strict=True):
        row["units"] = [{**row["units"][0], "expected": "one two three", "answer": answer, "exact": 0.0}]
    table = answers(rows)
    assert table is not None
    assert list(table.rows) == [
        ["1. expected", "one two three"],
        ["uncompressed", "one two three four"],
        ["kivi-2", "one two t\u25b8ree"],
        ["fp8", "\u25b8x"],
    ]
    for row in rows:
        row["units"][0]["exact"] = 1.0
    assert answers(rows) is None


def bits(value: float) -> dict[str, float]:
    return {"key_bits": value, "value_bits": value, "true_bits": value, "ratio": 16 / value}


def points(*pairs: tuple[float, float], **changes: Any) -> list[Row]:
    return [kl_record([kl] * 8, f"kivi-{x}", memory=bits(x), **changes).to_plain() for x, kl in pairs]


def test_the_front_is_what_nothing_smaller_beats() -> None:
    (chart,) = loss_by_size(points((5, 0.002), (3, 0.1), (2, 0.01), (1, 0.05), (8, 0.002), (3.5, 0.11)))
    assert [[x["bits"] for x in chart.data if x[kind]] for kind in ("front", "above")] == [[1, 2, 5], [3]]


@pytest.mark.parametrize(
    ("own", "differences", "expected"),
    [
        (0.0, {"a": (0.0, False)}, "The model itself finds nothing here: these rows say nothing of methods."),
        (0.5, {"a": (-0.2, True), "b": (0.1, True)}, "beyond chance: a; not told apart from it, or better: b."),
        (0.5, {"a": (-0.2, False)}, "Not told apart from it, or better: a."),
        (None, {"a": (0.0, False)}, None),
    ],
)
def test_a_table_says_in_words_what_it_shows(own: float | None, differences: Any, expected: str | None) -> None:
    def row(label: str, mean: float, versus: Any) -> Row:
        metric = {"mean": mean, "better": "higher", "difference": versus}
        return {
            "suite": "needle",
            "method": "fp16" if versus is None else label,
            "label": label,
            "metrics": {"exact": metric},
        }

    rows = [] if own is None else [row("uncompressed", own, None)]
    versus = {name: {"to": "uncompressed", "mean": mean, "real": real} for name, (mean, real) in differences.items()}
    said = verdict([*rows, *(row(name, 0.5 + x["mean"], x) for name, x in versus.items())])
    assert said == expected or (expected and said and said.endswith(expected))


def test_the_front_in_words() -> None:
    def row(method: str, bits: float, kl: float, label: str = "") -> Row:
        memory = {"true_bits": bits}
        shared = {"memory": memory, "metrics": {"kl_mean": {}}, "layer": None}
        return {"method": method, "label": label or method, "kl_mean": kl, **shared}

    rows = [row("kivi-4", 5, 0.002), row("rtn-4", 5.1, 0.003), row("klt-2", 2, 0.1, "a"), row("klt-2", 2, 0.2, "b")]
    said = "No other row has fewer bits and loses less than a (2.00 bits, KL 0.1), kivi-4 (5.00 bits, KL 0.002)."
    assert verdict(rows) == said
    assert verdict(rows[:1]) is None
    assert verdict([{**row, "layer": at} for at, row in enumerate(rows)]) is None


def test_small_losses_are_no_zeros_and_stand_beside_differences() -> None:
    values = [1e-5 * x for x in NOISE]
    small, large = kl_record(values, "kivi-4"), kl_record([2 * x for x in values])
    runs = (("kivi-2", small), ("rtn-2", kl_record(values, "rtn-4")))
    rows = [large.model_copy(update={"method": x, "metrics": metrics_of(large.units, other)}) for x, other in runs]
    cells = _cells(quality([x.model_dump() for x in (small, *rows)]).markdown())
    assert cells["KL"] == ["4.2e-06", "8.5e-06", "8.5e-06"]
    assert all(re.fullmatch(r"(\d\.\de-06)-(\d\.\de-0[56])", x) for x in cells["95 % interval"])
    assert cells["KL - kivi-4"] == ["-", "+4.2e-06*", "-"]
    for value, shown in ((0, "0.0000"), (6e-5, "0.0001"), (-4e-5, "-4.0e-05"), (float("inf"), "inf")):
        assert number(value) == shown


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_charts_are_files_of_their_own(kind: str, committed: list[str]) -> None:
    """In SVG their text follows a dark theme, in PNG it is on white; no word of a name is cut."""
    made = result("report", *committed[:2], "--format", kind, "--out", "charts", "--json")
    files = [Path(x) for x in made["files"]]
    assert files[0] == Path(f"charts/kl-1-1-loss-by-size-the-line-is-the-pareto.{kind}")
    assert [x.name.split("-")[0] for x in files[1:]] == ["attention"] * 3
    assert made["bytes"] == sum(x.stat().st_size for x in files)
    if kind == "svg":
        assert "prefers-color-scheme: dark" in files[0].read_text()
        assert "klt-tcq-3" in files[0].read_text()
    else:
        assert files[0].read_bytes().startswith(b"\x89PNG")
    Path("taken").touch()
    assert "must be a folder" in refused("report", committed[0], "--format", kind, "--out", "taken")


def test_rows_of_one_method_are_told_apart_and_a_later_one_replaces_the_same() -> None:
    first, other = (kl_record(NOISE, options={"sink_length": 4, "setting": x}).to_plain() for x in ([], ["k_bits=4"]))
    again = {**first, "kl_mean": 9.0}
    assert [(name, row["kl_mean"] == 9) for name, row in unique_names([first, other, again])] == [
        ("kivi-2, setting []", True),
        ("kivi-2, setting ['k_bits=4']", False),
    ]
    labelled = [{**first, "label": name} for name in ("mine", "yours")]
    assert [name for name, _ in unique_names(labelled)] == ["mine", "yours"]


def test_other_text_is_another_table_and_other_tokens_are_said() -> None:
    rows = points((2, 0.1)) + points((3, 0.1), options={"seq_len": 512}) + points((4, 0.1), protocol="other")
    first, second = sections(rows)
    assert [len(first.rows), len(second.rows)] == [2, 1]
    assert "not all measured on the very same tokens" in first.notes[-1]
    assert "not all measured" not in " ".join(second.notes)


def test_other_weights_of_one_name_are_said() -> None:
    (same,) = sections(points((2, 0.1)) + points((3, 0.1)))
    (other,) = sections(points((2, 0.1)) + points((3, 0.1), fingerprint="00:003c0040"))
    assert "weights" not in " ".join(same.notes)
    assert "Not all rows are of the same weights: weights of the key and value" in other.notes[-1]


def test_what_fits_is_sequences_of_a_length_or_tokens_of_one() -> None:
    rows = [
        {"method": method, "question": question, "context": context, "batch": batch, "status": status}
        for method, question, context, batch, status in (
            ("fp16", "largest batch", 32768, 1, "ok"),
            ("kivi-2", "largest batch", 32768, 9, "ok"),
            ("qjl", "largest batch", 32768, 0, "refused"),
            ("kivi-2", "longest context", 73728, 1, "ok"),
        )
    ]
    shown = {x.title: [(y["name"], y["x"]) for y in x.data] for x in capacity(rows)}
    assert shown == {
        "sequences of 32K tokens": [("fp16", 1), ("kivi-2", 9)],
        "longest context of one sequence": [("kivi-2", 73728)],
    }


def test_a_row_without_a_figure_says_why(committed: list[str]) -> None:
    rows = [json.loads(line) for line in Path(committed[1]).read_text().splitlines()]
    empty = dict.fromkeys(("p50_us", "speedup", "stored_gb_s", "true_bits"))
    rows[1] = {**rows[1], **empty, "status": "failed", "note": "ValueError: no"}
    (section,) = sections(rows)
    assert "failed" in [cell for row in section.table.rows for cell in row]
    assert f"{rows[1]['method']}: ValueError: no" in section.notes


def test_what_bench_prints_as_json_is_shown_too() -> None:
    shape = ("--shape", "smollm2-135m", "--contexts", "64", "--repeats", "1", "--method", "kivi-2")
    Path("rows.json").write_text(json.dumps(result("bench", "attention", *shape, "--json")))
    shown = result("report", "rows.json", "--format", "md", "-o", "-").stdout
    assert re.search(r"^\| kivi-2 \| [\d.]+ \| 3.00 \|", shown, re.MULTILINE)
    assert f", kvcli {__version__}" in shown


def test_what_cannot_be_shown_is_refused(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "name files of records" in refused("report")
    assert "cannot read missing" in refused("report", "missing")
    Path("rows.jsonl").write_text('{"suite": "speed"}\n')
    assert "row 0 is no record" in refused("report", "rows.jsonl")
    Path("three.json").write_text('{"rows": [3]}')
    assert "holds no records" in refused("report", "three.json")
    assert "is one of the records" in refused("report", "rows.jsonl", "-o", "rows.jsonl")
    row = next(row for row in map(json.loads, measured.read_text().splitlines()) if row["suite"] == "needle")
    Path("rows.jsonl").write_text(json.dumps({name: x for name, x in row.items() if name != "units"}))
    assert "of suite needle lacks what its table shows: 'units'" in refused("report", "rows.jsonl")
    for package in ("jinja2", "vl_convert"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            for kind in ("html", "svg"):
                assert "pip install 'kvcli[report]'" in refused("report", str(measured), "--format", kind)
    assert not Path("report.html").exists()
    assert not Path("report-svg").exists()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert invoke("report", str(measured), "--format", "md").exit_code == 0


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(("dark", "ink"), [(False, "rgb(29, 33, 41)"), (True, "rgb(228, 230, 234)")])
def test_a_browser_shows_it_on_a_phone_and_a_desk_by_day_and_night(
    measured: Path, committed: list[str], width: int, dark: bool, ink: str
) -> None:
    assert framed(page(measured, *committed), width, dark, "svg text", "fill") == (0, ink)


@pytest.mark.parametrize(
    "text", ['{"suite": "kl"}', '{"suite": "attention"}', '{"suite": "kl", "options": 3, "metrics": []}', "[" * 100_000]
)
def test_records_that_cannot_be_shown_are_refused_in_one_line(text: str) -> None:
    Path("bad.jsonl").write_text(text)
    for command in (("report",), ("inspect",), ("diff", "bad.jsonl")):
        refused(*command, "bad.jsonl", code=2)


def test_control_characters_and_marks_of_text_files(committed: list[str]) -> None:
    """What draws charts gets no control characters: none is left once a record is read."""
    rows = [json.loads(line) for line in Path(committed[0]).read_text().splitlines()[:2]]
    for control in ("\t\x7f", ""):
        rows[0]["label"] = rows[0]["method"] = f"a{control}</script>"
        Path("rows.jsonl").write_text("\ufeff" + "\n".join(map(json.dumps, rows)))
        assert read(Path("rows.jsonl"))[0]["label"] == f"a{' ' * len(control)}</script>"
    assert "a&lt;/script&gt;" in page("rows.jsonl")
    assert result("report", "rows.jsonl", "--json", "-o", "-", "--format", "md")["sections"][0]["rows"] == 2


def test_a_page_takes_the_place_of_a_file_only(committed: list[str]) -> None:
    os.mkfifo("pipe")
    refused("report", committed[0], "-o", "pipe", code=1)
    assert Path("pipe").is_fifo()


def test_rows_of_codes_in_pages_stand_beside_those_in_rows() -> None:
    """They are of the same method, context and batch."""
    from kvcli.report.compare import compared

    file = Path(__file__).parents[2] / "docs" / "results" / "pages-h100.jsonl"
    rows = read(file)
    (section,) = sections(rows)
    names = [row[0] for row in section.table.rows]
    assert names[:5] == ["fp16", "kivi-2", "kivi-2, pages of 16", "kivi-2, pages of 64", "kivi-2, pages of 256"]
    times = {row["p50_us"] for row in rows if row["method"] == "klt-2" and row["context"] == 8192}
    shown = {cells[1] for cells in section.table.rows if cells[0].startswith("klt-2")}
    assert shown == {f"{time:.1f}" for time in times}
    assert compared(file, file)["only in A"] == []
    assert sum(" pages of 64" in row["row"] for row in compared(file, file)["rows"]) == 12
