#!/usr/bin/env bash
# generate of Phi-3 with longrope drops its cache where the text outgrows the short factors, and reads only one token anew.
# transformers 5.4.0 (5.24.0 reads the whole text). Source: models/phi3/modeling_phi3.py, prepare_inputs_for_generation.
# The method sets the cache to None at the switch, so that keys are computed again with the long factors; but generate
# has told it already how many tokens are new, one. All that follows attends to a text of that token and later ones.
# Output seen: (switch at 64 tokens, prompt of 60)
#   tokens of each pass: [60, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
#   tokens that are those of use_cache=False: 5 of 12
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.4.0
"$folder/env/bin/python" -W ignore - 2> "$folder/log" <<'PY'
import torch
from transformers import Phi3Config, Phi3ForCausalLM

rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
rope["original_max_position_embeddings"] = 64
torch.manual_seed(1)
config = Phi3Config(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=256, original_max_position_embeddings=64,
                    rope_parameters=rope, pad_token_id=0, bos_token_id=1, eos_token_id=None)
model = Phi3ForCausalLM(config).eval()
for weight in model.parameters():
    weight.data *= 4 if weight.dim() > 1 else 1
widths = []
model.model.register_forward_pre_hook(lambda m, a, k: widths.append(k["input_ids"].shape[1]), with_kwargs=True)
ids = torch.randint(3, 97, (1, 60))
made = model.generate(ids, max_new_tokens=12, do_sample=False)[0, 60:]
passes = [*widths]
print("tokens of each pass:", passes)
whole = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=False)[0, 60:]
same = int((made == whole).int().cumprod(0).sum())
print(f"tokens that are those of use_cache=False: {same} of 12")
assert passes == [60] + [1] * 11 and same < 12, (passes, same)
PY
