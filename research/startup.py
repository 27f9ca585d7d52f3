"""Suite `startup`: from the start of a process to its first tokens, with no compiled kernels, and with all of them.

Every run is a process of its own. Triton keeps what it compiles in a folder that the suite makes and removes; the
user's is neither read nor cleared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvcli.bench.suite import BenchRows, BenchSuite, Row, WholeModelOptions, bench_table, run_row
from kvcli.commands.suite import Bars, Records
from kvcli.commands.tables import DataTable
from kvcli.errors import KvcliError
from kvcli.progress import Reporter, no_progress
from kvcli.registry import UNFITTED_METHOD

if TYPE_CHECKING:
    from kvcli.artifact.choice import MethodChoice

_NEW_TOKENS = 24
"""Enough that steps are captured."""

_STATES = {"cold": "with an empty cache of kernels", "warm": "with a full one"}


class Silent:
    """A `Reporter` that shows nothing."""

    progress = staticmethod(no_progress)

    def say(self, line: str) -> None:
        """Shows nothing."""

    warn = say


class StartupOptions(WholeModelOptions):
    """Options of `python -m research bench startup`."""

    prompt_tokens: int = Field(default=4096, ge=1, le=2**24, description="length of the prompt")


def prepare(options: StartupOptions, reporter: Reporter) -> BenchRows:
    """Rows of fp16 and of methods."""
    cases = options.choices(few=True)
    fp16: dict[str, float] = {}

    def measure(case: MethodChoice, row: Row) -> Row:
        with tempfile.TemporaryDirectory(prefix="kvcli-bench-") as folder:
            cold, warm = (_run(options, case.label, folder) for _ in range(2))
        row = replace(row, impl=cold["impl"]).plus(kernels=cold["kernels"], later=cold["later"])
        for state, run in (("cold", cold), ("warm", warm)):
            times = {f"{state}_{name}": run[name] for name in ("s", "tokens_s", "warmup_s")}
            row = row.plus(**times, **{f"{state}_extra_s": run["tokens_s"] - fp16.setdefault(state, run["tokens_s"])})
        return row

    rows = (run_row(partial(measure, case), Row(case.label, options.prompt_tokens, 1, "-")) for case in cases)
    shape = options.random_weights
    return BenchRows(rows, len(cases), {"model": shape or options.model, "weights": "random" if shape else "model"})


def _run(options: StartupOptions, method: str, folder: str) -> dict[str, Any]:
    """Figures of one process, in seconds since its start; KvcliError: it failed."""
    code = "import sys; from research.startup import first_tokens; first_tokens(*sys.argv[1:])"
    words = [sys.executable, "-c", code, options.model_dump_json(), method, str(time.time())]
    environment = {**os.environ, "TRITON_CACHE_DIR": folder}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KvcliError(done.stderr.strip().rpartition("\n")[2])
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def first_tokens(options_json: str, method: str, started: str) -> None:
    """What a process of the suite does: loads the model, reads a prompt, makes tokens, prints its figures."""
    from kvcli.artifact.choice import MethodChoice
    from kvcli.bench.model import attached, random_prompt, run_model
    from kvcli.commands.options import parse_settings
    from kvcli.kernels.compiling import compiled_kernels

    options = StartupOptions(**json.loads(options_json))
    model = options.load_model(options.random_weights, Silent())[0].model
    case = MethodChoice(method).plus(parse_settings(options.setting))
    with attached(model, case, options.impl, options.seed) as session:
        before = time.time()
        kernels = [] if session is None else session.warmup()
        warmed, compiled = time.time(), sum(compiled_kernels().counts.values())
        ids = random_prompt(model, 1, options.prompt_tokens, options.seed)
        began = time.time()
        run = run_model(model, session, ids, _NEW_TOKENS, options.prefill_chunk)
    figures = {
        "s": began + run.ttft_s - float(started),
        "tokens_s": began + run.ttft_s + run.decode_s - float(started),
        "warmup_s": warmed - before,
        "kernels": len(kernels),
        "later": sum(compiled_kernels().counts.values()) - compiled,
        "impl": "sdpa" if session is None else session.backend.impl,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


def tabulate(records: Records, options: StartupOptions) -> DataTable:
    """Seconds to the first token, and how much later than fp16 the last one comes."""
    columns = {
        "cold s": "{cold_s:.1f}",
        "cold warm-up s": "{cold_warmup_s:.1f}",
        "cold - fp16 s": "{cold_extra_s:.1f}",
        "warm s": "{warm_s:.1f}",
        "warm warm-up s": "{warm_warmup_s:.1f}",
        "warm - fp16 s": "{warm_extra_s:.1f}",
        "kernels": "{kernels:d}",
        "later": "{later:d}",
    }
    title = (
        f"{records[0]['model']}, from the start of a process to the first token of {options.prompt_tokens} prompt "
        f"tokens; less fp16: to the last of {_NEW_TOKENS} tokens"
    )
    return bench_table(title, records, columns, ("error", "impl"))


SUITE = BenchSuite(
    name="startup",
    help="The first tokens of a process, with and without compiled kernels, next to fp16.",
    options=StartupOptions,
    example=f"python -m research bench startup --random-weights llama-3.1-8b --method {UNFITTED_METHOD}",
    saves_memory="lower --prompt-tokens",
    prepare=prepare,
    figures={
        **{f"{state}_s": f"from the start of the process to the first token, {of}" for state, of in _STATES.items()},
        **{f"{state}_tokens_s": f"to the last of {_NEW_TOKENS} tokens, {of}" for state, of in _STATES.items()},
        **{f"{state}_warmup_s": f"of them in `Session.warmup`, {of}" for state, of in _STATES.items()},
        **{f"{state}_extra_s": f"to the last token, less that of fp16, {of}" for state, of in _STATES.items()},
        "kernels": "variants that the warm-up compiled",
        "later": "files that Triton compiled after the warm-up",
    },
    tabulate=tabulate,
    bars=(Bars("cold_s", "first token, cold", "s"), Bars("warm_s", "first token, compiled", "s")),
)
