"""`kvcli eval` and `kvcli bench`: a command of its own for each suite, all run alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from kvcli.builtin_models import BUILTIN_MODELS
from kvcli.cli.command import command
from kvcli.cli.next_command import last_method, model_argument, try_method
from kvcli.cli.output import Output
from kvcli.errors import suggestion
from kvcli.options import Options
from kvcli.registry import BENCH_SUITES, EVAL_SUITES, get_suite
from kvcli.storage.atomic import append_record
from kvcli.suite import Records, Suite

Following = Callable[[Records, Any], Sequence[Any]]
"""Words of the next command line, given the records and the options."""


def run_suite(suite: Suite, following: Following, options: Options, output: Output) -> None:
    """Measures a suite: a record is written as soon as it is measured, a table is shown at the end.

    Args:
        suite: what is measured.
        following: makes the words of the next command line.
        options: the suite's own.
        output: of the command.
    """
    run = suite.open(options)
    if run.out is not None:
        run.out.parent.mkdir(parents=True, exist_ok=True)
        run.out.open("a").close()  # fails before the measurement, not after it
    records: list[dict[str, Any]] = []
    summary = None
    try:
        for record in run.records(output):
            records.append(record)
            if run.out is not None:
                append_record(run.out, record)
    except KeyboardInterrupt:
        output.warn(f"stopped after {len(records)} row{'s' * (len(records) != 1)}")
        raise
    finally:  # what was measured is shown, also when the next row fails or the disk is full
        if records:
            summary = run.summary(records)
            shown = {"suite": suite.name, "rows": records, **summary.fields}
            output.result(shown, run.table(records), following(records, options))
            for line in summary.notes:
                output.warn(line)
    if summary is not None and summary.failure is not None:
        raise summary.failure


def register_suites(
    app: typer.Typer, name: str, paths: Mapping[str, str], default: str, text: str, following: Following
) -> None:
    """Adds a command with a subcommand for each suite.

    Args:
        app: where to add it.
        name: of the command.
        paths: its suites, as in the registry.
        default: the suite that is meant where none is named.
        text: help of the command.
        following: makes the words of the next command line.
    """

    class Suites(TyperGroup):
        """Puts the suite's name first: `MODEL --suite X` and `MODEL --suite=X` are `X MODEL`, others the default."""

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if not ctx.resilient_parsing:
                args = suite_first(args, paths, default)
            return super().parse_args(ctx, args)

    suites: list[Suite] = [get_suite(path) for path in paths.values()]
    group = typer.Typer(
        cls=Suites,
        help=f"{text} Without SUITE: {default}. 'kvcli {name} SUITE --help' shows the options of a suite.",
        epilog=f"Example: {next(suite.example for suite in suites if suite.name == default)}",
        subcommand_metavar="SUITE [MODEL] [OPTIONS]",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for suite in suites:
        register = command(
            group,
            suite.name,
            suite.options,
            suite.example,
            ("model",),
            saves_memory=suite.saves_memory,
            summary=suite.help,
        )
        register(partial(run_suite, suite, following))
    app.add_typer(group, name=name)


def suite_first(args: Sequence[str], suites: Mapping[str, str], default: str) -> list[str]:
    """The arguments of a command with the suite's name first.

    Args:
        args: as they were typed.
        suites: the suites by name.
        default: put first where no suite and no help of the command is asked for.

    Raises:
        BadParameter: a name that is no suite.
    """
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


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    register_suites(
        app,
        "eval",
        EVAL_SUITES,
        "kl",
        "Measure quality through the real cache, next to the uncompressed model.",
        lambda records, options: ["kvcli", "bench", "--method", last_method(records)],
    )
    register_suites(app, "bench", BENCH_SUITES, "attention", "Measure speed and memory of several methods.", _evaluate)


def _evaluate(records: Records, options: Any) -> list[str]:
    """Evaluates the last method on the model; rows of random weights and of single layers are of none."""
    model = model_argument(options.model) if records[0].get("weights") == "model" else ()
    return try_method(last_method(records), "eval", model)
