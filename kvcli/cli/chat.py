"""`kvcli chat`, with a model here or, with --url, a server of the OpenAI API."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvcli.cli.command import Command, model_argument
from kvcli.cli.compress import SUFFIX
from kvcli.cli.generate import describe_generation
from kvcli.cli.inputs import STORE_HELP, check_tokenizer, load_context, open_store
from kvcli.cli.output import Output
from kvcli.cli.session_options import PREFILL_CHUNK, SamplingOptions, choose_method
from kvcli.commands.sizes import size
from kvcli.contexts.index import check_name
from kvcli.errors import KvcliError, UsageError, error_text
from kvcli.registry import DEFAULT_METHOD, method_name

if TYPE_CHECKING:
    from kvcli.contexts import ContextStore
    from kvcli.text.chat import Conversation
    from kvcli.text.generate import Generation


SHOWN_MESSAGES, SHOWN_CHARACTERS = 2, 400
"""Last messages that are shown of a conversation that is resumed, and how much of each."""

HELP = "/exit ends the conversation, /stats shows the cache, /save [FILE or NAME] writes it"


class ChatOptions(SamplingOptions):
    """Options of `kvcli chat`."""

    max_new_tokens: int = Field(256, ge=1, lt=2**31, description="tokens of a reply at most")
    url: str | None = Field(None, description="an OpenAI API, such as http://127.0.0.1:8000/v1; key: OPENAI_API_KEY")
    system: str | None = Field(None, description="system message, before the first message of the user")
    save: Path | None = Field(
        None,
        description="where the conversation is kept: a file (NAME.safetensors, FOLDER/NAME) or a name in the store",
    )
    resume: Path | None = Field(
        None, description="conversation to go on from, a file or a name in the store, with model, method and settings"
    )
    store: Path | None = Field(None, description=STORE_HELP)
    overwrite: bool = Field(False, description="let --save replace a file or a context that exists")
    prefill_chunk: int = Field(PREFILL_CHUNK, ge=1, description="tokens per forward pass of what is read")


def run(options: ChatOptions, output: Output) -> None:
    """Talk to a model on one compressed cache; only what is new of each turn is read, and the cache can be saved."""
    if options.url is not None:
        talk(options.url, options.system, options, _read_lines(), output)
        return
    if options.system is not None and options.resume is not None:
        raise UsageError("--system goes before the first message; the conversation of --resume has begun")
    options.check(options.resume, options.store, chat=True)
    from kvcli.text.chat import Conversation

    where = options.model, options.store
    context = None if options.resume is None else load_context(options.resume, *where, conversation=True)
    options = options.for_context(context)
    if options.save is not None:
        _check_target(options.save, options)
    chosen = choose_method(options, output, context)
    loaded = options.load(output)
    if not loaded.tokenizer.chat_template:
        raise UsageError(f"{options.model} has no chat template")
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    with chosen.attach(loaded, options.impl, output) as session:
        shared: dict[str, Any] = {"seed": options.seed, "prefill_chunk": options.prefill_chunk, "say": output.say}
        sampling, notes = options.sampling(), chosen.notes
        conversation = Conversation(loaded, session, sampling, messages=system, notes=notes, **shared)
        if context is not None:
            check_tokenizer(loaded, context)
            conversation.resume(context)
            tokens = conversation.cache.get_seq_length()
            output.say(f"{tokens} tokens reused from {options.resume}: {len(conversation.messages)} messages")
            for message in conversation.messages[-SHOWN_MESSAGES:]:
                output.say(f"{message['role']}: {textwrap.shorten(message['content'], SHOWN_CHARACTERS)}")
        output.say(HELP)
        method = method_name(session.method.name, dict(session.config))
        turns = _talk(conversation, options, output)
        saved = options.save is not None and _save(conversation, options.save, options, output)
    store = ["--store", options.store] if options.store else []
    following = ["kvcli", "chat", *model_argument(options.model), *store, "--resume", options.save]
    record = {
        "model": options.model,
        "method": method,
        "messages": [dict(message) for message in conversation.messages],
        "turns": [turn.to_dict() for turn in turns],
        "saved": str(options.save) if saved else None,
    }
    output.result(record, following=following if saved else ())


def _talk(conversation: Conversation, options: ChatOptions, output: Output) -> list[Generation]:
    """Replies to every line until the input or the conversation ends; lines that begin with / are commands."""
    turns: list[Generation] = []
    for line in _read_lines():
        word, _, rest = line.partition(" ")
        if word == "/exit":
            break
        if word == "/stats":
            last = turns[-1] if turns else None
            output.say(describe_generation(last, conversation.session) if last else "nothing was said yet")
        elif word == "/save":
            target = Path(rest.strip()).expanduser() if rest.strip() else options.save
            try:
                if target is None:
                    raise UsageError("say where: /save FILE, or /save NAME for the store")
                if target != options.save:
                    _check_target(target, options)
                _save(conversation, target, options, output)
            except (KvcliError, OSError) as error:  # the conversation goes on
                output.warn(str(error))
        elif word.startswith("/"):
            output.say(f"{word} is no command; {HELP}")
        else:
            turns.append(conversation.reply(line, output.write))
            output.write("\n")
    return turns


def _read_lines() -> Iterator[str]:
    """Lines of standard input that are not empty; a terminal is asked for each."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise UsageError("standard input is not UTF-8 text") from error
        if not line:
            return
        if line.strip():
            yield line.strip()


def _store_of(target: Path, options: ChatOptions) -> ContextStore | None:
    """The store in which a conversation gets the target as its name; None: the target is a file."""
    if target.suffix == SUFFIX or target != Path(target.name):
        return None
    return open_store(options.store, options.model)


def _check_target(target: Path, options: ChatOptions) -> None:
    """Checks that a conversation can be written, and makes the folder."""
    store, resumed = _store_of(target, options), target == options.resume
    if store is None:
        if target.is_dir():
            raise UsageError(f"{target} is a folder; name a file")
        exists = target.exists()
    else:
        check_name(str(target))
        exists, resumed = str(target) in store.names(), resumed and not target.is_file()
    if exists and not resumed and not options.overwrite:
        raise UsageError(f"{target} exists already; use --overwrite to replace it")
    (target.parent if store is None else store.folder).mkdir(parents=True, exist_ok=True)


def _save(conversation: Conversation, target: Path, options: ChatOptions, output: Output) -> bool:
    """Writes the conversation to what `_check_target` let pass; returns whether there was anything to write."""
    num_tokens = conversation.cache.get_seq_length()
    if not num_tokens:
        output.say(f"nothing was said, so {target} is not written")
        return False
    context, store = conversation.context(), _store_of(target, options)
    if store is None:
        num_bytes, where = context.save(target), ""
    else:
        num_bytes = store.put(context, name=str(target), overwrite=True).record.nbytes
        where = f" in {store.folder}"
    output.say(f"{target}{where}: {num_tokens} tokens in {size(num_bytes)}")
    return True


def talk(url: str, system: str | None, options: SamplingOptions, lines: Iterator[str], output: Output) -> None:
    """Sends each line with all messages before it, and writes the reply as it comes; `/exit` ends.

    UsageError: options that are the server's, or no package `openai`; KvcliError: no server answers, it refuses, or
    what it says is not of this API.
    """
    ours = {"url", "system", "max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed"}
    if others := sorted(options.model_fields_set - ours):
        raise UsageError(f"--{others[0].replace('_', '-')} is for the server to know; it does not go with --url")
    try:
        import openai
    except ImportError as error:
        raise UsageError("--url needs the package openai: pip install 'kvcli[serve]'") from error
    client = openai.OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY") or "none", max_retries=0)
    messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    said = options.model_dump(include=options.model_fields_set & {"top_k", "repetition_penalty"})
    sampling = options.model_dump(include={"temperature", "top_p", "seed"}) | {"max_tokens": options.max_new_tokens}
    usages: list[dict[str, int]] = []
    try:
        model = next((found.id for found in client.models.list()), None)
        if model is None:
            raise KvcliError(f"{url} names no model")
        asked: dict[str, Any] = {"model": model, "messages": messages, "extra_body": said, **sampling}
        output.say(f"{model} at {url}; /exit ends the conversation")
        for line in lines:
            if line.partition(" ")[0] == "/exit":
                break
            messages.append({"role": "user", "content": line})
            pieces = []
            for event in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
                if (usage := event.usage) is not None:
                    cached = usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens
                    counts = {"prompt_tokens": usage.prompt_tokens, "reused_tokens": cached or 0}
                    usages.append(counts | {"new_tokens": usage.completion_tokens})
                for choice in event.choices:
                    pieces.append(choice.delta.content or "")
                    output.write(pieces[-1])
            if not pieces:
                raise KvcliError(f"{url} replied nothing")
            output.write("\n")
            messages.append({"role": "assistant", "content": "".join(pieces)})
    except (KvcliError, OSError):  # of the standard streams
        raise
    except Exception as error:  # of answers, openai checks little
        what = error_text(error)[:250] if isinstance(error, openai.APIError) else "no answer of an OpenAI API"
        raise KvcliError(f"{url}: {what}") from error
    output.result({"url": url, "model": model, "messages": messages, "turns": usages})


EXAMPLE = f"kvcli chat --method {DEFAULT_METHOD} --save talk.safetensors"
SAVES_MEMORY = "choose a --method with fewer bits, or begin a new conversation"
COMMAND = Command("chat", ChatOptions, run, EXAMPLE, ("model",), saves_memory=SAVES_MEMORY)
