#!/usr/bin/env bash
# A cache of one's own whose `update` takes what decoders passed so far fails in its first pass.
# transformers 5.24.0. Source: models/llama/modeling_llama.py, which calls `cache.update(..., kwargs=kwargs)`.
# Decoders hand the arguments of attention to the cache as one argument named `kwargs`. Up to 5.23.0 they passed keys,
# values and the layer's index, and before 5.0 `cache_kwargs`; so subclasses of DynamicCache whose `update` has
# these four, as several packages that quantize the cache do, end with a TypeError. One with `*args, **kwargs` works.
# Output seen:
#   5.23.0 torch.Size([1, 5, 50])
#   5.24.0 TypeError: Own.update() got an unexpected keyword argument 'kwargs'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.23.0 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q torch==2.13.0 "transformers==$version"
    "$folder/$version/bin/python" -W ignore - "$version" <<'PY'
import sys
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

class Own(DynamicCache):
    def update(self, key_states, value_states, layer_idx, cache_kwargs=None):
        return super().update(key_states, value_states, layer_idx)

config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
model = AutoModelForCausalLM.from_config(config).eval()
try:
    said = str(model(torch.arange(3, 8)[None], past_key_values=Own()).logits.shape)
except TypeError as error:
    said = f"TypeError: {error}"
print(sys.argv[1], said)
wrong = "TypeError: Own.update() got an unexpected keyword argument 'kwargs'"
assert said == (wrong if sys.argv[1] == "5.24.0" else "torch.Size([1, 5, 50])")
PY
done
