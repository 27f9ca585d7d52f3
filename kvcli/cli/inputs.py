"""What commands read: prompts and texts from flags, files and standard input, and stored contexts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcli.cli.output import Output
from kvcli.commands.paths import model_folder
from kvcli.contexts import index
from kvcli.errors import CacheError, ContextError, UsageError, error_text

if TYPE_CHECKING:
    from kvcli.cache.context import Context
    from kvcli.contexts import ContextStore, StoredContext
    from kvcli.contexts.reader import ContextReader
    from kvcli.models.load import LoadedModel

DEFAULT_PROMPT = "The water cycle is"
STANDARD_INPUT = Path("-")

STORE_HELP = "folder of the store of contexts; default: runs/MODEL/contexts"
"""Help of every `--store`."""

MAX_BYTES_HELP = "size that the store may have, as 20GiB or 20G; the least recently used contexts are removed"
"""Help of every `--max-bytes` of what is stored."""


class Source(NamedTuple):
    """A text or, as JSON, a conversation to be compressed; its name is fit for a file."""

    name: str
    text: str
    is_conversation: bool = False


def read_prompt(prompt: str | None, file: Path | None, output: Output) -> str:
    """The prompt from a file, a flag or standard input; of two, the file's text and a blank line come first.

    UsageError: standard input for both, or one that cannot be read.
    """
    if prompt == str(STANDARD_INPUT) == str(file):
        raise UsageError("--prompt and --prompt-file cannot both be standard input")
    text = None if file is None else _read(file).rstrip("\n")
    if prompt == str(STANDARD_INPUT):
        prompt = _read(STANDARD_INPUT).rstrip("\n")
    if prompt is None:
        if text is None:
            output.say(f"no --prompt given: continuing '{DEFAULT_PROMPT}'")
        return DEFAULT_PROMPT if text is None else text
    return prompt if text is None else f"{text}\n\n{prompt}"


def read_sources(files: list[Path], messages: Path | None) -> list[Source]:
    """Texts to be compressed one by one, see `read_texts`, or one conversation, from the JSON file `messages`.

    UsageError: nothing to read, both kinds, a file that cannot be read, is empty or not UTF-8 text, or two files of one
    name.
    """
    if bool(files) == (messages is not None):
        raise UsageError("give what is to be compressed with --prompt-file, or a conversation with --messages")
    if messages is not None:
        return [Source("stdin" if messages == STANDARD_INPUT else messages.stem, _read(messages), True)]
    return read_texts(files, "compress them one by one")


def read_texts(files: list[Path], one_of_a_name: str = "") -> list[Source]:
    """Texts of files (`text_of`), of all in folders but those whose name begins with a dot, and of standard input.

    UsageError: a file that cannot be read, has no text, or none in UTF-8; where `one_of_a_name` says what to do about
    them, two files of one name.
    """
    paths: list[Path] = []
    for file in files:
        if not file.is_dir():
            paths.append(file)
        elif inside := sorted(path for path in file.iterdir() if path.is_file() and not path.name.startswith(".")):
            paths += inside
        else:
            raise UsageError(f"{file} has no files")
    stems = ["stdin" if x == STANDARD_INPUT else x.stem.encode(errors="replace").decode() for x in paths]
    sources = [Source(name, text_of(path)) for name, path in zip(stems, paths, strict=True)]
    names = [source.name for source in sources]
    if one_of_a_name and (twice := [name for name in names if names.count(name) > 1]):
        raise UsageError(f"two files are named {twice[0]}; {one_of_a_name}")
    return sources


def text_of(path: Path) -> str:
    """The text of a PDF or HTML file by its suffix, else as UTF-8, or of standard input.

    UsageError: a package that is not installed, a file that cannot be read so, or that has no text.
    """
    kind = path.suffix.lower()
    try:
        text = _pdf(path) if kind == ".pdf" else _html(path) if kind in (".html", ".htm") else _read(path)
    except ImportError as error:
        raise UsageError(f"{path} needs packages: pip install 'kvcli[library]'") from error
    text = text.rstrip("\n")
    if not text.strip():
        shown = "standard input" if path == STANDARD_INPUT else path
        raise UsageError(f"{shown} {'has no text' if kind in ('.pdf', '.html', '.htm') else 'is empty'}")
    return text


def _pdf(path: Path) -> str:
    from pypdf import PdfReader

    try:
        pages = [page.extract_text() for page in PdfReader(path).pages]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a parser of files of strangers raises errors of many kinds
        raise UsageError(f"{path} is no PDF that can be read: {error_text(error)}") from error
    text = "\n\n".join(filter(None, map(str.strip, pages)))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # fonts may tell halves of characters


def _html(path: Path) -> str:
    from inscriptis import get_text  # type: ignore[import-untyped]

    return str(get_text(_read(path)))


def _read(path: Path) -> str:
    try:
        text = sys.stdin.read() if path == STANDARD_INPUT else path.read_text("utf-8")
        return text.removeprefix("\ufeff")  # a mark of UTF-8, no text
    except UnicodeDecodeError as error:
        shown = "standard input" if path == STANDARD_INPUT else path
        raise UsageError(f"{shown} is not UTF-8 text; convert it to text first") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def open_store(folder: Path | None, model: str) -> ContextStore:
    """A store by its folder, or else that of a model; it need not be there."""
    from kvcli.contexts import ContextStore

    return ContextStore(folder or model_folder(model, "contexts"))


def open_reader(folder: Path | None, model: str, *names: str, maker: str = "compress") -> ContextReader:
    """A store to read, without torch; UsageError: it is not there; ContextError: it has no contexts of these names."""
    from kvcli.contexts.reader import ContextReader

    folder = folder or model_folder(model, "contexts")
    if not folder.is_dir():
        others = ", as ".join(["names another", *sorted(str(x.parent) for x in folder.parent.glob("*/index.sqlite"))])
        raise UsageError(f"there is no store of contexts in {folder}; 'kvcli {maker}' makes one, --store {others}")
    for name in set(names).difference(index.names(folder) if names else ()):
        raise index.no_context(folder, name)
    return ContextReader(folder)


def open_library(
    options: Any, name: str, output: Output, wanted: Sequence[str] = ()
) -> tuple[ContextReader, dict[str, StoredContext]]:
    """A store, and documents of a library by name, by default all; ContextError: none, or no such document."""
    folder = options.store or model_folder(options.model, "contexts")
    if folder.is_dir() and name not in index.libraries(folder):
        raise ContextError(f"there is no library '{name}' in {folder}; 'kvcli library list' shows those there")
    store = open_reader(folder, options.model, maker="library add")
    from kvcli.contexts.reader import documents_of

    documents = documents_of(store, name, output.warn)
    if unknown := [f"'{x}'" for x in wanted if x not in documents] if documents else ["read to its end"]:
        raise ContextError(f"library '{name}' has no document {unknown[0]}; it has {', '.join(documents) or 0}"[:500])
    return store, {x: documents[x] for x in wanted or documents}


def load_context(source: Path, model: str, store: Path | None = None, conversation: bool = False) -> Context:
    """Reads and verifies a context: a file, or by name in the store of a model; one of a `conversation` if so.

    UsageError: it holds no conversation; CacheError: a file that is missing or damaged, of several sequences, with
    padding, or without its token ids; ContextError: a context of the store that is damaged.
    """
    from kvcli.cache.context import Context
    from kvcli.text.prompts import Rendered

    if source.exists():
        context = Context.load(source)
    else:
        contexts = open_store(store, model)
        context = contexts.load(contexts.whole(str(source)))
    rows = len(context.snapshot.counts.lengths)
    if context.input_ids is None:
        raise CacheError(f"{source} has no token ids: it can be gone on from in Python only")
    if rows > 1 or context.input_ids.numel() > context.snapshot.num_tokens:
        what = f"{rows} sequences" if rows > 1 else "padding"
        raise CacheError(f"{source} holds {what}: it can be gone on from in Python only")
    if conversation:
        Rendered.from_notes(context.notes, context.input_ids, context.name)
    return context


def check_tokenizer(loaded: LoadedModel, context: Context) -> None:
    """Checks that token ids mean the same here as where a context was made; CacheError: another tokenizer."""
    from kvcli.models.fingerprint import text_identity

    stored = context.identity.tokenizer
    if stored is not None and stored != text_identity(loaded.tokenizer)["tokenizer"]:
        raise CacheError(f"{context.name} was made with another tokenizer")
