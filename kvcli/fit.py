"""Fits a method layer by layer from a recording, so that a run that was cut off resumes at the first missing layer.

A run folder holds `run.json`, the configuration, and for each finished layer `layer-NNN.safetensors` and
`layer-NNN.json` with what fitting reported. `assemble` makes an artifact of a complete run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcli.artifact import Artifact, config_hash, new_metadata
from kvcli.errors import ArtifactError, UsageError
from kvcli.files import replacing
from kvcli.methods.config import CacheConfig
from kvcli.methods.method import Method
from kvcli.registry import get_method
from kvcli.samples import LayerSamples, Recording
from kvcli.spec import ModelSpec

RUN = "run.json"
_HELDOUT_FRACTION = 0.1

LayerDone = Callable[[int, Mapping[str, Any], bool], None]
"""Told the layer, its metrics, and whether it was found finished."""


def fit_recording(
    recording: Recording,
    method: Method,
    config: CacheConfig,
    folder: Path,
    *,
    layers: Iterable[int] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    overwrite: bool = False,
    done: LayerDone = lambda layer, metrics, found: None,
) -> None:
    """Fits the layers that the run folder does not hold yet.

    Args:
        recording: calibration samples; its last tenth of sequences is held out to measure on.
        method: a method that is fitted.
        config: its settings, resolved.
        folder: the run folder.
        layers: some layers only, for several machines to share the work; default all recorded layers.
        device: where fitting computes.
        seed: of every random choice; each layer draws from its own generator.
        overwrite: discard another run that stands in the folder.
        done: called after each layer.

    Raises:
        UsageError: a method without fitting, or layers that were not recorded.
        ArtifactError: the folder holds a run with another configuration and `overwrite` is off.
    """
    if method.fit is None:
        raise UsageError(f"method '{method.name}' needs no calibration")
    wanted = list(recording.layers if layers is None else layers)
    if missing := sorted(set(wanted) - set(recording.layers)):
        raise UsageError(f"layers {', '.join(map(str, missing))} were not recorded")
    _open_run(folder, _run_description(recording, method, config, seed), overwrite)
    for layer_idx in wanted:
        if (metrics := _finished(folder, layer_idx)) is not None:
            done(layer_idx, metrics, True)
            continue
        started = time.perf_counter()
        codec = method.build(recording.spec, config, layer_idx).to(device)
        train, heldout = _split(recording, layer_idx, config.sink_length, device)
        generator = torch.Generator().manual_seed(seed * 100_003 + layer_idx)
        with torch.no_grad():
            report = method.fit(codec, train, heldout, config, generator)
        metrics = {**report.metrics, "seconds": round(time.perf_counter() - started, 2)}
        state = {name: x.cpu().contiguous() for name, x in codec.state_dict().items()}
        with replacing(folder / _name(layer_idx, "safetensors")) as path:
            save_file(state, path)
        with replacing(folder / _name(layer_idx, "json")) as path:
            path.write_text(json.dumps(metrics) + "\n")
        done(layer_idx, metrics, False)


def assemble(folders: Sequence[Path]) -> Artifact:
    """Makes an artifact of a complete run, whose layers may be spread over several folders.

    Raises:
        ArtifactError: no run in a folder, folders of different runs, layers that are missing, or damaged files.
    """
    run = _read_run(folders[0])
    for folder in folders[1:]:
        if _read_run(folder) != run:
            raise ArtifactError(f"{folder} and {folders[0]} hold different training runs")
    try:
        spec = ModelSpec.from_dict(run["spec"])
        config = get_method(run["method"]).config_cls(**run["config"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{folders[0] / RUN} is damaged: {error!r}") from error
    homes = {i: next((f for f in folders if _finished(f, i) is not None), None) for i in range(spec.num_layers)}
    if missing := [str(layer_idx) for layer_idx, home in homes.items() if home is None]:
        raise ArtifactError(
            f"the run in {folders[0]} lacks layers {', '.join(missing)}; run 'kvcli train-codebook' again to resume it"
        )
    tensors: dict[str, Tensor] = {}
    reports: list[Mapping[str, Any]] = []
    for layer_idx, home in homes.items():
        assert home is not None
        reports.append(_finished(home, layer_idx) or {})
        try:
            state = load_file(home / _name(layer_idx, "safetensors"))
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"layer {layer_idx} of the run in {home} is damaged: {error}") from error
        tensors.update({f"layers.{layer_idx}.{name}": x for name, x in state.items()})
    metadata = new_metadata(
        method=run["method"],
        config=config,
        spec=spec,
        model=run["model"],
        fingerprint=run["fingerprint"],
        provenance=run["provenance"],
        layers=reports,
    )
    return Artifact(metadata, tensors)


def _read_run(folder: Path) -> dict[str, Any]:
    path = folder / RUN
    if not path.is_file():
        raise ArtifactError(f"no training run in {folder}; run 'kvcli train-codebook' first")
    try:
        run: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged: {error}") from error
    return run


def _run_description(recording: Recording, method: Method, config: CacheConfig, seed: int) -> dict[str, Any]:
    """What a run is bound to."""
    manifest = recording.manifest
    return {
        "method": method.name,
        "config": config.model_dump(),
        "model": manifest["model"],
        "fingerprint": manifest["fingerprint"],
        "spec": manifest["spec"],
        "provenance": {**manifest["provenance"], "num_tokens": recording.num_tokens, "seed": seed},
        "recording_sha256": config_hash(manifest),
    }


def _open_run(folder: Path, description: Mapping[str, Any], overwrite: bool) -> None:
    """Starts a run, or checks that the one in the folder is the same."""
    path = folder / RUN
    folder.mkdir(parents=True, exist_ok=True)
    wanted = json.loads(json.dumps(description))
    if path.is_file():
        try:
            found = json.loads(path.read_text())
        except ValueError:
            found = {}
        if found == wanted:
            return
        if not overwrite:
            odd = ", ".join(sorted(name for name in wanted if found.get(name) != wanted[name])) or "its content"
            raise ArtifactError(
                f"{folder} holds another training run (differs in {odd}); choose another --out or use --overwrite"
            )
        for stale in folder.glob("layer-*"):
            stale.unlink()
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(wanted, indent=2) + "\n")


def _split(
    recording: Recording, layer_idx: int, sink_length: int, device: torch.device | str
) -> tuple[LayerSamples, LayerSamples]:
    """Training and held-out samples of a layer, without the tokens that the cache keeps as sinks."""
    samples = recording.load(layer_idx, device)
    seq_len = int(recording.manifest["seq_len"])
    num_sequences = recording.num_tokens // seq_len
    heldout = max(1, round(num_sequences * _HELDOUT_FRACTION)) if num_sequences > 1 else 0
    border = (num_sequences - heldout) * seq_len
    kept = torch.arange(recording.num_tokens, device=samples.k.device)[
        samples.positions >= min(sink_length, seq_len - 1)
    ]
    train = samples.select(kept[kept < border])
    return train, samples.select(kept[kept >= border]) if heldout else train


def _finished(folder: Path, layer_idx: int) -> dict[str, Any] | None:
    """The metrics of a finished layer; they are written last, so their presence proves the tensors."""
    path = folder / _name(layer_idx, "json")
    if not path.is_file() or not (folder / _name(layer_idx, "safetensors")).is_file():
        return None
    try:
        metrics: dict[str, Any] = json.loads(path.read_text())
    except ValueError:
        return None
    return metrics


def _name(layer_idx: int, suffix: str) -> str:
    return f"layer-{layer_idx:03d}.{suffix}"
