"""`kvcli doctor` and `kvcli env`."""

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from pydantic import Field

from kvcli.artifact.choice import MethodChoice
from kvcli.cli.command import Command
from kvcli.cli.output import Output
from kvcli.commands.options import Options
from kvcli.commands.sizes import size
from kvcli.commands.tables import DataTable
from kvcli.errors import KvcliError, ModelError, error_text
from kvcli.models.builtin_models import BUILTIN_MODELS, CHECKSUMS, copy_folder, damage
from kvcli.registry import METHODS, UNFITTED_METHOD

_CONTEXT = 512
"""Tokens of each method's pass, and on which its kernels are compared with PyTorch."""


class Finding(NamedTuple):
    """What was looked at and found; what is broken must be mended, what is missing need not."""

    what: str
    state: Literal["ok", "missing", "broken"]
    detail: str


class EnvOptions(Options):
    """Options of `kvcli env`."""

    verify: bool = Field(False, description="read the copies of built-in models in full and check them")


def doctor(options: Options, output: Output) -> None:
    """Say what this machine can run, what is compiled and what is missing; exit code 1 if something is broken."""
    findings = [*_packages(), *_models(), *_gpus(), *_methods(output)]
    rows = [finding._asdict() for finding in findings]
    table = DataTable.of("kvcli on this machine", rows, text_columns=3, prose=("detail",))
    output.result({"findings": rows}, table, ["kvcli", "generate", "--method", UNFITTED_METHOD])
    if broken := [finding.what for finding in findings if finding.state == "broken"]:
        raise KvcliError(f"broken: {', '.join(broken)}")


def _packages() -> Iterator[Finding]:
    """Packages that kvcli needs, and extras, against the versions that it takes."""
    from packaging.requirements import Requirement

    absent: dict[str, list[str]] = {}
    good: list[str] = []
    try:
        about = metadata("kvcli")
    except PackageNotFoundError:
        yield Finding("packages", "missing", "kvcli runs from its sources: the versions that it needs are not known")
        return
    extras = ["", *(extra for extra in about.get_all("Provides-Extra", []) if extra != "test")]
    for requirement in map(Requirement, about.get_all("Requires-Dist", [])):
        name, marker = requirement.name, requirement.marker
        extra = next((x for x in extras if not marker or marker.evaluate({"extra": x})), None)
        if extra is None:
            continue
        found = None
        with suppress(PackageNotFoundError):
            found = version(name)
        if found is not None and requirement.specifier.contains(found, prereleases=True):
            good.append(f"{name} {found}")
        elif found is None and extra:
            absent.setdefault(extra, []).append(name)
        else:
            yield Finding(name, "broken", f"{found or 'not installed'}; kvcli needs {requirement}")
    yield Finding("packages", "ok", ", ".join(good))
    for extra, names in absent.items():
        yield Finding(f"kvcli[{extra}]", "missing", f"{', '.join(names)}: pip install 'kvcli[{extra}]'")


def _copies(thorough: bool) -> Iterator[tuple[str, Path, str | None]]:
    """The built-in models with the folders of their copies, and what is wrong with these."""
    for name, builtin in BUILTIN_MODELS.items():
        folder = copy_folder(builtin)
        yield name, folder, damage(folder, thorough) if folder.exists() else None


def _models() -> Iterator[Finding]:
    for name, folder, reason in _copies(thorough=False):
        state: Any = "broken" if reason else "ok" if folder.exists() else "missing"
        yield Finding(name, state, reason or (str(folder) if folder.exists() else "made by the first command"))


def _gpus() -> Iterator[Finding]:
    """GPUs, and what Triton compiled for them."""
    import torch

    from kvcli.kernels.launch import has_triton, shared_memory_limit

    if not torch.cuda.is_available():
        yield Finding("GPU", "missing", "none: methods run in PyTorch, exact and slow")
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        shared = size(shared_memory_limit(torch.device("cuda", index)))
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        detail = f"{gpu.name}, {size(gpu.total_memory)}, {capability}, {shared} of shared memory per block"
        yield Finding(f"GPU {index}", "ok", detail)
    if not has_triton():
        yield Finding("kernels", "missing", "Triton is not installed: methods run in PyTorch, exact and slow")
        return
    from kvcli.kernels.compiling import compiled_kernels  # imports Triton

    compiled = compiled_kernels()
    counts = ", ".join(f"{count} for {int(name) / 10}" for name, count in sorted(compiled.counts.items()))
    place = compiled.folder if compiled.folder.exists() else next(x for x in compiled.folder.parents if x.exists())
    if not os.access(place, os.W_OK):
        yield Finding("kernels", "broken", f"Triton cannot write to {compiled.folder}; set TRITON_CACHE_DIR")
    elif not counts:
        yield Finding("kernels", "missing", f"none compiled in {compiled.folder}: 'kvcli warmup' compiles them ahead")
    else:
        yield Finding("kernels", "ok", f"compiled: {counts}, {size(compiled.nbytes)} in {compiled.folder}")


def _methods(output: Output) -> Iterator[Finding]:
    """Every method on a small model: a pass, and its kernels where they run, compared with PyTorch."""
    import torch

    from kvcli.bench.layer import KernelCheck
    from kvcli.bench.model import random_model
    from kvcli.bench.suite import default_methods

    gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    model = random_model("smollm2-135m" if gpu else "tiny", 1, device, dtype, 0)
    known = default_methods()
    names = [*known, *(name for name in METHODS if not any(x.startswith(name) for x in known))]
    with output.progress("methods", len(names), "methods") as advance:
        for name in names:
            case = MethodChoice(name).plus({} if gpu else {"group_size": 8})
            try:
                _pass(model, case)
                agreement = KernelCheck(model, [case], "auto", 0).agreement(case, _CONTEXT, 1)
            except Exception as error:  # a kernel or another transformers may fail in any way
                yield Finding(name, "broken", f"{type(error).__name__}: {error_text(error)}")
            else:
                if agreement is None:
                    yield Finding(name, "ok", "in PyTorch")
                elif agreement.holds:
                    yield Finding(name, "ok", f"by kernels, {agreement.out_error:.0e} from PyTorch")
                else:
                    yield Finding(name, "broken", agreement.describe())
            advance(1)


def _pass(model: Any, case: Any) -> None:
    """Two tokens by transformers' own `generate`, and by that of a session from a cache that was saved and loaded."""
    import torch

    from kvcli.bench.model import open_session
    from kvcli.seam.versions import with_cache

    ids = torch.arange(_CONTEXT, device=model.device)[None] % model.config.vocab_size
    with open_session(model, case, "auto", 0) as session, TemporaryDirectory() as folder:
        cache, path = session.new_cache(), Path(folder) / "cache.safetensors"
        ours = model.generate(ids, max_new_tokens=2, do_sample=False, **with_cache(cache))
        cache.save(path)
        session.generate(ours, max_new_tokens=2, cache=session.load_cache(path), eos_token_id=[])


def env(options: EnvOptions, output: Output) -> None:
    """Print versions and hardware, for bug reports."""
    from kvcli.commands.machine import environment_info

    info = environment_info()
    lines = [f"kvcli {info['kvcli']}" + (f" at {info['commit']}" if info["commit"] else "")]
    lines.append(f"python {info['python']} on {info['platform']}")
    lines += [f"{name} {version or 'not installed'}" for name, version in info["packages"].items()]
    lines.append(f"cpu: {info['cpu']}, {info['cpu_count']} cores, {size(info['memory_bytes'])}")
    lines += [f"gpu: {gpu['name']}, {size(gpu['memory_bytes'])}" for gpu in info["gpus"]] or ["gpu: none"]
    if options.verify:
        states = info["models"] = {}
        for name, folder, reason in _copies(thorough=True):
            if not folder.exists():
                states[name] = "not downloaded"
            elif reason:
                states[name] = f"damaged: {reason}"
                (folder / CHECKSUMS).unlink(missing_ok=True)  # the next command that needs it makes it again
            else:
                states[name] = f"whole, in {folder}"
        lines += [f"{name}: {state}" for name, state in info["models"].items()]
    output.result(info, "\n".join(lines), ["kvcli", "demo"])
    if damaged := [name for name, state in info.get("models", {}).items() if state.startswith("damaged")]:
        raise ModelError(f"damaged: {', '.join(damaged)}; the next command that needs it makes it again")


DOCTOR = Command("doctor", Options, doctor, "kvcli doctor")
ENV = Command("env", EnvOptions, env, "kvcli env --json")
