"""`kvcli generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from pydantic import Field

from kvcli.cli.command import command
from kvcli.cli.dry_run import DRY_RUN, dry_generate
from kvcli.cli.options import IMPL_HELP, ModelOptions
from kvcli.cli.output import Output, size
from kvcli.cli.paths import newest_artifact
from kvcli.cli.values import parse_settings
from kvcli.errors import UsageError
from kvcli.registry import BASELINE, DEFAULT_METHOD

if TYPE_CHECKING:
    from kvcli.artifact import Artifact
    from kvcli.attention.session import Session
    from kvcli.generate import Generation

DEFAULT_PROMPT = "The water cycle is"


class GenerateOptions(ModelOptions):
    """Options of `kvcli generate`."""

    method: str | None = Field(
        default=None,
        description=f"compression method, with or without bits ({DEFAULT_METHOD}, {DEFAULT_METHOD}-1); "
        f"see 'kvcli methods'; default: the artifact's, else {BASELINE}",
    )
    artifact: Path | None = Field(
        default=None, description="artifact folder, which names its method; default: the newest for model and method"
    )
    prompt: str | None = Field(default=None, description="text to continue; '-' reads standard input")
    prompt_file: Path | None = Field(
        default=None, description="file with the text to continue; '-' reads standard input"
    )
    chat: bool = Field(default=False, description="treat the prompt as a message of a user to a chat model")
    max_new_tokens: int = Field(default=64, ge=1, lt=2**31, description="tokens to generate at most")
    temperature: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="sampling temperature; 0: the most probable token"
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="sample from the most probable tokens of this mass")
    top_k: int = Field(default=0, ge=0, description="sample from this many tokens; 0: all")
    repetition_penalty: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="penalty of tokens that occurred; 1: none"
    )
    sink_length: int | None = Field(
        default=None, ge=0, description="first tokens in full precision; default: the method's or the artifact's"
    )
    residual_length: int | None = Field(
        default=None, ge=0, description="last tokens in full precision; default: the method's or the artifact's"
    )
    setting: list[str] = Field(default=[], description="setting of the method, NAME=VALUE; repeatable")
    impl: str = Field(default="auto", description=IMPL_HELP)
    decode: Literal["auto", "graphs", "steps", "passes"] = Field(
        default="auto",
        description="how tokens are made: steps captured as CUDA graphs, the same steps without capturing, or ordinary "
        "forward passes; auto: graphs on a GPU",
    )
    stats: bool = Field(default=False, description="print time, rate and cache memory")
    dry_run: bool = Field(default=False, description=DRY_RUN)


def run(options: GenerateOptions, output: Output) -> None:
    """Generate text, streamed; --method compresses the KV cache."""
    from kvcli.attention.next_token import SamplingConfig
    from kvcli.attention.session import attach
    from kvcli.generate import generate_text, prompt_ids

    prompt = read_prompt(options, output)
    if not prompt and options.prompt != "":
        raise UsageError("the prompt is empty; give a text with --prompt or --prompt-file")
    if options.dry_run:
        dry_generate(options, prompt, output)
        return
    method, artifact = choose_method(options, output)
    settings = {**parse_settings(options.setting), **cache_settings(options)}
    loaded = options.load(output)
    if options.chat and not loaded.tokenizer.chat_template:
        raise UsageError(f"{options.model} has no chat template; omit --chat")
    if options.decode == "graphs" and loaded.model.device.type != "cuda":
        raise UsageError("--decode graphs needs a GPU")  # before the prompt is written
    sampling = SamplingConfig(
        options.max_new_tokens,
        options.temperature,
        options.top_p,
        options.top_k,
        options.repetition_penalty,
    )
    with attach(loaded, method, artifact=artifact, impl=options.impl, **settings) as session:
        if session.backend.note is not None:
            output.say(f"{session.backend.impl} backend: {session.backend.note}")
        ids = prompt_ids(loaded, prompt, options.chat, output.say)
        limit, length = loaded.spec.max_position_embeddings, ids.shape[1] + options.max_new_tokens
        if length > limit:
            output.warn(f"warning: {length} tokens are more than the {limit} that {options.model} was trained on")
        if not options.chat:
            output.write(prompt)
        mode = None if options.decode == "auto" else options.decode
        made = generate_text(loaded, session, ids, sampling, seed=options.seed, write=output.write, mode=mode)
        starts_at = compression_starts(session)
    output.write("\n")
    if made.note is not None:
        output.warn(f"warning: {made.note}")
    if options.stats:
        output.warn(describe(made, starts_at))
    output.result(
        {
            "model": options.model,
            "method": method,
            "prompt": prompt,
            "compression_starts_at": starts_at,
            **made.to_dict(),
        }
    )


def choose_method(options: GenerateOptions, output: Output) -> tuple[str, Artifact | None]:
    """The method's name and the artifact, where it uses one; an artifact given alone names the method.

    Raises:
        UsageError: no such method.
        ArtifactError: an artifact that is missing or damaged.
    """
    from kvcli.artifact import Artifact
    from kvcli.registry import parse_method

    folder = options.artifact
    if folder is None:
        method = BASELINE if options.method is None else options.method
        if not parse_method(method)[0].needs_artifact:
            return method, None
        folder = newest_artifact(options.model, method)
        output.say(f"using {folder}")
    artifact = Artifact.load(folder)
    return artifact.method if options.method is None else options.method, artifact


def compression_starts(session: Session) -> int | None:
    """Tokens of a prompt from which on the first of them is a code; None for a method that compresses nothing."""
    if session.method.name == BASELINE:
        return None
    starts = []
    for schedule in session.method.schedules(session.config):
        least = max(schedule.block, schedule.multiple_of, 1)
        starts.append(session.config.sink_length + schedule.keep + least)
    return min(starts)


def cache_settings(options: GenerateOptions) -> dict[str, Any]:
    """The lengths of sinks and residual window, as far as they were given."""
    given = {"sink_length": options.sink_length, "residual_length": options.residual_length}
    return {name: value for name, value in given.items() if value is not None}


def read_prompt(options: GenerateOptions, output: Output) -> str:
    """The prompt from a flag, a file or standard input.

    Raises:
        UsageError: both a flag and a file, a file that cannot be read, or text that is not UTF-8.
    """
    if options.prompt is not None and options.prompt_file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other")
    if options.prompt == "-" or options.prompt_file == Path("-"):
        try:
            return sys.stdin.read().rstrip("\n")
        except UnicodeDecodeError as error:
            raise UsageError("standard input is not UTF-8 text") from error
    if options.prompt_file is not None:
        try:
            return options.prompt_file.read_text().rstrip("\n")
        except UnicodeDecodeError as error:
            raise UsageError(f"{options.prompt_file} is not UTF-8 text") from error
        except OSError as error:
            raise UsageError(f"cannot read {options.prompt_file}: {error.strerror}") from error
    if options.prompt is None:
        output.say(f"no --prompt given: continuing '{DEFAULT_PROMPT}'")
        return DEFAULT_PROMPT
    try:
        options.prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError("--prompt is not UTF-8 text") from error
    return options.prompt


def describe(made: Generation, starts_at: int | None) -> str:
    """Time, rate and memory on two lines.

    Args:
        made: what was generated.
        starts_at: tokens from which on a cache holds codes; None for a method that compresses nothing.
    """
    memory = made.memory
    graphs = f", steps as CUDA graphs of {size(made.graph_bytes)}" if made.graph_bytes else ""
    time = (
        f"prompt {made.prompt_tokens} tokens, {made.new_tokens} new; first token after {made.ttft_s:.2f} s, "
        f"then {made.tokens_per_s:.1f} tokens/s{graphs}\n"
    )
    if starts_at is None:
        return f"{time}KV cache {size(memory.cache_bytes)} for {memory.num_tokens} tokens, not compressed"
    if memory.num_encoded == 0 and memory.code_bytes == 0:
        return (
            f"{time}KV cache {size(memory.cache_bytes)}: all {memory.num_tokens} tokens are inside the full-precision "
            f"window; compression starts at {starts_at} tokens (a lower --residual-length starts earlier)"
        )
    return (
        f"{time}KV cache {size(memory.cache_bytes)}, in fp16 {size(memory.fp16_bytes)} ({memory.ratio:.2f}x): "
        f"{memory.num_encoded} of {memory.num_tokens} tokens as codes at {memory.key_bits:.2f} (K) / "
        f"{memory.value_bits:.2f} (V) bits, {size(memory.window_bytes)} in full precision; "
        f"codebooks and encoders {size(memory.artifact_bytes)} per model"
    )


def register(app: typer.Typer) -> None:
    """Adds the command."""
    example = f'kvcli generate --method {DEFAULT_METHOD} --prompt "Photosynthesis is" --stats'
    memory = "shorten the prompt, lower --max-new-tokens, or choose a --method with fewer bits"
    command(app, "generate", GenerateOptions, example, ("model",), saves_memory=memory)(run)
