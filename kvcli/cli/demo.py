"""`kvcli demo`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from kvcli.cli import calibrate, fit
from kvcli.cli.command import Command
from kvcli.cli.output import Output, Stage, duration
from kvcli.commands.options import ComputeOptions
from kvcli.commands.sizes import number, size
from kvcli.commands.tables import DataTable
from kvcli.errors import UsageError
from kvcli.eval import kl
from kvcli.models.builtin_models import BUILTIN_MODELS, DEFAULT_MODEL
from kvcli.registry import BASELINE, DEFAULT_METHOD, DEMO_SETTINGS, get_config, get_method

_PROMPT_CHARACTERS = 4800


class DemoOptions(ComputeOptions):
    """Options of `kvcli demo`."""

    bits: Literal[1, 2] = Field(2, description="nominal bits per value")
    prompt: str | None = Field(None, description="text to continue; default: 1000 tokens of held-out text")
    max_new_tokens: int = Field(80, ge=1, description="tokens to generate")
    tokens: int = Field(12288, ge=1, description="calibration tokens")
    out: Path = Field(Path("runs/demo"), description="folder of everything the demo makes")


def run(options: DemoOptions, output: Output) -> None:
    """Run the whole pipeline on the small built-in model: calibrate, fit, export, generate, measure."""
    from kvcli.attention.attach import attach
    from kvcli.attention.generation import SamplingConfig
    from kvcli.calibrate.corpus import CorpusConfig, documents
    from kvcli.models.load import load_model
    from kvcli.text.generate import generate_text
    from kvcli.text.prompts import prompt_ids

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
    quiet = Stage(output.as_json, output.quiet, output.verbose)
    name = f"{DEFAULT_METHOD}-{options.bits}"
    samples, run_folder = options.out / "samples", options.out / "training" / f"{name}bit"
    artifact = options.out / f"{name}bit"
    shared: dict[str, Any] = {"seed": options.seed, "device": options.device}
    with _timed(seconds, "model"):
        loaded = load_model(device=options.torch_device(), say=output.say, progress=output.progress)
    with _timed(seconds, "calibrate"):
        small: dict[str, Any] = {"query_tokens": 4096, "fisher_tokens": 1024, "batch_size": 1}
        calibrate.run(calibrate.CalibrateOptions(tokens=options.tokens, out=samples, **small, **shared), quiet)
    with _timed(seconds, "train"):
        settings = [f"{key}={value}" for key, value in DEMO_SETTINGS.items()]
        fit.run(fit.FitOptions(method=name, setting=settings, samples=samples, out=run_folder, **shared), quiet)
    with _timed(seconds, "export"):
        fit.export_artifact(fit.ExportArtifactOptions(runs=[run_folder], out=artifact), quiet)
    sampling = SamplingConfig(max_new_tokens=options.max_new_tokens, repetition_penalty=1.1)
    prompt = options.prompt
    if prompt is None:  # the beginning of a text that calibration has not seen, cut after a sentence
        texts = documents(CorpusConfig("builtin:docs", "heldout"))
        text = next(text for text in texts if len(text) > _PROMPT_CHARACTERS)
        prompt = text[: text.rindex(". ", 0, _PROMPT_CHARACTERS) + 1]
    ids = prompt_ids(loaded, prompt, chat=False)
    generations = {}
    for method, folder in ((BASELINE, None), (DEFAULT_METHOD, artifact)):
        output.say(f"generating with {method}")
        with (
            _timed(seconds, f"generate {method}"),
            attach(loaded, method, artifact=folder, residual_length=32) as session,
        ):
            session.warmup(progress=output.progress)
            generations[method], _ = generate_text(loaded, session, ids, sampling, seed=options.seed)
    with _timed(seconds, "measure"):
        sizes: dict[str, Any] = {"seq_len": 1024, "num_sequences": 2, "batch_size": 2}
        measured = kl.KLOptions(method=[DEFAULT_METHOD], artifact=[artifact], **sizes, **shared)
        quality = next(kl.SUITE.open(measured).records(quiet))
    record = {
        "prompt": prompt,
        **{method: generation.to_dict() for method, generation in generations.items()},
        "kl_mean": quality["kl_mean"],
        "flips": quality["flips"],
        "true_bits": quality["memory"]["true_bits"],
        "seconds": seconds,
        "artifact": str(artifact),
    }
    output.result(record, _table(record), fit.generate_with(record["artifact"]))


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - started, 1)


def _table(record: dict[str, Any]) -> DataTable:
    memory, label = record[DEFAULT_METHOD]["memory"], get_method(DEFAULT_METHOD).paper.partition(",")[0]
    stages = ", ".join(f"{stage} {duration(value)}" for stage, value in record["seconds"].items())
    rows = (
        ("prompt", f"{record[BASELINE]['prompt_tokens']} tokens, ending in: …{record['prompt'][-320:]}"),
        (BASELINE, record[BASELINE]["text"].strip()),
        (label, record[DEFAULT_METHOD]["text"].strip()),
        (
            "KV bytes",
            f"fp16 {size(memory['fp16_bytes'])}, {label} {size(memory['cache_bytes'])} ({memory['ratio']:.1f}x "
            f"smaller; {memory['num_encoded']} of {memory['num_tokens']} tokens are codes), "
            f"codebooks and encoders {size(memory['artifact_bytes'])} per model",
        ),
        (
            "true bits",
            f"{record['true_bits']:.3f} per value (K {memory['key_bits']:.3f}, V {memory['value_bits']:.3f})",
        ),
        ("KL to fp16", f"{number(record['kl_mean'])} nats per token, {100 * record['flips']:.1f} % of top tokens flip"),
        ("time (m:ss)", f"{stages}; in all {duration(sum(record['seconds'].values()))}"),
    )
    return DataTable(f"kvcli demo: {BUILTIN_MODELS[DEFAULT_MODEL].title}", ("", " "), rows, 2, prose=(" ",))


COMMAND = Command("demo", DemoOptions, run, "kvcli demo", resumes=True, saves_memory="lower --tokens")
