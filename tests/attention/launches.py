"""Kernels that a session launches after its warm-up and not in it, a line each; without a GPU, nothing is compiled.

    python tests/attention/launches.py 'METHOD HEAD_DIM HEADS KV_HEADS BATCH DTYPE' ...

Run it without TRITON_INTERPRET, with `tests/kernels` on the path. 0 kv heads: latents of twice as many channels.
"""

import random
import sys
from contextlib import closing
from functools import cache, partial
from typing import Any

import compiled_kernels
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, LlamaConfig
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

CAPABILITY = 90
LENGTHS = (1, 1, 1, 2, 3, 7, 8, 9, 13, 31, 32, 47, 64, 100, 129, 256, 400, 1024)


def main(method: str, sizes: list[int], dtype: torch.dtype) -> None:
    """Prints what is launched late, and how much was launched in the warm-up."""
    head_dim, heads, kv_heads, batch = sizes
    compiled_kernels.pretend(CAPABILITY)
    from kvcli.artifact.choice import MethodChoice
    from kvcli.attention import decoder, fused_modules, layer, steps, warmup
    from kvcli.attention.generation import SamplingConfig
    from kvcli.bench.model import open_session
    from kvcli.cache.ranges import Ranges
    from kvcli.kernels import compiling

    backend = make_backend(GPUTarget("cuda", CAPABILITY, 32))
    launched: dict[str, str] = {}

    @cache
    def binder(kernel: Any) -> Any:
        return create_function_from_signature(kernel.signature, kernel.params, backend)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        _bound, specialization, _ = binder(kernel)(*args, **options, debug=False)
        launched.setdefault(f"{kernel.fn.__name__} {specialization} {sorted(options.items())}", when)

    def launch_all(variants: list[Any], progress: Any) -> None:
        for _, launch in variants:
            launch()

    def no_sdpa(query: Any, key: Any, value: Any, *others: Any) -> Any:
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])

    def taken(self: Any, module: Any, forward: Any, settings: list[Any], weights: Any) -> None:
        """What kernels have not written cannot be compared."""
        self._kernels[module] = partial(forward, **settings[0])

    JITFunction.run = run
    setattr(layer, "sdpa", no_sdpa)  # noqa: B010
    fused_modules.FusedModules._try = taken  # type: ignore[method-assign]
    setattr(compiling, "_compile", launch_all)  # noqa: B010
    Ranges.check = lambda self: None  # type: ignore[method-assign]  # what no kernel writes has any value
    steps.Steps.check_ranges = lambda self: None  # type: ignore[method-assign]
    accept = decoder.Decoder._accept
    decoder.Decoder._accept = lambda self, logits: accept(self, torch.zeros_like(logits))  # type: ignore[method-assign]
    shape = {
        "vocab_size": 97, "hidden_size": 4 * heads, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads or heads, "max_position_embeddings": 8192,
        "pad_token_id": None,
    }  # fmt: skip
    latent = {"kv_lora_rank": 2 * head_dim, "qk_rope_head_dim": head_dim, "q_lora_rank": None}
    latent |= {"qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 2}
    config = LlamaConfig(**shape, head_dim=head_dim) if kv_heads else DeepseekV2Config(**shape, **latent)
    model, draw, when = AutoModelForCausalLM.from_config(config).eval().to(dtype), random.Random(0), "warm-up"
    with torch.inference_mode(), open_session(model, MethodChoice(method), "fused", 0) as session:
        session.fused_modules()  # which tries kernels
        tried, names = len(launched), session.warmup(batch, chunk=32)
        known = len(launched)
        assert 10 < known - tried <= len(names) <= known  # each variant once
        layers = [(model.device, backend) for backend in session.backends]
        for trial, first in enumerate((1, 5, 30, 150, 257, 700)):
            lengths, padding = [first, *draw.choices(LENGTHS, k=14)], draw.randrange(first) * (trial % 2)
            cache_, seen = session.new_cache(), 0
            real = torch.ones(batch, sum(lengths), dtype=torch.bool)
            real[0, :padding] = batch == 1
            for count in lengths:
                seen, when = seen + count, f"pass of {count} after {seen} tokens"
                mask = real[:, None, None, :seen] & real.new_ones(count, seen).tril(seen - count)
                warmup._attend(cache_, layers, dtype, batch, seen - count, count, None if real.all() else mask)
            when = f"steps after {seen} tokens"
            if min(cache_.sequences.counts.attended):
                warmup._steps(cache_, layers, dtype, batch)
        when = "chunks"
        with closing(session.chunks(session.new_cache(), 32, 1600, "steps")) as read:
            for _ in range(50):
                read(torch.zeros(batch, 32, dtype=torch.int64))
        when, ids = "generate", torch.zeros(batch, 300, dtype=torch.int64)
        for chunk in (None, 77):
            session.generate(ids, sampling=SamplingConfig(70), mode="steps", eos_token_id=[], prefill_chunk=chunk)
        session.generate(ids, sampling=SamplingConfig(5), mode="passes", eos_token_id=[])
    for name, place in list(launched.items())[known:]:
        print(f"late: {place}: {name}")
    print(f"{method}: {known} kernels launched in the warm-up, {len(launched) - known} after it")


if __name__ == "__main__":
    for arguments in sys.argv[1:]:
        method, *sizes, dtype_name = arguments.split()
        main(method, [int(size) for size in sizes], getattr(torch, dtype_name))
