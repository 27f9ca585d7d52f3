"""Pages of codes that vLLM's connectors move elsewhere and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_answers import prompts_of
from engines import answers, engine, fitted, needs_vllm, saved

from kvcli.errors import UsageError

pytestmark = needs_vllm()


@pytest.mark.parametrize("name", ["turboquant-3", "klt"])
def test_pages_that_vllm_kept_elsewhere_come_back_as_codes(
    name: str, ask: Any, tiny_model: Any, tmp_path: Path
) -> None:
    """By vLLM's own connector to files: the answer is that of pages that stayed."""
    ask(name, fitted(tiny_model, name, tmp_path) if name == "klt" else None, sink_length=2, residual_length=7)
    (prompt,), folder = prompts_of(tiny_model, 90), saved(tiny_model, tmp_path)
    moved = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    moved |= {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "pages")}}
    with engine(folder, enable_prefix_caching=True) as llm:
        (computed,) = answers(llm, [prompt])
        (stayed,) = answers(llm, [prompt])
    with engine(folder, enable_prefix_caching=False, kv_transfer_config=moved) as llm:
        answers(llm, [prompt])
    assert len([*(tmp_path / "pages").glob("*/*.safetensors")]) == tiny_model.config.num_hidden_layers
    with engine(folder, enable_prefix_caching=False, kv_transfer_config=moved) as llm:
        (came_back,) = answers(llm, [prompt])
    assert came_back.tokens == stayed.tokens
    assert torch.equal(came_back.logprobs, stayed.logprobs)
    assert not torch.equal(computed.logprobs, stayed.logprobs)


def test_pages_of_groups_are_not_moved(ask: Any, tiny_model: Any, tmp_path: Path) -> None:
    ask("kivi-2", residual_length=32)
    options = {"block_size": 32, "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}
    folder = saved(tiny_model, tmp_path)
    with pytest.raises(UsageError, match="encodes 32 tokens together"), engine(folder, **options):
        pass
