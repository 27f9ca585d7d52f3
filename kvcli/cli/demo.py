"""`kvcli demo`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import typer
from pydantic import Field

from kvcli.builtin_models import BUILTIN_MODELS, DEFAULT_MODEL
from kvcli.cli import calibrate, export, fit
from kvcli.cli.bars import duration
from kvcli.cli.command import command
from kvcli.cli.output import Output
from kvcli.errors import UsageError
from kvcli.eval import kl
from kvcli.options import ComputeOptions
from kvcli.registry import BASELINE, DEFAULT_METHOD, DEMO_SETTINGS, get_config, get_method
from kvcli.sizes import size

_PROMPT_CHARACTERS = 4800
_SHOWN_CHARACTERS = 320


class DemoOptions(ComputeOptions):
    """Options of `kvcli demo`."""

    bits: Literal[1, 2] = Field(default=2, description="nominal bits per value")
    prompt: str | None = Field(default=None, description="text to continue; default: 1000 tokens of held-out text")
    max_new_tokens: int = Field(default=80, ge=1, description="tokens to generate")
    tokens: int = Field(default=12288, ge=1, description="calibration tokens")
    out: Path = Field(default=Path("runs/demo"), description="folder of everything the demo makes")


def run(options: DemoOptions, output: Output) -> None:
    """Run the whole pipeline on the small built-in model: calibrate, fit, export, generate, measure."""
    from kvcli.attention.attach import attach
    from kvcli.attention.next_token import SamplingConfig
    from kvcli.calibrate.corpus import CorpusConfig, documents
    from kvcli.generate import generate_text
    from kvcli.models import load_model
    from kvcli.prompts import prompt_ids

    if options.prompt == "":
        raise UsageError("the prompt is empty; give --prompt a text, or leave it out")
    defaults = get_config(DEFAULT_METHOD).model_fields
    tokens = calibrate.CalibrateOptions.model_fields["tokens"].get_default()
    changes = [f"{name} {value} instead of {defaults[name].get_default()}" for name, value in DEMO_SETTINGS.items()]
    output.say(
        f"quick preset: {', '.join([f'{options.tokens} calibration tokens instead of {tokens}', *changes])}; "
        "'kvcli calibrate' and 'kvcli fit' use the full defaults"
    )
    seconds: dict[str, float] = {}
    quiet = _Quiet(output)
    folders = {
        "samples": options.out / "samples",
        "training": options.out / "training" / f"{DEFAULT_METHOD}-{options.bits}bit",
        "artifact": options.out / f"{DEFAULT_METHOD}-{options.bits}bit",
    }
    shared: dict[str, Any] = {"seed": options.seed, "device": options.device}
    with _timed(seconds, "model"):
        loaded = load_model(device=options.torch_device(), say=output.say, progress=output.progress)
    with _timed(seconds, "calibrate"):
        settings = calibrate.CalibrateOptions(
            tokens=options.tokens, query_tokens=4096, fisher_tokens=1024, batch_size=1, out=folders["samples"], **shared
        )
        calibrate.run(settings, quiet)
    with _timed(seconds, "train"):
        fit.run(
            fit.FitOptions(
                method=f"{DEFAULT_METHOD}-{options.bits}",
                setting=[f"{name}={value}" for name, value in DEMO_SETTINGS.items()],
                samples=folders["samples"],
                out=folders["training"],
                **shared,
            ),
            quiet,
        )
    with _timed(seconds, "export"):
        export.run(export.ExportOptions(runs=[folders["training"]], out=folders["artifact"]), quiet)
    sampling = SamplingConfig(max_new_tokens=options.max_new_tokens, repetition_penalty=1.1)
    prompt = options.prompt
    if prompt is None:  # the beginning of a text that calibration has not seen, cut after a sentence
        texts = documents(CorpusConfig("builtin:docs", "heldout"))
        text = next(text for text in texts if len(text) > _PROMPT_CHARACTERS)
        prompt = text[: text.rindex(". ", 0, _PROMPT_CHARACTERS) + 1]
    ids = prompt_ids(loaded, prompt, chat=False)
    generations = {}
    for name, artifact in ((BASELINE, None), (DEFAULT_METHOD, folders["artifact"])):
        output.say(f"generating with {name}")
        with (
            _timed(seconds, f"generate {name}"),
            attach(loaded, name, artifact=artifact, residual_length=32) as session,
        ):
            generations[name], _ = generate_text(loaded, session, ids, sampling, seed=options.seed)
    with _timed(seconds, "measure"):
        asked = kl.KLOptions(
            method=[DEFAULT_METHOD],
            artifact=[folders["artifact"]],
            seq_len=1024,
            num_sequences=2,
            batch_size=2,
            **shared,
        )
        quality = next(kl.SUITE.open(asked).records(quiet))
    record = {
        "prompt": prompt,
        **{name: generation.to_dict() for name, generation in generations.items()},
        "kl_mean": quality["kl_mean"],
        "flips": quality["flips"],
        "true_bits": quality["memory"]["true_bits"],
        "seconds": seconds,
        "artifact": str(folders["artifact"]),
    }
    output.result(record, _table(record), export.generate_with(record["artifact"]))


class _Quiet(Output):
    """Shows a stage's messages and keeps its result for the demo's own table."""

    def __init__(self, outer: Output) -> None:
        super().__init__(outer.as_json, outer.quiet, outer.verbose)
        self.record: Any = {}

    def settings(self, values: Any) -> None:
        pass

    def result(self, record: Any, human: Any = None, following: Any = ()) -> None:
        self.record = record


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - started, 1)


def _table(record: dict[str, Any]) -> Any:
    from rich.table import Table

    memory, label = record[DEFAULT_METHOD]["memory"], get_method(DEFAULT_METHOD).paper.partition(",")[0]
    shown = Table(
        title=f"kvcli demo: {BUILTIN_MODELS[DEFAULT_MODEL].title}",
        title_justify="left",
        show_header=False,
        show_lines=True,
    )
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    tail = record["prompt"][-_SHOWN_CHARACTERS:]
    shown.add_row("prompt", f"{record[BASELINE]['prompt_tokens']} tokens, ending in: …{tail}")
    shown.add_row(BASELINE, record[BASELINE]["text"].strip())
    shown.add_row(label, record[DEFAULT_METHOD]["text"].strip())
    shown.add_row(
        "KV bytes",
        f"fp16 {size(memory['fp16_bytes'])}, {label} {size(memory['cache_bytes'])} ({memory['ratio']:.1f}x smaller; "
        f"{memory['num_encoded']} of {memory['num_tokens']} tokens are codes), "
        f"codebooks and encoders {size(memory['artifact_bytes'])} per model",
    )
    shown.add_row(
        "true bits", f"{record['true_bits']:.3f} per value (K {memory['key_bits']:.3f}, V {memory['value_bits']:.3f})"
    )
    shown.add_row(
        "KL to fp16", f"{record['kl_mean']:.4f} nats per token, {100 * record['flips']:.1f} % of top tokens flip"
    )
    stages = ", ".join(f"{stage} {duration(value)}" for stage, value in record["seconds"].items())
    shown.add_row("time (m:ss)", f"{stages}; in all {duration(sum(record['seconds'].values()))}")
    return shown


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "demo", DemoOptions, "kvcli demo", resumes=True, saves_memory="lower --tokens")(run)
