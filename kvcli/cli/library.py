"""`kvcli library`: documents that are read once and asked side by side."""

import time
from pathlib import Path
from typing import Any

from pydantic import Field

from kvcli.cli.ask import check_memory
from kvcli.cli.command import Command, command_group, model_argument
from kvcli.cli.contexts import StoreOptions, context_record
from kvcli.cli.inputs import STORE_HELP, open_library, open_reader, open_store, read_texts
from kvcli.cli.output import Output
from kvcli.cli.session_options import SessionOptions, choose_method
from kvcli.commands.paths import default_artifact
from kvcli.commands.sizes import size
from kvcli.commands.tables import DataTable
from kvcli.contexts.index import LIBRARY, check_name
from kvcli.errors import UsageError
from kvcli.registry import DEFAULT_METHOD, LIBRARY_METHOD
from kvcli.storage.locks import lock

DEFAULT_NAME = "library"
_EXAMPLE = f"kvcli library add papers --name papers --method {DEFAULT_METHOD}"
_POLL_SECONDS = 0.2


class AddOptions(SessionOptions):
    """Options of `kvcli library add`."""

    method: str | None = Field(None, description=f"method; default: the newest artifact's, else {LIBRARY_METHOD}")
    files: list[Path] = Field([], description="documents: text, Markdown, PDF, HTML; a folder: its files")
    name: str = Field(DEFAULT_NAME, description="the library; letters, digits, underscores and hyphens")
    store: Path | None = Field(None, description=STORE_HELP)
    prefill_chunk: int | None = Field(
        None, ge=1, description="tokens per forward pass, part of the result; default: 512 on a CPU, else 4096"
    )


class LibraryOptions(StoreOptions):
    """Options of `kvcli library list`."""

    name: str | None = Field(None, description="one library; default: all")


class DocumentsOptions(StoreOptions):
    """Options of `kvcli library show` and `rm`."""

    documents: list[str] = Field([], description="documents; rm: default: all")
    name: str = Field(DEFAULT_NAME, description="the library")


class ExportOptions(DocumentsOptions):
    """Options of `kvcli library export`."""

    out: Path | None = Field(None, description="folder for a file of each document; default: the library's name")
    overwrite: bool = Field(False, description="replace files that exist")


def add(options: AddOptions, output: Output) -> None:
    """Read documents once, each alone, and keep them for 'kvcli ask --library'; processes share the work."""
    if not options.files:
        raise UsageError(f"name files or folders; an example: {_EXAMPLE}")
    check_name(options.name)
    if "." in options.name:
        raise UsageError(f"the name of a library has no dot, as '{options.name}' has")
    sources = read_texts(options.files, "a library has one document of a name")
    if not options.names_method and options.artifact is None and default_artifact(options.model) is None:
        options = options.model_copy(update={"method": LIBRARY_METHOD})
    options.check(chat=True)
    store = open_store(options.store, options.model)
    store.check_writable()
    chosen = choose_method(options, output)
    loaded = options.load(output)
    from kvcli.text.library import Library

    records: list[dict[str, Any]] = []
    with chosen.attach(loaded, options.impl, output) as session:
        library, waiting = Library(loaded, session, store, options.name, options.prefill_chunk), sources
        while waiting:
            busy = []
            for source in waiting:
                document = library.document(source.name, source.text, chosen.notes)
                check_memory(document, 0)
                started = time.perf_counter()
                try:
                    with lock(store.folder / f"{document.name}.lock", BlockingIOError(), make_file=True):
                        library.add(document, output.progress, output.warn)
                except BlockingIOError:  # another process reads it
                    busy.append(source)
                    continue
                count, seconds = document.ids.shape[1], time.perf_counter() - started
                new = count - document.reused_tokens
                records.append({"document": source.name, "tokens": count, "read_tokens": new, "read_s": seconds})
                done = f"{new} of {count} tokens read in {seconds:.1f} s" if new else f"{count} tokens, read before"
                output.say(f"{source.name}: {done} ({len(records)} of {len(sources)})")
            if len(busy) == len(waiting):
                time.sleep(_POLL_SECONDS)
            waiting = busy
    where = ["--store", options.store] if options.store else []
    following = ["kvcli", "ask", *model_argument(options.model), *where, "--library", options.name, "QUESTION"]
    record = {"model": options.model, "library": options.name, "store": str(store.folder), "documents": records}
    output.result(record, f"{options.name}: {len(records)} documents", following)


def list_libraries(options: LibraryOptions, output: Output) -> None:
    """List libraries, or the documents of one."""
    from kvcli.contexts.reader import documents_of

    store = open_reader(options.store, options.model, maker="library add")
    if options.name is None:
        names = {str(x.record.notes[LIBRARY]) for x in store.contexts(output.warn) if LIBRARY in x.record.notes}
        found = {name: documents_of(store, name) for name in sorted(names)}
        rows = [
            {"library": name, "documents": str(len(documents)), **_sizes([x.record for x in documents.values()])}
            for name, documents in found.items()
        ]
        title = f"{store.folder}: libraries"
    else:
        _, documents = open_library(options, options.name, output)
        rows = [{"document": name, **_sizes([x.record])} for name, x in documents.items()]
        title = f"{store.folder}: documents of {options.name}"
    table = DataTable.of(title, rows, (), tuple(rows[0])) if rows else f"no libraries in {store.folder}"
    output.result({"store": str(store.folder), "rows": rows}, table)


def _sizes(records: list[Any]) -> dict[str, str]:
    total = sum(record.nbytes for record in records)
    ratio = sum(record.fp16_bytes for record in records) / max(1, total)
    methods = sorted({str(record.method) for record in records})
    tokens = sum(record.num_tokens for record in records)
    return {"method": ", ".join(methods), "tokens": str(tokens), "size": size(total), "smaller": f"{ratio:.1f}x"}


def show(options: DocumentsOptions, output: Output) -> None:
    """Show documents of a library: tokens, method, bits and bytes."""
    store, documents = open_library(options, options.name, output, options.documents)
    shared = store.shared()
    records = [{"document": name, **context_record(x, shared)} for name, x in documents.items()]
    lines = [
        f"{x['document']}: {x['tokens']} tokens, {x['method']}, {size(x['bytes'])}, in fp16 {size(x['fp16_bytes'])} "
        f"({x['ratio']:.1f}x); context {x['name']}, stored {x['created']}, last used {x['last_used']}"
        for x in records
    ]
    output.result({"library": options.name, "rows": records}, "\n".join(lines))


def remove(options: DocumentsOptions, output: Output) -> None:
    """Remove documents of a library, or all of it, and what no other context uses of them."""
    store, documents = open_library(options, options.name, output, options.documents)
    freed = open_store(store.folder, options.model).remove(*(stored.name for stored in documents.values()))
    output.result({"removed": [*documents], "freed_bytes": freed}, f"freed {size(freed)}")


def export(options: ExportOptions, output: Output) -> None:
    """Write a file of each document to a folder, for 'kvcli push' and 'kvcli contexts import'."""
    store, documents = open_library(options, options.name, output, options.documents)
    folder = options.out or Path(options.name)
    paths = {name: folder / f"{stored.name}.safetensors" for name, stored in documents.items()}
    if existing := [path for path in paths.values() if path.exists() and not options.overwrite]:
        raise UsageError(f"{existing[0]} exists already; use --overwrite to replace it")
    folder.mkdir(parents=True, exist_ok=True)
    written = sum(store.load(store.whole(stored.name)).save(paths[name]) for name, stored in documents.items())
    output.result({"folder": str(folder), "files": len(paths), "bytes": written}, str(folder))


COMMANDS = command_group(
    "library",
    "Documents that are read once, and asked side by side in any order.",
    Command("add", AddOptions, add, _EXAMPLE, ("files",), resumes=True),
    Command("list", LibraryOptions, list_libraries, "kvcli library list"),
    Command("show", DocumentsOptions, show, "kvcli library show moby-dick --name books", ("documents",)),
    Command("rm", DocumentsOptions, remove, "kvcli library rm moby-dick --name books", ("documents",)),
    Command("export", ExportOptions, export, "kvcli library export --name books --out books", ("documents",)),
)
