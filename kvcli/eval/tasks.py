"""Suite `tasks`: tasks of lm-eval, over the real cache (see `kvcli.eval.lm_tasks`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from kvcli.errors import UsageError
from kvcli.eval.records import Better, EvalRecord, Series, Strict
from kvcli.eval.suite import STAR, ComparedOptions, EvalSuite, Measured, Prepared, difference, interval
from kvcli.progress import Reporter
from kvcli.registry import UNFITTED_METHOD
from kvcli.suite import Records
from kvcli.tables import DataTable

if TYPE_CHECKING:
    from kvcli.eval.case import Case
    from kvcli.models import LoadedModel


class TasksOptions(ComparedOptions):
    """Options of `kvcli eval tasks`."""

    tasks: list[str] = Field(default=[], description="names of lm-eval tasks, or their YAML files; repeatable")
    include_path: Path | None = Field(default=None, description="folder with YAML files of further tasks")
    limit: int | None = Field(default=None, ge=1, description="documents per task; default: all")
    num_fewshot: int | None = Field(default=None, ge=0, description="examples; default: the task's own")
    chat: bool | None = Field(default=None, description="use the chat template; default: not")
    chunk: int = Field(
        default=32, ge=1, description="tokens fed at once; attention within a chunk is in full precision"
    )


class TaskDocument(Strict):
    """A unit: one document of one task."""

    task: str
    document: int
    metric: str
    better: Better
    value: float


class TaskRecord(EvalRecord):
    """A row; its figures are those of the tasks."""

    suite: Literal["tasks"] = "tasks"
    unit: Literal["document"] = "document"
    versions: dict[str, Any]
    units: list[TaskDocument]

    @classmethod
    def series(cls, units: Sequence[TaskDocument]) -> dict[str, Series]:
        made: dict[str, Series] = {}
        for unit in units:
            series = made.setdefault(f"{unit.task}/{unit.metric}", Series([], [], unit.better))
            series.values.append(unit.value)
            series.weights.append(1.0)
        return made


def check(options: TasksOptions) -> None:
    """Raises UsageError without tasks."""
    if not options.tasks:
        raise UsageError("suite tasks needs --tasks NAME; 'lm-eval ls tasks' lists those of lm-eval")


def prepare(options: TasksOptions, loaded: LoadedModel, cases: Sequence[Case], reporter: Reporter) -> Prepared:
    """Rows of the uncompressed model and of methods."""
    from kvcli.eval.case import REFERENCE
    from kvcli.eval.lm_tasks import TasksConfig, find_tasks, measure

    asked = {name: getattr(options, name) for name in ("tasks", "limit", "num_fewshot", "chat", "chunk", "seed")}
    config = TasksConfig(include_path=options.include_path, **{**asked, "chat": bool(options.chat)})
    manager = find_tasks(config)

    def rows() -> Iterator[Measured]:
        for case in (REFERENCE, *cases):
            reporter.say(f"{case.label}: {', '.join(options.tasks)}")
            documents, versions, memory = measure(loaded, case, config, manager)
            units = [TaskDocument(**document._asdict()) for document in documents]
            yield Measured(case.label, case, units, memory, {"versions": versions})

    return Prepared(asked, rows())


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
    record=TaskRecord,
    prepare=prepare,
    tabulate=table,
    with_reference=True,
    check=check,
)
