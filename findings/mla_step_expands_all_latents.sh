#!/usr/bin/env bash
# A decoded token of DeepSeek expands the latents of the whole context, in every layer.
# transformers 5.24.0 (and 5.17 on), DeepSeek V2/V3 and other models with latent attention, on any device.
# Source: models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3Attention.forward: `cache.update`, then `expand_kv`.
# Since the cache holds latents in place of keys and values of heads, a decoded token multiplies the latents of the
# whole context with kv_b_proj, in every layer and step. Up to 5.4.0 kv_b_proj saw the new token only. So a step that
# ought to be cheaper by the smaller cache takes longer as the context grows (an H200, four layers of V2-Lite's shape,
# 32K tokens, bfloat16: 57 ms, 37 with 5.4.0); absorbed products, as the paper has them, need no such product.
# Output seen: rows that kv_b_proj multiplies in a prompt of 1000 tokens and two steps after it
#   5.4.0  [1000, 1, 1]
#   5.24.0 [1000, 1001, 1002]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.4.0 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q torch==2.13.0 "transformers==$version"
    "$folder/$version/bin/python" -W ignore - "$version" <<'PY'
import sys
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

config = DeepseekV3Config(
    vocab_size=97, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_rope_head_dim=16,
    qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1, n_routed_experts=4, n_group=1, topk_group=1,
    num_experts_per_tok=2,
)
model, rows = AutoModelForCausalLM.from_config(config).eval(), []
projection = model.model.layers[0].self_attn.kv_b_proj
projection.register_forward_hook(lambda module, args, output: rows.append(output.shape[:-1].numel()))
model.generate(torch.randint(3, 90, (1, 1000)), max_new_tokens=3, do_sample=False, eos_token_id=None)
print(sys.argv[1], rows)
assert rows == ([1000, 1, 1] if sys.argv[1] == "5.4.0" else [1000, 1001, 1002])
PY
done
