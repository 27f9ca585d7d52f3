"""Options of `kvcli bench`, and which suites have them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from kvcli.errors import UsageError
from kvcli.options import IMPL_HELP, ModelOptions
from kvcli.registry import DEFAULT_METHOD

DEFAULT_MODEL = ModelOptions.model_fields["model"].get_default()
MAX_LENGTH = 2**31 - 1
SUITES_OF_OPTION = {
    "batches": ("attention", "generate", "memory"),
    "repeats": ("attention", "generate", "contexts"),
    "contexts": ("attention", "memory"),
    "shape": ("attention",),
    "layer": ("attention",),
    "random_weights": ("generate", "memory", "contexts"),
    "layers": ("generate", "memory", "contexts"),
    "prompt_tokens": ("generate", "contexts"),
    "max_new_tokens": ("generate",),
    "decode": ("generate",),
    "compile": ("generate",),
    "fill_prompt": ("generate",),
    "memory_budget": ("generate", "memory"),
    "prefill_chunk": ("generate", "memory", "contexts"),
    "full_prefill": ("memory",),
    "longest": ("memory",),
    "context_folder": ("contexts",),
}
"""Options that only some suites have."""


class BenchOptions(ModelOptions):
    """Options of `kvcli bench`; lists and lengths that are not given follow from the suite and the device."""

    former_names: ClassVar[dict[str, str]] = {
        "methods": "method",
        "settings": "setting",
        "new_tokens": "max_new_tokens",
    }

    suite: Literal["attention", "generate", "memory", "contexts"] = Field(
        default="attention",
        description="attention: one layer and one query token against fp16 SDPA; generate: a model end to end; "
        "memory: what fits into a budget; contexts: loading contexts from files against reading them again",
    )
    method: list[str] = Field(
        default=[],
        description=f"method, such as {DEFAULT_METHOD}-2; repeatable; default: every compared method and number of "
        "bits (generate on a CPU, contexts: one method without an artifact and one with)",
    )
    setting: list[str] = Field(default=[], description="setting of every method that has it, NAME=VALUE; repeatable")
    batches: list[str] = Field(
        default=[],
        description="sequences, or 'auto' for the largest batch that fits; repeatable; default: 1 (memory: auto)",
    )
    impl: str = Field(default="auto", description=IMPL_HELP)
    repeats: int | None = Field(
        default=None, ge=1, description="calls or runs timed; default: 50 (generate, contexts: 3)"
    )
    contexts: list[int] = Field(
        default=[],
        description="attention, memory: context lengths; repeatable; default: 1024 to 131072 (CPU: 256 and 1024; "
        "memory: 32768)",
    )
    shape: str = Field(default="llama-3.1-8b", description="attention: shape of the layer")
    layer: int | None = Field(
        default=None, ge=0, description="attention: its index, for methods whose layers differ; default: the last"
    )
    random_weights: str | None = Field(
        default=None,
        description="generate, memory, contexts: random weights of a shape instead of a model; memory: llama-3.1-8b",
    )
    layers: int | None = Field(default=None, ge=1, description="layers of the random model; default: all")
    prompt_tokens: list[int] = Field(
        default=[],
        description="generate, contexts: prompt lengths; repeatable; default: 512 (CPU: 256; contexts: 2048, 8192 and "
        "32768, on a CPU 256 and 1024)",
    )
    max_new_tokens: int | None = Field(
        default=None,
        ge=0,
        description="generate: tokens after the prompt; times are of whole rounds of encoding after the first two, or "
        "of all tokens if there are none; default: 513, four rounds of 128 (CPU: 8)",
    )
    decode: Literal["auto", "graphs", "steps", "passes"] = Field(
        default="auto",
        description="generate: how compressed rows make tokens: steps captured as CUDA graphs, the same not captured, "
        "or one forward pass each; auto: graphs on a GPU with kernels, else passes",
    )
    compile: bool = Field(
        default=False,
        description="generate: compile the model's layers around their attention with torch.compile for decode steps, "
        "those of fp16 too where that is faster",
    )
    fill_prompt: bool = Field(
        default=False,
        description="generate: fill the cache between the prompt's first and last chunk with random keys and values; "
        "the prompt's times are then left out",
    )
    memory_budget: str | None = Field(
        default=None,
        description="generate, memory: limit of torch, as 24GiB or 24G; default: none (memory: 24GiB)",
    )
    prefill_chunk: int | None = Field(
        default=None,
        ge=1,
        description="tokens of the whole batch per forward pass; default: the whole prompt "
        "(memory, --fill-prompt: 4096)",
    )
    full_prefill: bool = Field(
        default=False, description="memory: compute the whole prompt, instead of filling the cache between its ends"
    )
    longest: bool = Field(default=True, description="memory: also find the longest context of one sequence")
    context_folder: Path | None = Field(
        default=None,
        description="contexts: folder for files, which are deleted afterwards; default: the system's temporary folder",
    )
    out: Path | None = Field(default=None, description="append records here; default: runs/bench/SUITE.jsonl")


def check(options: BenchOptions) -> None:
    """Raises UsageError for lengths out of range, and for options that the suite does not have."""
    for name in ("contexts", "prompt_tokens"):
        if not all(1 <= value <= MAX_LENGTH for value in getattr(options, name)):
            raise UsageError(f"--{name.replace('_', '-')} takes lengths from 1 to {MAX_LENGTH}")
    for name, suites in SUITES_OF_OPTION.items():
        if options.suite not in suites and getattr(options, name) != BenchOptions.model_fields[name].get_default():
            listed = " or ".join([*([", ".join(suites[:-1])] if len(suites) > 1 else []), suites[-1]])
            raise UsageError(f"--{name.replace('_', '-')} goes with --suite {listed}")
    if options.model != DEFAULT_MODEL:
        if options.suite == "attention":
            raise UsageError(f"--suite attention runs no model; give --shape instead of '{options.model}'")
        if options.random_weights is not None:
            raise UsageError(f"'{options.model}' or --random-weights, not both")


def parse_batches(texts: list[str]) -> list[int] | None:
    """Numbers of sequences; None for `auto`.

    Raises:
        UsageError: neither numbers nor `auto` alone.
    """
    if texts == ["auto"]:
        return None
    if not all(text.isdecimal() and 1 <= int(text) <= MAX_LENGTH for text in texts):
        raise UsageError(f"--batches takes numbers from 1 to {MAX_LENGTH} or 'auto' alone, not {' '.join(texts)}")
    return [int(text) for text in texts] or [1]
