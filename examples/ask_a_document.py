"""Two questions about a document: it is read once, and its compressed cache is kept in the folder `contexts`.

Run it again, and nothing of the document is read again: python examples/ask_a_document.py [MODEL] [FILE]
"""

import sys
from pathlib import Path

import kvcli

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
file = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parents[1] / "docs" / "planning.md"

loaded = kvcli.load_model(model)
with kvcli.attach(loaded, "kivi-4") as session:
    document = kvcli.Document(loaded, session, file.read_text(encoding="utf-8"), store="contexts")
    document.read()
    print(f"{document.kept_tokens} tokens, {document.reused_tokens} of them from the store")
    for question in ("What is this text about?", "Which command does it explain?"):
        answer = document.ask(question, kvcli.SamplingConfig(max_new_tokens=48))
        print(f"{question} {answer.text.strip()}")
memory = answer.memory
print(f"{memory.num_encoded} of {memory.num_tokens} tokens are codes of {memory.true_bits:.2f} bits per value")
