"""How a recording is made in its folder: window of layers by window, file by file, what is there already left out.

This module does not know about locks, nor about other processes.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcli.calibrate.fisher import SEQ_LEN, layer_fisher, sequence_sums
from kvcli.calibrate.recorder import Recorder, WindowDone
from kvcli.calibrate.shards import SHARD, Shard, finish, read_sums
from kvcli.errors import SamplesError
from kvcli.files import open_run
from kvcli.models import LoadedModel
from kvcli.sample_parts import (
    FISHER,
    PARTS,
    STALE,
    SUMS,
    finished_parts,
    part_name,
    part_records,
    sums_name,
    write_fisher,
    write_part,
)
from kvcli.samples import FORMAT_VERSION, MANIFEST
from kvcli.seam.decoder import backbone
from kvcli.seam.key_bias import key_biases
from kvcli.seam.patch import Seam
from kvcli.seam.probe import find_rope

if TYPE_CHECKING:
    from kvcli.calibrate.collect import CollectConfig

_FISHER_SEED = 0


@dataclass(frozen=True)
class Collection:
    """A recording, or a share of it, in a folder that no other process writes to.

    Attributes:
        loaded: the model.
        sequences: int64 [num_sequences, seq_len] token ids of the whole recording.
        config: what the whole recording has.
        folder: where the files go.
        shard: which share; None: everything.
    """

    loaded: LoadedModel
    sequences: Tensor
    config: CollectConfig
    folder: Path
    shard: Shard | None = None

    def run(
        self,
        provenance: Mapping[str, Any],
        overwrite: bool,
        advance: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        """Records what is not there yet; arguments and errors are those of `collect`."""
        config, folder, spec = self.config, self.folder, self.loaded.spec
        windows, parts = config.windows(spec), config.parts(self.shard)
        manifest = self.description(provenance)
        stored = open_run(
            folder, MANIFEST, manifest, kind="recording", stale=STALE, error=SamplesError, overwrite=overwrite
        )
        names = [part_name(window, part) for window in range(len(windows)) for part in parts]
        own = config.sequences(self.shard)
        rows = [index for index, row in enumerate(config.fisher_rows) if row in own]
        if self.shard is not None:
            names += [sums_name(index) for index in rows]
        elif rows:
            names.append(FISHER)
        finished = finished_parts(folder, stored, names)
        if finished:
            say(f"{len(finished)} of {len(names)} parts were recorded already and are reused")
        _check_free_space(folder, config.disk_bytes(spec, self.shard) - sum(x["bytes"] for x in finished.values()))
        self._record(windows, parts, finished, advance)
        if FISHER in finished:
            advance(config.fisher_tokens)
        elif rows:
            self._record_fisher(rows, stored, advance)
        if len(finished) < len(names) or not stored.get("complete"):
            records = part_records(folder, stored)
            finish(folder, manifest, {name: records[name] for name in names})
        (folder / PARTS).unlink(missing_ok=True)
        for path in folder.glob(SUMS) if self.shard is None else ():
            path.unlink()

    def description(self, provenance: Mapping[str, Any]) -> dict[str, Any]:
        """What the recording, or the share of it, is bound to: plain JSON values."""
        config, tokens = self.config, self.sequences.to("cpu", torch.int64).contiguous()
        return {
            "format_version": FORMAT_VERSION,
            **self.loaded.identity(),
            "rope": find_rope(self.loaded.model).frequencies(),
            "provenance": dict(provenance),
            "token_ids_sha256": hashlib.sha256(tokens.numpy().data).hexdigest(),
            **asdict(config),
            "num_tokens": config.num_sequences * config.seq_len,
            "num_parts": config.num_parts,
            "windows": [list(window) for window in config.windows(self.loaded.spec)],
            **({} if self.shard is None else {SHARD: [self.shard.index, self.shard.count]}),
        }

    def _record(
        self,
        windows: Sequence[tuple[int, int]],
        parts: range,
        finished: Mapping[str, Any],
        advance: Callable[[int], None],
    ) -> None:
        """Records queries, keys and values, window of layers by window."""
        model, config = self.loaded.model, self.config
        dtype = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float16
        recorder = Recorder(dtype, key_biases(model, self.loaded.spec))
        with Seam(model, recorder), torch.inference_mode():
            for window_idx, window in enumerate(windows):
                for part in parts:
                    batch = self.sequences[part * config.batch_size : (part + 1) * config.batch_size]
                    if (name := part_name(window_idx, part)) not in finished:
                        recorder.start, recorder.stop = window
                        recorder.query_sequences = max(0, config.query_sequences - part * config.batch_size)
                        _run(model, batch)
                        write_part(self.folder, name, recorder.tensors)
                        recorder.tensors = {}
                    advance(batch.numel())

    def _record_fisher(self, rows: Sequence[int], stored: Mapping[str, Any], advance: Callable[[int], None]) -> None:
        """Records the sums of single sequences; a recording of its own adds them up and keeps that alone."""
        config, folder = self.config, self.folder
        finished = finished_parts(folder, stored, [sums_name(index) for index in rows])
        wanted = [index for index in rows if sums_name(index) not in finished]
        advance((len(rows) - len(wanted)) * min(config.seq_len, SEQ_LEN))
        sequences = self.sequences[config.fisher_rows, :SEQ_LEN]
        for index, sums in sequence_sums(self.loaded, sequences, _FISHER_SEED, wanted, advance):
            write_part(folder, sums_name(index), sums)
        if self.shard is None:
            found = (read_sums(folder / sums_name(index)) for index in rows)
            write_fisher(folder, layer_fisher(found, self.loaded.spec.num_layers))


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
        backbone(model)(input_ids=batch.to(model.device), use_cache=False)
    except WindowDone:
        return
