"""A small recording, run and artifact on disk, and ways to damage them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from factories import load, make_model

from kvcli.artifact.fit import assemble, fit_recording
from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig
from kvcli.calibrate.recording import Recording
from kvcli.registry import get_method
from kvcli.storage.manifest import write_sealed

SEQUENCES = torch.randint(3, 97, (6, 24), generator=torch.Generator().manual_seed(0))
SIZES = CollectConfig(6, 24, 3, 2, 2)

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 10**6, 2**31, 2**63, 10**18, 10**400, -(2**63), 0.5, 1e308, float("nan"),
    float("inf"), "", "x", "0" * 64, "0" * 300, "../../etc/passwd", "\x00", "\ud800", [], [[]], [1, 2], {}, {"x": {}},
)  # fmt: skip
"""What a field of a damaged or hostile JSON file may hold."""


def recorded(folder: Path, sequences: torch.Tensor = SEQUENCES, **options: Any) -> Recording:
    collect(load(make_model("llama")), sequences, SIZES, folder, {"corpus": {"source": "random"}}, **options)
    return Recording(folder)


def fitted(folder: Path, recording: Recording, sink_length: int | None = None, **options: Any) -> None:
    """Fits SQuat, which takes milliseconds; options are those of `fit_recording`."""
    method, sinks = get_method("squat"), {} if sink_length is None else {"sink_length": sink_length}
    settings = {**method.example_settings, "subspace_source": "calibration", **sinks}
    fit_recording(recording, method, method.config_cls(**settings).resolve(recording.spec), folder, **options)


def make(folder: Path) -> None:
    """A recording, a run and an artifact."""
    fitted(folder / "run", recorded(folder / "samples"))
    assemble([folder / "run"]).save(folder / "artifact")


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def swap(first: Path, second: Path) -> None:
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def edit(path: Path, change: Callable[[dict[str, Any]], Any], seal: bool = False) -> None:
    values = json.loads(path.read_text())
    change(values)
    if seal:
        del values["sha256"]
        write_sealed(path, values)
    else:
        path.write_text(json.dumps(values))
