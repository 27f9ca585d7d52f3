"""transformers' own pipeline with a compressed cache: each call takes a new one, and a list of prompts as one batch."""

import sys

from transformers import pipeline

import kvcli

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
prompts = ["The capital of France is", "Water boils at a temperature of"]

loaded = kvcli.load_model(model)
pipe = pipeline("text-generation", model=loaded.model, tokenizer=loaded.tokenizer)
with kvcli.attach(loaded, "kivi-4", residual_length=32) as session:
    cache = session.new_cache()
    options = {"max_new_tokens": 64, "do_sample": False, "return_full_text": False}
    answers = pipe(prompts, batch_size=len(prompts), cache=cache, **options)
for prompt, (answer,) in zip(prompts, answers, strict=True):
    print(f"{prompt} ... {' '.join(answer['generated_text'].split())}")
memory = cache.memory()
print(f"{memory.num_encoded} of {memory.num_tokens} tokens are codes of {memory.true_bits:.2f} bits per value")
