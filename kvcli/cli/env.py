"""`kvcli env`."""

from __future__ import annotations

import typer

from kvcli.cli.options import Options, command
from kvcli.cli.output import Output, size


class EnvOptions(Options):
    """Options of `kvcli env`."""


def run(options: EnvOptions, output: Output) -> None:
    """Print versions and hardware, for bug reports."""
    from kvcli.machine import facts

    found = facts()
    lines = [f"kvcli {found['kvcli']}" + (f" at {found['commit']}" if found["commit"] else "")]
    lines.append(f"python {found['python']} on {found['platform']}")
    lines += [f"{name} {version or 'not installed'}" for name, version in found["packages"].items()]
    lines.append(f"cpu: {found['cpu']}, {found['cpu_count']} cores, {size(found['memory_bytes'] or 0)}")
    lines += [f"gpu: {gpu['name']}, {size(gpu['memory_bytes'])}" for gpu in found["gpus"]] or ["gpu: none"]
    output.result(found, "\n".join(lines))


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "env", EnvOptions, "kvcli env --json")(run)
