"""`kvcli contexts`: what is in a store of contexts, and what is to stay there."""

from __future__ import annotations

from pathlib import Path

import typer
from pydantic import Field

from kvcli.cli import contexts_show as show
from kvcli.cli.command import command
from kvcli.cli.output import Output
from kvcli.cli.store_options import MAX_BYTES_HELP, StoreOptions, open_store
from kvcli.errors import ContextError, UsageError
from kvcli.sizes import parse_size, size
from kvcli.tables import DataTable


class VerifyOptions(StoreOptions):
    """Options of `kvcli contexts verify`."""

    names: list[str] = Field(default=[], description="contexts to read in full; default: all")


class PruneOptions(StoreOptions):
    """Options of `kvcli contexts prune`."""

    max_bytes: str | None = Field(
        default=None, description="remove the least recently used contexts until the store has this size, such as 20GiB"
    )


class RemoveOptions(StoreOptions):
    """Options of `kvcli contexts rm`."""

    names: list[str] = Field(default=[], description="contexts to remove, also damaged ones")


class ExportOptions(StoreOptions):
    """Options of `kvcli contexts export`."""

    name: str | None = Field(default=None, description="the context")
    out: Path | None = Field(default=None, description="the file, or a folder for it; default: NAME.safetensors")
    overwrite: bool = Field(default=False, description="replace a file that exists")


class ImportOptions(StoreOptions):
    """Options of `kvcli contexts import`."""

    files: list[Path] = Field(default=[], description="files of 'kvcli compress --out' or 'kvcli contexts export'")
    name: str | None = Field(default=None, description="name in the store; default: that of the file")
    overwrite: bool = Field(default=False, description="replace a context of this name")
    max_bytes: str | None = Field(default=None, description=MAX_BYTES_HELP)


def list_contexts(options: StoreOptions, output: Output) -> None:
    """List the contexts of a store, the most recently used first."""
    store = open_store(options.store, options.model)
    shared, (used, unused) = store.shared(), store.sizes()
    records = [show.describe(context, shared) for context in store.contexts(output.warn)]
    columns = ("name", "source", "method", "tokens", "bits K / V", "size", "smaller", "shared", "last used")
    rows = [
        [
            record["name"],
            record["source"],
            record["method"],
            str(record["tokens"]),
            show.bits(record),
            size(record["bytes"]),
            f"{record['ratio']:.1f}x",
            size(record["shared_bytes"]),
            record["last_used"].replace("T", " ")[:16],
        ]
        for record in records
    ]
    title = f"{store.folder}: {_contexts(len(store.names()))}, {size(used)}"
    if unused:
        title += f"; {size(unused)} that no context uses, see 'kvcli contexts prune'"
    optional = ("source", "bits K / V", "shared", "smaller", "last used")
    table = DataTable(title, columns, rows, text_columns=3, optional=optional)
    output.result({"store": str(store.folder), "bytes": used, "unused_bytes": unused, "rows": records}, table)


def verify(options: VerifyOptions, output: Output) -> None:
    """Read contexts in full and compare every checksum; exit code 1 if one is damaged."""
    store = open_store(options.store, options.model)
    names, known = options.names or store.names(), store.names()
    if unknown := [name for name in names if name not in known]:
        raise store.no_context(unknown[0])
    damages = store.damages(names, output.progress)
    for reason in damages.values():
        output.warn(reason)
    output.result(
        {"contexts": len(names), "damaged": damages}, None if damages else f"{_contexts(len(names))}, all whole"
    )
    if damages:
        raise ContextError(f"{len(damages)} of {_contexts(len(names))} damaged: {', '.join(damages)}")


def prune(options: PruneOptions, output: Output) -> None:
    """Remove files that no context uses, and contexts beyond a size, the least recently used first."""
    store = open_store(options.store, options.model)
    done = store.prune(parse_size(options.max_bytes))
    for name in done.evicted:
        output.say(f"removed {name}")
    left = store.sizes()[0]
    record = {"evicted": list(done.evicted), "freed_bytes": done.freed_bytes, "bytes": left}
    output.result(record, f"freed {size(done.freed_bytes)}; the store has {size(left)}")


def remove(options: RemoveOptions, output: Output) -> None:
    """Remove contexts, and what no other context uses of them."""
    store = open_store(options.store, options.model)
    if not options.names:
        raise UsageError("name one or more contexts; 'kvcli contexts list' shows those that are there")
    freed = store.remove(*options.names)
    output.result({"removed": options.names, "freed_bytes": freed}, f"freed {size(freed)}")


def export(options: ExportOptions, output: Output) -> None:
    """Write a context to one file, which 'kvcli generate --context' and 'kvcli contexts import' read."""
    if options.name is None:
        raise UsageError("name a context; 'kvcli contexts list' shows those that are there")
    store = open_store(options.store, options.model)
    path = options.out or Path()
    if path.is_dir():
        path /= f"{options.name}.safetensors"
    if path.exists() and not options.overwrite:
        raise UsageError(f"{path} exists already; use --overwrite to replace it")
    written = store.load(store.whole(options.name)).save(path)
    output.result({"file": str(path), "bytes": written}, str(path))


def import_files(options: ImportOptions, output: Output) -> None:
    """Put contexts from files into a store."""
    from kvcli.cache.context import Context

    if not options.files:
        raise UsageError("name one or more files of contexts")
    if options.name is not None and len(options.files) > 1:
        raise UsageError("--name goes with one file")
    store = open_store(options.store, options.model, must_exist=False)
    records, lines = [], []
    for path in options.files:
        name, max_bytes = options.name or path.stem, parse_size(options.max_bytes)
        stored = store.put(Context.load(path), name=name, overwrite=options.overwrite, max_bytes=max_bytes)
        record = {
            "name": stored.name,
            "tokens": stored.record.num_tokens,
            "new_bytes": stored.new_bytes,
            "shared_bytes": stored.shared_bytes,
            "evicted": list(stored.evicted),
        }
        records.append(record)
        removed = f"; removed {', '.join(stored.evicted)}" if stored.evicted else ""
        lines.append(
            f"{stored.name}: {record['tokens']} tokens, {size(stored.new_bytes)} written, "
            f"{size(stored.shared_bytes)} shared with other contexts{removed}"
        )
    output.result({"store": str(store.folder), "rows": records}, "\n".join(lines))


def _contexts(count: int) -> str:
    return f"{count} context{'' if count == 1 else 's'}"


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    contexts = typer.Typer(
        name=show.GROUP,
        help="Contexts on disk: what is stored, what it takes, whether it is whole.",
        no_args_is_help=True,
        rich_markup_mode="rich",
        epilog="Example: kvcli contexts list",
    )
    command(contexts, "list", StoreOptions, "kvcli contexts list")(list_contexts)
    show.register(contexts)
    command(contexts, "verify", VerifyOptions, "kvcli contexts verify", ("names",))(verify)
    command(contexts, "prune", PruneOptions, "kvcli contexts prune --max-bytes 20GiB")(prune)
    command(contexts, "rm", RemoveOptions, "kvcli contexts rm report", ("names",))(remove)
    example = "kvcli contexts export report --out report.safetensors"
    command(contexts, "export", ExportOptions, example, ("name",))(export)
    example = "kvcli contexts import report.safetensors"
    command(contexts, "import", ImportOptions, example, ("files",))(import_files)
    app.add_typer(contexts)
