"""`kvcli env`."""

from __future__ import annotations

from pydantic import Field

from kvcli.builtin_models import BUILTIN_MODELS, CHECKSUMS, copy_folder, damage
from kvcli.cli.command import Command
from kvcli.cli.output import Output
from kvcli.errors import ModelError
from kvcli.options import Options
from kvcli.sizes import size


class EnvOptions(Options):
    """Options of `kvcli env`."""

    verify: bool = Field(default=False, description="read the copies of built-in models in full and check them")


def run(options: EnvOptions, output: Output) -> None:
    """Print versions and hardware, for bug reports."""
    from kvcli.machine import environment_info

    info = environment_info()
    lines = [f"kvcli {info['kvcli']}" + (f" at {info['commit']}" if info["commit"] else "")]
    lines.append(f"python {info['python']} on {info['platform']}")
    lines += [f"{name} {version or 'not installed'}" for name, version in info["packages"].items()]
    lines.append(f"cpu: {info['cpu']}, {info['cpu_count']} cores, {size(info['memory_bytes'] or 0)}")
    lines += [f"gpu: {gpu['name']}, {size(gpu['memory_bytes'])}" for gpu in info["gpus"]] or ["gpu: none"]
    if options.verify:
        states = info["models"] = {}
        for name, builtin in BUILTIN_MODELS.items():
            folder = copy_folder(builtin)
            if not folder.exists():
                states[name] = "not downloaded"
            elif reason := damage(folder, thorough=True):
                states[name] = f"damaged: {reason}"
                (folder / CHECKSUMS).unlink(missing_ok=True)  # the next command that needs it makes it again
            else:
                states[name] = f"whole, in {folder}"
        lines += [f"{name}: {state}" for name, state in info["models"].items()]
    output.result(info, "\n".join(lines), ["kvcli", "demo"])
    if damaged := [name for name, state in info.get("models", {}).items() if state.startswith("damaged")]:
        raise ModelError(f"damaged: {', '.join(damaged)}; the next command that needs it makes it again")


COMMAND = Command("env", EnvOptions, run, "kvcli env --json")
