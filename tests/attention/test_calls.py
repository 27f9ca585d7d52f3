"""What one more layer costs a decoded token in Python: calls of our functions, and how often they change the file."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_config
from transformers import LlamaForCausalLM

import kvcli
from kvcli.seam.versions import with_cache

PACKAGE = str(Path(kvcli.__file__).parent)


def files_of_calls(num_layers: int, method: str) -> list[str]:
    """The file of each function of ours that one decoded token calls, in order."""
    model = LlamaForCausalLM(tiny_config("llama", num_hidden_layers=num_layers)).eval()
    ids, files = torch.arange(300)[None] % 90, []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    with torch.inference_mode(), kvcli.attach(model, method) as session:
        cache = session.new_cache()
        for chunk in (ids, *ids[:, :40].T[..., None]):
            model(chunk, **with_cache(cache))
        sys.setprofile(note)
        try:
            model(ids[:, :1], **with_cache(cache))
        finally:
            sys.setprofile(None)
    return files


@pytest.mark.parametrize(("method", "calls", "changes"), [("rtn-2", 60, 30), ("kivi-2", 112, 62)])
def test_a_further_layer_of_a_decoded_token(method: str, calls: int, changes: int) -> None:
    """Of rtn nothing is encoded in this step; kivi encodes a value in every one."""
    two, three = files_of_calls(2, method), files_of_calls(3, method)
    assert 40 < len(three) - len(two) <= calls
    changed = [sum(a != b for a, b in pairwise(files)) for files in (two, three)]
    assert 20 < changed[1] - changed[0] <= changes
