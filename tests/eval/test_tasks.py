"""lm-eval over caches, with a task of a local YAML file and local data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.tasks import TaskManager
from transformers import DynamicCache
from typer.testing import CliRunner

from kvcli.artifact.choice import MethodChoice
from kvcli.cli.app import app
from kvcli.cli.output import Output
from kvcli.errors import UsageError
from kvcli.eval.lm_tasks import CachedModel, find_tasks
from kvcli.eval.suite import REFERENCE, Case
from kvcli.eval.tasks import TasksOptions, measure, task_documents
from kvcli.models.load import LoadedModel

YAML = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{more}
metadata:
  version: 3
"""
CHOICE = 'doc_to_choice: ["{{first}}", "{{second}}"]\nmetric_list:\n  - metric: acc\n'
GENERATE = (
    'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 6\n'
    "metric_list:\n  - metric: exact_match\n    aggregation: mean\n    higher_is_better: true\n"
)
KIVI = Case("kivi-1", MethodChoice("kivi-1", {"group_size": 8, "residual_length": 8}))
EXACT = Case("fp16", MethodChoice("fp16", {"residual_length": 4, "flush_block": 1}))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    rows = [
        {
            "question": f"Number {i}: " + " ".join(f"word{(i * j) % 7}" for j in range(20)),
            "first": f" answer {i}",
            "second": " no",
            "label": i % 2,
            "right": "never",
        }
        for i in range(10)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, kind, target, more in (
        ("choose", "multiple_choice", "label", CHOICE),
        ("say", "generate_until", "right", GENERATE),
        ("read", "loglikelihood_rolling", '"{{question}}"', "metric_list:\n  - metric: word_perplexity\n"),
    ):
        text = YAML.format(name=name, data=data, kind=kind, target=target, more=more)
        text = text.replace('doc_to_text: "{{question}}"', 'doc_to_text: ""', name == "read")
        (folder / f"{name}.yaml").write_text(text)
    return folder


def direct(loaded: LoadedModel, context: list[int], continuation: list[int]) -> float:
    """Log-likelihood by one pass of the model without any cache."""
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        log_probs = loaded.model(ids, use_cache=False).logits.float().log_softmax(-1)[0, len(context) - 1 : -1]
    return float(log_probs.gather(-1, torch.tensor(continuation)[:, None]).sum())


def lm(loaded: LoadedModel, session: Any) -> CachedModel:
    return CachedModel(loaded, DynamicCache if session is None else session.new_cache, chunk=16)


@pytest.mark.parametrize("case", [REFERENCE, EXACT])
def test_likelihoods_of_exact_caches_are_the_models_own(loaded: LoadedModel, case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    context = torch.randint(3, 259, (50,), generator=generator).tolist()
    answers = [torch.randint(3, 259, (n,), generator=generator).tolist() for n in (1, 5, 1)]
    requests = [(("", ""), context, answer) for answer in answers] + [(("", ""), context[:1], answers[1])]
    with case.attached(loaded, Output(quiet=True)) as session:
        found = lm(loaded, session)._loglikelihood_tokens(requests)
    expected = [direct(loaded, request[1], request[2]) for request in requests]
    assert [likelihood for likelihood, _ in found] == pytest.approx(expected, abs=1e-3)


def test_a_context_is_read_once_for_all_its_answers_and_is_not_changed_by_them(loaded: Any, monkeypatch: Any) -> None:
    from kvcli.eval import lm_tasks as module

    lengths, read = [], module.read

    def counted(model: Any, cache: Any, ids: Any, chunk: Any = None) -> Any:
        lengths.append(len(ids))
        return read(model, cache, ids, chunk)

    monkeypatch.setattr(module, "read", counted)
    context = list(range(10, 60))
    requests = [(("", ""), context, answer) for answer in ([7], [8, 9], [7])]
    with KIVI.attached(loaded, Output(quiet=True)) as session:
        found = lm(loaded, session)._loglikelihood_tokens(requests)
    assert lengths == [49, 1, 2, 1]
    assert found[0] == found[2]


def test_answers_read_codes(loaded: LoadedModel) -> None:
    requests = [(("", ""), list(range(10, 90)), [5])]
    found = {}
    for case in (REFERENCE, KIVI):
        with case.attached(loaded, Output(quiet=True)) as session:
            model = lm(loaded, session)
            found[case.label] = model._loglikelihood_tokens(requests)[0][0]
    assert abs(found["kivi-1"] - found["uncompressed"]) > 1e-3
    assert model.memory.num_encoded > 40


def test_a_local_task_runs_and_its_documents_are_units(loaded: LoadedModel, tasks: Path) -> None:
    options = TasksOptions(tasks=["choose", "say"], include_path=tasks, limit=8)
    manager = find_tasks(options.tasks, tasks)
    row = measure(loaded, KIVI, options, manager, Output(quiet=True))
    assert [(unit.task, unit.document, unit.metric, unit.better) for unit in row.units] == [
        (task, i, metric, "higher") for task, metric in (("choose", "acc"), ("say", "exact_match")) for i in range(8)
    ]
    assert row.fields == {"versions": {"choose": 3, "say": 3}}
    assert row.memory.num_encoded > 0
    assert {unit.value for unit in row.units if unit.task == "say"} == {0.0}
    own, exact = (measure(loaded, case, options, manager, Output(quiet=True)) for case in (REFERENCE, EXACT))
    assert own.memory is None
    assert own.units == exact.units


def test_what_cannot_be_measured_is_refused(loaded: LoadedModel, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, manager = TasksOptions(tasks=["read"], include_path=tasks, limit=2), find_tasks(["read"], tasks)
    with pytest.raises(UsageError, match="'read' has no metric that is a mean over its documents"):
        measure(loaded, REFERENCE, options, manager, Output(quiet=True))
    (tasks.parent / "data.jsonl").unlink()
    with pytest.raises(UsageError, match="lm-eval cannot run read"):
        measure(loaded, REFERENCE, options, find_tasks(["read"], tasks), Output(quiet=True))
    # reading the thousands of tasks of lm-eval takes long
    monkeypatch.setattr("kvcli.eval.lm_tasks.TaskManager", lambda **x: TaskManager(**x | {"include_defaults": False}))
    with pytest.raises(UsageError, match="no task 'chose'; did you mean 'choose'"):
        find_tasks(["chose"], tasks)
    request = type("Request", (), {"args": ("x", {"until": [], "do_sample": True})})()
    with pytest.raises(UsageError, match="sampling"):
        lm(loaded, None).generate_until([request])


def test_a_mean_that_is_not_the_tasks_own_figure_is_left_out() -> None:
    samples = [{"doc_id": i, "filter": "none", "acc": float(i % 2), "f1": float(i)} for i in range(4)]
    results = {
        "results": {"t": {"acc,none": 0.5, "acc_stderr,none": 0.1, "f1,none": 0.9, "alias": "t"}},
        "samples": {"t": samples},
        "higher_is_better": {"t": {"acc": True, "f1": True}},
    }
    units = task_documents(results, "t")
    assert [(unit.metric, unit.value) for unit in units] == [("acc", float(i % 2)) for i in range(4)]


def test_tasks_from_the_command_line(command_model: LoadedModel, tasks: Path) -> None:
    chosen = ("--suite", "tasks", "--tasks", "choose", "--include-path", str(tasks))
    method = ("--method", "kivi-2", "--setting", "group_size=8", "--residual-length", "8")
    done = CliRunner().invoke(app, ["eval", *chosen, *method, "--json"])
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["label"] for row in rows] == ["uncompressed", "kivi-2"]
    assert rows[1]["metrics"]["choose/acc"]["difference"]["to"] == "uncompressed"
    assert rows[1]["versions"] == {"choose": 3}
    assert len(rows[1]["units"]) == 10
