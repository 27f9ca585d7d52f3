"""Fits a method layer by layer from a recording; an interrupted run resumes at the first layer that is not finished.

A run folder holds `run.json`, what the run is bound to, and for each finished layer `layer-NNN.safetensors` and
`layer-NNN.json` with what fitting reported, the layer's index, the sha256 of the run's description, and size and sha256
of the tensors: a layer counts as finished if all of them agree. `assemble` makes an artifact of a complete run.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.metadata import new_metadata
from kvcli.calibrate.recording import Recording
from kvcli.errors import ArtifactError, UsageError, error_text
from kvcli.methods.config import EXACT, CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import FitLayer, FitReport, Method
from kvcli.methods.per_layer import make_codec
from kvcli.methods.samples import BLOCK_TOKENS, LayerSamples
from kvcli.registry import METHODS, get_method
from kvcli.spec import ModelSpec
from kvcli.storage.atomic import file_record, is_intact, replacing
from kvcli.storage.locks import locked
from kvcli.storage.manifest import RunManifest, Sealed, json_sha256, write_sealed
from kvcli.storage.ranks import ALONE, Ranks, packed

_HELDOUT_FRACTION = 0.1
_REMEDY = "run the same fit again, with --overwrite"


class FitManifest(RunManifest):
    """`run.json`: everything that determines the result of a run."""

    VERSION = 5
    ERROR = ArtifactError
    REMEDY = _REMEDY
    FILE = "run.json"
    KIND = "run"
    MISSING = "no run in {folder}; run 'kvcli fit' first"
    STALE = ("layer-[0-9]*.safetensors", "layer-[0-9]*.json")

    method: str
    config: dict[str, Any]
    model: str
    fingerprint: str
    spec: ModelSpec
    provenance: dict[str, Any]


class LayerReport(Sealed):
    """`layer-NNN.json`: the report of a fitted layer."""

    VERSION = 5
    ERROR = ArtifactError
    REMEDY = _REMEDY

    layer: int
    run_sha256: str
    tensors: dict[str, Any]
    metrics: dict[str, Any]
    seconds: float

    @classmethod
    def of(cls, folder: Path, layer_idx: int, run: FitManifest) -> Self | None:
        """The report of a layer whose files are intact and belong to a run; None if it is not finished."""
        try:
            report = cls.read(folder / _name(layer_idx, "json"))
        except ArtifactError:
            return None
        belongs = report.layer == layer_idx and report.run_sha256 == json_sha256(run.values)
        return report if belongs and is_intact(folder / _name(layer_idx, "safetensors"), report.tensors) else None


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
    block_tokens: int = BLOCK_TOKENS,
    ranks: Ranks = ALONE,
    done: Callable[[int, Mapping[str, Any], bool], None] = lambda layer_idx, metrics, reused: None,
) -> None:
    """Fits the layers that the run folder does not hold yet.

    Args:
        recording: calibration samples; its last tenth of sequences is held out to measure on.
        config: settings of the method, resolved.
        layers: only these, to share the work among machines; default: all recorded layers.
        seed: of every random choice; each layer draws from its own generator.
        overwrite: discard a run that is in the folder, also the same one.
        block_tokens: tokens of a layer in memory at once; a recording of more is read again in every pass, and what
            is derived from it is in temporary files in the run folder.
        ranks: the processes that share the layers, all called with the same arguments, and with files in common.
        done: called after each layer with its index, its metrics, and whether it was finished before; in rank 0, also
            with the layers of the others when they have ended.

    UsageError: a method that is not fitted, layers that were not recorded, or sequences that are all sinks;
    ArtifactError: the folder holds another run and `overwrite` is off (the message names what differs), or is used by
    another process; SamplesError: samples that are missing or damaged; RankError: another rank has ended.
    """
    fit_layer = check_fitted(method)
    indices = list(recording.layers if layers is None else layers)
    if missing := sorted(set(indices) - set(recording.layers)):
        raise UsageError(f"layers {', '.join(map(str, missing))} were not recorded")
    if config.sink_length >= (seq_len := recording.manifest.seq_len):
        raise UsageError(f"sink_length {config.sink_length} leaves nothing to fit of sequences of {seq_len} tokens")
    if method.allocate is not None and ranks.rank == 0:
        read = partial(split_samples, recording, device=device, block_tokens=block_tokens, scratch=folder)
        samples = partial(read, sink_length=config.sink_length)
        config = method.allocate(recording.spec, config, recording.fisher, lambda layer_idx: samples(layer_idx)[0])
    description = {
        "format_version": FitManifest.VERSION,
        "method": method.name,
        "config": config.model_dump(),
        **recording.identity,
        "provenance": {**recording.manifest.provenance, "num_tokens": recording.manifest.num_tokens, "seed": seed},
        "recording_sha256": json_sha256(recording.manifest.values),
        "block_tokens": block_tokens,
    }
    with locked(folder, ArtifactError) if ranks.rank == 0 else nullcontext():
        if ranks.rank == 0:
            FitManifest.open(folder, description, overwrite=overwrite)
        ranks.wait()
        run, share = FitManifest.read(folder / FitManifest.FILE), indices
        if ranks.count > 1:  # a layer takes about as long as its codes have bits
            config = method.config_cls(**run.config)
            with torch.device("meta"):
                codecs = [make_codec(method, recording.spec, config, layer_idx) for layer_idx in indices]
            costs = [codec.key.bits_per_token() + codec.value.bits_per_token() for codec in codecs]
            share = [indices[index] for index in packed(costs, ranks.count)[ranks.rank]]
        for layer_idx in share:
            report, reused = LayerReport.of(folder, layer_idx, run), True
            if report is None:
                codec = make_codec(method, recording.spec, config, layer_idx).to(device)
                if codec.plain:
                    raise UsageError(f"layer {layer_idx}: {EXACT} bits, keys or values as they are, are not fitted")
                train, heldout = split_samples(recording, layer_idx, config.sink_length, device, block_tokens, folder)
                started = time.perf_counter()
                with torch.no_grad():
                    generator = torch.Generator().manual_seed(seed * 100_003 + layer_idx)
                    of_layer = config.in_layer(layer_idx, recording.spec.num_layers)
                    fitted = fit_layer(codec, train, heldout, of_layer, generator)
                seconds = round(time.perf_counter() - started, 2)
                report, reused = _write_layer(folder, layer_idx, run, codec, fitted, seconds), False
            done(layer_idx, {**report.metrics, "seconds": report.seconds}, reused)
        ranks.wait()
        for layer_idx in sorted(set(indices) - set(share)) if ranks.rank == 0 else ():
            report = LayerReport.of(folder, layer_idx, run)
            if report is None:
                lost = f"layer {layer_idx}, which another rank fitted, is not in {folder}"
                raise ArtifactError(f"{lost}; ranks need a folder that all of them see")
            done(layer_idx, {**report.metrics, "seconds": report.seconds}, False)


def _write_layer(
    folder: Path, layer_idx: int, run: FitManifest, codec: LayerCodec[Any, Any], fitted: FitReport, seconds: float
) -> LayerReport:
    """Writes the tensors of a layer, then its report."""
    with replacing(folder / _name(layer_idx, "safetensors")) as path:
        save_file({name: x.cpu().contiguous() for name, x in codec.state_dict().items()}, path)
        tensors = file_record(path)
    path = folder / _name(layer_idx, "json")
    report = {
        "format_version": LayerReport.VERSION,
        "layer": layer_idx,
        "run_sha256": json_sha256(run.values),
        "tensors": tensors,
        "metrics": {**fitted.metrics, **({"warnings": list(fitted.warnings)} if fitted.warnings else {})},
        "seconds": seconds,
    }
    write_sealed(path, report)
    return LayerReport.read(path)


def check_fitted(method: Method) -> FitLayer:
    """The function that fits a layer of a method; UsageError for a method that is not fitted."""
    if method.fit is None:
        fitted = [name for name in METHODS if get_method(name).fit is not None]
        raise UsageError(f"method '{method.name}' has nothing to fit; choose one of {', '.join(fitted)}")
    return method.fit


def assemble(folders: Sequence[Path]) -> Artifact:
    """Makes an artifact of a complete run, whose layers may be in several folders; nothing is written.

    ArtifactError: no run in a folder, different runs, missing layers, or damaged files.
    """
    run, *others = [FitManifest.read(folder / FitManifest.FILE) for folder in folders]
    for folder, other in zip(folders[1:], others, strict=True):
        if other.values != run.values:
            raise ArtifactError(f"{folder} and {folders[0]} hold different runs")
    try:
        config = get_method(run.method).config_cls(**run.config)
    except (UsageError, ValueError, TypeError) as error:
        raise ArtifactError(f"{folders[0] / run.FILE} is damaged ({error_text(error)}); {_REMEDY}") from error
    tensors: dict[str, Tensor] = {}
    metrics: list[Mapping[str, Any]] = []
    missing, damaged = [], ""
    for layer_idx in range(run.spec.num_layers):
        name = _name(layer_idx, "safetensors")
        finished = ((folder, report) for folder in folders if (report := LayerReport.of(folder, layer_idx, run)))
        folder, report = next(finished, (folders[0], None))
        if report is None:
            missing.append(str(layer_idx))
            damaged = " (missing or damaged)" if any((folder / name).exists() for folder in folders) else damaged
            continue
        metrics.append(report.metrics)
        try:
            state = load_file(folder / name)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise ArtifactError(f"layer {layer_idx} of the run in {folder} is damaged ({error}); {_REMEDY}") from error
        tensors.update({f"layers.{layer_idx}.{name}": x.clone() for name, x in state.items()})
    if missing:
        lacks = f"the run in {folders[0]} lacks layers {', '.join(missing)}{damaged}"
        raise ArtifactError(f"{lacks}; run the same fit again to resume")
    identity = {name: run.values[name] for name in ("model", "fingerprint", "spec")}
    metadata = new_metadata(
        method=run.method, config=config, identity=identity, provenance=run.provenance, layers=metrics
    )
    return Artifact(metadata, tensors)


def split_samples(
    recording: Recording,
    layer_idx: int,
    sink_length: int,
    device: torch.device | str,
    block_tokens: int = BLOCK_TOKENS,
    scratch: Path | None = None,
) -> tuple[LayerSamples, LayerSamples]:
    """Training and held-out samples of a layer, without the first `sink_length` tokens of each sequence.

    Other arguments are those of `Recording.load_sequences`.
    """
    num_sequences = recording.manifest.num_sequences
    heldout = max(1, round(num_sequences * _HELDOUT_FRACTION)) if num_sequences > 1 else 0
    border = num_sequences - heldout
    ranges = [range(border), range(border, num_sequences)] if heldout else [range(num_sequences)]
    samples = recording.load_sequences(
        layer_idx, ranges, device, skip=sink_length, block_tokens=block_tokens, scratch=scratch
    )
    return samples[0], samples[-1]


def _name(layer_idx: int, suffix: str) -> str:
    return f"layer-{layer_idx:03d}.{suffix}"
