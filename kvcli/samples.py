"""Recorded attention inputs on disk: what calibration writes and fitting reads.

A recording is a folder of safetensors parts. Part p of layer window w holds, for every layer of the window,
`layers.L.k` and `layers.L.v` [num_kv_heads, tokens, head_dim] and `layers.L.q` [num_heads, query_tokens, head_dim], all
pre-RoPE. Tokens are whole sequences of `seq_len` tokens, one after another. This module does not know where they
come from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvcli.errors import SamplesError
from kvcli.files import replacing
from kvcli.rope import Rotation
from kvcli.spec import ModelSpec

MANIFEST = "samples.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class LayerSamples:
    """What one attention layer saw, pre-RoPE.

    Attributes:
        q: [num_heads, query_tokens, head_dim], the first query_tokens tokens of the recording.
        k: [num_kv_heads, tokens, head_dim].
        v: [num_kv_heads, tokens, head_dim].
        positions: [tokens] int64, position of each token in its sequence.
        query_rotation: rotation of the recorded queries, [1, 1, query_tokens, rotary_dim/2].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    query_rotation: Rotation | None = None

    def select(self, tokens: Tensor) -> LayerSamples:
        """Keys and values of some tokens, [count] indices; queries stay."""
        return replace(self, k=self.k[:, tokens], v=self.v[:, tokens], positions=self.positions[tokens])

    def rotated_queries(self) -> Tensor:
        """The queries after RoPE, [num_heads, query_tokens, head_dim]."""
        assert self.query_rotation is not None
        return self.query_rotation.apply(self.q.unsqueeze(0))[0]


class Recording:
    """A folder of recorded samples.

    Args:
        folder: where the manifest stands.

    Raises:
        SamplesError: no manifest, another format version, or a recording that was not finished.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / MANIFEST
        if not path.is_file():
            raise SamplesError(f"no recorded samples in {folder}; run 'kvcli calibrate' first")
        try:
            self.manifest: dict[str, Any] = json.loads(path.read_text())
            version, complete = self.manifest["format_version"], self.manifest.get("complete", False)
            self.spec = ModelSpec.from_dict(self.manifest["spec"])
        except (ValueError, KeyError, TypeError) as error:
            raise SamplesError(f"{path} is not a manifest of recorded samples ({error!r})") from error
        if version != FORMAT_VERSION:
            raise SamplesError(f"{path} has format version {version}; this kvcli reads {FORMAT_VERSION}")
        if not complete:
            raise SamplesError(f"the recording in {folder} is not finished; run the same 'kvcli calibrate' again")

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
        """Reads one layer as float32.

        Raises:
            SamplesError: the layer was not recorded, or a part is damaged.
        """
        window = next((i for i, (a, b) in enumerate(self.manifest["windows"]) if a <= layer_idx < b), None)
        if window is None:
            raise SamplesError(f"layer {layer_idx} was not recorded in {self.folder}")
        parts: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
        for part in range(self.manifest["num_parts"]):
            path = self.folder / part_name(window, part)
            try:
                with safe_open(path, framework="pt") as handle:
                    names = set(handle.keys())
                    for kind, tensors in parts.items():
                        if (name := f"layers.{layer_idx}.{kind}") in names:
                            tensors.append(handle.get_tensor(name))
            except (OSError, SafetensorError) as error:
                raise SamplesError(f"{path} cannot be read ({error}); run 'kvcli calibrate --overwrite'") from error
        q, k, v = (torch.cat(tensors, dim=1).to(device).float() for tensors in parts.values())
        if k.shape[1] != self.num_tokens or not all(bool(x.isfinite().all()) for x in (q, k, v)):
            raise SamplesError(f"layer {layer_idx} in {self.folder} has missing or non-finite samples")
        positions = torch.arange(k.shape[1], device=device) % int(self.manifest["seq_len"])
        rope = self.manifest["rope"]
        angle = positions[: q.shape[1], None].float() * torch.tensor(rope["inv_freq"], device=device)
        rotation = Rotation(angle.cos()[None, None] * rope["scaling"], angle.sin()[None, None] * rope["scaling"])
        return LayerSamples(q, k, v, positions, rotation)


def model_identity(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a manifest that say which model it is about, as `LoadedModel.identity` made them."""
    return {name: manifest[name] for name in ("model", "fingerprint", "spec")}


def part_name(window: int, part: int) -> str:
    """File name of a part."""
    return f"window-{window:03d}-part-{part:05d}.safetensors"


def write_part(folder: Path, window: int, part: int, tensors: Mapping[str, Tensor]) -> None:
    """Writes one part; it appears under its name only when complete.

    Args:
        folder: the recording.
        window: index of the layer window.
        part: index of the forward pass.
        tensors: `layers.L.k` and `layers.L.v` [num_kv_heads, tokens, head_dim], `layers.L.q` [num_heads, query_tokens,
            head_dim].
    """
    with replacing(folder / part_name(window, part)) as temporary:
        save_file(dict(tensors), temporary)
