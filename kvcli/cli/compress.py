"""`kvcli compress`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import Field

from kvcli.cli.command import command
from kvcli.cli.output import Output, size
from kvcli.cli.prompt_sources import Source, parse_messages, read_sources
from kvcli.cli.session_options import PREFILL_CHUNK, SessionOptions, choose_method
from kvcli.errors import UsageError
from kvcli.registry import DEFAULT_METHOD

if TYPE_CHECKING:
    from kvcli.attention.session import Session
    from kvcli.models import LoadedModel

SUFFIX = ".safetensors"


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
    out: Path | None = Field(default=None, description="file to write, or a folder for several texts")
    overwrite: bool = Field(default=False, description="replace files that exist")
    prefill_chunk: int = Field(default=PREFILL_CHUNK, ge=1, description="tokens per forward pass; part of the result")


def run(options: CompressOptions, output: Output) -> None:
    """Read texts once and write their compressed caches, to be gone on from at once and as often as wanted."""
    sources = read_sources(options.prompt_file, options.messages)
    targets = output_files(options, sources)
    chosen = choose_method(options, output, default=DEFAULT_METHOD)
    loaded = options.load(output)
    records = []
    with chosen.attach(loaded, options.impl, output) as session:
        for source, target in zip(sources, targets, strict=True):
            records.append(compress_source(loaded, session, source, target, options, output))
            output.say(describe(records[-1]))
    human = "\n".join(record["context"] for record in records)
    output.result({"model": options.model, "method": chosen.name, "contexts": records}, human)


def output_files(options: CompressOptions, sources: list[Source]) -> list[Path]:
    """Where each context is written.

    Raises:
        UsageError: no place, one file for several texts, or a file that exists.
        OSError: the folder cannot be made.
    """
    out = options.out
    if out is None:
        raise UsageError(f"give a file with --out NAME{SUFFIX}, or a folder for several texts")
    if out.is_dir() or len(sources) > 1:
        if out.suffix == SUFFIX and not out.is_dir():
            raise UsageError(f"--out {out} is one file, but there are {len(sources)} texts; name a folder")
        targets = [out / f"{source.name}{SUFFIX}" for source in sources]
    else:
        targets = [out]
    existing = [target for target in targets if target.exists()]
    if existing and not options.overwrite:
        raise UsageError(f"{existing[0]} exists already; use --overwrite to replace it")
    targets[0].parent.mkdir(parents=True, exist_ok=True)  # what cannot be made is said before the texts are read
    return targets


def compress_source(
    loaded: LoadedModel, session: Session, source: Source, target: Path, options: CompressOptions, output: Output
) -> dict[str, Any]:
    """Reads one text into a cache and writes it; returns what was measured."""
    from kvcli.compress import compress
    from kvcli.fingerprint import text_identity
    from kvcli.prompts import checked_messages, prompt_ids
    from kvcli.rendered import Rendered

    notes = {**text_identity(loaded.tokenizer), "source": source.name}
    if source.is_conversation:
        messages = checked_messages(parse_messages(source), source.name)
        conversation = Rendered.of(loaded, messages, to_reply=False)
        ids, notes = conversation.ids, {**notes, **conversation.notes(conversation.ids.shape[1])}
    else:
        ids = prompt_ids(loaded, source.text, chat=False)
    limit = loaded.spec.max_position_embeddings
    if ids.shape[1] > limit:
        output.warn(f"warning: {ids.shape[1]} tokens are more than the {limit} that {options.model} was trained on")
    started = time.perf_counter()
    cache = compress(session, ids, prefill_chunk=options.prefill_chunk, progress=output.progress)
    read = time.perf_counter()
    num_bytes = cache.context(ids.cpu(), notes).save(target)
    memory = cache.memory()
    return {
        "context": str(target),
        "source": source.name,
        "tokens": memory.num_tokens,
        "file_bytes": num_bytes,
        "fp16_bytes": memory.fp16_bytes,
        "file_bits": 16 * num_bytes / memory.fp16_bytes,
        "true_bits": memory.true_bits,
        "read_s": read - started,
        "write_s": time.perf_counter() - read,
        "memory": memory.to_dict(),
    }


def describe(record: dict[str, Any]) -> str:
    """What was measured, on one line."""
    codes = f", codes at {record['true_bits']:.2f} bits" if record["true_bits"] else ", all in the window"
    return (
        f"{record['context']}: {record['tokens']} tokens in {size(record['file_bytes'])}, in fp16 "
        f"{size(record['fp16_bytes'])}; {record['file_bits']:.2f} bits per value{codes}; read and compressed in "
        f"{record['read_s']:.1f} s, written in {record['write_s']:.2f} s"
    )


def register(app: typer.Typer) -> None:
    """Adds the command."""
    example = f"kvcli compress --prompt-file book.txt --method {DEFAULT_METHOD}-1 --out book{SUFFIX}"
    memory = "lower --prefill-chunk, shorten the text, or choose a --method with fewer bits"
    command(app, "compress", CompressOptions, example, ("model",), saves_memory=memory)(run)
