"""vLLM on the shape of Llama-3.1-8B with random weights: its own cache beside codes, in as many bytes.

`python -m research.vllm_throughput kivi-2 --contexts 32768 --batches 1 16` prints capacity, tokens per second and the
time to the first token of one method, `auto` (16 bits) and `fp8` being vLLM's own, as lines of JSON.

Contexts are only declared as computed, by vLLM's DecodeBenchConnector without filling pages: what these hold does not
change how long a step takes. All requests have equally many tokens and share none. Prompts of the time to the first
token are computed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.choice import MethodChoice
from kvcli.artifact.metadata import new_metadata
from kvcli.bench.layer import randomize_, unfitted_codec
from kvcli.commands.options import parse_settings
from kvcli.models.shapes import shape_config
from kvcli.registry import parse_method
from kvcli.spec import ModelSpec

WARM = 8
"""Tokens of each request that are not timed."""


def save_random_artifact(method: str, config: Any, folder: Path, settings: dict[str, Any] | None = None) -> None:
    """Saves an artifact with random codebooks, which an engine with random weights takes for its own."""
    case, spec = MethodChoice(method, settings or {}), ModelSpec.from_config(config)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer_idx in range(spec.num_layers):
        codec = unfitted_codec(case, spec, layer_idx)
        randomize_(codec, generator)
        tensors.update({f"layers.{layer_idx}.{name}": x for name, x in codec.state_dict().items()})
    identity = {"model": "random", "fingerprint": "0" * 16 + ":" + "003c" * (4 * spec.num_layers)}
    metadata = new_metadata(
        method=case.name,
        config=case.config.resolve(spec),
        identity={**identity, "spec": spec.to_dict()},
        provenance={},
        layers=[{}] * spec.num_layers,
    )
    Artifact(metadata, tensors).save(folder)


def engine(options: argparse.Namespace) -> Any:
    """An engine of vLLM in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # ranks have what is replaced here
    torch.set_num_threads(1)  # ranks would wait for threads that a fork does not copy
    folder, own = Path(mkdtemp()), options.method in ("auto", "fp8")
    config: Any = shape_config(options.shape, options.layers)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    if not own and parse_method(options.method)[0].needs_artifact:
        save_random_artifact(options.method, config, folder / "artifact", parse_settings(options.setting))
        os.environ["KVCLI_ARTIFACT"] = str(folder / "artifact")
    elif not own:
        os.environ["KVCLI_METHOD"] = options.method
    from vllm import LLM
    from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as declared

    arguments: dict[str, Any] = {"kv_cache_dtype": options.method} if own else {"block_size": options.page_size}
    if torch.cuda.is_available():
        arguments["attention_backend"] = "FLASH_ATTN" if own else "CUSTOM"
    else:
        arguments["enforce_eager"] = True
    if not own:
        from kvcli.integrations.vllm import engine as state
        from kvcli.integrations.vllm import register

        register()
        # no page leaves the device, so connectors and groups of keys are no problem here
        state.check_engine = lambda config: None
        state.check_transfer = lambda method, group: None
    declared.DecodeBenchConnectorWorker.start_fill_kv = lambda self, metadata: None
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=config.max_position_embeddings,
        max_num_seqs=options.max_seqs,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=int(options.kv_gib * 2**30),
        enable_prefix_caching=False,
        tensor_parallel_size=options.tensor_parallel_size,
        kv_transfer_config={"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
        **arguments,
    )


def compute_prompts() -> None:
    """From here on, no token is declared as computed."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as declared

    scheduler = declared.DecodeBenchConnectorScheduler
    scheduler.get_num_new_matched_tokens = lambda self, request, computed: (0, False)


def tokens_per_second(llm: Any, count: int, length: int, new_tokens: int) -> float:
    """Of `count` requests that decode at once, after `WARM` tokens of each."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
    vocabulary = range(3, llm.llm_engine.vllm_config.model_config.get_vocab_size())
    for i in range(count):
        prompt = {"prompt_token_ids": random.choices(vocabulary, k=length)}
        llm.llm_engine.add_request(f"{length}-{count}-{i}-{time.time()}", prompt, sampling)
    have, since, before = dict[str, int](), 0.0, 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            have[output.request_id] = len(output.outputs[0].token_ids)
        if not since and len(have) == count and min(have.values()) >= WARM:
            since, before = time.perf_counter(), sum(have.values())
    return (sum(have.values()) - before) / (time.perf_counter() - since)


def kernels_of_a_step(llm: Any, length: int) -> list[Any]:
    """What most time is spent in, of steps of one request: names, launches per step, microseconds per step."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    steps, activities = 24, [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiled:
        tokens_per_second(llm, 1, length, steps)
    rows = [x for x in profiled.key_averages() if x.device_type == DeviceType.CUDA]
    rows.sort(key=lambda x: -x.self_device_time_total)
    shown = [[x.key[:60], round(x.count / steps, 1), round(x.self_device_time_total / steps, 1)] for x in rows[:40]]
    total = [sum(x.count for x in rows) / steps, sum(x.self_device_time_total for x in rows) / steps]
    return [["all", *(round(x, 1) for x in total)], *shown]


def first_token(llm: Any, length: int) -> float:
    """Seconds to the first token after a prompt of so many tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    vocabulary = range(3, llm.llm_engine.vllm_config.model_config.get_vocab_size())
    prompt = {"prompt_token_ids": random.choices(vocabulary, k=length)}
    start = time.perf_counter()
    llm.generate([prompt], sampling, use_tqdm=False)
    return round(time.perf_counter() - start, 3)


def main() -> None:
    """Measures one method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method")
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 0], help="0: as many as fit")
    parser.add_argument("--first-token", type=int, nargs="+", default=[], help="lengths of prompts to be computed")
    parser.add_argument("--kv-gib", type=float, default=48, help="of each GPU")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--setting", nargs="*", default=[], help="of an artifact, NAME=VALUE")
    parser.add_argument("--page-size", type=int, default=512)
    parser.add_argument("--max-seqs", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--profile", action="store_true", help="kernels of a step of one request of the last context")
    options = parser.parse_args()
    llm = engine(options)
    pages = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    size = pages.kv_cache_groups[0].kv_cache_spec.block_size
    shared: dict[str, Any] = {"method": options.method, "gpus": options.tensor_parallel_size}
    print(json.dumps({**shared, "capacity_tokens": pages.num_blocks * size}), flush=True)
    tokens_per_second(llm, 1, 33, WARM + 2)
    for context in options.contexts:
        fit = min((pages.num_blocks - 1) // -(-context // size), options.max_seqs)
        length = (context - options.new_tokens - 2) // 32 * 32 + 1  # earlier tokens are whole groups of KIVI
        for count in dict.fromkeys(x or fit for x in options.batches):
            row: dict[str, Any] = {**shared, "context": context, "batch": count, "fit": fit}
            if 0 < count <= fit:
                row["tokens_per_s"] = round(tokens_per_second(llm, count, length, options.new_tokens), 2)
            print(json.dumps(row), flush=True)
    if options.profile:
        print(json.dumps({**shared, "kernels": kernels_of_a_step(llm, length)}), flush=True)
    compute_prompts()
    for length in options.first_token:
        seconds = [first_token(llm, length) for _ in range(3)][1:]  # the first one may compile
        print(json.dumps({**shared, "prompt": length, "first_token_s": seconds}), flush=True)


if __name__ == "__main__":
    main()
