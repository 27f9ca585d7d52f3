"""Engines of vLLM in this process, and what they answer."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_answers import NEW_TOKENS, Answer
from factories import record

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.registry import get_method

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}


def needs_vllm() -> pytest.MarkDecorator:
    """Skips the rest of a module without vLLM; a mark that lets vLLM, and what it imports, warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm.v1.attention.backend", reason="needs vLLM, see docs/engines.md", exc_type=ImportError)
    return pytest.mark.filterwarnings("default")


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    """An engine for the model of a folder, with pages of 16 tokens; `KVCLI_METHOD` or `KVCLI_ARTIFACT` is set."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from kvcli.integrations.vllm import register

    register()
    options = {"dtype": "float32", "block_size": 16, "kv_cache_memory_bytes": 2**23, "max_model_len": 512, **options}
    llm = None
    with patch("gc.collect"):  # vLLM collects several times, seconds each
        try:
            llm = LLM(str(folder), skip_tokenizer_init=True, enforce_eager=True, seed=0, **options)
            yield llm
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()


def fitted(model: Any, name: str, folder: Path, **settings: Any) -> Artifact:
    """An artifact for a model, with its method's example settings and others."""
    method, samples = get_method(name), record(model, folder / "samples")
    config = method.config_cls(**{**method.example_settings, **settings}).resolve(samples.spec)
    fit_recording(samples, method, config, folder / "fit")
    return assemble([folder / "fit"])


def saved(model: Any, folder: Path) -> Path:
    """The folder of a model that was saved in another."""
    model.save_pretrained(folder / "model")
    return folder / "model"


def with_biases(model: Any) -> Any:
    """The model with large biases of its keys, if it has any."""
    for name, x in model.named_parameters():
        if name.endswith("k_proj.bias"):
            x.data.normal_().mul_(4)
    return model


def answers(llm: Any, prompts: Sequence[Sequence[int]], count: int = NEW_TOKENS) -> list[Answer]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)
    found = llm.generate([{"prompt_token_ids": list(x)} for x in prompts], sampling, use_tqdm=False)
    outputs = [x.outputs[0] for x in found]
    return [
        Answer(list(x.token_ids), torch.tensor([p[t].logprob for t, p in zip(x.token_ids, x.logprobs, strict=True)]))
        for x in outputs
    ]
