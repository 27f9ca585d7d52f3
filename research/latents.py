"""Errors of attention and time of a step of a random model of DeepSeek-V2-Lite's shape (MLA), on a GPU.

Old versions of transformers, such as 5.4, cache keys and values of all heads in place of latents. `python -m
research.latents --text FILE --folder FOLDER` prints a JSON line for each method.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV2Config, DynamicCache

import kvcli
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig
from kvcli.calibrate.recording import Recording
from kvcli.models.fingerprint import fingerprint
from kvcli.models.load import LoadedModel
from kvcli.registry import get_method
from kvcli.seam.probe import probe
from kvcli.seam.versions import with_cache

LAYERS, LONG = 4, 32768
SHAPE = {
    **{"vocab_size": 300, "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512},
    **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 2 * LONG},
    **{"first_k_dense_replace": LAYERS, "n_routed_experts": 4, "moe_intermediate_size": 256, "num_experts_per_tok": 2},
}


def random_model() -> Any:
    """Weights of attention are twice as large as usual, so that it is not uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DeepseekV2Config(**SHAPE)).eval()
    for name, weight in model.named_parameters():
        if any(part in name for part in ("q_proj", "kv_a_proj", "kv_b_proj")):
            weight.data *= 2
    return model.cuda()


def outputs(model: Any, ids: Tensor, method: str, artifact: Any = None, impl: Any = "auto") -> tuple[list[Tensor], Any]:
    """What each layer's attention returns for the last quarter of a text, and what the cache takes."""
    kept: list[Tensor] = []
    projections = [layer.self_attn.o_proj for layer in model.model.layers]
    with torch.inference_mode(), kvcli.attach(model, method, artifact=artifact, impl=impl) as session:
        cache, first = session.new_cache(), 3 * ids.shape[1] // 4
        model(ids[:, :first], **with_cache(cache))
        hooks = [x.register_forward_pre_hook(lambda _, args: kept.append(args[0].float())) for x in projections]
        for part in ids[:, first:].split(256, dim=1):
            model(part, **with_cache(cache))
        for hook in hooks:
            hook.remove()
        return [torch.cat(kept[layer::LAYERS], dim=1) for layer in range(LAYERS)], cache.memory()


def eager_ms(model: Any, ids: Tensor, cache: Any) -> float:
    """Milliseconds of a pass of one token after a long text."""
    with torch.inference_mode():
        for part in ids.split(4096, dim=1):
            model(part, **with_cache(cache), logits_to_keep=1)
        for count in range(6):
            if count == 2:
                torch.cuda.synchronize()
                start = time.perf_counter()
            model(ids[:, :1], **with_cache(cache))
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / 4 * 1e3


def step_ms(session: Any, ids: Tensor) -> float:
    """Milliseconds of a step in a CUDA graph after a long text: 168 against 40 of them, the median of three."""

    def seconds(steps: int) -> float:
        nonlocal made
        start = time.perf_counter()
        made = session.generate(made.sequences, max_new_tokens=steps, cache=made.cache, eos_token_id=[])
        torch.cuda.synchronize()
        assert made.mode == "graphs", made.note
        return time.perf_counter() - start

    made = session.generate(ids, max_new_tokens=40, eos_token_id=[])
    return median(seconds(168) - seconds(40) for _ in range(3)) / 128 * 1e3


def rounded(model: Any, ids: Tensor, method: str) -> dict[str, float]:
    """Errors of outputs in bfloat16, mean of the layers, by implementation, against the reference in float32."""
    exact, _ = outputs(model.float(), ids, method, impl="reference")
    found = {impl: outputs(model.bfloat16(), ids, method, impl=impl)[0] for impl in ("reference", "auto")}
    errors = {
        impl: [float((x - y).norm() / y.norm()) for x, y in zip(layers, exact, strict=True)]
        for impl, layers in found.items()
    }
    return {impl: fmean(layers) for impl, layers in errors.items()}


def main() -> None:
    """Records, fits, compares and times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    model, ids = random_model(), torch.tensor([*options.text.read_bytes()])  # a byte is a token
    spec, sequences = probe(model).spec, ids[: 96 * 1024].view(96, 1024)
    loaded: Any = LoadedModel("v2-lite", model, None, spec, fingerprint(model, spec))  # type: ignore[arg-type]
    collect(loaded, sequences, CollectConfig(96, 1024, 8, 8, 0, 8), options.folder / "samples", {})
    recording, heldout = Recording(options.folder / "samples"), ids[100_000:104_096][None].cuda()
    exact, _ = outputs(model, heldout, "fp16")
    for name in ("klt-3", "klt-2.5", "klt-2", "turboquant-3", "rtn-4", "kivi-2", "fp8"):
        artifact = None
        if name.startswith("klt"):
            method = get_method("klt")
            config = method.config_cls(bits=float(name.partition("-")[2])).resolve(spec)
            fit_recording(recording, method, config, options.folder / name, device="cuda")
            artifact = assemble([options.folder / name])
        found, memory = outputs(model, heldout, "klt" if artifact else name, artifact)
        errors = [float((x - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True)]
        coded = memory.code_bytes / memory.num_encoded
        record = {"transformers": transformers.__version__, "latent": spec.latent, "method": name, "errors": errors}
        print(json.dumps({**record, "bytes": coded, "fp16_bytes": spec.fp16_bytes_per_token()}), flush=True)
    model, long = model.to(torch.bfloat16), ids[torch.arange(LONG) % len(ids)][None].cuda()
    times = {"stock": eager_ms(model, long, DynamicCache(config=model.config))}
    for name in ("fp16", "fp8", "rtn-4", "turboquant-3", "kivi-2"):
        with kvcli.attach(model, name) as session:
            times[name] = step_ms(session, long)
        print(json.dumps({"method": name, "rounded": rounded(model, heldout, name)}), flush=True)
        model.to(torch.bfloat16)
    print(json.dumps({"ms": times}))


if __name__ == "__main__":
    main()
