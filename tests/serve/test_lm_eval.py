"""lm-eval's own client of completions, on a task of local data."""

import json
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from served import Served, serving

CHOICES = [" yes", " no", " perhaps not"]
YAML = """
task: own
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: right
output_type: """
CHOSEN = YAML + 'multiple_choice\ndoc_to_choice: ["yes", "no", "perhaps not"]\nmetric_list:\n  - metric: acc\n'
GENERATED = YAML + (
    'generate_until\ngeneration_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 6\n'
    "metric_list:\n  - metric: exact_match\n    aggregation: mean\n    higher_is_better: true\n"
)


def scored(served: Served, folder: Path, task: str, rows: list[dict[str, Any]], **arguments: Any) -> dict[str, float]:
    """What lm-eval says of a task with these rows."""
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.yaml").write_text(task.format(data=folder / "data.jsonl"))
    arguments |= {"model": "tiny", "base_url": f"http://127.0.0.1:{served.port}/v1/completions"}
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate("local-completions", model_args=arguments, tasks=["own"], task_manager=manager)
    return dict(found["results"]["own"])


def test_a_task_of_lm_eval_is_answered(tmp_path: Path) -> None:
    questions = [f"Number {i}: " + "word " * 30 for i in range(4)]
    with serving() as served:
        rows = [{"question": x, "right": served.complete(x, 6, stop="\n").choices[0].text} for x in questions]
        rows[0]["right"] = "another"
        found = scored(served, tmp_path, GENERATED, rows, tokenizer_backend=None, tokenized_requests=False)
    assert found["exact_match,none"] == 0.75


def test_texts_are_scored_as_by_the_model(tmp_path: Path) -> None:
    """Three answers to a question, of which one is more probable than the others."""
    rows = []
    with serving(method="fp16") as served, torch.no_grad():
        for i in range(4):
            question, sums = (f"Question {i}: " + "word " * 30).rstrip(), list[float]()
            start = len(served.loaded.tokenizer(question)["input_ids"])
            for choice in CHOICES:
                ids = torch.tensor([served.loaded.tokenizer(question + choice)["input_ids"]])
                logprobs = served.loaded.model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
                sums.append(float(logprobs.gather(1, ids[0, 1:, None])[start - 1 :].sum()))
            rows.append({"question": question, "right": sums.index(max(sums) if i else min(sums))})
        served.loaded.tokenizer.save_pretrained(tmp_path / "tokenizer")
        assert scored(served, tmp_path, CHOSEN, rows, tokenizer=str(tmp_path / "tokenizer"))["acc,none"] == 0.75
