"""Recorded attention inputs on disk: what calibration writes and fitting reads.

A recording is a folder of safetensors parts. Part p of layer window w holds, for every layer of the window,
`layers.L.k` and `layers.L.v` [num_kv_heads, tokens, head_dim] and `layers.L.q` [num_heads, query_tokens, head_dim], all
pre-RoPE and 16 bits. Tokens are whole sequences of `seq_len` tokens, one after another. Where the model's key
projection has a bias, `layers.L.key_bias`, float32 [num_kv_heads, head_dim], is the bias, and `layers.L.k` is without
it: a bias can be so much larger than what varies that 16 bits would lose the latter.

`fisher.safetensors`, which a recording can lack, holds `layers.L.NAME` for the fields of `LayerFisher`.

The manifest `samples.json` has size and sha256 of each of these files, and a sha256 of its own fields. While a
recording is not finished, `samples.parts.jsonl` has them instead, a line per file. This module does not know where
samples come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcli.errors import SamplesError, explain
from kvcli.files import append_record, file_record, is_intact, read_records, read_sealed, replacing
from kvcli.layer_samples import LayerFisher, LayerSamples
from kvcli.rope import Rotation
from kvcli.spec import FAMILIES, STATIC_ROPE_TYPES, ModelSpec

MANIFEST = "samples.json"
PARTS = "samples.parts.jsonl"
FISHER = "fisher.safetensors"
FORMAT_VERSION = 4
_REMEDY = "record again with 'kvcli calibrate --overwrite'"
_PART_REMEDY = "record it again with the same 'kvcli calibrate'"
_MAX_SIZE = 2**40
_SPEC_LIMITS = {
    "num_layers": 4096,
    "hidden_size": 2**20,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 4096,
    "max_position_embeddings": 2**40,
    "vocab_size": 2**31,
    "rotary_dim": 4096,
}
"""Fields of `ModelSpec` and the largest value that metadata of a file may claim."""


class _Rope(BaseModel):
    """The rotary embedding of the recorded model, see `rope.Rope.frequencies`."""

    model_config = ConfigDict(strict=True)

    inv_freq: list[float] = Field(min_length=1)
    scaling: float = Field(allow_inf_nan=False)


class _Manifest(BaseModel):
    """Types and ranges of a manifest's fields."""

    model_config = ConfigDict(strict=True)

    model: str
    fingerprint: str
    spec: dict[str, Any]
    rope: _Rope
    provenance: dict[str, Any]
    num_sequences: int = Field(ge=1, le=_MAX_SIZE)
    seq_len: int = Field(ge=1, le=_MAX_SIZE)
    query_sequences: int = Field(ge=0, le=_MAX_SIZE)
    batch_size: int = Field(ge=1, le=_MAX_SIZE)
    fisher_sequences: int = Field(ge=0, le=_MAX_SIZE)
    num_tokens: int
    num_parts: int
    windows: list[list[int]]
    complete: bool = False
    parts: dict[str, dict[str, Any]] = {}

    def inconsistency(self, spec: ModelSpec) -> str | None:
        """Which of the fields contradicts the others."""
        ends = [0, *(stop for _, stop in self.windows)] if all(len(window) == 2 for window in self.windows) else []
        if (
            not ends
            or ends[-1] != spec.num_layers
            or any(a != b for (a, _), b in zip(self.windows, ends, strict=False))
        ):
            return "windows"
        if sorted(set(ends)) != ends:
            return "windows"
        if self.num_tokens != self.num_sequences * self.seq_len:
            return "num_tokens"
        if self.num_parts != -(-self.num_sequences // self.batch_size):
            return "num_parts"
        if len(self.rope.inv_freq) != spec.rope.rotary_dim // 2:
            return "rope.inv_freq"
        if self.complete and len(self.parts) != self.num_parts * len(self.windows) + bool(self.fisher_sequences):
            return "parts"
        return None


class Recording:
    """A finished folder of recorded samples.

    Args:
        folder: where the manifest stands.

    Raises:
        SamplesError: no manifest, a damaged one, another format version, or a recording that was not finished.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / MANIFEST
        if not path.exists():
            raise SamplesError(f"no recorded samples in {folder}; run 'kvcli calibrate' first")
        self.manifest = read_sealed(path, FORMAT_VERSION, _REMEDY, SamplesError)
        try:
            checked = _Manifest(**self.manifest)
            self.spec = checked_spec(self.manifest["spec"])
            wrong = checked.inconsistency(self.spec)
        except ValidationError as error:
            raise SamplesError(f"{path} is damaged ({explain(error, ())}); {_REMEDY}") from error
        except (ValueError, TypeError) as error:
            raise SamplesError(f"{path} is damaged ({' '.join(str(error).split())}); {_REMEDY}") from error
        if wrong is not None:
            raise SamplesError(f"{path} is damaged ({wrong} does not agree with the other fields); {_REMEDY}")
        if not checked.complete:
            raise SamplesError(f"the recording in {folder} is not finished; run the same 'kvcli calibrate' again")
        self._verified: set[str] = set()

    @cached_property
    def fisher(self) -> list[LayerFisher] | None:
        """What errors of each layer's keys and values cost; None if it was not recorded.

        Raises:
            SamplesError: the file is missing or damaged.
        """
        if not self.manifest["fisher_sequences"]:
            return None
        path, spec = self.folder / FISHER, self.spec
        if not is_intact(path, self.manifest["parts"].get(FISHER)):
            state = "damaged: its size or sha256 is not that of its recording" if path.is_file() else "missing"
            raise SamplesError(f"{path} is {state}; {_PART_REMEDY}")
        try:
            tensors = load_file(path)
            names = [field.name for field in fields(LayerFisher)]
            layers = [[tensors[f"layers.{i}.{name}"] for name in names] for i in range(spec.num_layers)]
        except (OSError, SafetensorError, KeyError) as error:
            raise SamplesError(f"{path} cannot be read ({error}); {_PART_REMEDY}") from error
        shape = (spec.num_kv_heads, spec.head_dim, spec.head_dim)
        if any(x.shape != shape or x.dtype != torch.float32 or not x.isfinite().all() for x in chain(*layers)):
            raise SamplesError(f"{path} has tensors of another shape or dtype, or not finite ones; {_REMEDY}")
        return [LayerFisher(*layer) for layer in layers]

    @property
    def identity(self) -> dict[str, Any]:
        """Which model was recorded: its name, fingerprint and spec, as plain JSON values."""
        return model_identity(self.manifest)

    @property
    def num_tokens(self) -> int:
        """Tokens recorded per layer."""
        return int(self.manifest["num_tokens"])

    @property
    def layers(self) -> list[int]:
        """Indices of the recorded layers, ascending."""
        return [layer for start, stop in self.manifest["windows"] for layer in range(start, stop)]

    def load(self, layer_idx: int, device: torch.device | str = "cpu") -> LayerSamples:
        """Reads one layer as float32; the first layer of a part verifies the part's sha256.

        Raises:
            SamplesError: the layer was not recorded, no queries were, or a part is missing or damaged.
        """
        window = next((i for i, (a, b) in enumerate(self.manifest["windows"]) if a <= layer_idx < b), None)
        if window is None:
            raise SamplesError(f"layer {layer_idx} was not recorded in {self.folder}")
        if not self.manifest["query_sequences"]:
            raise SamplesError(f"{self.folder} has no queries; {_REMEDY} and a --query-tokens above 0")
        parts: dict[str, list[Tensor]] = {"q": [], "k": [], "v": [], "key_bias": []}
        for part in range(self.manifest["num_parts"]):
            for kind, x in self._read_part(window, part, layer_idx).items():
                parts[kind].append(x)
        biases = parts.pop("key_bias")
        q, k, v = (torch.cat(tensors, dim=1).to(device).float() for tensors in parts.values())
        key_bias = biases[0].to(device) if biases else None
        if key_bias is not None:
            k = k + key_bias.unsqueeze(1)
        if not all(bool(x.isfinite().all()) for x in (q, k, v)):
            raise SamplesError(f"layer {layer_idx} in {self.folder} has samples that are not finite; {_REMEDY}")
        positions = torch.arange(k.shape[1], device=device) % int(self.manifest["seq_len"])
        rope = self.manifest["rope"]
        angle = positions[: q.shape[1], None].float() * torch.tensor(rope["inv_freq"], device=device)
        rotation = Rotation(angle.cos()[None, None] * rope["scaling"], angle.sin()[None, None] * rope["scaling"])
        fisher = None
        if self.fisher is not None:
            fisher = LayerFisher(*(x.to(device) for x in vars(self.fisher[layer_idx]).values()))
        return LayerSamples(q, k, v, positions, rotation, key_bias, fisher)

    def _read_part(self, window: int, part: int, layer_idx: int) -> dict[str, Tensor]:
        """q, k, v and key_bias of a layer in one part, as far as they were recorded."""
        name, manifest, spec = part_name(window, part), self.manifest, self.spec
        path, first = self.folder / name, part * manifest["batch_size"]
        sequences, query_sequences = (
            max(0, min(manifest["batch_size"], manifest[count] - first))
            for count in ("num_sequences", "query_sequences")
        )
        heads = {"k": spec.num_kv_heads, "v": spec.num_kv_heads, **({"q": spec.num_heads} if query_sequences else {})}
        tensors = {}
        try:
            if name not in self._verified and not is_intact(path, manifest["parts"].get(name)):
                state = "damaged: its size or sha256 is not that of its recording" if path.is_file() else "missing"
                raise SamplesError(f"{path} is {state}; {_PART_REMEDY}")
            self._verified.add(name)
            with safe_open(path, framework="pt") as handle:
                for kind, count in heads.items():
                    tokens = (query_sequences if kind == "q" else sequences) * manifest["seq_len"]
                    shape = [count, tokens, spec.head_dim]
                    if handle.get_slice(f"layers.{layer_idx}.{kind}").get_shape() != shape:
                        raise SamplesError(f"{path} has {kind} of another shape than {shape}; {_REMEDY}")
                    tensors[kind] = handle.get_tensor(f"layers.{layer_idx}.{kind}")
                bias = f"layers.{layer_idx}.key_bias"
                key_bias = handle.get_tensor(bias) if bias in handle.keys() else None  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise SamplesError(f"{path} cannot be read ({error}); {_PART_REMEDY}") from error
        if any(x.dtype not in (torch.float16, torch.bfloat16) for x in tensors.values()):
            raise SamplesError(f"{path} has samples that are neither float16 nor bfloat16; {_REMEDY}")
        if key_bias is not None:
            if key_bias.shape != (spec.num_kv_heads, spec.head_dim) or key_bias.dtype != torch.float32:
                raise SamplesError(f"{path} has a key bias of another shape or dtype; {_REMEDY}")
            tensors["key_bias"] = key_bias
        return tensors


def checked_spec(values: Any) -> ModelSpec:
    """A model's shapes as `ModelSpec.to_dict` wrote them, with sizes that a model can have.

    Raises:
        ValueError: fields that are missing, of the wrong type or out of range; the message names one.
        TypeError: the same.
    """
    names = {field.name for field in fields(ModelSpec)}
    if not isinstance(values, Mapping) or set(values) != names:
        raise ValueError(f"spec must have the fields {', '.join(sorted(names))}")
    rope = values["rope"]
    if not isinstance(rope, Mapping) or set(rope) != {"rope_type", "theta", "rotary_dim"}:
        raise ValueError("spec.rope must have the fields rope_type, theta and rotary_dim")
    if values["family"] not in FAMILIES or rope["rope_type"] not in STATIC_ROPE_TYPES:
        raise ValueError(f"spec: unknown family {values['family']!r} or RoPE type {rope['rope_type']!r}")
    for name, most in _SPEC_LIMITS.items():
        value = rope[name] if name in rope else values[name]
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"spec.{name} must be an integer from 1 to {most}")
    if type(rope["theta"]) not in (int, float) or not 0 < rope["theta"] < math.inf:
        raise ValueError("spec.rope.theta must be a positive number")
    spec = ModelSpec.from_dict(values)
    if spec.num_heads % spec.num_kv_heads or spec.rope.rotary_dim > spec.head_dim or spec.rope.rotary_dim % 2:
        raise ValueError("spec: num_heads is no multiple of num_kv_heads, or rotary_dim is odd or above head_dim")
    return spec


def model_identity(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a manifest that say which model it is about, as `LoadedModel.identity` made them."""
    return {name: manifest[name] for name in ("model", "fingerprint", "spec")}


def part_name(window: int, part: int) -> str:
    """File name of a part."""
    return f"window-{window:03d}-part-{part:05d}.safetensors"


def write_part(folder: Path, window: int, part: int, tensors: Mapping[str, Tensor]) -> None:
    """Writes one part, which appears under its name only when complete, and then its size and sha256 to `PARTS`.

    Args:
        folder: the recording.
        window: index of the layer window.
        part: index of the forward pass.
        tensors: as this module's docstring says.
    """
    path = folder / part_name(window, part)
    with replacing(path) as temporary:
        save_file(dict(tensors), temporary)
        record = file_record(temporary)
    append_record(folder / PARTS, {"part": path.name, **record})


def write_fisher(folder: Path, layers: Sequence[LayerFisher]) -> None:
    """Writes what errors cost; size and sha256 are written as those of a part."""
    tensors = {f"layers.{i}.{name}": x for i, layer in enumerate(layers) for name, x in vars(layer).items()}
    with replacing(folder / FISHER) as temporary:
        save_file(tensors, temporary)
        record = file_record(temporary)
    append_record(folder / PARTS, {"part": FISHER, **record})


def part_records(folder: Path, manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Size and sha256 of the parts that were written to a folder, by file name, finished or not."""
    parts = manifest.get("parts")
    known = dict(parts) if isinstance(parts, Mapping) else {}
    for record in read_records(folder / PARTS):
        known[str(record.pop("part", ""))] = record
    return known


def finished_parts(folder: Path, manifest: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Size and sha256 of the parts of some file names that are in a folder as they were written."""
    known = part_records(folder, manifest)
    return {name: known[name] for name in names if is_intact(folder / name, known.get(name))}
