#!/usr/bin/env bash
# transformers reads a GGUF file without its RoPE scaling and without its sliding window, and says nothing.
# transformers 5.24.0, gguf 0.19.0. Source: the names of fields in transformers/integrations/ggml.py.
# llama.cpp writes <architecture>.rope.scaling.type, .factor and .original_context_length (linear, YaRN), and
# .attention.sliding_window. Of llama and qwen2 files transformers maps .rope.freq_base alone, so the model that it loads
# rotates beyond the trained length as if it had never been extended, and attends to all where the file says a window.
# Logits of short texts are right. What helps: load with the config of the original model.
# Output seen: llama: rope {'rope_theta': 10000.0, 'rope_type': 'default'}, window None; qwen2: the same
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 gguf==0.19.0
cat > "$folder/run.py" <<'PY'
import sys
import numpy
from gguf import GGUFWriter, RopeScalingType
from transformers import AutoConfig

for name in ("llama", "qwen2"):
    path = f"{sys.argv[1]}/{name}.gguf"
    file = GGUFWriter(path, name)
    for add, number in (
        (file.add_context_length, 32768), (file.add_embedding_length, 64), (file.add_feed_forward_length, 64),
        (file.add_block_count, 1), (file.add_head_count, 4), (file.add_rope_freq_base, 10000.0),
        (file.add_rope_scaling_type, RopeScalingType.YARN), (file.add_rope_scaling_factor, 4.0),
        (file.add_rope_scaling_orig_ctx_len, 8192), (file.add_sliding_window, 512),
    ):
        add(number)
    file.add_tensor("output_norm.weight", numpy.ones(64, dtype=numpy.float32))
    for write in (file.write_header_to_file, file.write_kv_data_to_file, file.write_tensors_to_file, file.close):
        write()
    config = AutoConfig.from_pretrained(sys.argv[1], gguf_file=f"{name}.gguf")
    print(f"{name}: rope {config.rope_parameters}, window {getattr(config, 'sliding_window', None)}")
    assert config.rope_parameters["rope_type"] == "default" and not getattr(config, "sliding_window", None)
PY
"$folder/env/bin/python" "$folder/run.py" "$folder" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
