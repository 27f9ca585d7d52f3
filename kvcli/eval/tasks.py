"""Suite `tasks`: tasks of lm-eval, over the real cache.

lm-eval asks for log-likelihoods and continuations of contexts. Here every context is read into a cache in chunks, and
what follows reads the cache: with a single pass over context and answer, as usual, no code would ever be read.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, suppress
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvcli.commands.suite import Records
from kvcli.commands.tables import DataTable
from kvcli.errors import UsageError, error_text
from kvcli.eval.records import STAR, Better, EvalRecord, Figure, Unit, difference, interval
from kvcli.eval.suite import Case, ComparedOptions, EvalSuite, Measured, Prepared
from kvcli.progress import Reporter
from kvcli.registry import UNFITTED_METHOD

if TYPE_CHECKING:
    from kvcli.models.load import LoadedModel


class TasksOptions(ComparedOptions):
    """Options of `kvcli eval tasks`."""

    tasks: list[str] = Field([], description="names of lm-eval tasks, or their YAML files; repeatable")
    include_path: Path | None = Field(None, description="folder with YAML files of further tasks")
    limit: int | None = Field(None, ge=1, description="documents per task; default: all")
    num_fewshot: int | None = Field(None, ge=0, description="examples; default: the task's own")
    chat: bool | None = Field(None, description="use the chat template; default: not")
    chunk: int = Field(32, ge=1, description="tokens fed at once; attention within a chunk is in full precision")

    def check(self) -> None:
        if not self.tasks:
            raise UsageError("suite tasks needs --tasks NAME; 'lm-eval ls tasks' lists those of lm-eval")
        if find_spec("lm_eval") is None:
            raise UsageError("suite tasks needs lm-eval; install it with: pip install 'kvcli[eval]'")


class TaskDocument(Unit):
    """One document of one task."""

    kind = "document"

    task: str
    document: int
    metric: str
    better: Better
    value: float

    @property
    def figures(self) -> tuple[Figure, ...]:  # type: ignore[override]
        return (Figure(f"{self.task}/{self.metric}", "value", self.better),)


class TaskRecord(EvalRecord):
    """A row."""

    versions: dict[str, Any]


def measure(loaded: LoadedModel, case: Case, options: TasksOptions, manager: Any, reporter: Reporter) -> Measured:
    """Runs tasks of the index of `find_tasks`; a unit per document and metric.

    UsageError: tasks that cannot be read, or have no metric that is a mean over documents.
    """
    from datasets import disable_progress_bars
    from lm_eval import evaluate
    from transformers import DynamicCache

    from kvcli.eval.lm_tasks import CachedModel

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    disable_progress_bars()
    random.seed(options.seed)
    # lm-eval's own bars, one for each of its steps, are not shown
    with case.attached(loaded, reporter) as session, redirect_stderr(StringIO()):
        model = CachedModel(loaded, DynamicCache if session is None else session.new_cache, options.chunk)
        try:
            chosen = manager.load(options.tasks)
            for task in chosen["tasks"].values():
                if options.num_fewshot is not None or task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=options.num_fewshot or 0)
                task.set_fewshot_seed(seed=options.seed)
            how = {"apply_chat_template": bool(options.chat), "bootstrap_iters": 0, "log_samples": True}
            results = evaluate(lm=model, task_dict=chosen, limit=options.limit, **how)
        except (KeyError, ValueError, OSError) as error:  # data that cannot be had, fields that are missing
            raise UsageError(f"lm-eval cannot run {', '.join(options.tasks)}: {error_text(error)}") from error
    units = [unit for task in results["samples"] for unit in task_documents(results, task)]
    return Measured(case, units, model.memory, {"versions": dict(results["versions"])})


def task_documents(results: dict[str, Any], task: str) -> list[TaskDocument]:
    """The documents of a task in what lm-eval returned, with every metric that is a mean over them.

    UsageError: no metric is a mean over documents, such as those of perplexity.
    """
    units: list[TaskDocument] = []
    figures, better = results["results"][task], results["higher_is_better"][task]
    for name in figures:
        metric, comma, chosen = name.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        samples = [sample for sample in results["samples"][task] if sample["filter"] == chosen]
        values = []
        with suppress(KeyError, TypeError, ValueError):  # a metric of several numbers per document
            values = [(int(sample["doc_id"]), float(sample[metric])) for sample in samples]
        mean = sum(value for _, value in values) / len(values) if values else math.nan
        if not math.isclose(mean, figures[name], abs_tol=1e-6):
            continue
        shown = metric if chosen == "none" else f"{metric},{chosen}"
        of_all: Any = {"task": task, "metric": shown, "better": "higher" if better.get(metric, True) else "lower"}
        units += [TaskDocument(**of_all, document=document, value=value) for document, value in sorted(values)]
    if not units:
        raise UsageError(f"task '{task}' has no metric that is a mean over its documents; choose another task")
    return units


def prepare(options: TasksOptions, loaded: LoadedModel, cases: Sequence[Case], reporter: Reporter) -> Prepared:
    """Rows of the uncompressed model and of methods."""
    from kvcli.eval.lm_tasks import find_tasks

    manager = find_tasks(options.tasks, options.include_path)

    def rows() -> Iterator[Measured]:
        for case in cases:
            reporter.say(f"{case.label}: {', '.join(options.tasks)}")
            yield measure(loaded, case, options, manager, reporter)

    names = ("tasks", "limit", "num_fewshot", "chat", "chunk", "seed")
    return Prepared({name: getattr(options, name) for name in names}, rows())


def table(records: Records, options: TasksOptions) -> DataTable:
    """Figures of lm-eval's tasks."""
    rows = []
    for record in records:
        for name, metric in record["metrics"].items():
            task, _, figure = name.partition("/")
            count = sum((unit["task"], unit["metric"]) == (task, figure) for unit in record["units"])
            rows.append(
                {
                    "method": record["label"],
                    "task and metric": name,
                    "value": "inf" if metric["mean"] is None else f"{metric['mean']:.4f}",
                    "95 % interval": interval(record, name, "{:.3f}"),
                    "difference": difference(record, name, "{:+.4f}"),
                    "documents": f"{count}",
                }
            )
    title = f"{records[0]['model']}: lm-eval, contexts in chunks of {options.chunk}; {STAR}"
    return DataTable.of(title, rows, ("documents", "95 % interval"), text_columns=2)


SUITE = EvalSuite(
    name="tasks",
    help="Tasks of lm-eval, which is an extra to install.",
    options=TasksOptions,
    example=f"kvcli eval tasks --tasks arc_easy --limit 50 --method {UNFITTED_METHOD}",
    saves_memory="lower --chunk",
    unit=TaskDocument,
    record=TaskRecord,
    prepare=prepare,
    tabulate=table,
    with_reference=True,
)
