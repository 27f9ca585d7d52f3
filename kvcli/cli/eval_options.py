"""Options of `kvcli eval`, and which suites have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from kvcli.cli.options import IMPL_HELP, ModelOptions
from kvcli.errors import UsageError
from kvcli.registry import BASELINE, DEFAULT_METHOD

_CORPUS = ("kl", "needle", "recall", "drift", "layers")
SUITES_OF_OPTION = {
    **dict.fromkeys(("corpus", "corpus_name", "corpus_split", "revision", "text_column"), _CORPUS),
    **dict.fromkeys(("seq_len", "num_sequences", "batch_size", "max_kld", "max_flips"), ("kl", "layers")),
    "chunk": ("kl", "layers", "tasks"),
    "contexts": ("needle",),
    "depths": ("needle",),
    "distances": ("recall",),
    "passage_words": ("recall",),
    "num_prompts": ("needle", "recall", "drift"),
    "prompt_tokens": ("drift",),
    "max_new_tokens": ("drift",),
    "layers": ("layers",),
    "tasks": ("tasks",),
    "include_path": ("tasks",),
    "limit": ("tasks",),
    "num_fewshot": ("tasks",),
    "chat": ("needle", "recall", "tasks"),
}
"""Options that only some suites have."""

DEFAULT_PROMPTS = {"needle": 2, "recall": 8, "drift": 8}


class EvalOptions(ModelOptions):
    """Options of `kvcli eval`."""

    suite: Literal["kl", "needle", "recall", "drift", "layers", "tasks"] = Field(
        default="kl",
        description="kl: KL to the uncompressed model; needle: a value found in a long text; recall: a passage quoted "
        "word for word; drift: of long generation; layers: KL per compressed layer; tasks: lm-eval tasks",
    )
    method: list[str] = Field(
        default=[],
        description=f"method to measure, such as {DEFAULT_METHOD}-2; repeatable; default: {BASELINE} and fitted "
        "methods that have an artifact",
    )
    setting: list[str] = Field(default=[], description="setting of every method that has it, NAME=VALUE; repeatable")
    artifact: list[Path] = Field(default=[], description="artifact to measure, with its own method; repeatable")
    compare_with: str | None = Field(
        default=None,
        description="row that the others are compared with, by its name in the table; default: the uncompressed model "
        "where it is a row, else the first method that compresses",
    )
    corpus: str = Field(
        default="builtin:docs",
        description="held-out text: file, folder, hub name, '-', 'builtin', a mixture of domains, or 'builtin:DOMAIN'",
    )
    corpus_name: str | None = Field(default=None, description="configuration of a hub dataset")
    corpus_split: str | None = Field(default=None, description="split; default: heldout for built-in text, else train")
    revision: str | None = Field(default=None, description="revision of a hub dataset")
    text_column: str = Field(default="text", description="column that holds the text")
    seq_len: int = Field(default=2048, ge=2, description="kl, layers: tokens per sequence")
    num_sequences: int = Field(default=8, ge=1, description="kl, layers: sequences")
    batch_size: int = Field(default=4, ge=1, description="kl, layers: sequences per batch")
    chunk: int = Field(
        default=32,
        ge=1,
        description="kl, layers, tasks: tokens fed at once; attention within a chunk is in full precision",
    )
    contexts: list[int] = Field(
        default=[], description="needle: lengths of the text in tokens; repeatable; default: 512, 1024"
    )
    depths: list[float] = Field(
        default=[], description="needle: places of the value, in percent of the text; repeatable; default: 0, 50, 100"
    )
    distances: list[int] = Field(
        default=[], description="recall: words between passage and question; repeatable; default: 100, 300, 600"
    )
    passage_words: int = Field(default=40, ge=1, le=1000, description="recall: words to be quoted")
    num_prompts: int | None = Field(
        default=None,
        ge=1,
        description="needle: prompts per cell (default 2); recall: per distance (8); drift: in all (8)",
    )
    prompt_tokens: int = Field(default=256, ge=1, description="drift: tokens of a prompt")
    max_new_tokens: int = Field(default=128, ge=1, description="drift: tokens generated")
    chat: bool | None = Field(
        default=None,
        description="needle, recall, tasks: use the chat template; default: if there is one (tasks: not)",
    )
    layers: str | None = Field(default=None, description="layers: indices A-B only (inclusive); default: all")
    tasks: list[str] = Field(default=[], description="tasks: names of lm-eval tasks; repeatable")
    include_path: Path | None = Field(default=None, description="tasks: folder with YAML files of further tasks")
    limit: int | None = Field(default=None, ge=1, description="tasks: documents per task; default: all")
    num_fewshot: int | None = Field(default=None, ge=0, description="tasks: examples; default: the task's own")
    sink_length: int = Field(default=4, ge=0, description="first tokens in full precision")
    residual_length: int = Field(default=32, ge=0, description="last tokens in full precision")
    impl: str = Field(default="auto", description=IMPL_HELP)
    max_kld: float | None = Field(
        default=None, ge=0, description="kl, layers: exit with code 3 if the mean KL of a row is higher, nats per token"
    )
    max_flips: float | None = Field(
        default=None, ge=0, description="kl, layers: exit with code 3 if a row has more changed top tokens, in percent"
    )
    baseline: Path | None = Field(
        default=None,
        description="records of an earlier run, from --json or --out; exit with code 3 if a row is significantly worse",
    )
    out: Path | None = Field(default=None, description="append one JSON record per row to this file")


def check(options: EvalOptions) -> None:
    """Raises UsageError for values out of range, and for options that the suite does not have."""
    for name, suites in SUITES_OF_OPTION.items():
        if options.suite not in suites and getattr(options, name) != EvalOptions.model_fields[name].get_default():
            raise UsageError(f"--{name.replace('_', '-')} goes with --suite {' or '.join(suites)}")
    ranges: tuple[tuple[str, list[Any], float, float], ...] = (
        ("contexts", list(options.contexts), 16, 2**24),
        ("depths", list(options.depths), 0, 100),
        ("distances", list(options.distances), 1, 2**24),
    )
    for name, values, low, high in ranges:
        if not all(low <= value <= high for value in values):
            raise UsageError(f"--{name} takes numbers from {low} to {high}")
    if options.suite == "tasks" and not options.tasks:
        raise UsageError("--suite tasks needs --tasks NAME; 'lm-eval ls tasks' lists those of lm-eval")


def num_prompts(options: EvalOptions) -> int:
    """Prompts asked for, or the suite's own number."""
    return options.num_prompts or DEFAULT_PROMPTS[options.suite]


def parse_layers(text: str | None, num_layers: int) -> list[int]:
    """Indices from a number or a range; all without one.

    Raises:
        UsageError: neither a number nor a range, or layers that the model does not have.
    """
    if text is None:
        return list(range(num_layers))
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise UsageError(f"--layers takes a number or a range such as 0-7, not '{text}'")
    low, high = int(first), int(last or first)
    if low > high or high >= num_layers:
        raise UsageError(f"--layers {text}: the model has layers 0-{num_layers - 1}")
    return list(range(low, high + 1))
