"""`kvcli plan`."""

import json
from pathlib import Path
from typing import Any

import pytest
from console import refused, result, says
from factories import make_model
from families import tiny_config

from kvcli.registry import parse_method

SMALL = ("--prompt-tokens", "600", "--max-new-tokens", "9", "--tokens", "512", "--seq-len", "128", "--batch-size", "2")
GROUPS = ("--setting", "group_size=8")


def plan(*words: str) -> dict[str, Any]:
    return dict(result("plan", "tiny", "--device", "cpu", *SMALL, *GROUPS, *words, "--json"))


def test_every_compared_method_by_default() -> None:
    made = plan()
    names = [row["method"] for row in made["methods"]]
    assert names[0] == "fp16"
    assert {"kivi-2", "commvq-1"} <= {*names}
    for row in made["methods"]:
        needs = parse_method(row["method"])[0].needs_artifact
        assert needs == bool(row["artifact_bytes"]) == bool(row["break_even"])
        assert row["peak_bytes"] > row["memory"]["allocated_bytes"] >= row["memory"]["cache_bytes"]
        assert row["memory"]["num_tokens"] == 600 + 9 - 1
        assert row["fits"] is None
    assert made["calibrate"]["tokens"] == 512


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_fits_is_the_most_that_fits(device: str) -> None:
    words = ("--method", "kivi-2", "--device", device)
    budget = 2 * plan(*words)["methods"][1]["peak_bytes"]
    row = plan(*words, "--memory", f"{budget}B")["methods"][1]
    for option, number in (("--prompt-tokens", row["fits"]["context"]), ("--batch", row["fits"]["batch"])):
        counts = (number, number + number // 50 + 9)
        most, more = (plan(*words, option, str(count))["methods"][1]["peak_bytes"] for count in counts)
        assert most <= budget * 1.02  # the program itself is measured anew
        assert more > budget * 0.98


def test_an_artifact_pays_from_where_it_is_said_to() -> None:
    words = ("--method", "commvq-2", "--method", "kivi-4")
    against = {pays["against"]: pays for pays in plan(*words)["methods"][1]["break_even"]}
    assert set(against) == {"fp16", "kivi-4"}
    context = against["fp16"]["context"]
    for tokens, pays in ((context, True), (context - 1, False)):
        rows = plan(*words, "--prompt-tokens", str(tokens), "--max-new-tokens", "1")["methods"]
        theirs, ours = (row["memory"] for row in rows[:2])
        assert (ours["artifact_bytes"] + ours["cache_bytes"] < theirs["cache_bytes"]) == pays
    assert against["kivi-4"]["context"] > context
    few = plan(*words, "--prompt-tokens", str(context - 20))["methods"][1]["break_even"][0]
    assert few["contexts"] > 1


def test_methods_are_named_with_their_bits() -> None:
    assert [row["method"] for row in plan("--method", "kivi")["methods"]] == ["fp16", "kivi-2"]


def test_the_table() -> None:
    words = ("--method", "commvq-1", "--method", "rtn-4", "--memory", "1GiB", "--prompt-tokens", "64K")
    done = result("plan", "tiny", "--device", "cuda", *SMALL, *GROUPS, *words)
    texts = "1 x 64K + 9 tokens", "pays from: tokens, against fp16 / ", "method", "cache", "peak", " 209K ", "batch"
    says(" ".join(done.stdout.split()), *texts)
    assert "calibrate 512 tokens: disk" in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80


WRONG = {
    "--memory much": "'much' is not a size",
    "--device mps": "cpu and cuda",
    "--device gpu9000": "gpu9000",
    "--setting colour=red": "colour",
    "--method zip": "unknown method 'zip'",
    "--method kivi-2 --setting group_size=7": "group_size",
}


def test_what_cannot_be_planned_is_refused_in_a_line() -> None:
    assert "llama-3.1-8b" in refused("plan", "no-such-model", code=1)
    for words, named in WRONG.items():
        assert named in refused("plan", "tiny", *words.split())


UNCOMPRESSED = {
    "bert": "encoder.layer.0.attention.self is not causal",
    "deepseek_v32": "no layer attends to the whole context with keys and values alone: indexed_attention in layers 0",
    "dory": "it cannot run on a few tokens of text (RuntimeError: Attempting to broadcast",
    "falcon": "no attention in it goes through transformers' attention interface",
    "gemma4_assistant": "4 layers attend to what another one caches (num_kv_shared_layers)",
    "jetmoe": "it cannot be planned: it reads weights before any layer attends",
    "megatron-bert": "no attention in it goes through transformers' attention interface",
    "minimax": "it cannot run on a few tokens of text (ValueError: MiniMax uses cache of its own",
    "musicgen": "transformers makes no model of its config (AttributeError: 'MusicgenConfig' object has no",
}


@pytest.mark.parametrize("model_type", UNCOMPRESSED)
def test_what_cannot_be_compressed_is_not_planned(model_type: str, tmp_path: Path) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)
    assert UNCOMPRESSED[model_type] in refused("plan", str(tmp_path), code=1)


def test_a_quantized_checkpoint_is_planned_as_if_it_were_not(tmp_path: Path) -> None:
    words, path = ("plan", str(tmp_path), "--device", "cpu", *SMALL), tmp_path / "config.json"
    make_model("llama").config.save_pretrained(tmp_path)
    assert "is quantized" not in result(*words).stderr
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "gptq"}}))
    assert "is quantized (gptq): its weights, and all peaks, are smaller than these" in result(*words).stderr


@pytest.mark.parametrize("method", ["fp16", "kivi-2", "qjl"])
def test_the_planned_size_of_a_context_is_that_of_its_file(tiny: Any, method: str) -> None:
    grouped = () if method == "fp16" else GROUPS
    words = ("--method", method, "--sink-length", "2", "--residual-length", "64", *grouped)
    Path("text.txt").write_text("word " * 300)
    made = result("compress", "tiny", "--prompt-file", "text.txt", *words, "--out", "c.safetensors", "--json")
    (context,) = made["contexts"]
    words = ("--method", method, "--setting", "sink_length=2", "--setting", "residual_length=64", *grouped)
    sizes = ("--device", "cpu", *SMALL, "--prompt-tokens", str(context["tokens"]))
    row = result("plan", "tiny", *sizes, *words, "--json")["methods"][-1]
    assert row["context_bytes"] == pytest.approx(context["file_bytes"], rel=0.1)
