"""`kvcli tune`."""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import Field

from kvcli.artifact.choice import MethodChoice
from kvcli.cli.command import Command, model_argument
from kvcli.cli.output import Output
from kvcli.cli.session_options import PREFILL_CHUNK
from kvcli.commands.machine import commit
from kvcli.commands.options import DEVICES_HELP, IMPL_HELP, Devices, Impl, parse_settings
from kvcli.commands.paths import model_folder
from kvcli.commands.sizes import number, parse_size, size
from kvcli.commands.tables import DataTable
from kvcli.errors import ConfigError, QualityGateError, UsageError
from kvcli.eval.suite import Case, TextOptions
from kvcli.models.hub import check_model_name
from kvcli.registry import BASELINE, METHODS, get_config, get_method, parse_name
from kvcli.storage.ranks import join_ranks, joined_ranks, start_ranks


class TuneOptions(TextOptions):
    """Options of `kvcli tune`."""

    max_kld: float | None = Field(None, gt=0, description="find the fewest bytes for this KL, nats per token")
    max_bits: float | None = Field(None, gt=0, description="find the least loss at so many bits per number")
    memory: str | None = Field(None, description="find the least loss in so much GPU memory, such as 24GiB")
    context: int = Field(32768, ge=1, description="tokens of the cache whose bytes count, window included")
    method: list[str] = Field(
        [], description="method to search, without bits; repeatable; default: all with bits of both"
    )
    artifact: list[Path] = Field([], description="artifact to measure beside them; repeatable")
    setting: list[str] = Field([], description="setting of every method that has it, NAME=VALUE; repeatable")
    sink_length: int = Field(4, ge=0, description="first tokens in full precision")
    residual_length: list[int] = Field([32], description="last tokens in full precision; repeatable")
    seq_len: int = Field(1024, ge=2, description="tokens per sequence")
    search_sequences: int = Field(2, ge=1, description="sequences for the search")
    num_sequences: int = Field(8, ge=1, description="other sequences, to measure on")
    batch_size: int = Field(4, ge=1, description="sequences per batch")
    chunk: int = Field(32, ge=1, description="tokens fed at once")
    impl: Impl = Field("auto", description=IMPL_HELP)
    devices: Devices | None = Field(None, description=DEVICES_HELP)
    out: Path | None = Field(
        None, description="recipe to write, beside its records (.jsonl); default: runs/MODEL/recipe.yaml"
    )

    def bases(self, output: Output) -> list[Case]:
        """The methods and windows to search; UsageError or ConfigError: one that is asked for has no bits to search."""
        common, found = parse_settings(self.setting), []
        pairs = [x for x in METHODS if len(get_config(x).bit_settings()) == 2 and not get_config(x).needs_artifact]
        for name, window in product(self.method or pairs, self.residual_length):
            if name not in pairs:
                parse_name(name)
                raise UsageError(f"--method {name}: bits are searched of {', '.join(pairs)}")
            choice = MethodChoice(name).plus({**common, "sink_length": self.sink_length, "residual_length": window})
            try:
                choice.check()
            except ConfigError as error:
                if self.method:
                    raise
                output.say(f"not searched with these settings: {error}")
            else:
                label = f", window {window}" if len(self.residual_length) > 1 else ""
                found.append(Case(label, choice, self.impl))
        return found

    def max_bytes(self, tokens: int, fp16_bytes: int) -> float:
        """The most bytes of a cache of so many tokens, of `fp16_bytes` uncompressed; UsageError: none are left."""
        import torch

        from kvcli.plan.memory import MethodPlan, PlannedModel, model_config

        most = math.inf if self.max_bits is None else self.max_bits / 16 * fp16_bytes
        memory = parse_size(self.memory)
        if memory is None:
            return most
        config = model_config(self.model, self.base_config, self.model_revision)
        planned = PlannedModel(self.model, config, torch.bfloat16, torch.device("cuda"))
        plan = MethodPlan(planned, BASELINE, get_method(BASELINE), get_config(BASELINE)(), fused=True)
        cache = plan.memory(tokens, 1, chunk=PREFILL_CHUNK).allocated_bytes
        left = memory - plan.peak_bytes(tokens, 1, chunk=PREFILL_CHUNK) + cache
        if left <= 0:
            raise UsageError(f"the model alone needs {size(memory - left)}, more than {self.memory}")
        return min(most, left * 8 / 9)  # buffers of codes grow by an eighth


def run(options: TuneOptions, output: Output) -> None:
    """Find the bits of each layer that lose least for their bytes; writes a recipe, and resumes."""
    if options.max_kld is None and options.max_bits is None and options.memory is None:
        raise UsageError("say what is to be reached: --max-kld, --max-bits or --memory")
    bases = options.bases(output)
    check_model_name(options.model)
    options.check_text()
    window = {"sink_length": options.sink_length, "residual_length": options.residual_length[0]}
    fitted = [Case(x.name, MethodChoice.of(artifact=x, settings=window), options.impl) for x in options.artifact]
    start_ranks(options.devices, options.device)
    with join_ranks():
        _search(options, bases, fitted, output)


def _search(options: TuneOptions, bases: Sequence[Case], fitted: Sequence[Case], output: Output) -> None:
    """Searches, writes the recipe and shows what was measured."""
    from kvcli.eval.tune import ROUNDS, SCREENED, Goal, Objective, tune, widths_of

    tokens, loaded = options.context, options.load(output)
    options.warn_of_fits([*bases, *fitted], output)
    most = options.max_bytes(tokens, tokens * loaded.spec.fp16_bytes_per_token())
    goal = Goal(tokens, math.inf if options.max_kld is None else options.max_kld, most)
    sequences = options.sequences(loaded, options.search_sequences + options.num_sequences, options.seq_len, output)
    texts = sequences[: options.search_sequences], sequences[options.search_sequences :]
    if not len(texts[1]):
        needed = (options.search_sequences + 1) * options.seq_len
        raise UsageError(f"the text is too short: take one of {needed} tokens or more, or lower --seq-len")
    path = options.out or model_folder(options.model, "recipe.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    search = 2 * (loaded.spec.num_layers + max(len(widths_of(x.choice.method)) for x in bases))
    final = len(SCREENED) * len(bases) + 2 * ROUNDS + len(fitted)
    total = search * texts[0].numel() + final * texts[1].numel()
    output.say(f"at most {search + final} measurements, of {total} tokens in all")
    objective = Objective(options, loaded, goal, texts, path.with_suffix(".jsonl"), search + final, total, output)
    try:
        best, trials = tune(bases, fitted, objective)
    except QualityGateError:  # which all ranks find
        joined_ranks().wait()
        if output.ranks.rank:
            return
        raise
    text = {x: getattr(options, x) for x in ("corpus", "corpus_split", "seq_len", "chunk", "seed")}
    text |= {"context": tokens, "compressed": best.plan.coverage(tokens)}
    text |= {"tokens": texts[1].numel(), "commit": commit()}
    if output.ranks.rank == 0:
        best.recipe(loaded, text).save(path)
    rows = [trial.to_dict(best) for trial in sorted(trials, key=lambda x: x.memory.cache_bytes)]
    of_layers = f" in {best.plan.coverage(tokens)}" if loaded.spec.other_layers else ""
    name = f"{best.case.choice.method} {best.memory.effective_bits:.2f} bits{of_layers}, KL {best.loss:.2g}"
    badge = f"![KV cache: {name}](https://img.shields.io/badge/KV_cache-{quote(name.replace('-', '--'))}-blue)"
    if " by layer" not in best.case.label:
        output.say("nothing with bits by layer is better")
    if all(row["kl_low"] is None for row in rows):
        output.warn(f"warning: {texts[1].numel()} tokens are too few for an interval: other text may lose far more")
    output.say(f"wrote {path}; for a model card: {badge}")
    title = f"{options.model}: KL of {texts[1].numel()} tokens, caches of {tokens}; difference: to {best.case.label}; "
    title += "*: its 95 % interval excludes 0"
    table = DataTable.of(title, [_cells(row) for row in rows], ("95 % interval", "bits K", "bits V"))
    record = {"recipe": str(path), "best": best.case.label, "badge": badge, "rows": rows}
    output.result(record, table, ["kvcli", "generate", *model_argument(options.model), "--recipe", str(path)])


def _cells(row: dict[str, Any]) -> dict[str, str]:
    low, high, difference = row["kl_low"], row["kl_high"], row["difference"]
    return {
        "method": row["label"],
        "bits K": f"{row['key_bits']:.2f}",
        "bits V": f"{row['value_bits']:.2f}",
        "bits": f"{row['effective_bits']:.2f}",
        "cache": size(row["cache_bytes"]),
        "KL": number(row["kl_mean"]),
        "95 % interval": "-" if low is None else f"{number(low)}-{number(high)}",
        "difference": f"{number(difference, '{:+.4f}')}{'*' if row['real'] else ' '}",
    }


EXAMPLE = "kvcli tune smollm2-135m --max-kld 0.01"
COMMAND = Command("tune", TuneOptions, run, EXAMPLE, ("model",), resumes=True)
