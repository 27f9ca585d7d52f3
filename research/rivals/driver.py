"""`python -m research rivals`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import Field

from kvcli.cli.command import Command
from kvcli.cli.output import Output
from kvcli.commands.options import Options
from kvcli.models.builtin_models import BUILTIN_MODELS, cache_folder, download_gguf
from kvcli.progress import no_progress
from research.rivals.packages import BASE, RIVALS, TORCH, Rival

ROOT = Path(__file__).resolve().parents[2]
MODEL, CORPUS, TOKENS = "smollm2-135m", "builtin:mobydick", 2048
"""Text that nothing is fitted to: no file of its kind is in the calibration split."""

INSTALL_S, PACKAGE_S = 300, 900
"""Seconds that the installation and the measurements of one package may take."""


class RivalsOptions(Options):
    """Options of `python -m research rivals`."""

    only: list[str] = Field(default=[], description="package to measure, or 'kvcli'; repeatable; default: all")
    artifact: list[Path] = Field(default=[], description="artifact of kvcli as one more row; repeatable")
    jobs: int = Field(default=2, ge=1, description="packages at a time, each on one core; with more, seconds say less")
    out: Path = Field(default=Path("rivals.jsonl"), description="records; those of measured packages are replaced")
    folder: Path | None = Field(default=None, description="environments and model; default: in kvcli's cache")


def run(options: RivalsOptions, output: Output) -> None:
    """Install pinned packages that compress the KV cache, each in an environment of its own, and measure them."""
    folder = options.folder or cache_folder("rivals")
    prepare(folder)
    output.say("the model and its tokens are there")
    chosen = [Rival("kvcli_methods", (f"kvcli=={version('kvcli')}",)), *RIVALS]
    asked = [x for x in chosen if not options.only or x.package in options.only]
    measure = partial(records, folder=folder, artifacts=options.artifact)
    with ThreadPoolExecutor(options.jobs) as pool:
        for rival, rows in zip(asked, pool.map(measure, asked), strict=True):
            replace(options.out, rival.package, rows)
            failed = sum("error" in row for row in rows)
            output.say(f"{rival.package} {rival.version}: {len(rows)} records, {failed} of them errors")


def prepare(folder: Path) -> None:
    """Makes the environment that others share, and saves the model, also as GGUF, and the tokens, once."""
    if not (base := folder / "environments" / "base").exists():
        create(base, BASE)
    if (folder / "tokens.json").exists():
        return
    import torch

    from kvcli.calibrate.corpus import CorpusConfig, documents, token_sequences
    from kvcli.models.checkpoint import quiet_transformers
    from kvcli.models.load import load_model

    folder.mkdir(parents=True, exist_ok=True)
    loaded = load_model(MODEL, dtype=torch.float16)
    with quiet_transformers():
        loaded.model.save_pretrained(folder / "model")
        loaded.tokenizer.save_pretrained(folder / "model")
    change(folder / "model" / "config.json", rope_theta=loaded.spec.rope.theta)
    change(folder / "model" / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    download_gguf(BUILTIN_MODELS[MODEL], folder, no_progress).replace(folder / "model.gguf")
    texts = documents(CorpusConfig(CORPUS, "heldout"))
    tokens = token_sequences(texts, loaded.tokenizer, 1, TOKENS)[0].tolist()
    (folder / "tokens.json").write_text(json.dumps(tokens))


def change(path: Path, **entries: Any) -> None:
    """Adds entries that older versions of transformers read."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}, indent=1))


def records(rival: Rival, folder: Path, artifacts: list[Path]) -> list[dict[str, Any]]:
    """The records of one package; settings that fail are measured once more with an older transformers."""
    found = list(measured(rival, folder, artifacts))
    failed = {row["setting"] for row in found if "error" in row}
    if failed and rival.for_transformers and rival.package != "kvcli":
        found += measured(rival, folder, artifacts, rival.older, () if "" in failed else sorted(failed))
    return found


def measured(
    rival: Rival, folder: Path, artifacts: list[Path], older: tuple[str, ...] = (), names: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Of each setting, or named setting, and way, or of what failed before."""
    about = {"package": rival.package, "version": rival.version}
    failure = {**about, "setting": "", "claim": "", **({"transformers": older[0].split("==")[1]} if older else {})}
    try:
        python = Path(sys.executable) if rival.package == "kvcli" else environment(rival, folder, older)
    except (subprocess.SubprocessError, OSError) as error:
        yield {**failure, "way": "install", "error": installation_error(error)}
        return
    out = folder / f"{rival.adapter}.jsonl"
    out.unlink(missing_ok=True)
    command = [
        str(python),
        "-W",
        "ignore",
        "-m",
        "research.rivals.protocol",
        rival.adapter,
        str(folder),
        str(out),
        *names,
    ]
    try:
        done = subprocess.run(command, env=variables(artifacts), capture_output=True, timeout=PACKAGE_S, check=False)
        ended = f"the process ended with {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        ended = f"no result within {PACKAGE_S} s"
    for line in out.read_text().splitlines() if out.exists() else ():
        yield {**about, **json.loads(line)}
    if ended:
        yield {**failure, "way": "process", "error": ended}


def environment(rival: Rival, folder: Path, older: tuple[str, ...] = ()) -> Path:
    """Python of a package's environment, which is made where it is missing; torch and transformers come from a base."""
    base = folder / "environments" / "base"
    place = base.with_name(f"{rival.adapter}-older" if older else rival.adapter)
    if not place.exists():
        wanted = (TORCH, *rival.requirements, *older)
        create(place, wanted, next(base.glob("lib/python*/site-packages")))
    return place / "bin" / "python"


def create(place: Path, requirements: tuple[str, ...], shared: Path | None = None) -> None:
    """An environment with these requirements, beside packages that it shares; none is left where pip fails."""
    making = place.with_name(f".{place.name}")
    venv.create(making, with_pip=True, clear=True)
    if shared is not None:
        (next(making.glob("lib/python*/site-packages")) / "shared.pth").write_text(f"{shared}\n")
    command = [str(making / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-input", *requirements]
    subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=True)
    making.rename(place)


def installation_error(error: Exception) -> str:
    """What pip said last, without paths."""
    lines = [x for x in (getattr(error, "stderr", None) or str(error)).splitlines() if x.startswith(("ERROR", "error"))]
    return re.sub(r"\S*/\S+", "PATH", lines[0] if lines else type(error).__name__)[:200]


def variables(artifacts: list[Path]) -> dict[str, str]:
    """The environment of a measurement: one thread, no hub, and adapters on the path."""
    mine = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **mine, "KVCLI_ARTIFACTS": os.pathsep.join(map(str, artifacts))}


def replace(out: Path, package: str, rows: list[dict[str, Any]]) -> None:
    """Puts the records of a package in the place of its former ones."""
    kept = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    kept = [row for row in kept if row["package"] != package]
    out.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *rows]))


EXAMPLE = "python -m research rivals --only nexusquant-kv"
COMMAND = Command("rivals", RivalsOptions, run, EXAMPLE, resumes=True)
