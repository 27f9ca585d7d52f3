"""`kvcli ask`."""

from __future__ import annotations

import time
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from kvcli.cli.command import Command
from kvcli.cli.generate import describe_generation
from kvcli.cli.inputs import STANDARD_INPUT, STORE_HELP, open_library, open_store, read_texts
from kvcli.cli.output import Output
from kvcli.cli.session_options import SamplingOptions, choose_method
from kvcli.commands.sizes import size
from kvcli.errors import UsageError
from kvcli.models.hub import is_file
from kvcli.registry import method_name

if TYPE_CHECKING:
    from kvcli.attention.session import Session
    from kvcli.text.document import Document
    from kvcli.text.generate import Generation

EXAMPLE = 'kvcli ask book.txt "Who is the landlord?"'


class AskOptions(SamplingOptions):
    """Options of `kvcli ask`."""

    takes_several_gpus: ClassVar[bool] = False

    files: list[Path] = Field(
        [], description="texts of a document, in order, also PDF and HTML; a folder: its files; '-': standard input"
    )
    question: str | None = Field(None, description="the question, after the files")
    max_new_tokens: int = Field(256, ge=1, lt=2**31, description="tokens of the answer at most")
    library: str | None = Field(None, description="library whose documents are asked, in place of files")
    document: list[str] = Field([], description="document of the library; repeatable, in this order")
    top: int = Field(4, ge=1, description="documents that are chosen by the question (BM25), where none are named")
    repair: float = Field(
        0.1, ge=0, le=1, description="share of the later documents' tokens that is read again beside the earlier ones"
    )
    store: Path | None = Field(None, description=STORE_HELP)
    prefill_chunk: int | None = Field(
        None, ge=1, description="tokens per forward pass, part of the result; default: 512 on a CPU, else 4096"
    )
    stats: bool = Field(False, description="print time, rate and cache memory")


def run(options: AskOptions, output: Output) -> None:
    """Ask a chat model about a document, which is read once: the next question goes on from its compressed cache."""
    question = _question(options)
    options.check(chat=True)
    if options.library is not None:
        _ask_library(options, options.library, question, output)
        return
    sources = read_texts(options.files)
    store = open_store(options.store, options.model)
    store.check_writable()
    from kvcli.text.document import Document

    chosen = choose_method(options, output)
    loaded = options.load(output)
    names = ", ".join(source.name for source in sources)
    with chosen.attach(loaded, options.impl, output) as session:
        text, chunk = "\n\n".join(source.text.strip() for source in sources), options.prefill_chunk
        kept: dict[str, Any] = {"store": store, "source": names, "notes": chosen.notes}
        document = Document(loaded, session, text, prefill_chunk=chunk, **kept)
        count, prompt = document.ids.shape[1], document.prompt(question, options.max_new_tokens)
        check_memory(document, prompt.shape[1] - count + options.max_new_tokens)
        started = time.perf_counter()
        try:
            document.read(output.progress, output.warn)
        except KeyboardInterrupt:
            output.warn(f"{document.kept_tokens} of {count} tokens are kept in {store.folder}")
            raise
        read_s, reused = time.perf_counter() - started, document.reused_tokens
        if reused == count:
            output.say(f"{names}: {count} tokens, read before, loaded in {read_s:.2f} s")
        else:
            before = f", {reused} of them before" if reused else ""
            output.say(f"{names}: {count} tokens read in {read_s:.1f} s{before}; kept in {store.folder}")
        generation = document.ask(question, options.sampling(), seed=options.seed, write=output.write)
        read = {"document_tokens": count, "read_tokens": count - reused, "read_s": read_s}
        asked = {"files": [str(file) for file in options.files], "context": document.name, **read}
        _end(generation, session, options, output, asked | {"question": question, "store": str(store.folder)})


def _ask_library(options: AskOptions, name: str, question: str, output: Output) -> None:
    """Asks documents of a library side by side."""
    store, known = open_library(options, name, output, options.document)
    chosen = choose_method(options, output, store.load(store.whole(next(iter(known.values())).name)))
    loaded = options.load(output)
    from kvcli.text.library import Library

    with chosen.attach(loaded, options.impl, output) as session:
        library, started = Library(loaded, session, store.folder, name, options.prefill_chunk), time.perf_counter()
        names = options.document or library.best(question, options.top)
        fit = library.that_fit(names, question, options.max_new_tokens)
        if fit < len(names):
            if options.document or not fit:
                raise UsageError(
                    f"{fit} of {len(names)} documents fit with question and answer into the "
                    f"{loaded.spec.max_position_embeddings} tokens that {loaded.name} was trained on; name fewer"
                )
            output.warn(f"of the documents chosen, {fit} fit: {', '.join(names[fit:])} left out")
        lengths = [known[name].record.num_tokens for name in names[:fit] if name in known]
        more = options.max_new_tokens + library.question(question).shape[1]
        # codes of a document, and of all together
        if lack := _lack(session, loaded.name, library.prefill_chunk, 1.0, sum(lengths), more):
            what = f"{', '.join(names[:fit])} have {sum(lengths)} tokens together"
            raise UsageError(f"{what}, which {lack[0]}; {lack[1]} would fit; name fewer")
        composed = library.compose(names[:fit], repair=options.repair, progress=output.progress)
        count, compose_s = composed.input_ids.shape[1], time.perf_counter() - started
        again = f", {composed.reread} of them read again" if composed.reread else ""
        output.say(f"{', '.join(names[:fit])}: {count} tokens{again}, side by side in {compose_s:.1f} s")
        generation = library.ask(question, composed, options.sampling(), seed=options.seed, write=output.write)
        read = {"document_tokens": count, "reread_tokens": composed.reread, "compose_s": compose_s}
        asked = {"library": name, "documents": names[:fit], **read}
        _end(generation, session, options, output, asked | {"question": question, "store": str(store.folder)})


def _end(generation: Generation, session: Session, options: AskOptions, output: Output, asked: dict[str, Any]) -> None:
    """Ends a streamed answer, and says what is unusual about it, and what was asked."""
    output.write("\n")
    if generation.new_tokens == 1 and not generation.text:
        output.warn("warning: the model's first token is the one that ends its answer; put the question otherwise")
    if generation.new_tokens == options.max_new_tokens:
        output.say(f"the answer ends after {generation.new_tokens} tokens; --max-new-tokens lets it be longer")
    if options.stats:
        output.warn(describe_generation(generation, session))
    method = method_name(session.method.name, dict(session.config))
    output.result({"model": options.model, "method": method, **asked, **generation.to_dict()})


def _question(options: AskOptions) -> str:
    """The question; UsageError: it is missing, or there is no file before it."""
    question = options.question or ""
    told = f", but '{question}' is one of these" if question == str(STANDARD_INPUT) or is_file(question) else ""
    if told or not question:
        raise UsageError(f"the question is missing: it comes after the files{told}; an example: {EXAMPLE}")
    if options.library is not None:
        if options.files:
            raise UsageError("a library is asked in place of files; name one of the two")
        return question
    if options.document:
        raise UsageError("--document is of a --library")
    if not options.files:
        raise UsageError(f"name a file before the question, or - for standard input; an example: {EXAMPLE}")
    return question


def check_memory(document: Document, more: int) -> None:
    """Raises UsageError, before a document is read, where it and `more` tokens may not fit into memory."""
    session, tokens = document.session, document.ids.shape[1]
    stored = 0.2 if session.model.device.type == "cpu" else 0.0  # blocks that are being stored or loaded
    if lack := _lack(session, document.loaded.name, document.prefill_chunk, stored, tokens, more):
        remedy = f"{document.that_fits(lack[1])}, or choose a --method with fewer bits"
        raise UsageError(f"the document has {tokens} tokens, which {lack[0]}; {remedy}")


def _lack(
    session: Session, name: str, chunk: int | None, copies: float, tokens: int, more: int
) -> tuple[str, int] | None:
    """Why so many tokens and `more` may not fit beside the weights, and how many would; None: they do.

    They take `copies` of the cache, also a part of one, besides.
    """
    from kvcli.commands.machine import free_bytes
    from kvcli.plan.budget import largest
    from kvcli.plan.memory import MethodPlan, PlannedModel

    model, fused = session.model, session.backend.impl == "fused"
    config = deepcopy(model.config)  # a model that is made of one changes it
    planned = PlannedModel(name, config, model.dtype, model.device)
    plan = MethodPlan(planned, session.method.name, session.method, session.config, fused)

    def needed(count: int) -> int:
        return plan.bytes_beside_weights(count, more, chunk=chunk) + int(copies * plan.memory(count, more).cache_bytes)

    if (most := needed(tokens)) <= (free := free_bytes(model.device)):
        return None
    fit = largest(lambda count: needed(count) <= free, start=tokens, most=tokens, resolution=1 / 256)
    return f"may take {size(most)} beside the model, and {size(free)} are free", fit


SAVES_MEMORY = "lower --prefill-chunk, shorten the document, or choose a --method with fewer bits"
COMMAND = Command("ask", AskOptions, run, EXAMPLE, ("files", "question"), resumes=True, saves_memory=SAVES_MEMORY)
