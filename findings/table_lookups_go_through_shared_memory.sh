#!/usr/bin/env bash
# Triton copies every value that a loop looks up in a small float32 table to shared memory by itself.
# triton 3.6.0, 3.7.1, for compute capability 9.0. Source: the pass that pipelines loads of loops (num_stages).
# Codes are loaded, looked up in a table of 8 numbers and multiplied by tl.dot. One would guess that the lookups are loads
# that hit the L1 cache; with the default num_stages=3 they are pipelined as if they were the operand: one asynchronous
# copy of 4 bytes each. On an H200 an attention kernel over 3-bit codes took 821 us so, and 162 us with num_stages=1. A table
# of float16 is not pipelined, as asynchronous copies have at least 4 bytes.
# Output seen: stages, bytes of shared memory and asynchronous copies with a table of float32, then of float16
#   1: 20480 0, 12288 0
#   3: 69632 192, 12288 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q triton==3.7.1
cat > "$folder/run.py" <<'PY'
import triton.language as tl
from triton import jit
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

@jit
def kernel(codes, table, x, out, count):
    n, d, m = tl.arange(0, 64), tl.arange(0, 128), tl.arange(0, 16)
    query, total = tl.load(x + m[:, None] * 128 + d[None, :]), tl.zeros([16, 64], tl.float32)
    for start in range(0, count, 64):
        code = tl.load(codes + (start + n)[:, None] * 128 + d[None, :]).to(tl.int32)
        total = tl.dot(query, tl.trans(tl.load(table + (code & 7)).to(tl.float16)), total)
    tl.store(out + m[:, None] * 64 + n[None, :], total)

seen = []
for stages in (1, 3):
    for kind in ("*fp32", "*fp16"):
        types = {"codes": "*u8", "table": kind, "x": "*fp16", "out": "*fp32", "count": "i32"}
        made = compile(ASTSource(kernel, types), target=GPUTarget("cuda", 90, 32), options={"num_stages": stages})
        seen.append((made.metadata.shared, made.asm["ptx"].count("cp.async.ca.shared")))
    print(f"{stages}: {seen[-2][0]} {seen[-2][1]}, {seen[-1][0]} {seen[-1][1]}")
assert seen[0][1] == seen[1][1] == seen[3][1] == 0 < seen[2][1] and seen[2][0] > 3 * seen[0][0], seen
PY
"$folder/env/bin/python" "$folder/run.py"
