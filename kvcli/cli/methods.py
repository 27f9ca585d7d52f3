"""`kvcli methods`."""

from typing import Any, Literal, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

from kvcli.bench.suite import Lengths
from kvcli.cli.command import Command, try_method
from kvcli.cli.output import Output
from kvcli.commands.options import Options
from kvcli.commands.tables import DataTable
from kvcli.errors import UsageError
from kvcli.models.shapes import check_shape, shape_spec
from kvcli.registry import DEFAULT_METHOD, METHODS, get_config, get_method, method_name, parse_name

CONTEXTS = [4096, 131072]
_COMPARISONS = {"ge": "from {}", "gt": "above {}", "le": "to {}", "lt": "below {}"}


class MethodsOptions(Options):
    """Options of `kvcli methods`."""

    name: str | None = Field(None, description="settings of this method, with or without bits; default: the methods")
    bits: str | None = Field(None, description="stored bits of the papers' settings for llama-3.1-8b or smollm2-135m")
    contexts: Lengths = Field([], description="lengths of that table, in tokens; repeatable; default: 4096 and 131072")


def run(options: MethodsOptions, output: Output) -> None:
    """List the compression methods, the settings of one, or the stored bits of the papers' configurations."""
    if options.name is not None and options.bits is not None:
        raise UsageError("name a method or give --bits, not both")
    if options.contexts and options.bits is None:
        raise UsageError("--contexts goes with --bits")
    if options.name is not None:
        _print_settings(options.name, output)
    elif options.bits is not None:
        _print_bits(options.bits, options.contexts or CONTEXTS, output)
    else:
        records = []
        for name in METHODS:
            method = get_method(name)
            calibration = "needs an artifact" if method.needs_artifact else "optional" if method.fit else "none"
            record = {"name": name, "bits": method.bits, "paper": method.paper, "arxiv": method.arxiv}
            records.append({**record, "calibration": calibration, "summary": method.summary})
        columns = ("name", "bits", "paper", "calibration", "summary")
        cells = [[record[column] for column in columns] for record in records]
        table = DataTable("methods", columns, cells, text_columns=len(columns), prose=columns[1:])
        output.result({"methods": records}, table, ["kvcli", "methods", DEFAULT_METHOD])


def _print_settings(name: str, output: Output) -> None:
    """Prints name, default, range and meaning of each setting of a method; its bits, if it has any, are defaults."""
    method, from_bits = parse_name(name)
    records: list[dict[str, Any]] = []
    cells = []
    for setting, field in get_config(method).model_fields.items():
        default, values = from_bits.get(setting, field.get_default()), _value_range(field)
        records.append({"name": setting, "default": default, "range": values, "meaning": field.description or ""})
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        values = values.removeprefix("from ") if " to " in values else values
        cells.append([setting, shown, values, field.description or ""])
    title, columns = f"settings of {name}, for --setting NAME=VALUE", ("name", "default", "range", "meaning")
    table = DataTable(title, columns, cells, text_columns=len(columns), prose=("range", "meaning"))
    output.result({"method": method_name(name, {}), "settings": records}, table, try_method(name, "generate"))


def _value_range(field: FieldInfo) -> str:
    """The values that a setting takes, such as `from 0`, `hard or annealed` or `any text`."""
    if get_origin(field.annotation) is Literal:
        *first, last = map(str, get_args(field.annotation))
        return f"{', '.join(first)} or {last}" if first else last
    bounds = {name: getattr(bound, name) for bound in field.metadata for name in _COMPARISONS if hasattr(bound, name)}
    words = [_COMPARISONS[name].format(bounds[name]) for name in _COMPARISONS if name in bounds]
    kinds: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number"}
    return " ".join(words) or kinds.get(field.annotation, "any text")


def _print_bits(shape: str, contexts: list[int], output: Output) -> None:
    """Prints nominal bits, bits of the codes, and bits of a whole cache at some numbers of tokens."""
    check_shape(shape)
    from kvcli.plan.cache import stored_bits

    spec = shape_spec(shape)
    rows = [row for name in METHODS for row in (get_method(name).paper_settings or {name: {}}).items()]
    records = [stored_bits(name, dict(settings), spec, contexts) for name, settings in rows]
    cells = [
        {
            "method": record["method"],
            "nominal K/V": "/".join(f"{bits:.2f}" for bits in record["nominal"]),
            "codes K": f"{record['key_bits']:.3f}",
            "codes V": f"{record['value_bits']:.3f}",
            **{f"all at {x}": f"{bits:.3f}" for x, bits in zip(contexts, record["effective"], strict=True)},
        }
        for record in records
    ]
    table = DataTable.of(f"bits per value, {shape}, 16-bit model", cells)
    output.result({"shape": shape, "rows": records}, table, ["kvcli", "methods", DEFAULT_METHOD])


COMMAND = Command("methods", MethodsOptions, run, f"kvcli methods {DEFAULT_METHOD}", ("name",))
