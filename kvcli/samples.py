"""Recorded attention inputs on disk: what calibration writes and fitting reads.

A recording is a folder of safetensors parts, whose tensors `sample_parts` describes: `window-WWW-part-PPPPP` with the
samples of a window of layers in one forward pass after another. `fisher.safetensors`, which a recording can lack, holds
`layers.L.NAME` for the fields of `LayerFisher`.

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
from safetensors import SafetensorError
from safetensors.torch import load_file

from kvcli.errors import SamplesError, explain
from kvcli.files import is_intact, read_sealed
from kvcli.layer_samples import LayerFisher, LayerSamples
from kvcli.rope import Rotation
from kvcli.sample_parts import FISHER, RECORD_AGAIN, RESUME, LayerParts, part_name, sample_blocks
from kvcli.spec import NO_ROPE, STATIC_ROPE_TYPES, ModelSpec
from kvcli.token_blocks import BLOCK_TOKENS

MANIFEST = "samples.json"
FORMAT_VERSION = 4
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
        self.manifest = read_sealed(path, FORMAT_VERSION, RECORD_AGAIN, SamplesError)
        if (shard := self.manifest.get("shard")) is not None:
            raise SamplesError(f"{folder} holds shard {shard} of a recording; put all together with 'kvcli merge'")
        try:
            checked = _Manifest(**self.manifest)
            self.spec = checked_spec(self.manifest["spec"])
            wrong = checked.inconsistency(self.spec)
        except ValidationError as error:
            raise SamplesError(f"{path} is damaged ({explain(error, ())}); {RECORD_AGAIN}") from error
        except (ValueError, TypeError) as error:
            raise SamplesError(f"{path} is damaged ({' '.join(str(error).split())}); {RECORD_AGAIN}") from error
        if wrong is not None:
            raise SamplesError(f"{path} is damaged ({wrong} does not agree with the other fields); {RECORD_AGAIN}")
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
            raise SamplesError(f"{path} is {state}; {RESUME}")
        try:
            tensors = load_file(path)
            names = [field.name for field in fields(LayerFisher)]
            layers = [[tensors[f"layers.{i}.{name}"] for name in names] for i in range(spec.num_layers)]
        except (OSError, SafetensorError, KeyError) as error:
            raise SamplesError(f"{path} cannot be read ({error}); {RESUME}") from error
        shape = (spec.num_kv_heads, spec.head_dim, spec.head_dim)
        if any(x.shape != shape or x.dtype != torch.float32 or not x.isfinite().all() for x in chain(*layers)):
            raise SamplesError(f"{path} has tensors of another shape or dtype, or not finite ones; {RECORD_AGAIN}")
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
        """One layer of all sequences, as `load_sequences` gives it."""
        return self.load_sequences(layer_idx, [range(int(self.manifest["num_sequences"]))], device)[0]

    def load_sequences(
        self,
        layer_idx: int,
        sequences: Sequence[range],
        device: torch.device | str = "cpu",
        *,
        skip: int = 0,
        block_tokens: int = BLOCK_TOKENS,
        scratch: Path | None = None,
    ) -> list[LayerSamples]:
        """One layer as float32: queries in memory, keys and values of some sequences to be read block by block.

        The first layer of a part verifies the part's sha256. Keys and values that are a single block stay in memory
        once they were read.

        Args:
            layer_idx: the layer.
            sequences: ranges of sequences.
            device: where the tensors are.
            skip: tokens at the beginning of each sequence that are left out.
            block_tokens: tokens of a block.
            scratch: folder for what is derived from the samples and exceeds a block; None: that of the system.

        Returns:
            Samples for each of the ranges; their queries are the same tensor.

        Raises:
            SamplesError: the layer was not recorded, no queries were, or a part is missing or damaged; reading keys or
                values raises it if they are not finite.
        """
        window = next((i for i, (a, b) in enumerate(self.manifest["windows"]) if a <= layer_idx < b), None)
        if window is None:
            raise SamplesError(f"layer {layer_idx} was not recorded in {self.folder}")
        if not self.manifest["query_sequences"]:
            raise SamplesError(f"{self.folder} has no queries; {RECORD_AGAIN} and a --query-tokens above 0")
        for part in range(self.manifest["num_parts"]):
            self._verify(part_name(window, part))
        parts, seq_len = LayerParts(self.folder, self.manifest, self.spec, window, layer_idx), self.manifest["seq_len"]
        q = torch.cat(list(parts.read("q", 0, parts.tokens["q"])), dim=1).to(device).float()
        rope, positions = self.manifest["rope"], torch.arange(q.shape[1], device=device) % seq_len
        angle = positions[:, None].float() * torch.tensor(rope["inv_freq"], device=device)
        rotation = Rotation(angle.cos()[None, None] * rope["scaling"], angle.sin()[None, None] * rope["scaling"])
        if layer_idx in self.spec.unrotated:
            rotation = Rotation.none(rotation)
        fisher = None
        if self.fisher is not None:
            fisher = LayerFisher(*(x.to(device) for x in vars(self.fisher[layer_idx]).values()))
        key_bias = None if parts.key_bias is None else parts.key_bias.to(device)
        loaded = []
        for chosen in sequences:
            k, v = (
                sample_blocks(parts, kind, chosen, skip=skip, block_tokens=block_tokens, device=device, scratch=scratch)
                for kind in ("k", "v")
            )
            at = torch.arange(skip, seq_len, device=device).repeat(len(chosen))
            loaded.append(LayerSamples(q, k, v, at, rotation, key_bias, fisher))
        return loaded

    def _verify(self, name: str) -> None:
        """Compares a part with its recorded size and sha256, once."""
        if name in self._verified:
            return
        path = self.folder / name
        if not is_intact(path, self.manifest["parts"].get(name)):
            state = "damaged: its size or sha256 is not that of its recording" if path.is_file() else "missing"
            raise SamplesError(f"{path} is {state}; {RESUME}")
        self._verified.add(name)


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
    if type(values["family"]) is not str or rope["rope_type"] not in (*STATIC_ROPE_TYPES, NO_ROPE):
        raise ValueError(f"spec: family {values['family']!r} is no name, or unknown RoPE type {rope['rope_type']!r}")
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
