#!/usr/bin/env bash
# A weight that torchao has quantized says that it is 16 bits wide and in one piece; its pointer is 0.
# torchao 0.18.0, torch 2.13.0. Source: torchao/quantization/quantize_/workflows/int8/int8_tensor.py, a wrapper subclass.
# The module stays an nn.Linear, and its weight answers bfloat16, contiguous, a Parameter, and, by nbytes and by its
# storage, twice the bytes that are held. So who sums nbytes reports no saving, and a kernel that is handed the weight
# because dtype and strides fit reads from address 0; type(weight) and the tensors inside tell.
# Output seen:
#   Linear Int8Tensor torch.bfloat16 contiguous: True Parameter: True
#   nbytes 8192, of the storage 8192, held 4416, pointer 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 torchao==0.18.0
"$folder/env/bin/python" -W ignore - 2> "$folder/log" <<'PY'
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

model = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
quantize_(model, Int8WeightOnlyConfig())
weight = model[0].weight
named = type(model[0]).__name__, type(weight).__name__, weight.dtype
told = weight.is_contiguous(), isinstance(weight, nn.Parameter)
print(*named, f"contiguous: {told[0]} Parameter: {told[1]}")
inner, _ = weight.__tensor_flatten__()
held = sum(getattr(weight, name).nbytes for name in inner)
sizes = weight.nbytes, weight.untyped_storage().nbytes(), held, weight.data_ptr()
print("nbytes {}, of the storage {}, held {}, pointer {}".format(*sizes))
assert named == ("Linear", "Int8Tensor", torch.bfloat16), named
assert told == (True, True), told
assert sizes == (8192, 8192, 4416, 0), sizes
PY
