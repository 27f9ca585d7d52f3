#!/usr/bin/env bash
# In Triton's interpreter a load is refused whose mask joins a comparison of a block and one of a number.
# triton 3.9.0 (3.7.1 takes it), TRITON_INTERPRET=1. Source: triton/runtime/interpreter.py, the results of comparisons.
# A mask such as (offsets < width) & (place >= 0) is int1. The interpreter notes for a comparison the dtype of what was
# compared: spread over a block it is int32 in memory, and since 3.9 loads take bool alone. A mask of two blocks is taken,
# and so is this one by the compiler: kernels that run on a GPU fail where they are tested.
# Output seen: 3.7.1 refuses []; 3.9.0 refuses ['block and number']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PY'
import torch, triton.language as tl
from triton import __version__, jit
from triton.runtime.errors import InterpreterError

@jit
def blocks(x, place):
    o = tl.arange(0, 16)
    tl.load(x + o, mask=(o < 5) & (o < place))
@jit
def block_and_number(x, place):
    o = tl.arange(0, 16)
    tl.load(x + o, mask=(o < 5) & (place >= 0))

refused = []
for name, kernel in (("two blocks", blocks), ("block and number", block_and_number)):
    try:
        kernel[(1,)](torch.zeros(16), 4)
    except InterpreterError as error:
        assert "mask has unsupported dtype" in str(error), error
        refused.append(name)
print(f"{__version__} refuses {refused}")
assert refused == (["block and number"] if __version__ == "3.9.0" else []), refused
PY
for version in 3.7.1 3.9.0; do
  "$folder/env/bin/pip" install -q --no-deps "triton==$version"
  TRITON_INTERPRET=1 "$folder/env/bin/python" "$folder/run.py"
done
