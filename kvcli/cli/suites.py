"""`kvcli eval` and `kvcli bench`: a command of its own for each suite, all run alike."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from kvcli.cli.command import Command
from kvcli.cli.groups import group
from kvcli.cli.output import Output
from kvcli.commands.options import Options
from kvcli.commands.suite import Records, Run, Suite
from kvcli.errors import suggestion
from kvcli.models.builtin_models import BUILTIN_MODELS
from kvcli.registry import BASELINE, BENCH_SUITES, DEFAULT_METHOD, EVAL_SUITES, METHODS, UNFITTED_METHOD, get_suite
from kvcli.storage.atomic import append_record
from kvcli.storage.ranks import join_ranks, joined_ranks, start_ranks


def run_suite(suite: Suite, options: Options, output: Output) -> None:
    """Measures a suite: a record is written as soon as it is measured, a table is shown at the end."""
    run = suite.open(options)
    if run.out is not None:
        run.out.parent.mkdir(parents=True, exist_ok=True)
        run.out.open("a").close()  # fails before the measurement, not after it
    if not hasattr(options, "devices"):
        _measure(suite, run, output)
        return
    start_ranks(options.devices, run.options.device)
    with join_ranks():
        _measure(suite, run, output)


def _measure(suite: Suite, run: Run, output: Output) -> None:
    records: list[dict[str, Any]] = []
    summary, first = None, output.ranks.rank == 0
    try:
        for record in run.records(output):
            records.append(record)
            if run.out is not None and first:
                append_record(run.out, record)
    except KeyboardInterrupt:
        output.warn(f"stopped after {len(records)} row{'s' * (len(records) != 1)}")
        raise
    finally:  # what was measured is shown, also when the next row fails or the disk is full
        if records and first:
            summary = run.summary(records)
            result = {"suite": suite.name, "rows": records, **summary.fields}
            following = ["report", run.out] if run.out else ["bench", "--method", last_method(records)]
            output.result(result, suite.tabulate(records, run.options), ["kvcli", *following])
            for line in summary.notes:
                output.warn(line)
    joined_ranks().wait()  # others would be ended while they end
    if summary is not None and summary.failure is not None:
        raise summary.failure


def _suites(name: str, paths: Mapping[str, str], default: str, text: str) -> typer.Typer:
    """A command with a subcommand for each suite; `default` is the suite that is meant where none is named."""

    class Suites(TyperGroup):
        """Puts the suite's name first: `MODEL --suite X` and `MODEL --suite=X` are `X MODEL`, others the default."""

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return super().parse_args(ctx, args if ctx.resilient_parsing else suite_first(args, paths, default))

    def command(path: str) -> typer.Typer:
        suite: Suite = get_suite(path)
        shared: dict[str, Any] = {"arguments": ("model",), "saves_memory": suite.saves_memory, "summary": suite.help}
        return Command(suite.name, suite.options, partial(run_suite, suite), suite.example, **shared).typer()

    shown = f"{text} Without SUITE: {default}. 'kvcli {name} SUITE --help' shows the options of a suite."
    words = {
        "epilog": f"Example: kvcli {name} --method {UNFITTED_METHOD}",
        "subcommand_metavar": "SUITE [MODEL] [OPTIONS]",
    }
    return group(name, paths, command, Suites, help=shown, **words)


def suite_first(args: Sequence[str], suites: Mapping[str, str], default: str) -> list[str]:
    """The arguments, the suite's name first, by default unless help is asked for; BadParameter: no such suite."""
    for place, word in enumerate(args):
        flag, equals, name = word.partition("=")
        if flag == "--suite" and (equals or place + 1 < len(args)):
            name, end = (name, place + 1) if equals else (args[place + 1], place + 2)
            if name not in suites:
                raise typer.BadParameter(f"--suite takes {', '.join(suites)}, not '{name}'{suggestion(name, suites)}")
            return [name, *args[:place], *args[end:]]
    first = args[0] if args else ""
    if first in suites or first in ("-h", "--help"):
        return [*args]
    if first.isidentifier() and first not in BUILTIN_MODELS and not Path(first).exists():
        raise typer.BadParameter(f"there is no suite '{first}'{suggestion(first, suites)} ({', '.join(suites)})")
    return [default, *args]


def last_method(rows: Records) -> str:
    """The last method measured that compresses, else one that needs no artifact."""
    names = [str(row["method"]) for row in rows if row["method"] != BASELINE]
    return names[-1] if names else next(name for name in METHODS if name not in (BASELINE, DEFAULT_METHOD))


EVAL = _suites("eval", EVAL_SUITES, "kl", "Measure quality through the real cache, next to the uncompressed model.")
BENCH = _suites("bench", BENCH_SUITES, "attention", "Measure speed and memory of several methods.")
