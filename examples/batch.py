"""A batch of prompts of different lengths, padded on the left, through one compressed cache."""

import sys

import kvcli

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
prompts = ["The capital of France is", "Water boils at", "The three primary colours are red,"]

loaded = kvcli.load_model(model)
inputs = loaded.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(loaded.model.device)
with kvcli.attach(loaded, "kivi-4", residual_length=32) as session:
    made = session.generate(inputs["input_ids"], inputs["attention_mask"], max_new_tokens=64)
new = made.sequences[:, inputs["input_ids"].shape[1] :]
for prompt, text in zip(prompts, loaded.tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
    print(f"{prompt} ... {' '.join(text.split())}")
memory = made.cache.memory()
print(f"{memory.num_encoded} of {memory.num_tokens} tokens are codes of {memory.true_bits:.2f} bits per value")
