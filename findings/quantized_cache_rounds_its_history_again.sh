#!/usr/bin/env bash
# QuantizedCache with hqq quantizes the whole history again every 128 tokens, in groups that shift.
# transformers 5.24.0, hqq 0.2.8. Source: cache_utils.py, QuantizedLayer.update and HQQQuantizedLayer.
# A flush decodes all tokens and quantizes them again together with new ones. With the default axis, 0, a group's
# members are a share of the sequence apart, so that they are other tokens after each flush and errors add up; with
# axis 1 a group lies within a token and its codes stay. So old tokens lose more the longer a text goes on.
# Output seen: error of the first 64 keys, as a share of their norm, after the 1st and the 15th flush, 2 bits
#   axis 0: 0.49 1.45
#   axis 1: 0.44 0.44
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 hqq==0.2.8
"$folder/env/bin/python" -W ignore - 2> "$folder/log" <<'PY'
import torch
from transformers import LlamaConfig, QuantizedCache

config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, hidden_size=128)
generator, found = torch.Generator().manual_seed(0), {}
keys = torch.randn(1, 2, 64 * 32, 64, generator=generator)
for axis in (0, 1):
    cache, errors = QuantizedCache("hqq", config, nbits=2, axis_key=axis, axis_value=axis), []
    for part in keys.split(64, 2):
        read, _ = cache.update(part, part, 0)
        layer = cache.layers[0]
        if read.shape[2] > 64 and not layer.keys.numel():
            kept = layer._dequantize(layer._quantized_keys)[:, :, :64]
            errors.append(float((kept - keys[:, :, :64]).norm() / keys[:, :, :64].norm()))
    found[axis] = errors
    print(f"axis {axis}: {errors[0]:.2f} {errors[14]:.2f}")
assert len(found[0]) == 15 and found[0][14] > 1.3 * found[0][0], found[0]
assert found[1][14] < 1.1 * found[1][0], found[1]
PY
