"""SmolLM2 in an engine on a CPU: how many tokens fit, how many are found again, and answers beside a session's.

`python -m research.engine_capacity serve kivi-2 FILE` (or `vllm`) prints a line of JSON; `exact` is a cache of numbers.
Two prompts begin with the same 512 tokens of the file; 16 tokens of the first answer are compared with those of a
session that reads the prompt in the passes of the engine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import kvcli
from kvcli.attention.session import Session
from kvcli.models.builtin_models import BUILTIN_MODELS, copy_folder
from kvcli.models.load import LoadedModel, load_model
from kvcli.paged.rings import RESIDUAL_LENGTH
from kvcli.registry import parse_method
from kvcli.seam.versions import with_cache
from kvcli.serve.pages import pass_ends

NEW_TOKENS, NBYTES = 16, 2**28

PASSES: dict[str, Callable[[int, int], list[int]]] = {
    "serve": lambda length, page: pass_ends(length - RESIDUAL_LENGTH, page),
    "vllm": lambda length, page: [],
}
"""Where the passes of an engine over a prompt end, before which all is in codes then; but for the last one."""


def prompts_of(loaded: LoadedModel, text: str) -> list[list[int]]:
    """Two prompts of 576 tokens, of which 512 are the same."""
    ids = loaded.tokenizer(text)["input_ids"]
    return [ids[:512] + ids[start : start + 64] for start in (512, 1024)]


def in_serve(loaded: LoadedModel, method: str, artifact: Path | None, prompts: Any, page: int) -> dict[str, Any]:
    """Capacity, hits and the first answer of the engine of `kvcli serve`."""
    from threading import Event

    from kvcli.artifact.choice import MethodChoice
    from kvcli.attention.generation import SamplingConfig
    from kvcli.paged.model import open_pages
    from kvcli.serve.answers import Answer
    from kvcli.serve.continuous import ContinuousEngine
    from kvcli.serve.jobs import Job

    choice = MethodChoice.of("fp16" if method == "exact" else method, artifact)
    with open_pages(loaded, choice, max_bytes=NBYTES, num_rings=4, max_length=2**20, page_size=page) as model:
        engine, made = ContinuousEngine(model, loaded.tokenizer, loaded.name), list[list[int]]()
        for prompt in prompts:
            ended, tokens = Event(), list[int]()
            answer = Answer(loaded.tokenizer, NEW_TOKENS, [], [], None, lambda piece: None)
            answer.feed = lambda new, *told, tokens=tokens, feed=answer.feed: (tokens.extend(new), feed(new, *told))[1]  # type: ignore
            job = Job(
                torch.tensor([prompt]), SamplingConfig(NEW_TOKENS), 0, answer, "", True, lambda error, e=ended: e.set()
            )
            engine.submit(job)
            ended.wait()
            made.append(tokens)
        engine.close()
    return {"capacity_tokens": model.num_pages * page, "hits": job.cached, "answer": made[0]}


def in_vllm(loaded: LoadedModel, method: str, artifact: Path | None, prompts: Any, page: int) -> dict[str, Any]:
    """The same of `LLM`."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
    if method != "exact":
        os.environ["KVCLI_ARTIFACT" if artifact else "KVCLI_METHOD"] = str(artifact or method)
    from vllm import LLM, SamplingParams

    from kvcli.integrations.vllm import register

    register()
    llm: Any = LLM(
        str(copy_folder(BUILTIN_MODELS[loaded.name])), dtype="float32", block_size=page, kv_cache_memory_bytes=NBYTES,
        max_model_len=1024, max_num_batched_tokens=1024, max_num_seqs=4, skip_tokenizer_init=True, enforce_eager=True,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    outputs = [llm.generate([{"prompt_token_ids": x}], sampling, use_tqdm=False)[0] for x in prompts]
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    capacity = config.num_blocks * config.kv_cache_groups[0].kv_cache_spec.block_size
    return {
        "capacity_tokens": capacity,
        "hits": outputs[1].num_cached_tokens,
        "answer": list(outputs[0].outputs[0].token_ids),
    }


def in_session(session: Session, prompt: list[int], ends: list[int]) -> list[int]:
    """The answer of a session that has only codes at each end of a pass."""
    cache, ids = session.new_cache(), torch.tensor([prompt])
    for start, stop in pairwise([0, *ends]):
        with torch.inference_mode():
            session.model(ids[:, start:stop], **with_cache(cache))
        session.flush(cache)
    made = session.generate(ids, cache=cache, max_new_tokens=NEW_TOKENS, eos_token_id=-1)
    return [int(x) for x in made.sequences[0, -NEW_TOKENS:]]


ENGINES: dict[str, Callable[..., dict[str, Any]]] = {"serve": in_serve, "vllm": in_vllm}


def main() -> None:
    """Measures one method in one engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=[*ENGINES])
    parser.add_argument("method")
    parser.add_argument("text", type=Path, help="file of 1100 tokens or more")
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--page-size", type=int, default=64)
    options = parser.parse_args()
    loaded = load_model("smollm2-135m", dtype=torch.float32)
    prompts = prompts_of(loaded, options.text.read_text())
    found = ENGINES[options.engine](loaded, options.method, options.artifact, prompts, options.page_size)
    answer, row = found.pop("answer"), {"engine": options.engine, "method": options.method, **found}
    if options.method != "exact":
        alone = {} if options.method.startswith("kivi") else {"flush_block": 1}  # its keys are in groups
        name = parse_method(options.method)[0].name if options.artifact else options.method
        with kvcli.attach(loaded, name, artifact=options.artifact, residual_length=RESIDUAL_LENGTH, **alone) as session:
            expected = in_session(session, prompts[0], PASSES[options.engine](len(prompts[0]), options.page_size))
        row["equal"] = sum(a == b for a, b in zip(answer, expected, strict=True))
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
