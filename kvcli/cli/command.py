"""How a command is registered and run: its options, its errors in one line, and the next command to type."""

from __future__ import annotations

import inspect
import logging
import os
import shlex
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import typer
from pydantic import BaseModel

from kvcli.cli.bars import duration
from kvcli.cli.error_lines import describe_error
from kvcli.cli.flags import SHARED_FLAGS, signature
from kvcli.cli.output import Output
from kvcli.cli.signals import stop_reason
from kvcli.cli.values import OptionsT, resolve
from kvcli.errors import OutputError, UsageError
from kvcli.ranks import environment


def command(
    app: typer.Typer,
    name: str,
    options: type[OptionsT],
    example: str,
    arguments: tuple[str, ...] = (),
    settings: type[BaseModel] | None = None,
    resumes: bool = False,
    saves_memory: str = "",
    summary: str = "",
) -> Callable[[Callable[[OptionsT, Output], None]], Callable[[OptionsT, Output], None]]:
    """Registers a command whose flags are the fields of an options model.

    Args:
        app: where to register.
        name: the command's name.
        options: its options; a field's description is its help.
        example: a runnable command line, shown at the end of the help.
        arguments: fields that are positional.
        settings: of a method, which are options too and become entries of `setting`.
        resumes: whether the same command goes on where it was interrupted.
        saves_memory: what to do when memory does not suffice, such as `lower --batch-size`.
        summary: the help; default: the docstring of what is registered.
    """

    def register(run: Callable[[OptionsT, Output], None]) -> Callable[[OptionsT, Output], None]:
        def invoke(**given: Any) -> None:
            shared = {name: given.pop(name) for name in SHARED_FLAGS}
            output = Output(shared["as_json"], shared["quiet"], shared["verbose"])
            with suppress(UsageError):  # told by the commands that several processes can share
                output.set_ranks(environment())
            try:
                _run(run, options, given, shared, output, arguments, settings)
            except (typer.Exit, BrokenPipeError):
                raise
            except (Exception, KeyboardInterrupt) as error:
                if shared["debug"]:
                    raise
                several = output.ranks.count > 1
                code, line = describe_error(stop_reason() or error, resumes, saves_memory, several)
                if output.as_json and output.record is None:
                    with suppress(OutputError):  # the line on standard error is all that can be said
                        output.result({"error": line, "exit_code": code})
                output.error(line)
                raise typer.Exit(code) from None

        invoke.__doc__ = run.__doc__
        flags, annotations = signature(options, arguments, settings)
        invoke.__signature__ = flags  # type: ignore[attr-defined]
        invoke.__annotations__ = annotations
        app.command(name, help=summary or inspect.cleandoc(run.__doc__ or ""), epilog=f"Example: {example}")(invoke)
        return run

    return register


def _run(
    run: Callable[[OptionsT, Output], None],
    options: type[OptionsT],
    given: dict[str, Any],
    shared: dict[str, Any],
    output: Output,
    arguments: Collection[str],
    settings: type[BaseModel] | None,
) -> None:
    """Runs a command and says what to do next."""
    if output.quiet and output.verbose:
        raise UsageError("--quiet and --verbose exclude each other")
    level = "info" if output.verbose else "error"
    for variable in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(variable, "critical" if level == "error" and "DATASETS" in variable else level)
    if not output.verbose:
        for noisy in ("torchao", "torch.utils._pytree"):  # they warn while they are imported
            logging.getLogger(noisy).setLevel(logging.ERROR)
    started = time.monotonic()
    chosen = resolve(options, given, shared["config"], arguments, settings)
    output.detail(f"options: {chosen.model_dump(mode='json')}")
    run(chosen, output)
    took = f"took {duration(time.monotonic() - started)}"
    with suppress(ImportError):  # not every system has it
        from resource import RUSAGE_SELF, getrusage

        took += f", peak memory {getrusage(RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    output.detail(took)
    if not output.as_json and output.following:
        output.say(f"next: {shlex.join(map(str, output.following))}")
