"""`kvcli contexts`: what is in a store of contexts, what a stored copy loses, and what is to stay there."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvcli.cli.command import Command, command_group
from kvcli.cli.inputs import MAX_BYTES_HELP, STORE_HELP, open_reader, open_store
from kvcli.cli.output import Output
from kvcli.cli.session_options import SessionOptions, choose_method
from kvcli.commands.options import IMPL_HELP, Impl, ModelOptions, Options
from kvcli.commands.sizes import number, parse_size, size
from kvcli.commands.tables import DataTable
from kvcli.errors import ContextError, UsageError
from kvcli.models.builtin_models import DEFAULT_MODEL

if TYPE_CHECKING:
    from kvcli.contexts import StoredContext
    from kvcli.contexts.chunks import ChunksOfKind


class StoreOptions(Options):
    """Options of `kvcli contexts list`, and of commands that change a store."""

    model: str = Field(DEFAULT_MODEL, description="model whose contexts are meant")
    store: Path | None = Field(None, description=STORE_HELP)


class ShowOptions(ModelOptions):
    """Options of `kvcli contexts show`."""

    name: str | None = Field(None, description="the context")
    store: Path | None = Field(None, description=STORE_HELP)
    kl: bool = Field(False, description="measure what the stored copy loses, on its last tokens; reads the model")
    kl_tokens: int = Field(256, ge=1, le=2**16, description="last tokens whose predictions --kl compares")
    artifact: Path | None = Field(None, description="artifact, for --kl; default: the newest for model and method")
    impl: Impl = Field("auto", description=IMPL_HELP)


class NamesOptions(StoreOptions):
    """Options of `kvcli contexts verify` and `rm`."""

    names: list[str] = Field([], description="contexts, also damaged ones; verify: default: all")


class PruneOptions(StoreOptions):
    """Options of `kvcli contexts prune`."""

    max_bytes: str | None = Field(None, description="remove least recently used contexts down to this size, as 20GiB")


class ExportContextOptions(StoreOptions):
    """Options of `kvcli contexts export`."""

    name: str | None = Field(None, description="the context")
    out: Path | None = Field(None, description="the file, or a folder for it; default: NAME.safetensors")
    overwrite: bool = Field(False, description="replace a file that exists")


class ImportOptions(StoreOptions):
    """Options of `kvcli contexts import`."""

    files: list[Path] = Field([], description="files of 'kvcli compress --out' or 'kvcli contexts export'")
    name: str | None = Field(None, description="name in the store; default: that of the file")
    overwrite: bool = Field(False, description="replace a context of this name")
    max_bytes: str | None = Field(None, description=MAX_BYTES_HELP)


def list_contexts(options: StoreOptions, output: Output) -> None:
    """List the contexts of a store, and chunks that engines keep there, the most recently used first."""
    from kvcli.contexts.chunks import chunks_of

    store = open_reader(options.store, options.model)
    shared, (used, unused) = store.shared(), store.sizes()
    records = [context_record(context, shared) for context in store.contexts(output.warn)]
    rows = [
        {
            "name": record["name"],
            "source": record["source"],
            "method": record["method"],
            "tokens": str(record["tokens"]),
            "bits K / V": _bits(record),
            "size": size(record["bytes"]),
            "smaller": f"{record['ratio']:.1f}x",
            "shared": size(record["shared_bytes"]),
            "last used": record["last_used"].replace("T", " ")[:16],
        }
        for record in records
    ]
    title = f"{store.folder}: {_count(len(store.names()))}, {size(used)}"
    if unused:
        title += f"; {size(unused)} that no context uses, see 'kvcli contexts prune'"
    columns = ("name", "source", "method", "tokens", "bits K / V", "size", "smaller", "shared", "last used")
    optional = ("source", "bits K / V", "shared", "smaller", "last used")
    table, chunks = DataTable.of(title, rows, optional, columns, text_columns=3), chunks_of(store.folder)
    record = {"store": str(store.folder), "bytes": used, "unused_bytes": unused, "rows": records}
    human: list[str | DataTable] = [table] if rows or not chunks else []
    human += [chunk_table(store.folder, chunks)] if chunks else []
    output.result({**record, "chunks": [x._asdict() for x in chunks]}, human)


def chunk_table(folder: Path, chunks: Collection[ChunksOfKind]) -> DataTable:
    """Chunks of engines in a store, and what is lost of their keys and values."""
    rows = [
        {
            "model and method": x.kind,
            "chunks": f"{x.chunks:,}",
            "size": size(x.bytes),
            "smaller": f"{x.plain_bytes / max(1, x.bytes):.1f}x",
            "error of keys (most)": _error(x.key_error, x.worst_key_error),
            "of values (most)": _error(x.value_error, x.worst_value_error),
            "last used": datetime.fromtimestamp(x.used, UTC).strftime("%Y-%m-%d %H:%M"),
        }
        for x in chunks
    ]
    total = size(sum(x.bytes for x in chunks))
    title = f"{folder}: chunks of engines, {total}; errors are shares of the squared norm"
    return DataTable.of(title, rows, ("last used", "smaller"))


def _error(average: float | None, most: float | None) -> str:
    return "-" if average is None or most is None else f"{number(average)} ({number(most)})"


def show(options: ShowOptions, output: Output) -> None:
    """Show a context: tokens, bytes against fp16, bits, shared blocks; with --kl, what the stored copy loses."""
    name = _name(options.name)
    store = open_reader(options.store, options.model, name)
    stored = store.get(name)
    record = context_record(stored, store.shared())
    lines = [
        f"{record['name']}: {record['tokens']} tokens of {record['source'] or 'an unknown source'}, "
        f"{record['model']} in {record['dtype']}, method {record['method']}",
        f"{size(record['bytes'])}, in fp16 {size(record['fp16_bytes'])} ({record['ratio']:.2f}x): "
        f"{record['coded_tokens']} tokens as codes at {_bits(record)} (K / V) bits, {size(record['code_bytes'])}; "
        f"{size(record['window_bytes'])} in full precision",
        f"{record['blocks']} blocks of {record['block_tokens']} tokens, {record['shared_blocks']} of them shared with "
        f"other contexts; {size(record['shared_bytes'])} shared in all",
        f"stored {record['created']}, last used {record['last_used']}",
    ]
    if options.kl:
        from kvcli.contexts import identity_of
        from kvcli.eval.quality import copied_tokens, stored_quality

        copied_tokens(stored.record, options.kl_tokens)
        context = store.load(store.whole(stored.name))
        names = {*ModelOptions.model_fields, "artifact", "impl"}
        session_options = SessionOptions(**options.model_dump(include=names, exclude_unset=True)).for_context(context)
        chosen = choose_method(session_options, output, context)
        loaded = session_options.load(output)
        with chosen.attach(loaded, options.impl, output) as session:
            store.whole(stored.name, identity_of(session, loaded.tokenizer))
            kl = record["kl"] = stored_quality(session, store, stored, options.kl_tokens).figures
        lines.append(
            f"the copy against the uncompressed model, over the last {kl['num_tokens']} tokens: "
            f"KL {number(kl['kl_mean'])} nats per token (p99 {number(kl['kl_p99'])}), {100 * kl['flips']:.1f} % flips, "
            f"perplexity {kl['perplexity']:.3f} instead of {kl['reference_perplexity']:.3f}"
        )
    output.result(record, "\n".join(lines))


def context_record(context: StoredContext, shared: Collection[str]) -> dict[str, Any]:
    """What is known of a context, as plain JSON values; `shared` are digests of blocks that several contexts need."""
    stored, identity = context.record, context.record.identity
    key_bits, value_bits = stored.bits
    return {
        "name": context.name,
        "tokens": stored.num_tokens,
        "model": identity.get("model"),
        "method": stored.method,
        "dtype": identity.get("dtype"),
        "config": identity.get("config"),
        "coded_tokens": stored.counts.attended[0],
        "key_bits": key_bits,
        "value_bits": value_bits,
        "bytes": stored.nbytes,
        "fp16_bytes": stored.fp16_bytes,
        "ratio": stored.fp16_bytes / stored.nbytes,
        "code_bytes": sum(stored.bytes_of.get(kind, 0) for kind in ("key_codes", "value_codes")),
        "window_bytes": sum(stored.bytes_of.get(kind, 0) for kind in ("keys", "values")),
        "block_tokens": stored.part_tokens,
        "blocks": len(stored.coded),
        "shared_blocks": sum(block.digest in shared for block in stored.coded),
        "shared_bytes": sum(block.bytes for block in stored.blocks if block.digest in shared),
        "created": context.created,
        "last_used": datetime.fromtimestamp(context.used, UTC).isoformat(timespec="seconds"),
        "source": str(stored.notes.get("source", "")),
    }


def _name(name: str | None) -> str:
    if name is None:
        raise UsageError("name a context; 'kvcli contexts list' shows those that are there")
    return name


def _bits(record: dict[str, Any]) -> str:
    """Stored bits per key and per value; a hyphen where nothing is a code."""
    return f"{record['key_bits']:.2f} / {record['value_bits']:.2f}" if record["coded_tokens"] else "-"


def _count(contexts: int) -> str:
    return f"{contexts} context{'' if contexts == 1 else 's'}"


def verify(options: NamesOptions, output: Output) -> None:
    """Read contexts in full and compare every checksum; exit code 1 if one is damaged."""
    store = open_reader(options.store, options.model, *options.names)
    names = options.names or store.names()
    damages = store.damages(names, output.progress)
    for reason in damages.values():
        output.warn(reason)
    output.result({"contexts": len(names), "damaged": damages}, None if damages else f"{_count(len(names))}, all whole")
    if damages:
        raise ContextError(f"{len(damages)} of {_count(len(names))} damaged: {', '.join(damages)}")


def prune(options: PruneOptions, output: Output) -> None:
    """Remove files that no context uses, and contexts beyond a size, the least recently used first."""
    max_bytes, there = parse_size(options.max_bytes), open_reader(options.store, options.model)
    store = open_store(there.folder, options.model)
    done = store.prune(max_bytes)
    for name in done.evicted:
        output.say(f"removed {name}")
    used = store.sizes()[0]
    record = {"evicted": list(done.evicted), "freed_bytes": done.freed_bytes, "bytes": used}
    output.result(record, f"freed {size(done.freed_bytes)}; the store has {size(used)}")


def remove(options: NamesOptions, output: Output) -> None:
    """Remove contexts, and what no other context uses of them."""
    if not options.names:
        raise UsageError("name one or more contexts; 'kvcli contexts list' shows those that are there")
    there = open_reader(options.store, options.model, *options.names)
    freed = open_store(there.folder, options.model).remove(*options.names)
    output.result({"removed": options.names, "freed_bytes": freed}, f"freed {size(freed)}")


def export_context(options: ExportContextOptions, output: Output) -> None:
    """Write a context to one file, which 'kvcli generate --context' and 'kvcli contexts import' read."""
    name = _name(options.name)
    store = open_reader(options.store, options.model, name)
    path = options.out or Path()
    if path.is_dir():
        path /= f"{name}.safetensors"
    if path.exists() and not options.overwrite:
        raise UsageError(f"{path} exists already; use --overwrite to replace it")
    output.result({"file": str(path), "bytes": store.load(store.whole(name)).save(path)}, str(path))


def import_files(options: ImportOptions, output: Output) -> None:
    """Put contexts from files into a store."""
    if not options.files:
        raise UsageError("name one or more files of contexts")
    if options.name is not None and len(options.files) > 1:
        raise UsageError("--name goes with one file")
    max_bytes, store = parse_size(options.max_bytes), open_store(options.store, options.model)
    from kvcli.cache.context import Context

    records, lines = [], []
    for path in options.files:
        context, name = Context.load(path), options.name or path.stem
        stored = store.put(context, name=name, overwrite=options.overwrite, max_bytes=max_bytes)
        record = {"name": stored.name, "tokens": stored.record.num_tokens, "new_bytes": stored.new_bytes}
        records.append({**record, "shared_bytes": stored.shared_bytes, "evicted": list(stored.evicted)})
        removed = f"; removed {', '.join(stored.evicted)}" if stored.evicted else ""
        lines.append(
            f"{stored.name}: {record['tokens']} tokens, {size(stored.new_bytes)} written, "
            f"{size(stored.shared_bytes)} shared with other contexts{removed}"
        )
    output.result({"store": str(store.folder), "rows": records}, "\n".join(lines))


_EXPORTED = "kvcli contexts export report --out report.safetensors"
COMMANDS = command_group(
    "contexts",
    "Contexts on disk: what is stored, what it takes, whether it is whole.",
    Command("list", StoreOptions, list_contexts, "kvcli contexts list"),
    Command("show", ShowOptions, show, "kvcli contexts show report --kl", ("name",)),
    Command("verify", NamesOptions, verify, "kvcli contexts verify", ("names",)),
    Command("prune", PruneOptions, prune, "kvcli contexts prune --max-bytes 20GiB"),
    Command("rm", NamesOptions, remove, "kvcli contexts rm report", ("names",)),
    Command("export", ExportContextOptions, export_context, _EXPORTED, ("name",)),
    Command("import", ImportOptions, import_files, "kvcli contexts import report.safetensors", ("files",)),
)
