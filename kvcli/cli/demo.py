"""`kvcli demo`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import typer
from pydantic import Field

from kvcli.cli import calibrate, evaluate, export, train_codebook
from kvcli.cli.options import Options, command
from kvcli.cli.output import Output, duration, size

_PROMPT_CHARACTERS = 4800
_SHOWN_CHARACTERS = 320


class DemoOptions(Options):
    """Options of `kvcli demo`."""

    bits: Literal[1, 2] = Field(default=2, description="nominal bits a value")
    prompt: str | None = Field(default=None, description="text to continue; default: 1000 tokens of held-out text")
    max_new_tokens: int = Field(default=80, ge=1, description="tokens to generate")
    tokens: int = Field(default=16384, ge=1, description="calibration tokens")
    out: Path = Field(default=Path("runs/demo"), description="folder of everything the demo makes")


def run(options: DemoOptions, output: Output) -> None:
    """Run the whole pipeline on the small built-in model: calibrate, train, export, generate, measure."""
    from kvcli.attention.session import attach
    from kvcli.generate import SamplingConfig, generate_text, prompt_ids
    from kvcli.models import load_model

    output.say(
        f"quick preset: {options.tokens} calibration tokens instead of 65536, 8 EM iterations instead of 12, "
        "6 value rounds instead of 8; 'kvcli calibrate' and 'kvcli train-codebook' use the full defaults"
    )
    seconds: dict[str, float] = {}
    quiet = _Quiet(output)
    folders = {
        "samples": options.out / "samples",
        "training": options.out / "training" / f"commvq-{options.bits}bit",
        "artifact": options.out / f"commvq-{options.bits}bit",
    }
    shared: dict[str, Any] = {"seed": options.seed, "device": options.device}
    with _timed(seconds, "model"):
        loaded = load_model(device=options.torch_device(), say=output.say)
    with _timed(seconds, "calibrate"):
        settings = calibrate.CalibrateOptions(
            tokens=options.tokens, query_tokens=4096, out=folders["samples"], **shared
        )
        calibrate.run(settings, quiet)
    with _timed(seconds, "train"):
        train_codebook.run(
            train_codebook.TrainCodebookOptions(
                samples=folders["samples"],
                bits=options.bits,
                key_iterations=8,
                value_iterations=6,
                out=folders["training"],
                **shared,
            ),
            quiet,
        )
    with _timed(seconds, "export"):
        export.run(export.ExportOptions(runs=[folders["training"]], out=folders["artifact"], **shared), quiet)
    sampling = SamplingConfig(max_new_tokens=options.max_new_tokens, repetition_penalty=1.1, seed=options.seed)
    prompt = options.prompt or heldout_prompt()
    ids = prompt_ids(loaded, prompt, chat=False)
    made = {}
    for name, artifact in (("fp16", None), ("commvq", folders["artifact"])):
        output.say(f"generating with {name}")
        with (
            _timed(seconds, f"generate {name}"),
            attach(loaded.model, name, artifact=artifact, residual_length=32) as session,
        ):
            made[name] = generate_text(loaded, session, ids, sampling)
    with _timed(seconds, "measure"):
        evaluate.run(
            evaluate.EvalOptions(
                method=["commvq"], artifact=[folders["artifact"]], seq_len=1024, num_sequences=2, batch_size=2, **shared
            ),
            quiet,
        )
    quality = quiet.record["rows"][0]
    record = {
        "prompt": prompt,
        "fp16": made["fp16"].to_dict(),
        "commvq": made["commvq"].to_dict(),
        "kl_mean": quality["kl_mean"],
        "flips": quality["flips"],
        "true_bits": quality["memory"]["true_bits"],
        "seconds": seconds,
        "artifact": str(folders["artifact"]),
    }
    output.result(record, _table(record))


def heldout_prompt() -> str:
    """The beginning of a text that calibration has not seen, cut after a sentence."""
    from kvcli.calibrate.corpus import CorpusConfig, documents

    text = next(text for text in documents(CorpusConfig(split="heldout")) if len(text) > _PROMPT_CHARACTERS)
    return text[: text.rindex(". ", 0, _PROMPT_CHARACTERS) + 1]


class _Quiet(Output):
    """Shows a stage's talk and keeps its result for the demo's own table."""

    def __init__(self, outer: Output) -> None:
        super().__init__(outer.as_json)
        self.record: Any = {}

    def settings(self, values: Any) -> None:
        pass

    def result(self, record: Any, human: Any = None) -> None:
        self.record = record


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - started, 1)


def _table(record: dict[str, Any]) -> Any:
    from rich.table import Table

    memory = record["commvq"]["memory"]
    shown = Table(title="kvcli demo: SmolLM2-135M-Instruct", title_justify="left", show_header=False, show_lines=True)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    tail = record["prompt"][-_SHOWN_CHARACTERS:]
    shown.add_row("prompt", f"{record['fp16']['prompt_tokens']} tokens, ending in: …{tail}")
    shown.add_row("fp16", record["fp16"]["text"].strip())
    shown.add_row("CommVQ", record["commvq"]["text"].strip())
    shown.add_row(
        "KV bytes",
        f"fp16 {size(memory['fp16_bytes'])}, CommVQ {size(memory['cache_bytes'])} ({memory['ratio']:.1f}x smaller; "
        f"{memory['num_encoded']} of {memory['num_tokens']} tokens are codes), "
        f"codebooks and encoders {size(memory['artifact_bytes'])} once a model",
    )
    shown.add_row(
        "true bits", f"{record['true_bits']:.3f} a value (K {memory['key_bits']:.3f}, V {memory['value_bits']:.3f})"
    )
    shown.add_row(
        "KL to fp16", f"{record['kl_mean']:.4f} nats a token, {100 * record['flips']:.1f} % of top tokens flip"
    )
    stages = ", ".join(f"{stage} {duration(value)}" for stage, value in record["seconds"].items())
    shown.add_row("time (m:ss)", f"{stages}; in all {duration(sum(record['seconds'].values()))}")
    return shown


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "demo", DemoOptions, "kvcli demo")(run)
