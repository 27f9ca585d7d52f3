"""Runs a model over token sequences and records pre-RoPE queries, keys and values of its layers.

Layers are recorded window by window: each window is one pass over the sequences that stops after the window's last
layer, so the memory and the open files stay bounded however deep the model is. A recording that was cut off resumes:
parts whose size and sha256 are those of when they were written are kept. This module does not know where sequences
come from.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.calibrate.fisher import SEQ_LEN, collect_fisher
from kvcli.errors import SamplesError
from kvcli.files import locked, open_run, write_sealed
from kvcli.models import LoadedModel
from kvcli.sample_parts import FISHER, PARTS, finished_parts, part_name, part_records, write_fisher, write_part
from kvcli.samples import FORMAT_VERSION, MANIFEST, Recording
from kvcli.seam.key_bias import key_biases
from kvcli.seam.patch import RotaryOutput, Seam, find_rope, layer_index
from kvcli.seam.sdpa import sdpa
from kvcli.spec import ModelSpec

_PART_BYTES = 512 * 2**20
_STALE = ("window-[0-9]*-part-[0-9]*.safetensors", FISHER, PARTS)
_FISHER_SEED = 0
_KINDS = {"q": "queries", "k": "keys", "v": "values"}


@dataclass(frozen=True)
class CollectConfig:
    """What is recorded.

    Attributes:
        num_sequences: sequences recorded.
        seq_len: tokens per sequence.
        query_sequences: sequences whose queries are recorded too; keys and values are recorded for all.
        batch_size: sequences per forward pass.
        layer_window: layers per pass; 0: as many as keep a part below half a GiB.
        fisher_sequences: sequences whose gradients are computed, their first 1024 tokens, to know what errors cost.
    """

    num_sequences: int
    seq_len: int
    query_sequences: int
    batch_size: int
    layer_window: int = 0
    fisher_sequences: int = 0

    @classmethod
    def for_tokens(
        cls,
        sequences: Tensor,
        *,
        query_tokens: int,
        fisher_tokens: int,
        batch_size: int,
        layer_window: int = 0,
    ) -> CollectConfig:
        """For [num_sequences, seq_len] token ids and numbers of tokens, which are rounded up to whole sequences."""
        count, seq_len = sequences.shape
        return cls(
            num_sequences=count,
            seq_len=seq_len,
            query_sequences=min(count, -(-query_tokens // seq_len)),
            batch_size=batch_size,
            fisher_sequences=min(count, -(-fisher_tokens // min(seq_len, SEQ_LEN))),
            layer_window=layer_window,
        )

    @property
    def fisher_tokens(self) -> int:
        """Tokens whose gradients are computed."""
        return self.fisher_sequences * min(self.seq_len, SEQ_LEN)

    def total_tokens(self, spec: ModelSpec) -> int:
        """Tokens of all passes, those with gradients included: what `collect` advances by in all."""
        return self.num_sequences * self.seq_len * len(self.windows(spec)) + self.fisher_tokens

    @property
    def num_parts(self) -> int:
        """Parts of each window: one per forward pass."""
        return -(-self.num_sequences // self.batch_size)

    def windows(self, spec: ModelSpec) -> list[tuple[int, int]]:
        """Half-open ranges of layers, one per pass."""
        per_layer = self.batch_size * self.seq_len * 2 * (2 * spec.kv_dim + spec.num_heads * spec.head_dim)
        size = self.layer_window or max(1, _PART_BYTES // per_layer)
        return [(a, min(a + size, spec.num_layers)) for a in range(0, spec.num_layers, size)]

    def disk_bytes(self, spec: ModelSpec) -> int:
        """Bytes of samples on disk, 16 bits per value."""
        kv_values = 2 * spec.kv_dim * self.num_sequences
        q_values = spec.num_heads * spec.head_dim * self.query_sequences
        return 2 * spec.num_layers * self.seq_len * (kv_values + q_values)


class _WindowDone(Exception):
    """Ends a forward pass once the last layer of the window is recorded."""


class _Recorder:
    """Runs SDPA in full precision and records q, k and v of the window's layers."""

    def __init__(self, dtype: torch.dtype, key_biases: Sequence[Tensor | None]) -> None:
        self.dtype, self.key_biases = dtype, key_biases
        self.start, self.stop, self.query_sequences = 0, 0, 0
        self.tensors: dict[str, Tensor] = {}

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        rotary: RotaryOutput,
    ) -> Tensor:
        layer_idx = layer_index(module)
        if layer_idx >= self.start:
            bias = self.key_biases[layer_idx]
            if bias is None:
                self._keep(layer_idx, "k", key)
            else:
                self._keep(layer_idx, "k", key.float() - bias.to(key.device).unsqueeze(1))
                self.tensors[f"layers.{layer_idx}.key_bias"] = bias.cpu()
            self._keep(layer_idx, "v", value)
            if self.query_sequences:
                self._keep(layer_idx, "q", query[: self.query_sequences])
        if layer_idx == self.stop - 1:
            raise _WindowDone
        rotate = rotary.rotation.apply
        return sdpa(rotate(query), rotate(key), value, mask, scaling)

    def _keep(self, layer_idx: int, kind: str, x: Tensor) -> None:
        """Stores x [batch, heads, time, head_dim] as [heads, batch * time, head_dim].

        Raises:
            SamplesError: values that are not finite, or not in the recording's dtype.
        """
        kept = x.transpose(0, 1).flatten(1, 2).to("cpu", self.dtype).contiguous()
        if not bool(kept.isfinite().all()):
            where = f"the {_KINDS[kind]} of layer {layer_idx}"
            if not bool(x.isfinite().all()):
                raise SamplesError(
                    f"{where} are not finite; the model's weights may be damaged, or its dtype too narrow"
                )
            raise SamplesError(
                f"{where} reach {float(x.abs().max()):.3g}, more than {self.dtype} holds; use --dtype bfloat16"
            )
        self.tensors[f"layers.{layer_idx}.{kind}"] = kept


def collect(
    loaded: LoadedModel,
    sequences: Tensor,
    config: CollectConfig,
    folder: Path,
    provenance: Mapping[str, Any],
    *,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda tokens: None,
    say: Callable[[str], None] = lambda line: None,
) -> Recording:
    """Records the model's attention inputs over the sequences.

    Args:
        loaded: the model.
        sequences: [num_sequences, seq_len] int64 token ids.
        config: what to record.
        folder: where the parts and the manifest go.
        provenance: kept in the manifest: corpus, revision, seed and the like.
        overwrite: discard a recording that is in the folder, also the same one.
        advance: called with the number of tokens of each pass, recorded now or before.
        say: called with a line about what is reused.

    Returns:
        The finished recording; when the folder holds it already, nothing is run.

    Raises:
        SamplesError: the folder holds another recording and `overwrite` is off (the message names what differs), is
            used by another process or has too little disk; samples that are not finite.
    """
    with locked(folder, SamplesError):
        return _collect(loaded, sequences, config, folder, provenance, overwrite, advance, say)


def _collect(
    loaded: LoadedModel,
    sequences: Tensor,
    config: CollectConfig,
    folder: Path,
    provenance: Mapping[str, Any],
    overwrite: bool,
    advance: Callable[[int], None],
    say: Callable[[str], None],
) -> Recording:
    """`collect` in a folder that is locked."""
    windows = config.windows(loaded.spec)
    manifest = {
        "format_version": FORMAT_VERSION,
        **loaded.identity(),
        "rope": find_rope(loaded.model).frequencies(),
        "provenance": dict(provenance),
        "token_ids_sha256": hashlib.sha256(sequences.to("cpu", torch.int64).contiguous().numpy().tobytes()).hexdigest(),
        **asdict(config),
        "num_tokens": config.num_sequences * config.seq_len,
        "num_parts": config.num_parts,
        "windows": [list(window) for window in windows],
    }
    stored = open_run(
        folder, MANIFEST, manifest, kind="recording", stale=_STALE, error=SamplesError, overwrite=overwrite
    )
    names = [part_name(window, part) for window in range(len(windows)) for part in range(config.num_parts)]
    if config.fisher_sequences:
        names.append(FISHER)
    finished = finished_parts(folder, stored, names)
    if finished:
        say(f"{len(finished)} of {len(names)} parts were recorded already and are reused")
    _check_free_space(folder, config.disk_bytes(loaded.spec) - sum(record["bytes"] for record in finished.values()))
    dtype = torch.bfloat16 if loaded.model.dtype == torch.bfloat16 else torch.float16
    recorder = _Recorder(dtype, key_biases(loaded.model, loaded.spec))
    with Seam(loaded.model, recorder), torch.inference_mode():
        for window_idx, window in enumerate(windows):
            for part in range(config.num_parts):
                batch = sequences[part * config.batch_size : (part + 1) * config.batch_size]
                if part_name(window_idx, part) not in finished:
                    recorder.start, recorder.stop = window
                    recorder.query_sequences = max(0, config.query_sequences - part * config.batch_size)
                    _run(loaded.model, batch)
                    write_part(folder, window_idx, part, recorder.tensors)
                    recorder.tensors = {}
                advance(batch.numel())
    if config.fisher_sequences:
        if FISHER not in finished:
            # spread over the recording: sequences that follow each other can be of one document
            rows = torch.linspace(0, config.num_sequences - 1, config.fisher_sequences).round().long()
            write_fisher(folder, collect_fisher(loaded, sequences[rows, :SEQ_LEN], _FISHER_SEED, advance))
        else:
            advance(config.fisher_tokens)
    if len(finished) < len(names) or not stored.get("complete"):
        records = part_records(folder, stored)
        parts = {name: records[name] for name in names}
        write_sealed(folder / MANIFEST, {**manifest, "complete": True, "parts": parts})
    (folder / PARTS).unlink(missing_ok=True)
    return Recording(folder)


def _check_free_space(folder: Path, needed: int) -> None:
    """Raises when the disk cannot take that many bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise SamplesError(
            f"the recording needs {-(-needed // 2**20)} MiB, but {folder} has {free // 2**20} MiB free; lower "
            "--tokens or --query-tokens, or choose another --out"
        )


def _run(model: Any, batch: Tensor) -> None:
    """One forward pass of the decoder alone: no logits are computed."""
    try:
        model.base_model(input_ids=batch.to(model.device), use_cache=False)
    except _WindowDone:
        return
