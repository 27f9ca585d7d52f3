#!/usr/bin/env bash
# With PEFT, generate ignores the prefix that was tuned, without a word: it makes the base model's tokens.
# peft 0.21.2 with transformers 5.24.0 (5.23.0 uses it). Source: PeftModelForCausalLM.prepare_inputs_for_generation.
# A prefix is keys and values, which PEFT hands to the model as `past_key_values`. Since 5.24 generate calls the argument
# `cache`: PEFT looks for the old name, and the model gets generate's own empty cache. One pass of the same adapter, by
# `forward`, has the prefix. So an adapter that was evaluated by its loss answers as if it were not there.
# Output seen: 5.24.0: forward differs from the base by 1.0, generate by 0.0; 5.23.0: by 1.0, by 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 peft==0.21.2 transformers==5.24.0
cat > "$folder/run.py" <<'PY'
import copy, warnings
import torch, transformers
from peft import PrefixTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
base = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, eos_token_id=None, pad_token_id=0)).eval()
tuned = get_peft_model(copy.deepcopy(base), PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM")).eval()
for x in tuned.prompt_encoder.parameters():
    torch.nn.init.normal_(x)
ids = torch.randint(3, 99, (1, 12))

def first(model):
    made = model.generate(input_ids=ids, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True)
    return made.logits[0]

with torch.no_grad():
    forward = (tuned(input_ids=ids).logits[:, -1] - base(ids).logits[:, -1]).norm() / base(ids).logits[:, -1].norm()
    generate = (first(tuned) - first(base)).norm() / first(base).norm()
print(f"{transformers.__version__}: forward differs from the base by {forward:.1f}, generate by {generate:.1f}")
assert forward > 0.3 and (generate < 1e-5) == (transformers.__version__ == "5.24.0"), (forward, generate)
PY
"$folder/env/bin/python" "$folder/run.py" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
"$folder/env/bin/pip" install -q transformers==5.23.0
"$folder/env/bin/python" "$folder/run.py" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
