"""The files of a recording: its manifest, parts with samples, and Fisher information.

Part p of layer window w, `window-WWW-part-PPPPP`, holds for every layer of the window `layers.L.k` and `layers.L.v`
[num_kv_heads, tokens, head_dim] and `layers.L.q` [num_heads, query_tokens, head_dim], all pre-RoPE and 16 bits. Tokens
are whole sequences, one after another. Where the model's key projection has a bias, `layers.L.key_bias`, float32
[num_kv_heads, head_dim], is the bias, and `layers.L.k` is without it: a bias can be so much larger than what varies
that 16 bits would lose the latter. `fisher.safetensors`, which a recording can lack, holds `layers.L.NAME` for the
fields of `LayerFisher`.

The manifest `samples.json` has size and sha256 of each of these files. While a recording is not finished,
`samples.parts.jsonl` has them instead, a line per file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors.torch import save_file
from torch import Tensor

from kvcli.errors import SamplesError
from kvcli.spec import ModelSpec
from kvcli.storage.atomic import append_record, file_record, is_intact, read_records, replacing
from kvcli.storage.manifest import RunManifest, write_sealed

PARTS = "samples.parts.jsonl"
FISHER = "fisher.safetensors"
SUMS = "fisher-[0-9]*.safetensors"
RESUME = "record it again with the same 'kvcli calibrate'"

_Size = Annotated[int, Field(ge=1, le=2**40)]
_Count = Annotated[int, Field(ge=0, le=2**40)]


class _Rope(BaseModel):
    """The rotary embedding of the recorded model, see `rope.Rope.frequencies`."""

    model_config = ConfigDict(strict=True)

    inv_freq: list[float] = Field(min_length=1)
    scaling: float = Field(allow_inf_nan=False)


class SamplesManifest(RunManifest):
    """`samples.json`: the manifest of a recording, or of a shard of one."""

    VERSION = 5
    ERROR = SamplesError
    REMEDY = "record again with 'kvcli calibrate --overwrite'"
    FILE = "samples.json"
    KIND = "recording"
    MISSING = "no recorded samples in {folder}; run 'kvcli calibrate' first"
    STALE = ("window-[0-9]*-part-[0-9]*.safetensors", SUMS, FISHER, PARTS)

    model: str
    fingerprint: str
    spec: ModelSpec
    rope: _Rope
    provenance: dict[str, Any]
    num_sequences: _Size
    seq_len: _Size
    query_sequences: _Count
    batch_size: _Size
    fisher_sequences: _Count
    num_tokens: int
    num_parts: int
    windows: list[tuple[int, int]]
    shard: tuple[int, int] | None = None
    complete: bool = False
    parts: dict[str, dict[str, Any]] = {}

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        ends = [0, *(stop for _, stop in self.windows)]
        num_files = self.num_parts * len(self.windows) + bool(self.fisher_sequences)
        agree = {
            "windows": [start for start, _ in self.windows] == ends[:-1]
            and ends[-1] == self.spec.num_layers
            and sorted(set(ends)) == ends,
            "num_tokens": self.num_tokens == self.num_sequences * self.seq_len,
            "num_parts": self.num_parts == -(-self.num_sequences // self.batch_size),
            "rope.inv_freq": len(self.rope.inv_freq) == self.spec.rope.rotary_dim // 2,
            "parts": not self.complete or self.shard is not None or len(self.parts) == num_files,
        }
        if wrong := [name for name, right in agree.items() if not right]:
            raise ValueError(f"{wrong[0]} does not agree with the other fields")
        return self

    def intact_parts(self, folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Size and sha256 of those files of some names that are in a folder as they were written."""
        records = self.parts | part_records(folder)
        return {name: records[name] for name in names if is_intact(folder / name, records.get(name))}

    def finish(self, folder: Path, records: Mapping[str, Any]) -> None:
        """Writes the manifest of a complete recording or shard; its files are now listed there and nowhere else."""
        write_sealed(folder / self.FILE, {**self.values, "complete": True, "parts": dict(records)})


def part_name(window: int, part: int) -> str:
    """File name of a part."""
    return f"window-{window:03d}-part-{part:05d}.safetensors"


def sums_name(sequence: int) -> str:
    """File name of what one sequence adds to the Fisher information."""
    return f"fisher-{sequence:05d}.safetensors"


def write_part(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Writes one file, which appears under its name only when complete, and then its size and sha256 to `PARTS`."""
    with replacing(folder / name) as temporary:
        save_file(dict(tensors), temporary)
        record = file_record(temporary)
    append_record(folder / PARTS, {"part": name, **record})


def part_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and sha256 of the files that were written to an unfinished recording, by name."""
    return {str(record.pop("part", "")): record for record in read_records(folder / PARTS)}
