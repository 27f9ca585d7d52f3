"""A finished recording, read for fitting: each layer's queries in memory, its keys and values block by block.

Nothing is used before its size and sha256 were compared with the manifest; `parts` describes the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from kvcli.calibrate.parts import FISHER, RESUME, SamplesManifest, part_name
from kvcli.errors import SamplesError
from kvcli.methods.samples import BLOCK_TOKENS, LayerFisher, LayerSamples, TokenBlocks
from kvcli.rope import Rotation
from kvcli.storage.atomic import is_intact

_RECORD_AGAIN = SamplesManifest.REMEDY


class Recording:
    """A finished folder of recorded samples.

    SamplesError: no manifest, a damaged one, another format version, or a recording that was not finished.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = SamplesManifest.read(folder / SamplesManifest.FILE)
        self.spec = self.manifest.spec
        if (shard := self.manifest.shard) is not None:
            raise SamplesError(
                f"{folder} holds shard {list(shard)} of a recording; put all together with 'kvcli merge'"
            )
        if not self.manifest.complete:
            raise SamplesError(f"the recording in {folder} is not finished; run the same 'kvcli calibrate' again")
        self._verified: set[str] = set()

    @property
    def identity(self) -> dict[str, Any]:
        """Name, fingerprint and spec of the recorded model, as plain JSON values."""
        return {name: self.manifest.values[name] for name in ("model", "fingerprint", "spec")}

    @property
    def layers(self) -> list[int]:
        """Indices of the recorded layers, ascending."""
        return list(range(self.spec.num_layers))

    @cached_property
    def fisher(self) -> list[LayerFisher] | None:
        """Fisher information of each layer's keys and values; None if it was not recorded."""
        if not self.manifest.fisher_sequences:
            return None
        path, spec = self._verified_path(FISHER), self.spec
        try:
            tensors = load_file(path)
            names = [field.name for field in fields(LayerFisher)]
            layers = [[tensors[f"layers.{i}.{name}"] for name in names] for i in range(spec.num_layers)]
        except (OSError, SafetensorError, KeyError) as error:
            raise SamplesError(f"{path} cannot be read ({error}); {RESUME}") from error
        widths = [spec.value_dim if name.startswith("value") else spec.head_dim for name in names]
        shapes = [(spec.num_kv_heads, width, width) for width in widths] * spec.num_layers
        found = zip(chain(*layers), shapes, strict=True)
        if any(x.shape != shape or x.dtype != torch.float32 or not x.isfinite().all() for x, shape in found):
            raise SamplesError(f"{path} has tensors of another shape or dtype, or not finite ones; {_RECORD_AGAIN}")
        return [LayerFisher(*layer) for layer in layers]

    def load(self, layer_idx: int, device: torch.device | str = "cpu") -> LayerSamples:
        """One layer of all sequences, as `load_sequences` gives it."""
        return self.load_sequences(layer_idx, [range(self.manifest.num_sequences)], device)[0]

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

        Samples for each range of sequences have the same tensor of queries. `skip` tokens at the beginning of each
        sequence are left out; what is derived from the samples and exceeds a block goes to the folder `scratch`, None:
        that of the system. SamplesError: the layer was not recorded, no queries were, or a part is missing or damaged;
        reading keys or values raises it if they are not finite.
        """
        window = next((i for i, (a, b) in enumerate(self.manifest.windows) if a <= layer_idx < b), None)
        if window is None:
            raise SamplesError(f"layer {layer_idx} was not recorded in {self.folder}")
        if not self.manifest.query_sequences:
            raise SamplesError(f"{self.folder} has no queries; {_RECORD_AGAIN} and a --query-tokens above 0")
        paths = [self._verified_path(part_name(window, part)) for part in range(self.manifest.num_parts)]
        layer, seq_len, rope = _LayerReader(paths, self.manifest, layer_idx), self.manifest.seq_len, self.manifest.rope
        q = torch.cat(list(layer.read("q", 0, self.manifest.query_sequences * seq_len)), dim=1).to(device).float()
        positions = torch.arange(q.shape[1], device=device) % seq_len
        angle = positions[:, None].float() * torch.tensor(rope.inv_freq, device=device)
        rotation = Rotation(angle.cos()[None, None] * rope.scaling, angle.sin()[None, None] * rope.scaling)
        if layer_idx in self.spec.unrotated:
            rotation = Rotation.none(rotation)
        fisher = None
        if self.fisher is not None:
            fisher = LayerFisher(*(x.to(device) for x in vars(self.fisher[layer_idx]).values()))
        key_bias = None if layer.key_bias is None else layer.key_bias.to(device)
        loaded = []
        for chosen in sequences:
            k = layer.blocks("k", chosen, skip, block_tokens, device, scratch, key_bias)
            v = layer.blocks("v", chosen, skip, block_tokens, device, scratch)
            at = torch.arange(skip, seq_len, device=device).repeat(len(chosen))
            loaded.append(LayerSamples(q, k, v, at, rotation, key_bias, fisher))
        return loaded

    def _verified_path(self, name: str) -> Path:
        """A file whose size and sha256 are the recorded ones; they are compared once."""
        path = self.folder / name
        if name not in self._verified and not is_intact(path, self.manifest.parts.get(name)):
            state = "damaged: its size or sha256 is not that of its recording" if path.is_file() else "missing"
            raise SamplesError(f"{path} is {state}; {RESUME}")
        self._verified.add(name)
        return path


class _LayerReader:
    """One layer in the parts of its window; its tensors are checked when it is made.

    `key_bias`, float32 [num_kv_heads, head_dim], is that of the model's key projection; None where it has none.
    """

    def __init__(self, paths: Sequence[Path], manifest: SamplesManifest, layer_idx: int) -> None:
        self.paths, self.layer_idx, self.seq_len = paths, layer_idx, manifest.seq_len
        self.part_tokens = manifest.batch_size * manifest.seq_len
        self.key_bias: Tensor | None = None
        spec, tokens = manifest.spec, manifest.num_tokens
        kinds = {
            "k": (spec.num_kv_heads, tokens, spec.head_dim),
            "v": (spec.num_kv_heads, tokens, spec.value_dim),
            "q": (spec.num_heads, manifest.query_sequences * self.seq_len, spec.head_dim),
        }
        for part, path in enumerate(paths):
            try:
                with safe_open(path, framework="pt") as handle:
                    for kind, (heads, num_tokens, width) in kinds.items():
                        if (tokens := min(self.part_tokens, num_tokens - part * self.part_tokens)) <= 0:
                            continue
                        x = handle.get_slice(f"layers.{layer_idx}.{kind}")
                        if x.get_shape() != (shape := [heads, tokens, width]):
                            raise SamplesError(f"{path} has {kind} of another shape than {shape}; {_RECORD_AGAIN}")
                        if x.get_dtype() not in ("F16", "BF16"):
                            wrong = f"{path} has samples that are neither float16 nor bfloat16"
                            raise SamplesError(f"{wrong}; {_RECORD_AGAIN}")
                    if (bias := f"layers.{layer_idx}.key_bias") in handle.keys():  # noqa: SIM118
                        self.key_bias = handle.get_tensor(bias)
            except (OSError, SafetensorError) as error:
                raise SamplesError(f"{path} cannot be read ({error}); {RESUME}") from error
        shape = [spec.num_kv_heads, spec.head_dim]
        if (x := self.key_bias) is not None and not (
            [*x.shape] == shape and x.dtype == torch.float32 and bool(x.isfinite().all())
        ):
            wrong = f"layer {layer_idx} in {paths[0].parent} has a key bias of another shape or dtype"
            raise SamplesError(f"{wrong}, or not a finite one; {_RECORD_AGAIN}")

    def read(self, kind: str, start: int, stop: int) -> Iterator[Tensor]:
        """Samples of a range of tokens in order, 16 bits [heads, tokens, head_dim], each of `BLOCK_TOKENS` at most."""
        while start < stop:
            part, offset = divmod(start, self.part_tokens)
            count = min(stop - start, self.part_tokens - offset, BLOCK_TOKENS)
            path = self.paths[part]
            try:
                with safe_open(path, framework="pt") as handle:
                    x = handle.get_slice(f"layers.{self.layer_idx}.{kind}")[:, offset : offset + count]
            except (OSError, SafetensorError) as error:
                raise SamplesError(f"{path} cannot be read ({error}); {RESUME}") from error
            if not bool(x.isfinite().all()):
                where = f"layer {self.layer_idx} in {path.parent}"
                raise SamplesError(f"{where} has samples that are not finite; {_RECORD_AGAIN}")
            yield x
            start += count

    def blocks(
        self,
        kind: str,
        sequences: range,
        skip: int,
        block_tokens: int,
        device: torch.device | str,
        scratch: Path | None,
        bias: Tensor | None = None,
    ) -> TokenBlocks:
        """Keys or values of adjacent sequences as float32 [num_kv_heads, tokens, head_dim], in blocks of equal size.

        A single block stays in memory once it was read; several are read again in every pass. A `bias`
        [num_kv_heads, head_dim] is added to every token; for the other arguments see `Recording.load_sequences`.
        """
        num_tokens = len(sequences) * (self.seq_len - skip)
        single: list[Tensor] = []

        def read() -> Iterator[Tensor]:
            at, remaining = sequences.start * self.seq_len, num_tokens
            block, filled = torch.empty(0), 0
            for piece in self.read(kind, at, sequences.stop * self.seq_len):
                position = torch.arange(at, at + piece.shape[1]) % self.seq_len
                at += piece.shape[1]
                rows = piece[:, position >= skip]
                while rows.shape[1]:
                    if not filled:
                        block = rows.new_empty(len(rows), min(block_tokens, remaining), rows.shape[2])
                    count = min(rows.shape[1], block.shape[1] - filled)
                    block[:, filled : filled + count] = rows[:, :count]
                    rows, filled, remaining = rows[:, count:], filled + count, remaining - count
                    if filled == block.shape[1]:
                        x, filled = block.to(device).float(), 0
                        yield x if bias is None else x + bias.unsqueeze(1)

        def read_once() -> list[Tensor]:
            if not single:
                single.extend(read())
            return single

        return TokenBlocks(num_tokens, read if num_tokens > block_tokens else read_once, folder=scratch)
