"""Fits a method layer by layer from a recording; an interrupted run resumes at the first missing layer.

A run folder holds `run.json`, what the run is bound to, and for each finished layer `layer-NNN.safetensors` and
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
from kvcli.files import open_run, replacing, write_json
from kvcli.methods.config import CacheConfig
from kvcli.methods.method import FitLayer, Method
from kvcli.registry import METHODS, get_method
from kvcli.samples import LayerSamples, Recording, model_identity
from kvcli.spec import ModelSpec

RUN = "run.json"
_HELDOUT_FRACTION = 0.1
_STALE = ("layer-*.safetensors*", "layer-*.json*")

LayerDone = Callable[[int, Mapping[str, Any], bool], None]
"""Called with the layer's index, its metrics, and whether it was finished before this run."""


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
    done: LayerDone = lambda layer_idx, metrics, reused: None,
) -> None:
    """Fits the layers that the run folder does not hold yet.

    Args:
        recording: calibration samples; its last tenth of sequences is held out to measure on.
        method: a method that is fitted.
        config: its settings, resolved.
        folder: the run folder.
        layers: fit these layers only, to share the work among machines; default: all recorded layers.
        device: where fitting computes.
        seed: of every random choice; each layer draws from its own generator.
        overwrite: discard another run that is in the folder.
        done: called after each layer.

    Raises:
        UsageError: a method that is not fitted, or layers that were not recorded.
        ArtifactError: the folder holds another run and `overwrite` is off; the message names what differs.
    """
    fit_layer = check_fitted(method)
    wanted = list(recording.layers if layers is None else layers)
    if missing := sorted(set(wanted) - set(recording.layers)):
        raise UsageError(f"layers {', '.join(map(str, missing))} were not recorded")
    description = _run_description(recording, method, config, seed)
    open_run(folder, RUN, description, kind="run", stale=_STALE, error=ArtifactError, overwrite=overwrite)
    for layer_idx in wanted:
        if (metrics := _finished(folder, layer_idx)) is not None:
            done(layer_idx, metrics, True)
            continue
        started = time.perf_counter()
        codec = method.build(recording.spec, config, layer_idx).to(device)
        train, heldout = _split(recording, layer_idx, config.sink_length, device)
        generator = torch.Generator().manual_seed(seed * 100_003 + layer_idx)
        with torch.no_grad():
            report = fit_layer(codec, train, heldout, config, generator)
        metrics = {**report.metrics, "seconds": round(time.perf_counter() - started, 2)}
        state = {name: x.cpu().contiguous() for name, x in codec.state_dict().items()}
        with replacing(folder / _name(layer_idx, "safetensors")) as path:
            save_file(state, path)
        write_json(folder / _name(layer_idx, "json"), metrics)
        done(layer_idx, metrics, False)


def check_fitted(method: Method) -> FitLayer:
    """The function that fits a layer of a method.

    Raises:
        UsageError: a method that is not fitted.
    """
    if method.fit is None:
        fitted = [name for name in METHODS if get_method(name).fit is not None]
        raise UsageError(f"method '{method.name}' has nothing to fit; choose one of {', '.join(fitted)}")
    return method.fit


def assemble(folders: Sequence[Path]) -> Artifact:
    """Makes an artifact of a complete run, whose layers may be in several folders.

    Args:
        folders: run folders of the same run.

    Returns:
        The artifact; nothing is written.

    Raises:
        ArtifactError: no run in a folder, folders of different runs, layers that are missing, or damaged files.
    """
    run = _read_run(folders[0])
    for folder in folders[1:]:
        if _read_run(folder) != run:
            raise ArtifactError(f"{folder} and {folders[0]} hold different runs")
    try:
        num_layers = ModelSpec.from_dict(run["spec"]).num_layers
        config = get_method(run["method"]).config_cls(**run["config"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{folders[0] / RUN} is damaged: {error!r}") from error
    folder_of = {i: next((f for f in folders if _finished(f, i) is not None), None) for i in range(num_layers)}
    if missing := [str(layer_idx) for layer_idx, home in folder_of.items() if home is None]:
        raise ArtifactError(
            f"the run in {folders[0]} lacks layers {', '.join(missing)}; run the same fit again to resume"
        )
    tensors: dict[str, Tensor] = {}
    reports: list[Mapping[str, Any]] = []
    for layer_idx, home in folder_of.items():
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
        identity=model_identity(run),
        provenance=run["provenance"],
        layers=reports,
    )
    return Artifact(metadata, tensors)


def _read_run(folder: Path) -> dict[str, Any]:
    path = folder / RUN
    if not path.is_file():
        raise ArtifactError(f"no run in {folder}; run 'kvcli fit' first")
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
        **recording.identity,
        "provenance": {**manifest["provenance"], "num_tokens": recording.num_tokens, "seed": seed},
        "recording_sha256": config_hash(manifest),
    }


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
