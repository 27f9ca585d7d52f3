"""`kvcli generate`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from kvcli.cli.command import Command, model_argument
from kvcli.cli.inputs import STORE_HELP, check_tokenizer, load_context, open_store, read_prompt
from kvcli.cli.output import Output
from kvcli.cli.session_options import SamplingOptions, choose_method
from kvcli.commands.sizes import size
from kvcli.errors import CacheError, UsageError
from kvcli.registry import BASELINE, DEFAULT_METHOD, method_name

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.attention.session import Session
    from kvcli.cache.compressed import CompressedCache, MemoryReport
    from kvcli.cache.context import Context
    from kvcli.models.load import LoadedModel
    from kvcli.text.generate import Generation


class GenerateOptions(SamplingOptions):
    """Options of `kvcli generate`."""

    context: Path | None = Field(
        None, description="context to go on from, a file or a name in the store, with model, method and settings"
    )
    reuse: bool = Field(False, description="go on from a stored context that the prompt begins like, and read the rest")
    store: Path | None = Field(None, description=STORE_HELP)
    prompt: str | None = Field(None, description="text to continue; '-' reads standard input")
    prompt_file: Path | None = Field(None, description="file with the text to continue; '-' reads standard input")
    chat: bool = Field(False, description="treat the prompt as a message of a user to a chat model")
    prefill_chunk: int | None = Field(None, ge=1, description="tokens of the prompt per forward pass; default: all")
    decode: Literal["auto", "graphs", "steps", "passes"] = Field(
        "auto", description="decode by CUDA graphs of steps, steps or ordinary passes; auto: graphs on a GPU"
    )
    stats: bool = Field(False, description="print time, rate and cache memory")

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.context is not None and self.prompt is None and self.prompt_file is None:
            raise ValueError("--context needs a text that goes on from it; give it with --prompt or --prompt-file")
        if self.context is not None and self.reuse:
            raise ValueError("--context names what is gone on from, --reuse looks for it; give one of them")
        return self


def run(options: GenerateOptions, output: Output) -> None:
    """Generate text, streamed; --method compresses the KV cache."""
    options.check(options.context, options.store, chat=options.chat)
    prompt = read_prompt(options.prompt, options.prompt_file, output)
    if not prompt and options.prompt != "":
        raise UsageError("the prompt is empty; give a text with --prompt or --prompt-file")
    from kvcli.text.generate import generate_text

    started = time.perf_counter()
    where = options.model, options.store
    context = None if options.context is None else load_context(options.context, *where, conversation=options.chat)
    read_s = time.perf_counter() - started
    options = options.for_context(context)
    chosen = choose_method(options, output, context)
    loaded = options.load(output)
    if options.chat and not loaded.tokenizer.chat_template:
        raise UsageError(f"{options.model} has no chat template; omit --chat")
    if options.decode == "graphs" and loaded.model.device.type != "cuda":
        raise UsageError("--decode graphs needs a GPU")  # before the prompt is written
    with chosen.attach(loaded, options.impl, output) as session:
        started = time.perf_counter()
        ids, cache, reused_from = _begin(loaded, session, prompt, context, options, output)
        load_s = read_s + time.perf_counter() - started if reused_from else 0.0
        loaded.check_length(ids.shape[1] + options.max_new_tokens, output.warn)
        if not options.chat:
            output.write(prompt)
        generation, _ = generate_text(
            loaded,
            session,
            ids,
            options.sampling(),
            seed=options.seed,
            write=output.write,
            cache=cache,
            mode=None if options.decode == "auto" else options.decode,
            prefill_chunk=options.prefill_chunk,
        )
        method = method_name(session.method.name, dict(session.config))
    output.write("\n")
    if generation.new_tokens == 1 and not generation.text:
        to_chat = not options.chat and loaded.tokenizer.chat_template
        advice = f"; {options.model} is made for conversations: add --chat" if to_chat else ""
        output.warn(f"warning: the model's first token is the one that ends its answer{advice}")
    if generation.note is not None:
        output.warn(f"warning: {generation.note}")
    if reused_from is not None:
        output.say(
            f"{generation.reused_tokens} of {generation.prompt_tokens} tokens reused from {reused_from}, loaded in "
            f"{load_s:.2f} s; first token after {generation.ttft_s:.2f} s"
        )
    elif options.reuse:
        output.say(f"no tokens reused; first token after {generation.ttft_s:.2f} s")
    if options.stats:
        output.warn(describe_generation(generation, session))
    following: list[Any] = []
    if options.context is None:
        named = {"--artifact": options.artifact, "--recipe": options.recipe, "--method": method}
        measured = next([name, value] for name, value in named.items() if value)
        following = ["kvcli", "eval", *model_argument(options.model), *(measured if method != BASELINE else ())]
    record = {
        "model": options.model,
        "method": method,
        "prompt": prompt,
        "reused_from": reused_from,
        "load_s": load_s,
        "compression_starts_at": compression_starts(session),
        "smaller_than_fp16_from": smaller_from(session, generation.memory),
        **generation.to_dict(),
    }
    output.result(record, following=following)


def _begin(
    loaded: LoadedModel,
    session: Session,
    prompt: str,
    context: Context | None,
    options: GenerateOptions,
    output: Output,
) -> tuple[Tensor, CompressedCache | None, str | None]:
    """Token ids [1, time] of a prompt after a context or, with --reuse, with what a store has of it.

    And a cache with the first of them and the name of its context, or None and None.
    """
    import torch

    from kvcli.contexts import identity_of
    from kvcli.text.prompts import Rendered, common_length, ids_of_text, prompt_ids

    if context is None:
        ids = prompt_ids(loaded, prompt, options.chat, output.say)
        if not options.reuse:
            return ids, None, None
        store = open_store(options.store, options.model)
        stored = store.fetch(ids[:, :-1], identity_of(session, loaded.tokenizer), loaded.model.device, output.warn)
        if stored is None:
            output.say(f"no context of this model, method and settings in {store.folder} begins like the prompt")
            return ids, None, None
        return ids, session.load_cache(stored[1]), stored[1].name
    cache = session.load_cache(context)
    check_tokenizer(loaded, context)
    cached = torch.as_tensor(context.input_ids).clone()
    if not options.chat:
        ids = torch.cat((cached.to(loaded.model.device), ids_of_text(loaded, prompt, follows=True)), dim=1)
    else:
        conversation = Rendered.from_notes(context.notes, cached, context.name)
        ids = conversation.followed_by(loaded, {"role": "user", "content": prompt}).ids
        if common_length(cached, ids) < cached.shape[1] or cached.shape[1] == ids.shape[1]:
            raise CacheError(
                f"the chat template renders {context.name} differently when a message follows; use kvcli chat"
            )
    return ids, cache, context.name


def compression_starts(session: Session) -> int | None:
    """Tokens of a prompt from which on the first of them is a code; None for a method that compresses nothing."""
    if session.method.name == BASELINE:
        return None
    schedules = session.method.schedules(session.config)
    return session.config.sink_length + min(x.keep + max(x.block, x.multiple_of, 1) for x in schedules)


def smaller_from(session: Session, memory: MemoryReport) -> int | None:
    """Where a compressed cache is larger than in fp16: tokens of a sequence from which on it is smaller; else None."""
    if session.method.name == BASELINE or memory.ratio >= 1:
        return None
    from kvcli.plan.cache import CachePlan

    shapes = session.spec, session.method, session.config, session.codecs, session.model.dtype
    return CachePlan.of_codecs(*shapes, fused=session.backend.impl == "fused").pays_from()


def describe_generation(generation: Generation, session: Session) -> str:
    """Time, rate and memory on two lines."""
    memory, starts_at = generation.memory, compression_starts(session)
    others = ""
    if memory.other_layers:
        others = (
            f"; {memory.other_layers} of {memory.layers + memory.other_layers} layers keep transformers' own cache of "
            f"{size(memory.other_bytes)}: the others have {100 * memory.share:.0f} % of an uncompressed one"
        )
    graphs = f", steps as CUDA graphs of {size(generation.graph_bytes)}" if generation.graph_bytes else ""
    reused = f" ({generation.reused_tokens} reused)" if generation.reused_tokens else ""
    time = (
        f"prompt {generation.prompt_tokens} tokens{reused}, {generation.new_tokens} new; "
        f"first token after {generation.ttft_s:.2f} s, then {generation.tokens_per_s:.1f} tokens/s{graphs}\n"
    )
    if starts_at is None:
        return f"{time}KV cache {size(memory.cache_bytes)} for {memory.num_tokens} tokens, not compressed{others}"
    if memory.num_encoded == 0 and memory.code_bytes == 0:
        return (
            f"{time}KV cache {size(memory.cache_bytes)}: all {memory.num_tokens} tokens are inside the full-precision "
            f"window; compression starts at {starts_at} tokens (a lower --residual-length starts earlier){others}"
        )
    pays_from = smaller_from(session, memory)
    larger = f"; larger than in fp16, as every context below {pays_from} tokens" if pays_from else ""
    return (
        f"{time}KV cache {size(memory.cache_bytes)}, in fp16 {size(memory.fp16_bytes)} ({memory.ratio:.2f}x): "
        f"{memory.num_encoded} of {memory.num_tokens} tokens as codes at {memory.key_bits:.2f} (K) / "
        f"{memory.value_bits:.2f} (V) bits, {size(memory.window_bytes)} in full precision; "
        f"codebooks and encoders {size(memory.artifact_bytes)} per model{larger}{others}"
    )


EXAMPLE = f'kvcli generate --method {DEFAULT_METHOD} --prompt "Photosynthesis is" --residual-length 16 --stats'
SAVES_MEMORY = "shorten the prompt, lower --max-new-tokens, or choose a --method with fewer bits"
COMMAND = Command("generate", GenerateOptions, run, EXAMPLE, ("model",), saves_memory=SAVES_MEMORY)
