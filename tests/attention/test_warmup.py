"""A session's kernels are compiled before its first pass, and none later."""

import os
import subprocess
import sys

import pytest
import torch
from factories import make_model

import kvcli
from kvcli.artifact.choice import MethodChoice
from kvcli.attention import decoded
from kvcli.attention.steps import begin_steps
from kvcli.bench.layer import encoded_layer, shape_rope, unfitted_codec
from kvcli.models.shapes import shape_spec
from kvcli.seam.versions import with_cache


@pytest.mark.kernels
@pytest.mark.parametrize(
    "cases",
    [
        ("kivi-2 128 8 2 1 bfloat16", "commvq-2 128 32 8 1 bfloat16", "rtn-4 112 7 1 1 float32"),
        ("squat-pre-2 64 9 3 3 float32", "qjl 64 4 4 17 float16"),
        ("kvarn-4 64 16 0 1 bfloat16", "fp16 32 40 0 3 bfloat16", "kvarn-2 64 4 0 2 float32"),
        ("turboquant-3 256 3 3 2 bfloat16", "fp16 128 8 2 3 bfloat16", "kvarn-2 64 12 2 2 float32"),
    ],
)
def test_nothing_is_compiled_after_the_warm_up(cases: tuple[str, ...]) -> None:
    """Over growing lengths, chunks, ragged batches, and steps as they are captured."""
    variables = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "tests/attention/launches.py", *cases],
        env={**variables, "PYTHONPATH": ".:tests/kernels"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(" 0 after it\n") == done.stdout.count("\n") == len(cases), done.stdout


def test_blocks_of_codes_and_rows_of_counts_begin_where_kernels_are_compiled_for() -> None:
    """At multiples of 16 tokens, and of 16 bytes."""
    codec = unfitted_codec(MethodChoice("rtn").plus({"group_size": 4}), shape_spec("tiny"), 0)
    starts = [start for start, _ in codec.blocks(10000, 3855)]
    assert len(starts) == 3
    assert [start % 16 for start in starts] == [0, 0, 0]
    model = make_model("llama")
    with kvcli.attach(model, "rtn", group_size=4, residual_length=8) as session, torch.no_grad():
        cache = session.new_cache()
        model(torch.full((3, 40), 5), **with_cache(cache))
        step = begin_steps(cache, 64, 8)
    assert step.code_lengths(model.device).data_ptr() % 16 == 0
    assert step.code_lengths(model.device).shape == (3,)


def test_all_is_decoded_at_once_only_within_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    case, rope = MethodChoice("rtn").plus({"group_size": 4}), shape_rope("tiny", torch.device("cpu"))
    like = {"layer_idx": 0, "device": torch.device("cpu"), "dtype": torch.float32, "seed": 0}
    layer = encoded_layer(case=case, spec=shape_spec("tiny"), rope=rope, context=64, batch=1, **like)
    found = {}
    for most in (64, 63):
        monkeypatch.setattr(decoded, "_block_tokens", lambda codec, query, most=most: most)
        found[most] = decoded.dequantize_all(layer.codec, layer.query, layer.encoded_tokens())
    assert found[63] is None
    assert [x.shape[2] for x in found[64]] == [64, 64]
