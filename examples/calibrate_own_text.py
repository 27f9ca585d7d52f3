"""Fits KLT to your own text and generates with it: calibrate, fit, export, use; all that is made lies in `own`.

python examples/calibrate_own_text.py [MODEL] [FILE], a FILE of .txt (a passage per line), .jsonl, .csv or .parquet.
"""

import subprocess
import sys

import kvcli

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
corpus = sys.argv[2] if len(sys.argv) > 2 else "builtin:docs"
budget = ["--tokens", "4096", "--seq-len", "512", "--fisher-tokens", "1024"]  # few: without them, 65536


def run(*command: str) -> None:
    """Runs a command of kvcli, which goes on where it stopped."""
    subprocess.run([sys.executable, "-m", "kvcli", *command], check=True)


run("calibrate", model, "--corpus", corpus, *budget, "--out", "own/samples")
run("fit", "own/samples", "--method", "klt-2", "--out", "own/fit")
run("export", "own/fit", "--out", "own/klt-2")

loaded = kvcli.load_model(model)
inputs = loaded.tokenizer("The best of times", return_tensors="pt").to(loaded.model.device)
with kvcli.attach(loaded, "klt", artifact="own/klt-2", residual_length=32) as session:
    made = session.generate(inputs["input_ids"], max_new_tokens=64)
print(loaded.tokenizer.decode(made.sequences[0], skip_special_tokens=True))
print(f"{made.cache.memory().true_bits:.2f} bits per value")
