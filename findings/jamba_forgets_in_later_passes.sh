#!/usr/bin/env bash
# Jamba begins with an empty state in every pass of two or more tokens, without a warning.
# transformers 5.24.0 (5.23.0 as well), Jamba without the CUDA kernels of mamba_ssm.
# Source: models/jamba/modeling_jamba.py: the scan uses the recurrent state of the cache only where `seq_len == 1`.
# A pass of two or more tokens over a cache that holds tokens begins with an empty state in every Mamba layer, without
# a warning: a prompt read in two passes, a second turn of a chat, or text that is appended to a kept cache gives
# other logits than the same tokens at once. Passes of one token are right, so `generate` alone shows nothing.
# Bamba, whose code is the same in name, goes on with its state.
# Output seen: largest difference of logits from one pass, as a share of the largest logit
#   jamba 20 + 1 + 1 ...: 2e-06   20 + 20: 4e-02
#   bamba 20 + 1 + 1 ...: 4e-07   20 + 20: 2e-07
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$folder/env/bin/python" -W ignore - <<'PY'
import torch
from transformers import AutoModelForCausalLM, BambaConfig, DynamicCache, JambaConfig

SIZES = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, mamba_d_state=16, initializer_range=0.1)
CONFIGS = (JambaConfig(**SIZES, attn_layer_period=2, attn_layer_offset=1, num_experts=2, use_mamba_kernels=False),
           BambaConfig(**SIZES, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_chunk_size=16))
for config in CONFIGS:
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.randint(3, 90, (1, 40))

    @torch.no_grad()
    def read(*sizes):
        cache, places = DynamicCache(config=config), torch.arange(40)[None].split(sizes, 1)
        parts = zip(ids.split(sizes, 1), places)
        return torch.cat([model(x, position_ids=at, cache=cache, use_cache=True).logits for x, at in parts], 1)

    whole = read(40)
    one, two = (float((read(*x) - whole).abs().max() / whole.abs().max()) for x in ((20, *[1] * 20), (20, 20)))
    print(f"{config.model_type} 20 + 1 + 1 ...: {one:.0e}   20 + 20: {two:.0e}")
    assert one < 1e-4 and ((two > 1e-2) if config.model_type == "jamba" else (two < 1e-4))
PY
