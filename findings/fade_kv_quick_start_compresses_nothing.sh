#!/usr/bin/env bash
# The quick start of fade-kv holds all tokens in full precision: tokens move to 4 bits only in a loop of one's own.
# fade-kv 1.1.0, which asks for transformers below 5.4. Source: fade/cache.py, TieredKVCache.update.
# `update` appends to the tier of full precision; a call of `reassign_tiers` moves tokens into the others, and
# `model.generate`, which the page says needs no loop, never calls it. So `generate` gives stock's tokens and takes
# at least stock's memory (page: 3.6 times smaller). With tiers reassigned after it, the cache is as small as it says.
# Output seen: bytes over those of the same tokens in the model's dtype
#   after generate: 1.00 or more: True
#   after reassign_tiers_by_position: less than half: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 fade-kv==1.1.0
"$folder/env/bin/python" -W ignore - 2> "$folder/log" <<'PY'
import torch
from fade import FadeConfig, create_tiered_cache
from fade.policy import reassign_tiers_by_position
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(vocab_size=97, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=2, head_dim=64)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config).eval()
cache = create_tiered_cache(model, config=FadeConfig.safe())
model.generate(torch.randint(3, 90, (1, 900)), past_key_values=cache, max_new_tokens=32, do_sample=False, eos_token_id=None)
whole = cache.get_seq_length() * 2 * 2 * 2 * 64 * 4
before = cache.storage_bytes() / whole
reassign_tiers_by_position(cache, 2)
after = cache.storage_bytes() / whole
print("after generate: 1.00 or more:", before >= 1)
print("after reassign_tiers_by_position: less than half:", after < 0.5)
assert before >= 1 and after < 0.5, (before, after)
PY
