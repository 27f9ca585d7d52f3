"""lm-eval's own client of completions, on a task of local data."""

import json
from pathlib import Path

import pytest
import torch
from served import serving

pytest.importorskip("lm_eval", reason="needs lm-eval, the extra kvcli[eval]")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

CHOICES = [" yes", " no", " perhaps not"]
CHOICE_YAML = """
task: choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["yes", "no", "perhaps not"]
doc_to_target: right
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
YAML = """
task: numbers
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: right
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


def test_a_task_of_lm_eval_is_answered(tmp_path: Path) -> None:
    questions = [f"Number {i}: " + "word " * 30 for i in range(4)]
    data = tmp_path / "data.jsonl"
    with serving() as served:
        rights = [served.complete(x, 6, stop="\n").choices[0].text for x in questions]
        rights[0] = "another"
        rows = [{"question": x, "right": right} for x, right in zip(questions, rights, strict=True)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "numbers.yaml").write_text(YAML.format(data=data))
        url = f"http://127.0.0.1:{served.port}/v1/completions"
        found = simple_evaluate(
            "local-completions",
            model_args={"model": "tiny", "base_url": url, "tokenizer_backend": None, "tokenized_requests": False},
            tasks=["numbers"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        )
    assert found["results"]["numbers"]["exact_match,none"] == 0.75


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
            right = sums.index(max(sums)) if i else sums.index(min(sums))
            rows.append({"question": question, "right": right})
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "choices.yaml").write_text(CHOICE_YAML.format(data=tmp_path / "data.jsonl"))
        served.loaded.tokenizer.save_pretrained(tmp_path / "tokenizer")
        url = f"http://127.0.0.1:{served.port}/v1/completions"
        found = simple_evaluate(
            "local-completions",
            model_args={"model": "tiny", "base_url": url, "tokenizer": str(tmp_path / "tokenizer")},
            tasks=["choices"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        )
    assert found["results"]["choices"]["acc,none"] == 0.75
