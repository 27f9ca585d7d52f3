"""The files of a recording that hold tensors: parts with samples, and what errors cost.

Part p of layer window w holds, for every layer of the window, `layers.L.k` and `layers.L.v` [num_kv_heads, tokens,
head_dim] and `layers.L.q` [num_heads, query_tokens, head_dim], all pre-RoPE and 16 bits. Tokens are whole sequences,
one after another. Where the model's key projection has a bias, `layers.L.key_bias`, float32 [num_kv_heads, head_dim],
is the bias, and `layers.L.k` is without it: a bias can be so much larger than what varies that 16 bits would lose the
latter.

Size and sha256 of each file that is complete are a line of `samples.parts.jsonl`. This module does not know when a
recording is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvcli.errors import SamplesError
from kvcli.files import append_record, file_record, is_intact, read_records, replacing
from kvcli.layer_samples import LayerFisher
from kvcli.spec import ModelSpec
from kvcli.token_blocks import BLOCK_TOKENS, TokenBlocks

PARTS = "samples.parts.jsonl"
FISHER = "fisher.safetensors"
SUMS = "fisher-[0-9]*.safetensors"
STALE = ("window-[0-9]*-part-[0-9]*.safetensors", SUMS, FISHER, PARTS)
"""Patterns of the files of a recording beside its manifest."""

RECORD_AGAIN = "record again with 'kvcli calibrate --overwrite'"
RESUME = "record it again with the same 'kvcli calibrate'"


class LayerParts:
    """One layer in the parts of a finished recording.

    Args:
        folder: the recording.
        manifest: its manifest, checked.
        spec: the model's shapes.
        window: index of the layer's window.
        layer_idx: the layer.

    Raises:
        SamplesError: tensors that are missing, or of another shape or dtype than the manifest says.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], spec: ModelSpec, window: int, layer_idx: int) -> None:
        self.folder, self.spec, self.layer_idx = folder, spec, layer_idx
        self.seq_len = int(manifest["seq_len"])
        self.part_tokens = int(manifest["batch_size"]) * self.seq_len
        self.tokens = {"k": int(manifest["num_sequences"]) * self.seq_len}
        self.tokens["v"] = self.tokens["k"]
        self.tokens["q"] = int(manifest["query_sequences"]) * self.seq_len
        self.names = [part_name(window, part) for part in range(manifest["num_parts"])]
        self.key_bias: Tensor | None = None
        for part in range(len(self.names)):
            self._check(part)

    def read(self, kind: str, start: int, stop: int) -> Iterator[Tensor]:
        """Samples of a range of tokens in order, 16 bits, [heads, tokens, head_dim] each with `BLOCK_TOKENS` at most.

        Args:
            kind: k, v or q.
            start: first token.
            stop: the token after the last.

        Raises:
            SamplesError: a file that cannot be read, or samples that are not finite.
        """
        while start < stop:
            part, offset = divmod(start, self.part_tokens)
            count = min(stop - start, self.part_tokens - offset, BLOCK_TOKENS)
            path = self.folder / self.names[part]
            try:
                with safe_open(path, framework="pt") as handle:
                    x = handle.get_slice(f"layers.{self.layer_idx}.{kind}")[:, offset : offset + count]
            except (OSError, SafetensorError) as error:
                raise SamplesError(f"{path} cannot be read ({error}); {RESUME}") from error
            if not bool(x.isfinite().all()):
                where = f"layer {self.layer_idx} in {self.folder}"
                raise SamplesError(f"{where} has samples that are not finite; {RECORD_AGAIN}")
            yield x
            start += count

    def blocks(self, kind: str, sequences: range, skip: int, block_tokens: int) -> Iterator[Tensor]:
        """Samples of whole sequences without the first `skip` tokens of each, 16 bits, in blocks of equal size.

        Args:
            kind: k, v or q.
            sequences: adjacent sequences.
            skip: tokens at the beginning of each sequence that are left out.
            block_tokens: tokens of each block, of the last one at most.

        Raises:
            SamplesError: as `read`.
        """
        left, filled = len(sequences) * (self.seq_len - skip), 0
        block: Tensor | None = None
        at = sequences.start * self.seq_len
        for piece in self.read(kind, at, sequences.stop * self.seq_len):
            position = torch.arange(at, at + piece.shape[1]) % self.seq_len
            at += piece.shape[1]
            kept = piece[:, position >= skip]
            while kept.shape[1]:
                if block is None:
                    block, filled = kept.new_empty(len(kept), min(block_tokens, left), kept.shape[2]), 0
                count = min(kept.shape[1], block.shape[1] - filled)
                block[:, filled : filled + count] = kept[:, :count]
                kept, filled, left = kept[:, count:], filled + count, left - count
                if filled == block.shape[1]:
                    yield block
                    block = None

    def _check(self, part: int) -> None:
        """Compares what a part says about its tensors with the manifest, and keeps the key bias."""
        path, spec, first = self.folder / self.names[part], self.spec, part * self.part_tokens
        heads = {"k": spec.num_kv_heads, "v": spec.num_kv_heads, "q": spec.num_heads}
        try:
            with safe_open(path, framework="pt") as handle:
                for kind, count in heads.items():
                    tokens = max(0, min(self.part_tokens, self.tokens[kind] - first))
                    if not tokens:
                        continue
                    x = handle.get_slice(f"layers.{self.layer_idx}.{kind}")
                    if x.get_shape() != (shape := [count, tokens, spec.head_dim]):
                        raise SamplesError(f"{path} has {kind} of another shape than {shape}; {RECORD_AGAIN}")
                    if x.get_dtype() not in ("F16", "BF16"):
                        raise SamplesError(f"{path} has samples that are neither float16 nor bfloat16; {RECORD_AGAIN}")
                if (bias := f"layers.{self.layer_idx}.key_bias") in handle.keys():  # noqa: SIM118
                    self.key_bias = handle.get_tensor(bias)
        except (OSError, SafetensorError) as error:
            raise SamplesError(f"{path} cannot be read ({error}); {RESUME}") from error
        bias_shape = (spec.num_kv_heads, spec.head_dim)
        if self.key_bias is not None and (
            self.key_bias.shape != bias_shape
            or self.key_bias.dtype != torch.float32
            or not bool(self.key_bias.isfinite().all())
        ):
            raise SamplesError(f"{path} has a key bias of another shape or dtype, or not a finite one; {RECORD_AGAIN}")


def sample_blocks(
    parts: LayerParts,
    kind: str,
    sequences: range,
    *,
    skip: int,
    block_tokens: int,
    device: torch.device | str,
    scratch: Path | None,
) -> TokenBlocks:
    """Keys, with their bias, or values of a layer as float32 [num_kv_heads, tokens, head_dim].

    A single block stays in memory once it was read; several are read again in every pass.

    Args:
        parts: the layer.
        kind: k or v.
        sequences: adjacent sequences.
        skip: tokens at the beginning of each sequence that are left out.
        block_tokens: tokens of a block.
        device: where the blocks are.
        scratch: see `TokenBlocks`.
    """
    num_tokens = len(sequences) * (parts.seq_len - skip)
    bias = None if kind != "k" or parts.key_bias is None else parts.key_bias.to(device).unsqueeze(1)
    kept: list[Tensor] = []

    def finished(block: Tensor) -> Tensor:
        x = block.to(device).float()
        return x if bias is None else x + bias

    def read() -> Iterable[Tensor]:
        blocks = map(finished, parts.blocks(kind, sequences, skip, block_tokens))
        if num_tokens > block_tokens:
            return blocks
        if not kept:
            kept.extend(blocks)
        return kept

    return TokenBlocks(num_tokens, read, folder=scratch)


def part_name(window: int, part: int) -> str:
    """File name of a part."""
    return f"window-{window:03d}-part-{part:05d}.safetensors"


def sums_name(sequence: int) -> str:
    """File name of what one sequence adds to the Fisher information."""
    return f"fisher-{sequence:05d}.safetensors"


def write_part(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Writes one file, which appears under its name only when complete, and then its size and sha256 to `PARTS`.

    Args:
        folder: the recording.
        name: the file's name.
        tensors: what it holds.
    """
    with replacing(folder / name) as temporary:
        save_file(dict(tensors), temporary)
        record = file_record(temporary)
    append_record(folder / PARTS, {"part": name, **record})


def write_fisher(folder: Path, layers: Sequence[LayerFisher]) -> None:
    """Writes what errors of all layers cost."""
    tensors = {f"layers.{i}.{name}": x for i, layer in enumerate(layers) for name, x in vars(layer).items()}
    write_part(folder, FISHER, tensors)


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
