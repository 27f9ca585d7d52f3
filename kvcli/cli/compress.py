"""`kvcli compress`."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvcli.cli.command import Command, model_argument
from kvcli.cli.generate import smaller_from
from kvcli.cli.inputs import MAX_BYTES_HELP, STORE_HELP, Source, open_store, read_sources
from kvcli.cli.output import Output
from kvcli.cli.session_options import PREFILL_CHUNK, SessionOptions, choose_method
from kvcli.commands.sizes import parse_size, size
from kvcli.contexts.index import check_name, name_from
from kvcli.errors import UsageError
from kvcli.registry import DEFAULT_METHOD, method_name

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.attention.session import Session
    from kvcli.models.load import LoadedModel

SUFFIX = ".safetensors"


class CompressOptions(SessionOptions):
    """Options of `kvcli compress`."""

    prompt_file: list[Path] = Field([], description="text; repeatable; a folder: its files; '-': standard input")
    messages: Path | None = Field(
        None, description="conversation, a JSON list of objects with role and content; '-': standard input"
    )
    out: Path | None = Field(None, description="file, or a folder for several texts; default: the store of contexts")
    store: Path | None = Field(None, description=STORE_HELP)
    name: str | None = Field(None, description="name in the store; default: that of the file")
    reuse: bool = Field(True, description="go on from the stored context that a text begins like, and read the rest")
    max_bytes: str | None = Field(None, description=MAX_BYTES_HELP)
    overwrite: bool = Field(False, description="replace files, or contexts of the store, that exist")
    prefill_chunk: int = Field(PREFILL_CHUNK, ge=1, description="tokens per forward pass; part of the result")


def run(options: CompressOptions, output: Output) -> None:
    """Read texts once and write their compressed caches, from which 'kvcli generate' and 'kvcli chat' go on."""
    sources = read_sources(options.prompt_file, options.messages)
    options.check()
    target = Target(options, sources)
    chosen = choose_method(options, output)
    loaded = options.load(output)
    records = []
    with chosen.attach(loaded, options.impl, output) as session:
        method = method_name(session.method.name, dict(session.config))
        for source in sources:
            ids, notes = _tokens_of(loaded, source)
            notes |= chosen.notes
            loaded.check_length(ids.shape[1], output.warn)
            record = {"source": source.name, **target.save(session, source, ids, notes, output)}
            records.append(record)
            origin = f", {record['reused_tokens']} of them from '{record['reused_from']}'"
            reused = origin if record["reused_tokens"] else ""
            codes = f", codes at {record['true_bits']:.2f} bits" if record["true_bits"] else ", all in the window"
            shared = f" ({size(record['shared_bytes'])} of it stored before)" if record["shared_bytes"] else ""
            larger = record["smaller_than_fp16_from"]
            larger = f"; larger than in fp16, as every context below {larger} tokens" if larger else ""
            evicted = f"; removed {', '.join(record['evicted'])}" if record["evicted"] else ""
            output.say(
                f"{record['context']}: {record['tokens']} tokens{reused} in {size(record['file_bytes'])}{shared}, in "
                f"fp16 {size(record['fp16_bytes'])}; {record['file_bits']:.2f} bits per value{codes}; read and "
                f"compressed in {record['read_s']:.1f} s, written in {record['write_s']:.2f} s{larger}{evicted}"
            )
    human = "\n".join(record["context"] for record in records)
    removed = {name for record in records for name in record["evicted"]}
    stored = [record["context"] for record in records if record["context"] not in removed][:1]
    model = model_argument(options.model) if target.store is not None else []
    store = ["--store", options.store] if options.store else []
    following = ["kvcli", "generate", *model, "--context", *stored, *store, "--prompt", "In short,"] if stored else ()
    folder = None if target.store is None else str(target.store.folder)
    record = {"model": options.model, "method": method, "store": folder, "contexts": records}
    output.result(record, human, following)


class Target:
    """Where contexts go: files, or the store; KvcliError, before texts are read: they cannot be written there."""

    def __init__(self, options: CompressOptions, sources: list[Source]) -> None:
        self.options, self.store, out = options, None, options.out
        several = len(sources) > 1
        if out is None:
            if options.name is not None and several:
                raise UsageError(f"--name is one name, but there are {len(sources)} texts")
            self.names = {source.name: options.name or name_from(source.name) for source in sources}
            for name in self.names.values():
                check_name(name)
            self.max_bytes = parse_size(options.max_bytes)
            self.store = open_store(options.store, options.model)
            self.store.check_writable()
            return
        for name in ("store", "name", "max_bytes"):
            if getattr(options, name) is not None:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} is of the store, and --out writes a file; give one of them")
        if several and out.suffix == SUFFIX and not out.is_dir():
            raise UsageError(f"--out {out} is one file, but there are {len(sources)} texts; name a folder")
        in_folder = several or out.is_dir()
        paths = {source.name: out / f"{source.name}{SUFFIX}" if in_folder else out for source in sources}
        existing = [path for path in paths.values() if path.exists()]
        if existing and not options.overwrite:
            raise UsageError(f"{existing[0]} exists already; use --overwrite to replace it")
        self.names = {name: str(path) for name, path in paths.items()}
        (out if in_folder else out.parent).mkdir(parents=True, exist_ok=True)

    def save(
        self, session: Session, source: Source, ids: Tensor, notes: dict[str, Any], output: Output
    ) -> dict[str, Any]:
        """Reads what is new of a text [1, time] and writes all of it; returns what was measured."""
        from kvcli.text.generate import compress

        options, store, name, started = self.options, self.store, self.names[source.name], time.perf_counter()
        cache, match = None, None
        if store is not None:
            texts = {key: notes[key] for key in ("tokenizer", "chat_template")}
            identity = replace(session.identity(ids.shape[1]), **texts)
            if not options.overwrite:
                store.check_free(name, ids, identity)
            if options.reuse:
                window = max(1, session.config.residual_length)
                found = store.fetch(ids, identity, session.model.device, output.warn, window)
                if found is not None:
                    match, cache = found[0], session.load_cache(found[1])
        if cache is None or cache.get_seq_length() < ids.shape[1]:
            chunk, progress = options.prefill_chunk, output.progress
            cache = compress(session, ids, prefill_chunk=chunk, past_key_values=cache, progress=progress)
        read = time.perf_counter()
        context = cache.context(ids.cpu(), notes)
        if store is None:
            num_bytes = new_bytes = context.save(name)
            evicted: tuple[str, ...] = ()
        else:
            stored = store.put(context, name=name, overwrite=options.overwrite, max_bytes=self.max_bytes)
            num_bytes, new_bytes, evicted = stored.record.nbytes, stored.new_bytes, stored.evicted
        memory = cache.memory()
        fp16_bytes = memory.fp16_bytes + memory.other_bytes
        return {
            "context": name,
            "reused_tokens": match.num_tokens if match else 0,
            "reused_from": match.context.name if match else None,
            "new_bytes": new_bytes,
            "shared_bytes": num_bytes - new_bytes,
            "evicted": list(evicted),
            "read_s": read - started,
            "write_s": time.perf_counter() - read,
            "tokens": memory.num_tokens,
            "file_bytes": num_bytes,
            "fp16_bytes": fp16_bytes,
            "file_bits": 16 * num_bytes / fp16_bytes,
            "true_bits": memory.true_bits,
            "smaller_than_fp16_from": smaller_from(session, memory),
            "memory": memory.to_dict(),
        }


def _tokens_of(loaded: LoadedModel, source: Source) -> tuple[Tensor, dict[str, Any]]:
    """Token ids [1, time] of a text or a conversation, and what is noted of it."""
    from kvcli.models.fingerprint import text_identity
    from kvcli.text.prompts import Rendered, chat_text, checked_messages, ids_of_text, prompt_ids

    notes: dict[str, Any] = {**text_identity(loaded.tokenizer), "source": source.name}
    if not source.is_conversation:
        return prompt_ids(loaded, source.text, chat=False), notes
    try:
        values = json.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source.name}: the conversation is not JSON ({error})") from error
    messages = checked_messages(values, source.name)
    text = chat_text(loaded, messages, to_reply=False)
    conversation = Rendered(tuple(messages), text, ids_of_text(loaded, text))
    return conversation.ids, {**notes, **conversation.notes(conversation.ids.shape[1])}


EXAMPLE = f"kvcli compress --prompt-file book.txt --method {DEFAULT_METHOD}-1"
SAVES_MEMORY = "lower --prefill-chunk, shorten the text, or choose a --method with fewer bits"
COMMAND = Command("compress", CompressOptions, run, EXAMPLE, ("model",), saves_memory=SAVES_MEMORY)
