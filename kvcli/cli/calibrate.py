"""`kvcli calibrate` and `kvcli merge`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from kvcli.cli.command import Command
from kvcli.cli.output import Output
from kvcli.commands.options import DEVICES_HELP, Devices, ModelOptions, Options
from kvcli.commands.paths import model_folder, newest_samples, newest_shards
from kvcli.commands.sizes import size
from kvcli.errors import UsageError
from kvcli.models.builtin_models import BUILTIN_MODELS
from kvcli.models.hub import check_model_name
from kvcli.storage.ranks import environment, join_ranks, start_ranks

if TYPE_CHECKING:
    from kvcli.models.load import LoadedModel


class CalibrateOptions(ModelOptions):
    """Options of `kvcli calibrate`."""

    takes_several_gpus: ClassVar[bool] = True

    corpus: str | None = Field(
        None,
        description="dataset on the hub, file or folder (parquet, jsonl, csv or txt, also .gz), '-' for standard "
        "input, 'builtin', a mixture of domains, or 'builtin:DOMAIN'; default: 'builtin' for built-in models, "
        "FineWeb-Edu for others",
    )
    corpus_name: str | None = Field(None, description="configuration of a hub dataset")
    corpus_split: str | None = Field(None, description="split of a hub dataset")
    revision: str | None = Field(None, description="revision of a hub dataset; FineWeb-Edu's is pinned")
    text_column: str = Field("text", description="column that holds the text")
    skip_bad_rows: bool = Field(False, description="leave out rows without text, and say how many")
    tokens: int = Field(65536, ge=2, description="token budget")
    seq_len: int = Field(2048, ge=2, description="tokens per sequence")
    query_tokens: int = Field(8192, ge=0, description="tokens whose queries are recorded too")
    fisher_tokens: int = Field(
        32768,
        ge=0,
        description="tokens whose gradients tell what errors cost, each in the time of 4 others or more; 0: all layers "
        "get the same bits",
    )
    batch_size: int = Field(4, ge=1, description="sequences per forward pass")
    layer_window: int = Field(0, ge=0, description="layers per pass; 0: as many as keep a file below half a GiB")
    devices: Devices | None = Field(None, description=DEVICES_HELP)
    shard: str | None = Field(None, description="share of the work, 1/4 to 4/4 in four processes; then 'kvcli merge'")
    out: Path | None = Field(None, description="output folder; default: runs/MODEL/samples or runs/MODEL/shards/1-of-4")
    overwrite: bool = Field(False, description="discard a recording in the output folder and start again")


class MergeOptions(Options):
    """Options of `kvcli merge`."""

    shards: list[Path] = Field([], description="folders of all shards, in any order; default: the newest below runs/")
    out: Path | None = Field(None, description="output folder; default: runs/MODEL/samples")
    overwrite: bool = Field(False, description="discard another recording in the output folder")


def run(options: CalibrateOptions, output: Output, loaded: LoadedModel | None = None) -> None:
    """Record pre-RoPE queries, keys and values of every layer over a calibration corpus.

    With --devices, or started by torchrun, processes share the sequences.
    """
    from kvcli.calibrate.builtin_text import BUILTIN, is_builtin
    from kvcli.calibrate.config import CollectConfig, Shard
    from kvcli.calibrate.corpus import FINEWEB_EDU, CorpusConfig, beginning, check_source, documents, token_sequences
    from kvcli.report.facts import full_attention, other_layers

    check_model_name(options.model)
    shard = None if options.shard is None else Shard.parse(options.shard)
    source = options.corpus or (BUILTIN if options.model in BUILTIN_MODELS else FINEWEB_EDU)
    default = CorpusConfig(source, "calibration" if is_builtin(source) else "train")
    if source == FINEWEB_EDU:
        default = CorpusConfig.fineweb_edu()
    given: dict[str, Any] = {
        **{"split": options.corpus_split, "name": options.corpus_name, "revision": options.revision},
        **{"text_column": options.text_column, "seed": options.seed},
    }
    corpus = replace(default, **{name: value for name, value in given.items() if value is not None})
    check_source(corpus, shared=options.devices is not None)
    if shard is not None and (options.devices is not None or environment().count > 1):
        raise UsageError("torchrun and --devices share the work by themselves; leave out --shard")
    start_ranks(options.devices, options.device)

    from kvcli.calibrate.collect import collect

    output.settings(options.model_dump(mode="json"))
    with join_ranks() as ranks:
        parts = ("samples",) if shard is None else ("shards", f"{shard.index}-of-{shard.count}")
        folder = options.out or model_folder(options.model, *parts)
        loaded = loaded or options.load(output)
        seq_len = min(options.seq_len, options.tokens, loaded.spec.max_position_embeddings)
        count = max(1, options.tokens // seq_len)
        output.say(f"reading {corpus.source}")
        texts = documents(corpus, skipping=output.warn if options.skip_bad_rows else None)
        sequences = token_sequences(texts, loaded.tokenizer, count, seq_len)
        if len(sequences) < count:
            output.say(f"the corpus is smaller than --tokens: {sequences.numel()} of {options.tokens} tokens")
        budgets = options.model_dump(include={"query_tokens", "fisher_tokens", "batch_size", "layer_window"})
        config = CollectConfig.for_tokens(*sequences.shape, **budgets)
        share = Shard(ranks.rank + 1, ranks.count) if ranks.count > 1 else shard
        needed = config.disk_bytes(loaded.spec, shard)
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        output.say(
            f"{sequences.numel()} tokens, {len(config.windows(loaded.spec))} layer window(s): {size(needed)} of disk "
            f"({size(free)} free)"
        )
        provenance: dict[str, Any] = {"corpus": corpus.provenance(), **other_layers(loaded)}
        if begins_with := beginning(loaded.tokenizer):
            provenance["begins_with"] = begins_with
        label = "calibrate" if ranks.count == 1 else f"calibrate (rank 0 of {ranks.count})"
        with output.progress(label, config.total_tokens(loaded.spec, share), "token passes") as advance:
            collect(
                loaded,
                sequences,
                config,
                folder,
                provenance,
                shard=shard,
                ranks=ranks,
                overwrite=options.overwrite,
                advance=advance,
                say=output.say,
            )
    output.say(f"recorded {full_attention(loaded.spec, provenance)}")
    if shard is not None:
        output.say(f"shard {shard} is complete; when all are, put them together with 'kvcli merge'")
    counts = {"num_tokens": len(config.sequences(shard)) * config.seq_len, "layers": loaded.spec.num_layers}
    record = {"samples": str(folder), **counts, "bytes": needed}
    output.result(record, str(folder), ["kvcli", "fit", folder] if shard is None else ())


def merge_shards(options: MergeOptions, output: Output) -> None:
    """Put the shards of a recording together: the result is what one process would have recorded."""
    folders = options.shards or newest_shards()
    for folder in folders:
        newest_samples(folder)
    from kvcli.calibrate.shards import merge, read_shards

    shards = read_shards(folders)
    folder = options.out or model_folder(shards[0][1].model, "samples")
    output.settings({"shards": len(shards), "out": folder})
    total = sum(len(manifest.parts) for _, manifest in shards)
    with output.progress("merge", total, "files") as advance:
        recording = merge(folders, folder, overwrite=options.overwrite, advance=advance)
    counts = {"num_tokens": recording.manifest.num_tokens, "layers": len(recording.layers), "shards": len(shards)}
    output.result({"samples": str(folder), **counts}, str(folder), ["kvcli", "fit", folder])


EXAMPLE = "kvcli calibrate --tokens 32768"
SAVES_MEMORY = "lower --batch-size, --seq-len or --query-tokens, or leave gradients out with --fisher-tokens 0"
CALIBRATE = Command("calibrate", CalibrateOptions, run, EXAMPLE, ("model",), resumes=True, saves_memory=SAVES_MEMORY)
MERGE = Command("merge", MergeOptions, merge_shards, "kvcli merge", ("shards",), resumes=True)
