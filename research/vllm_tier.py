"""A document that vLLM read before it was killed, asked again: from a tier of codes, from vLLM's own, or read anew.

`python -m research.vllm_tier klt-2.25 fs none --tokens 32768` prints one line of JSON per tier: seconds to the first
token computed, of pages that are still there, and restored; bytes on disk; milliseconds per token while the document is
being stored. With `--pages kivi-2`, pages themselves are codes, which the tier `fs` keeps. The shape is that of
Llama-3.1-8B with random weights. Each tier has two processes: the first reads, and ends as a kill would end it.

Runs with vLLM 0.26, too, which torch 2.11 needs: kvcli's tier is for 0.32, and `adapt` is what lies between.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import torch

from kvcli.models.shapes import shape_config
from kvcli.registry import parse_method
from research.vllm_throughput import save_random_artifact

NEW_TOKENS = 64
"""That are decoded after a document."""

_places: dict[bytes, int] = {}
_made = [0]


def adapt() -> None:
    """Gives vLLM 0.26 the names of 0.32, and registers the tier, which 0.26 cannot import by module."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.tiering import async_lookup, factory
    from vllm.v1.kv_offload.tiering import base as tiering

    if hasattr(tiering, "TransferJob"):
        return
    make_key, first, job_result = scheduler.make_offload_key, tiering.SecondaryTierManager.__init__, tiering.JobResult

    def numbered(block_hash: bytes, group: int) -> Any:  # a request's chunks in their order, of one request at a time
        key = make_key(block_hash, group)
        _places[key] = _made[0]
        _made[0] += 1
        return key

    def result(job_id: int, success: bool, **more: Any) -> Any:
        return job_result(job_id, success)

    scheduler.make_offload_key = numbered
    base.Medium = SimpleNamespace(STORAGE="storage")
    tiering.TransferJob, tiering.JobResult = tiering.JobMetadata, result
    tiering.SecondaryTierManager.__init__ = lambda self, spec, view, kind, _=None: first(self, spec, view, kind)
    async_lookup.AsyncLookupManager.mark_miss = lambda self, keys: None
    runtime = torch.cuda.cudart()
    sys.modules["vllm.v1.kv_offload.cpu.host_register"] = SimpleNamespace(  # type: ignore[assignment]
        host_register=lambda at, size: not int(runtime.cudaHostRegister(at, size, 0)),
        host_unregister=runtime.cudaHostUnregister,
    )
    base.Locality = getattr(base, "Locality", str)
    from kvcli.integrations.vllm.tier import KvcliTier

    class Tier(KvcliTier):
        def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **settings: Any) -> None:
            settings.pop("module_path")
            config = SimpleNamespace(**vars(offloading_spec.config))
            config.groups = [SimpleNamespace(**vars(x), group_id=i) for i, x in enumerate(config.groups)]
            config.model = SimpleNamespace(name=config.model.name, dtype="bfloat16")  # "auto"
            config.canonical_layout = config.replicated_layout = False
            config.kv_cache_layout = "LBNHC"  # of FlashAttention
            self.chunk = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
            super().__init__(SimpleNamespace(config=config), primary_kv_view, tier_type, None, **settings)

        def _submit(self, pool: Any, run: Any, job: Any) -> None:
            context = SimpleNamespace(req_id="", get_offload_key_position=lambda key: self.chunk * (_places[key] + 1))
            names = {"job_id": job.job_id, "keys": job.keys, "chunk_ids": job.block_ids, "req_context": context}
            super()._submit(pool, run, SimpleNamespace(**names))

    factory.SecondaryTierFactory._registry["KvcliTier"] = lambda: Tier


def engine(options: argparse.Namespace, folder: Path) -> Any:
    """An engine of vLLM in this process, with the one tier of the options."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "WARNING"}
    adapt()
    from vllm import LLM

    (name,), store = options.tiers, str(folder / "store")
    tier: dict[str, Any] = {"type": "fs", "root_dir": store}
    if name not in ("fs", "none"):
        tier = {"type": "KvcliTier", "module_path": "kvcli.integrations.vllm.tier", "folder": store}
        tier |= {"device": options.device, "max_workers": options.workers}
        tier |= {"artifact": str(folder / "artifact")} if (folder / "artifact").exists() else {"method": name}
    extra: dict[str, Any] = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    extra |= {"cpu_bytes_to_use": int(options.cpu_gib * 2**30), "block_size": options.chunk}
    pages: dict[str, Any] = {}
    if options.pages:
        coded = (folder / "pages").exists()
        os.environ["KVCLI_ARTIFACT" if coded else "KVCLI_METHOD"] = str(folder / "pages") if coded else options.pages
        from kvcli.integrations.vllm import register

        register()
        pages = {"attention_backend": "CUSTOM", "block_size": options.chunk}
    return LLM(
        str(folder / "model"),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=131072,
        max_num_seqs=8,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=int(options.kv_gib * 2**30),
        enable_prefix_caching=True,
        kv_transfer_config=None
        if name == "none"
        else {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra},
        **pages,
    )


def ask(llm: Any, tokens: list[int], new_tokens: int) -> dict[str, Any]:
    """Seconds to the first token and per further one, tokens found, and the answer."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
    start, _made[0] = time.perf_counter(), 0
    llm.llm_engine.add_request(f"{start}", {"prompt_token_ids": tokens}, sampling)
    first, output = 0.0, None
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        if outputs:
            output, first = outputs[0], first or time.perf_counter() - start
        else:
            time.sleep(0.001)  # as vLLM's own process does while it waits for a tier
    assert output is not None
    rest = (time.perf_counter() - start - first) / max(1, new_tokens - 1)
    answer = list(output.outputs[0].token_ids)
    return {"first": first, "each_ms": 1e3 * rest, "found": output.num_cached_tokens, "answer": answer}


def settle(llm: Any, folder: Path) -> None:
    """Returns when nothing more is being stored; vLLM hands chunks over in the steps of later requests."""
    size, since = -1, time.monotonic()
    while time.monotonic() - since < 3:
        ask(llm, random.choices(range(3, 9999), k=20), 2)
        time.sleep(0.05)
        if (now := disk(folder / "store")) != size:
            size, since = now, time.monotonic()


def disk(folder: Path) -> int:
    """Bytes of the chunks of a tier."""
    return sum(x.stat().st_size for x in folder.rglob("*") if x.suffix in (".kvc", ".bin"))


def child(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What one process measures."""
    llm = engine(options, folder)
    document, warm, other = (random.Random(x).choices(range(3, 9999), k=options.tokens) for x in (1, 2, 3))
    ask(llm, warm[:9000], 4)
    settle(llm, folder)
    if options.phase == "read":
        before = disk(folder / "store")
        row = ask(llm, document, NEW_TOKENS)
        settle(llm, folder)
        hot = ask(llm, document, NEW_TOKENS)
        return {
            "hot_s": hot["first"],
            "hot_found": hot["found"],
            "hot": hot["answer"],
            "read_s": row["first"],
            "each_ms": row["each_ms"],
            "answer": row["answer"],
            "bytes": disk(folder / "store") - before,
        }
    computed = ask(llm, other, NEW_TOKENS)
    settle(llm, folder)
    again = ask(llm, document, NEW_TOKENS)
    return {
        "computed_s": computed["first"],
        "again_s": again["first"],
        "found": again["found"],
        "again": again["answer"],
    }


def _same(first: list[int], second: list[int]) -> int:
    """How many first tokens are the same."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def main() -> None:
    """Measures each tier."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tiers", nargs="+", help="methods, fs for vLLM's own files, none")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--kv-gib", type=float, default=16)
    parser.add_argument("--cpu-gib", type=float, default=12)
    parser.add_argument("--pages", default="", help="method by which pages are codes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--phase", choices=["read", "again"])
    options = parser.parse_args()
    if options.phase:
        print("ROW " + json.dumps(child(options, options.folder)), flush=True)
        os._exit(9)
    for name in options.tiers:
        folder = Path(mkdtemp())
        config: Any = shape_config(options.shape, options.layers)
        config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
        config.save_pretrained(folder / "model")
        if name not in ("fs", "none") and parse_method(name)[0].needs_artifact:
            save_random_artifact(name, config, folder / "artifact")
        if options.pages and parse_method(options.pages)[0].needs_artifact:
            save_random_artifact(options.pages, config, folder / "pages")
        row: dict[str, Any] = {"tier": name, "pages": options.pages or "16 bits", "tokens": options.tokens}
        passed = sys.argv[1 + len(options.tiers) :]
        for phase in ("read", "again"):
            words = [
                sys.executable,
                "-m",
                "research.vllm_tier",
                name,
                *passed,
                "--folder",
                str(folder),
                "--phase",
                phase,
            ]
            done = subprocess.run(
                words, check=False, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True
            )
            for left in Path("/dev/shm").glob("vllm_offload_*"):  # which a killed engine leaves
                left.unlink()
            lines = [x for x in done.stdout.splitlines() if x.startswith("ROW ")]
            row["log"] = [x[-300:] for x in done.stderr.splitlines() if "kvcli" in x or "Error" in x][-6:]
            if not lines:
                row["error"] = done.stderr[-6000:]
                break
            row |= json.loads(lines[0][4:])
        answers = [row.pop(x, []) for x in ("answer", "hot", "again")]
        row["same_tokens"], row["same_as_hot"] = (_same(x, answers[2]) for x in answers[:2])
        print(json.dumps(row), flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
