"""`kvcli generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import Field

from kvcli.cli.options import IMPL_HELP, ModelOptions, command, parse_settings
from kvcli.cli.output import Output, size
from kvcli.cli.paths import newest_artifact
from kvcli.errors import UsageError
from kvcli.registry import BASELINE, DEFAULT_METHOD

if TYPE_CHECKING:
    from kvcli.generate import Generation

DEFAULT_PROMPT = "The water cycle is"


class GenerateOptions(ModelOptions):
    """Options of `kvcli generate`."""

    method: str = Field(
        default=BASELINE,
        description=f"compression method, with or without bits ({DEFAULT_METHOD}, {DEFAULT_METHOD}-1); "
        "see 'kvcli methods'",
    )
    artifact: Path | None = Field(default=None, description="artifact folder; default: the newest for model and method")
    prompt: str | None = Field(default=None, description="text to continue; '-' reads standard input")
    prompt_file: Path | None = Field(
        default=None, description="file with the text to continue; '-' reads standard input"
    )
    chat: bool = Field(default=False, description="treat the prompt as a message of a user to a chat model")
    max_new_tokens: int = Field(default=64, ge=1, description="tokens to generate at most")
    temperature: float = Field(default=0.0, ge=0, description="sampling temperature; 0: the most probable token")
    top_p: float = Field(default=1.0, gt=0, le=1, description="sample from the most probable tokens of this mass")
    top_k: int = Field(default=0, ge=0, description="sample from this many tokens; 0: all")
    repetition_penalty: float = Field(default=1.0, gt=0, description="penalty of tokens that occurred; 1: none")
    sink_length: int | None = Field(default=None, ge=0, description="first tokens in full precision; default: 4")
    residual_length: int | None = Field(
        default=None, ge=0, description="last tokens in full precision; default: the method's or the artifact's"
    )
    setting: list[str] = Field(default=[], description="setting of the method, NAME=VALUE; repeatable")
    impl: str = Field(default="auto", description=IMPL_HELP)
    stats: bool = Field(default=False, description="print time, rate and cache memory")


def run(options: GenerateOptions, output: Output) -> None:
    """Generate text, streamed; --method compresses the KV cache."""
    from kvcli.attention.session import attach
    from kvcli.generate import SamplingConfig, generate_text, prompt_ids
    from kvcli.registry import parse_method

    prompt = read_prompt(options, output)
    artifact = options.artifact
    if parse_method(options.method)[0].needs_artifact and artifact is None:
        artifact = newest_artifact(options.model, options.method)
        output.say(f"using {artifact}")
    settings = {**parse_settings(options.setting), **cache_settings(options)}
    loaded = options.load(output)
    if options.chat and not loaded.tokenizer.chat_template:
        raise UsageError(f"{options.model} has no chat template; omit --chat")
    sampling = SamplingConfig(
        options.max_new_tokens,
        options.temperature,
        options.top_p,
        options.top_k,
        options.repetition_penalty,
        options.seed,
    )
    with attach(loaded, options.method, artifact=artifact, impl=options.impl, **settings) as session:
        ids = prompt_ids(loaded, prompt, options.chat)
        limit, length = loaded.spec.max_position_embeddings, ids.shape[1] + options.max_new_tokens
        if length > limit:
            output.say(f"warning: {length} tokens are more than the {limit} that {options.model} was trained on")
        if not options.chat:
            output.write(prompt)
        made = generate_text(loaded, session, ids, sampling, write=output.write)
    output.write("\n")
    if options.stats:
        output.say(describe(made))
    if output.as_json:
        output.result({"model": options.model, "method": options.method, "prompt": prompt, **made.to_dict()})


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
        return sys.stdin.read().rstrip("\n")
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


def describe(made: Generation) -> str:
    """Time, rate and memory on two lines."""
    memory = made.memory
    return (
        f"prompt {made.prompt_tokens} tokens, {made.new_tokens} new; first token after {made.ttft_s:.2f} s, "
        f"then {made.tokens_per_s:.1f} tokens/s\n"
        f"KV cache {size(memory.cache_bytes)} instead of {size(memory.fp16_bytes)} in fp16 ({memory.ratio:.2f}x): "
        f"{memory.num_encoded} of {memory.num_tokens} tokens as codes at {memory.key_bits:.2f} (K) / "
        f"{memory.value_bits:.2f} (V) bits, {size(memory.window_bytes)} in full precision; "
        f"codebooks and encoders {size(memory.artifact_bytes)} per model"
    )


def register(app: typer.Typer) -> None:
    """Adds the command."""
    example = f'kvcli generate --method {DEFAULT_METHOD} --prompt "Photosynthesis is" --stats'
    command(app, "generate", GenerateOptions, example, ("model",))(run)
