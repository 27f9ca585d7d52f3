"""Runs a model over token sequences and records pre-RoPE queries, keys and values of its layers.

Layers are recorded window by window: each window is one pass over the sequences that stops after the window's last
layer, so the memory and the open files stay bounded however deep the model is. A recording that was cut off resumes:
parts whose size and sha256 are those of when they were written are kept.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcli.calibrate.config import FISHER_SEQ_LEN, GRADIENT_COST, CollectConfig, Shard
from kvcli.calibrate.fisher import sequence_sums
from kvcli.calibrate.parts import FISHER, PARTS, SUMS, SamplesManifest, part_name, part_records, sums_name, write_part
from kvcli.calibrate.shards import merge_into, write_fisher
from kvcli.errors import SamplesError
from kvcli.models.load import LoadedModel
from kvcli.progress import Advance, Say, say_nothing
from kvcli.seam.decoder import backbone
from kvcli.seam.layer import AttentionCall
from kvcli.seam.patch import Seam
from kvcli.seam.probe import probe
from kvcli.storage.locks import locked
from kvcli.storage.ranks import ALONE, Ranks

_FISHER_SEED = 0
_RANK_FOLDERS = "rank-[0-9]*-of-[0-9]*"
_KINDS = {"q": "queries", "k": "keys", "v": "values"}


def collect(
    loaded: LoadedModel,
    sequences: Tensor,
    config: CollectConfig,
    folder: Path,
    provenance: Mapping[str, Any],
    *,
    shard: Shard | None = None,
    ranks: Ranks = ALONE,
    overwrite: bool = False,
    advance: Advance = lambda tokens: None,
    say: Say = say_nothing,
) -> None:
    """Records the model's attention inputs over the sequences; `Recording` reads them.

    When the folder holds the recording already, nothing is run.

    Args:
        sequences: [num_sequences, seq_len] int64 token ids.
        provenance: corpus, revision, seed and the like, for the manifest.
        shard: record this share alone; `shards.merge` puts all shares together.
        ranks: processes that share the work, all called with the same arguments, and with files in common; their
            shares are in folders below the recording's until rank 0 has put them together.
        overwrite: discard a recording that is in the folder, also the same one; else SamplesError names what differs.
        advance: called with the number of tokens of each pass of this rank, recorded now or before, unless all were.

    SamplesError: the folder is used by another process or has too little disk, or samples are not finite; UsageError:
    more ranks or shards than forward passes; RankError: another rank has ended.
    """
    first = ranks.rank == 0
    collection = _Collection(loaded, sequences, config, folder, provenance, advance, say, shard)
    with locked(folder, SamplesError) if first else nullcontext():
        if ranks.count == 1:
            collection.record(overwrite)
        else:
            if first:
                SamplesManifest.open(folder, collection.description(), overwrite=overwrite)
            ranks.wait()
            if not SamplesManifest.read(folder / SamplesManifest.FILE).complete:
                places = [folder / f"rank-{rank}-of-{ranks.count}" for rank in range(ranks.count)]
                place, shard = places[ranks.rank], Shard(ranks.rank + 1, ranks.count)
                with locked(place, SamplesError):
                    replace(collection, folder=place, shard=shard).record(overwrite)
                ranks.wait()
                if first:
                    merge_into(places, folder)
            elif first:
                collection.record(overwrite=False)
            for place in folder.glob(_RANK_FOLDERS) if first else ():
                shutil.rmtree(place)
            ranks.wait()


@dataclass(frozen=True)
class _Collection:
    """A recording, or a share of it, in a folder that no other process writes to."""

    loaded: LoadedModel
    sequences: Tensor
    config: CollectConfig
    folder: Path
    provenance: Mapping[str, Any]
    advance: Callable[[int], None]
    say: Callable[[str], None]
    shard: Shard | None = None

    def record(self, overwrite: bool) -> None:
        """Records what is not there yet."""
        config, folder, spec = self.config, self.folder, self.loaded.spec
        stored = SamplesManifest.open(folder, self.description(), overwrite=overwrite)
        windows, sequences = range(len(config.windows(spec))), config.sequences(self.shard)
        names = [part_name(window, part) for window in windows for part in config.parts(self.shard)]
        rows = [index for index, row in enumerate(config.fisher_rows) if row in sequences]
        if self.shard is not None:
            names += [sums_name(index) for index in rows]
        elif rows:
            names.append(FISHER)
        finished = stored.intact_parts(folder, names)
        if finished:
            self.say(f"{len(finished)} of {len(names)} parts were recorded already and are reused")
        needed = config.disk_bytes(spec, self.shard) - sum(record["bytes"] for record in finished.values())
        if needed > (free := shutil.disk_usage(folder).free):
            raise SamplesError(
                f"the recording needs {-(-needed // 2**20)} MiB, but {folder} has {free // 2**20} MiB free; lower "
                "--tokens or --query-tokens, or choose another --out"
            )
        if len(finished) < len(names):
            self._record_samples(finished)
            if FISHER in finished:
                self._advance_gradients(config.fisher_tokens)
            elif rows:
                self._record_fisher(rows, stored)
        if len(finished) < len(names) or not stored.complete:
            records = stored.parts | part_records(folder)
            stored.finish(folder, {name: records[name] for name in names})
        for path in (folder / PARTS, *(folder.glob(SUMS) if self.shard is None else ())):
            path.unlink(missing_ok=True)

    def description(self) -> dict[str, Any]:
        """Everything that determines the recording, or the share of it, as plain JSON values."""
        config, tokens = self.config, self.sequences.to("cpu", torch.int64).contiguous()
        return {
            "format_version": SamplesManifest.VERSION,
            **self.loaded.identity(),
            "rope": probe(self.loaded.model).rope.for_length(config.seq_len).frequencies(),
            "provenance": dict(self.provenance),
            **asdict(config),
            "num_tokens": config.num_sequences * config.seq_len,
            "num_parts": config.num_parts,
            "windows": config.windows(self.loaded.spec),
            **({} if self.shard is None else {"shard": [self.shard.index, self.shard.count]}),
            "token_ids_sha256": hashlib.sha256(tokens.numpy().data).hexdigest(),  # last: others say what was changed
        }

    def _record_samples(self, finished: Mapping[str, Any]) -> None:
        """Records queries, keys and values, window of layers by window."""
        model, config = self.loaded.model, self.config
        dtype = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float16
        recorder = _SampleRecorder(dtype, probe(model).key_biases())
        with Seam(model, recorder), torch.inference_mode():
            for window_idx, window in enumerate(config.windows(self.loaded.spec)):
                for part in config.parts(self.shard):
                    batch = self.sequences[part * config.batch_size : (part + 1) * config.batch_size]
                    if (name := part_name(window_idx, part)) not in finished:
                        recorder.start, recorder.stop = window
                        recorder.query_sequences = max(0, config.query_sequences - part * config.batch_size)
                        with suppress(_WindowDone):
                            backbone(model)(input_ids=batch.to(model.device), use_cache=False)  # without logits
                        write_part(self.folder, name, recorder.tensors)
                        recorder.tensors = {}
                    self.advance(batch.numel())

    def _advance_gradients(self, tokens: int) -> None:
        self.advance(GRADIENT_COST * tokens)

    def _record_fisher(self, rows: Sequence[int], stored: SamplesManifest) -> None:
        """Records the sums of single sequences; without a shard, adds them up and keeps that alone."""
        config, folder = self.config, self.folder
        finished = stored.intact_parts(folder, [sums_name(index) for index in rows])
        missing = [index for index in rows if sums_name(index) not in finished]
        self._advance_gradients((len(rows) - len(missing)) * min(config.seq_len, FISHER_SEQ_LEN))
        sequences = self.sequences[config.fisher_rows, :FISHER_SEQ_LEN]
        for index, sums in sequence_sums(self.loaded, sequences, _FISHER_SEED, missing, self._advance_gradients):
            write_part(folder, sums_name(index), sums)
        if self.shard is None:
            write_fisher(folder, [folder / sums_name(index) for index in rows], self.loaded.spec.num_layers)


class _WindowDone(Exception):
    """Ends a forward pass once the last layer of the window is recorded."""


class _SampleRecorder:
    """Runs SDPA in full precision and records q, k and v of the window's layers."""

    def __init__(self, dtype: torch.dtype, key_biases: Sequence[Tensor | None]) -> None:
        self.dtype, self.key_biases = dtype, key_biases
        self.start, self.stop, self.query_sequences = 0, 0, 0
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        layer_idx, query, key, value = call.layer.layer_idx, call.query, call.key, call.value
        if layer_idx >= self.start:
            bias = self.key_biases[layer_idx]
            if bias is None:
                self._keep(layer_idx, "k", key)
            else:
                self._keep(layer_idx, "k", key.float() - bias.to(key.device).unsqueeze(1))
                self.tensors[f"layers.{layer_idx}.key_bias"] = bias.cpu()
            self._keep(layer_idx, "v", value)
            if self.query_sequences:
                self._keep(layer_idx, "q", query[: self.query_sequences, ..., : key.shape[-1]])
        if layer_idx == self.stop - 1:
            raise _WindowDone
        return call.exact()

    def _keep(self, layer_idx: int, kind: str, x: Tensor) -> None:
        """Stores x [batch, heads, time, head_dim] as [heads, batch * time, head_dim]."""
        samples = x.transpose(0, 1).flatten(1, 2).to("cpu", self.dtype).contiguous()
        if not bool(samples.isfinite().all()):
            where = f"the {_KINDS[kind]} of layer {layer_idx}"
            if not bool(x.isfinite().all()):
                raise SamplesError(f"{where} are not finite; the weights may be damaged, or their dtype too narrow")
            raise SamplesError(
                f"{where} reach {float(x.abs().max()):.3g}, more than {self.dtype} holds; use --dtype bfloat16"
            )
        self.tensors[f"layers.{layer_idx}.{kind}"] = samples
