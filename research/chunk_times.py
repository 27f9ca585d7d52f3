"""How long a tier codes and decodes chunks of Llama-3.1-8B's shape: `python -m research.chunk_times kivi-2 klt-2.25`.

Prints one line of JSON per method: the median of milliseconds for `--chunks` chunks of `--tokens` random tokens, all
layers, in bfloat16, and bits per number. On a CPU, OMP_NUM_THREADS says how many cores; artifacts have random tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvcli.integrations.chunks.codec import ChunkCodec
from kvcli.integrations.chunks.format import ChunkLayout
from kvcli.integrations.chunks.served import ChunkSettings, Served
from kvcli.models.shapes import shape_config
from kvcli.registry import parse_method
from research.vllm_throughput import save_random_artifact


def milliseconds(work: Callable[[], object], device: torch.device, runs: int) -> float:
    """The median, after a first run that does not count."""
    taken = []
    for _ in range(runs + 1):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(1000 * (time.perf_counter() - begun))
    return statistics.median(taken[1:])


def main() -> None:
    """Prints one line of JSON per method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    for method in options.methods:
        with TemporaryDirectory() as folder:
            config: Any = shape_config("llama-3.1-8b")
            config.save_pretrained(folder)
            coding = {"method": method}
            if parse_method(method)[0].needs_artifact:
                coding = {"artifact": str(Path(folder) / "artifact")}
                save_random_artifact(method, config, Path(folder) / "artifact")
            served = Served.load(ChunkSettings(model=folder, device=options.device, **coding))
        spec, codec = served.spec, ChunkCodec(served)
        layout = ChunkLayout(spec.num_layers, options.tokens, spec.num_kv_heads, spec.head_dim, torch.bfloat16)
        shape = (options.chunks, spec.num_kv_heads, options.tokens, spec.head_dim)
        both = tuple(torch.randn(shape, dtype=torch.bfloat16, device=served.device) for _ in range(2))
        starts = [i * options.tokens for i in range(options.chunks)]

        def encode(codec: Any = codec, layout: Any = layout, both: Any = both, starts: Any = starts) -> Any:
            return codec.encode(layout, lambda i: both, starts, with_errors=True).stored

        stored = list(encode())

        def decode(codec: Any = codec, layout: Any = layout, stored: Any = stored) -> None:
            for _ in codec.decode(stored, layout):
                pass

        times = {"encode_ms": milliseconds(encode, served.device, options.runs)}
        times |= {"decode_ms": milliseconds(decode, served.device, options.runs)}
        bits = 8 * stored[0].numel() / (layout.plain_bytes / 2)
        print(json.dumps({"method": method, "bits": round(bits, 3), **{k: round(x, 1) for k, x in times.items()}}))


if __name__ == "__main__":
    main()
