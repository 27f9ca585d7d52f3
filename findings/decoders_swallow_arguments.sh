#!/usr/bin/env bash
# Two decoders ignore arguments that other causal language models follow, without a word.
# transformers 5.24.0. Source: models/whisper/modeling_whisper.py and models/blenderbot/modeling_blenderbot.py, whose
# forwards take **kwargs.
# Two decoders ignore, without a word, an argument that other causal language models follow. Whisper's keeps the logits
# of all tokens whatever `logits_to_keep` says; Blenderbot's counts positions from the cache whatever `position_ids`
# says. So who packs several texts into one row, or takes the rows that were to be kept, gets logits of other tokens.
# Output seen:
#   llama: 1 row kept of 5; other positions, other logits: True
#   whisper: 5 rows kept of 5; other positions, other logits: True
#   blenderbot: 1 row kept of 5; other positions, other logits: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$folder/env/bin/python" -W ignore - <<'PY'
import torch
from transformers import AutoModelForCausalLM, BlenderbotConfig, LlamaConfig, WhisperConfig

torch.manual_seed(0)
coder = dict(d_model=16, vocab_size=50, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32, encoder_layers=1,
             pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, is_decoder=True, init_std=0.5)
llama = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50, initializer_range=0.5)
ids, found = torch.arange(3, 8)[None], {}
for config in (llama, WhisperConfig(**coder), BlenderbotConfig(**coder)):
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        rows = model(ids, logits_to_keep=1).logits.shape[1]
        plain, spread = model(ids).logits, model(ids, position_ids=torch.arange(0, 20, 4)[None]).logits
    found[config.model_type] = rows, not torch.allclose(plain, spread, atol=1e-4)
    print(f"{config.model_type}: {rows} row{'s' * (rows > 1)} kept of 5; other positions, other logits: {found[config.model_type][1]}")
assert found == {"llama": (1, True), "whisper": (5, True), "blenderbot": (1, False)}, found
PY
