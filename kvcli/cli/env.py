"""`kvcli env`."""

from __future__ import annotations

import typer

from kvcli.cli.command import command
from kvcli.cli.options import Options
from kvcli.cli.output import Output, size


class EnvOptions(Options):
    """Options of `kvcli env`."""


def run(options: EnvOptions, output: Output) -> None:
    """Print versions and hardware, for bug reports."""
    from kvcli.machine import environment_info

    info = environment_info()
    lines = [f"kvcli {info['kvcli']}" + (f" at {info['commit']}" if info["commit"] else "")]
    lines.append(f"python {info['python']} on {info['platform']}")
    lines += [f"{name} {version or 'not installed'}" for name, version in info["packages"].items()]
    lines.append(f"cpu: {info['cpu']}, {info['cpu_count']} cores, {size(info['memory_bytes'] or 0)}")
    lines += [f"gpu: {gpu['name']}, {size(gpu['memory_bytes'])}" for gpu in info["gpus"]] or ["gpu: none"]
    output.result(info, "\n".join(lines))


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "env", EnvOptions, "kvcli env --json")(run)
