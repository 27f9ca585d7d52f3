"""lm-eval's score of a compressed cache, on a task of your own; a name such as "arc_easy" is one of lm-eval's tasks.

It needs pip install 'kvcli[eval]'. `kvcli eval tasks` does the same beside the uncompressed model, with intervals.
"""

import sys

import lm_eval
from datasets import Dataset

import kvcli
from kvcli.eval.lm_tasks import CachedModel

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
rows = [{"country": x, "answer": i} for i, x in enumerate(("France", "Japan", "Italy", "Egypt"))]
task = {
    "task": "capitals",
    "custom_dataset": lambda **kwargs: {"test": Dataset.from_list(rows)},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "The capital of {{country}} is",
    "doc_to_choice": ["Paris", "Tokyo", "Rome", "Cairo"],
    "doc_to_target": "answer",
}
loaded = kvcli.load_model(model)
with kvcli.attach(loaded, "kivi-2", residual_length=32) as session:
    made = lm_eval.simple_evaluate(CachedModel(loaded, session.new_cache, chunk=32), tasks=[task], bootstrap_iters=0)
print(f"capitals: {made['results']['capitals']['acc,none']:.2f} of {len(rows)} questions right")
