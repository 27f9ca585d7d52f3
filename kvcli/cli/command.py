"""How a command is registered and run: its options, its errors in one line, and the next command to type."""

import errno
import inspect
import logging
import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import typer
from pydantic import BaseModel

from kvcli.cli.flags import SHARED_FLAGS, OptionsT, resolve, signature
from kvcli.cli.groups import TYPER, group
from kvcli.cli.output import Output, duration
from kvcli.cli.signals import stop_reason
from kvcli.errors import KvcliError, OutputError, Terminated, UsageError, error_text
from kvcli.models.builtin_models import DEFAULT_MODEL
from kvcli.registry import get_config, parse_name
from kvcli.storage.ranks import environment


@dataclass(frozen=True)
class Command(Generic[OptionsT]):
    """A command whose flags are the fields of an options model."""

    name: str
    options: type[OptionsT]  # a field's description is its help
    run: Callable[[OptionsT, Output], None]
    example: str  # a runnable command line, shown at the end of the help
    arguments: tuple[str, ...] = ()  # fields that are positional
    settings: type[BaseModel] | None = None  # of a method, which are options too and become entries of `setting`
    resumes: bool = False  # whether the same command goes on where it was interrupted
    saves_memory: str = ""  # what to do when memory does not suffice, such as `lower --batch-size`
    summary: str = ""  # the help; default: the docstring of `run`

    def typer(self) -> typer.Typer:
        """The command as typer takes it."""
        app = typer.Typer(**TYPER)

        def invoke(**values: Any) -> None:
            shared = {name: values.pop(name) for name in SHARED_FLAGS}
            output = Output(shared["as_json"], shared["quiet"], shared["verbose"])
            with suppress(UsageError):  # told by the commands that several processes can share
                output.set_ranks(environment())
            try:
                _run(self, values, shared["config"], output)
            except (typer.Exit, BrokenPipeError):
                raise
            except (Exception, KeyboardInterrupt) as error:
                if shared["debug"]:
                    raise
                several = output.ranks.count > 1
                code, line = describe_error(stop_reason() or error, self.resumes, self.saves_memory, several)
                if output.as_json and output.record is None:
                    with suppress(OutputError):  # the line on standard error is all that can be said
                        output.result({"error": line, "exit_code": code})
                output.error(line)
                raise typer.Exit(code) from None

        flags, annotations = signature(self.options, self.arguments, self.settings)
        invoke.__signature__ = flags  # type: ignore[attr-defined]
        invoke.__annotations__ = annotations
        summary = self.summary or inspect.cleandoc(self.run.__doc__ or "")
        app.command(self.name, help=summary, epilog=f"Example: {self.example}")(invoke)
        return app


def command_group(name: str, summary: str, *commands: Command[Any]) -> typer.Typer:
    """A group of commands in the order of its help, which ends with the first one's example."""
    shown: dict[str, Any] = {"help": summary, "no_args_is_help": True, "epilog": f"Example: {commands[0].example}"}
    return group(name, {command.name: command for command in commands}, Command.typer, **shown)


def _run(command: Command[OptionsT], flags: dict[str, Any], config: str | None, output: Output) -> None:
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
    options = resolve(command.options, flags, config, command.arguments, command.settings)
    output.detail(f"options: {options.model_dump(mode='json')}")
    command.run(options, output)
    took = f"took {duration(time.monotonic() - started)}"
    with suppress(OSError, StopIteration):  # Linux has it; getrusage's begins with that of the parent process
        peak = next(x.split()[1] for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
        took += f", peak memory {int(peak) / 2**20:.2f} GiB"
    output.detail(took)
    if not output.as_json and output.following:
        output.say(f"next: {shlex.join(map(str, output.following))}")


def describe_error(
    error: BaseException, resumes: bool = True, saves_memory: str = "", ranks: bool = False
) -> tuple[int, str]:
    """The exit code and the message of an error, one line; `ranks` says whether several processes share the run."""
    text = error_text(error)
    if isinstance(error, KvcliError):
        return error.exit_code, text
    if isinstance(error, KeyboardInterrupt):
        advice = f"run the same command again to {'resume' if resumes else 'start over'}"
        if not isinstance(error, Terminated):
            return 130, f"interrupted; {advice}"
        shared = ", as torchrun does with all ranks when one has ended" if ranks else ""
        return error.exit_code, f"terminated{shared}; {advice}"
    full = "what was finished is kept: free some space and run the same command again"
    if isinstance(error, OSError):
        if error.errno == errno.ENOSPC:
            return 1, f"the disk is full{f' ({error.filename})' if error.filename else ''}; {full}"
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            return 1, f"cannot write to {error.filename}: permission denied, or it is read-only; choose another place"
        return 1, f"{error.strerror or text}: {error.filename}; choose another path" if error.filename else text
    of_torch = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text  # a GPU's, or a RuntimeError
    if isinstance(error, MemoryError) or of_torch:
        return 1, f"out of memory; {saves_memory or 'end other programs, or use a machine with more'}"
    if type(error).__name__ == "SafetensorError":
        return 1, f"the disk is full; {full}" if "No space left" in text else text
    return 1, f"unexpected {type(error).__name__}: {text} (run again with --debug for the traceback, and report it)"


def model_argument(model: str) -> list[str]:
    """A model as an argument of the next command, if it is not the default."""
    return [] if model == DEFAULT_MODEL else [model]


def try_method(method: str, command: str, model: Sequence[str] = ()) -> list[str]:
    """The next command with a method, or the first step towards the artifact that the method needs."""
    if get_config(parse_name(method)[0]).needs_artifact:
        return ["kvcli", "calibrate", *model]
    return ["kvcli", command, *model, "--method", method]
