"""lm-eval's score of a compressed cache, on a task of your own; a name such as "arc_easy" is one of lm-eval's tasks.

It needs pip install 'kvcli[eval]'. `kvcli eval tasks` does the same beside the uncompressed model, with intervals.
"""

import sys

import lm_eval
from datasets import Dataset

import kvcli
from kvcli.eval.lm_tasks import CachedModel

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
things = ["lamp", "rope", "key", "map", "coin", "ring", "drum", "bell", "book", "shoe", "fork", "kite"]
task = {
    **{"task": "boxes", "output_type": "multiple_choice", "test_split": "test", "doc_to_choice": things},
    "custom_dataset": lambda **kwargs: {"test": Dataset.from_dict({"box": list(range(12))})},
    "doc_to_text": "".join(f"Box {i} holds the {x}. " for i, x in enumerate(things)) + "So box {{box}} holds the",
    "doc_to_target": "box",
}
loaded = kvcli.load_model(model)
with kvcli.attach(loaded, "kivi-2", residual_length=32) as session:
    scored = CachedModel(loaded, session.new_cache, chunk=32)
    made = lm_eval.simple_evaluate(scored, tasks=[task], bootstrap_iters=0)
print(f"boxes: {made['results']['boxes']['acc,none']:.0%} of {len(things)} questions right")
memory = scored.memory
print(f"{memory.num_encoded} of {memory.num_tokens} tokens are codes of {memory.true_bits:.2f} bits per value")
