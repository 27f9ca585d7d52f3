"""`kvcli compress`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import Field

from kvcli.cli.command import command
from kvcli.cli.compress_targets import FileTarget, StoreTarget
from kvcli.cli.next_command import FOLLOW_UP, model_argument
from kvcli.cli.output import Output
from kvcli.cli.prompt_sources import Source, parse_messages, read_sources
from kvcli.cli.session_options import PREFILL_CHUNK, SessionOptions, choose_method
from kvcli.cli.store_options import MAX_BYTES_HELP, STORE_HELP, open_store
from kvcli.errors import UsageError
from kvcli.options import check_storable
from kvcli.registry import DEFAULT_METHOD, method_name
from kvcli.sizes import parse_size, size

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.models import LoadedModel


class CompressOptions(SessionOptions):
    """Options of `kvcli compress`."""

    method: str | None = Field(
        default=None,
        description=f"compression method, with or without bits ({DEFAULT_METHOD}, {DEFAULT_METHOD}-1); "
        f"see 'kvcli methods'; default: the artifact's, else {DEFAULT_METHOD}",
    )
    prompt_file: list[Path] = Field(
        default=[], description="text to compress; repeatable; a folder stands for its files; '-' reads standard input"
    )
    messages: Path | None = Field(
        default=None,
        description="conversation to compress, a JSON list of objects with role and content; '-' reads standard input",
    )
    out: Path | None = Field(
        default=None, description="file to write, or a folder for several texts; default: the store of contexts"
    )
    store: Path | None = Field(default=None, description=STORE_HELP)
    name: str | None = Field(default=None, description="name in the store; default: that of the file")
    reuse: bool = Field(
        default=True, description="go on from the stored context that a text begins like, and read only the rest"
    )
    max_bytes: str | None = Field(default=None, description=MAX_BYTES_HELP)
    overwrite: bool = Field(default=False, description="replace files, or contexts of the store, that exist")
    prefill_chunk: int = Field(default=PREFILL_CHUNK, ge=1, description="tokens per forward pass; part of the result")


def run(options: CompressOptions, output: Output) -> None:
    """Read texts once and write their compressed caches, from which 'kvcli generate' and 'kvcli chat' go on."""
    sources = read_sources(options.prompt_file, options.messages)
    if options.method is not None or options.artifact is not None:
        options.check()
    target = target_of(options, sources)
    target.make_folder()  # what cannot be made is said before the texts are read
    chosen = choose_method(options, output, default=DEFAULT_METHOD)
    loaded = options.load(output)
    check_storable(options.model, loaded.spec)
    records = []
    with chosen.attach(loaded, options.impl, output) as session:
        method = method_name(session.method.name, dict(session.config))
        for source in sources:
            ids, notes = tokens_of(loaded, source)
            notes |= chosen.notes
            if ids.shape[1] > (limit := loaded.spec.max_position_embeddings):
                output.warn(
                    f"warning: {ids.shape[1]} tokens are more than the {limit} that {options.model} was trained on"
                )
            records.append({"source": source.name, **target.save(session, source, ids, notes, output)})
            output.say(describe(records[-1]))
    human = "\n".join(record["context"] for record in records)
    removed = {name for record in records for name in record["evicted"]}
    kept = [record["context"] for record in records if record["context"] not in removed][:1]
    model = model_argument(options.model) if target.store else []
    store = ["--store", options.store] if options.store else []
    following = ["kvcli", "generate", *model, "--context", *kept, *store, "--prompt", FOLLOW_UP] if kept else ()
    record = {"model": options.model, "method": method, "store": target.store, "contexts": records}
    output.result(record, human, following)


def target_of(options: CompressOptions, sources: list[Source]) -> FileTarget | StoreTarget:
    """Where contexts go.

    Raises:
        UsageError: options that exclude each other, one name for several texts, or a file that exists.
    """
    if options.out is None:
        store = open_store(options.store, options.model, must_exist=False)
        max_bytes = parse_size(options.max_bytes)
        return StoreTarget(
            store, sources, options.prefill_chunk, options.name, options.reuse, options.overwrite, max_bytes
        )
    if given := [name for name in ("store", "name", "max_bytes") if getattr(options, name) is not None]:
        raise UsageError(f"--{given[0].replace('_', '-')} is of the store, and --out writes a file; give one of them")
    return FileTarget(options.out, sources, options.prefill_chunk, options.overwrite)


def tokens_of(loaded: LoadedModel, source: Source) -> tuple[Tensor, dict[str, Any]]:
    """Token ids [1, time] of a text or a conversation, and what is noted of it."""
    from kvcli.fingerprint import text_identity
    from kvcli.prompts import checked_messages, prompt_ids
    from kvcli.rendered import Rendered

    notes: dict[str, Any] = {**text_identity(loaded.tokenizer), "source": source.name}
    if not source.is_conversation:
        return prompt_ids(loaded, source.text, chat=False), notes
    messages = checked_messages(parse_messages(source), source.name)
    conversation = Rendered.of(loaded, messages, to_reply=False)
    return conversation.ids, {**notes, **conversation.notes(conversation.ids.shape[1])}


def describe(record: dict[str, Any]) -> str:
    """What was measured, on one line."""
    reused = f", {record['reused_tokens']} of them from '{record['reused_from']}'" if record["reused_tokens"] else ""
    codes = f", codes at {record['true_bits']:.2f} bits" if record["true_bits"] else ", all in the window"
    shared = f" ({size(record['shared_bytes'])} of it stored before)" if record["shared_bytes"] else ""
    evicted = f"; removed {', '.join(record['evicted'])}" if record["evicted"] else ""
    return (
        f"{record['context']}: {record['tokens']} tokens{reused} in {size(record['file_bytes'])}{shared}, in fp16 "
        f"{size(record['fp16_bytes'])}; {record['file_bits']:.2f} bits per value{codes}; read and compressed in "
        f"{record['read_s']:.1f} s, written in {record['write_s']:.2f} s{evicted}"
    )


def register(app: typer.Typer) -> None:
    """Adds the command."""
    example = f"kvcli compress --prompt-file book.txt --method {DEFAULT_METHOD}-1"
    memory = "lower --prefill-chunk, shorten the text, or choose a --method with fewer bits"
    command(app, "compress", CompressOptions, example, ("model",), saves_memory=memory)(run)
