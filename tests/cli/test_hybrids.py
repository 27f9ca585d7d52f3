"""Commands on models with layers of a sliding window beside those of full attention, loaded from folders."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest
from byte_tokenizer import CHAT, byte_tokenizer
from console import result
from families import make


@pytest.fixture(scope="module", params=["gemma3_text", "gpt_oss"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("models") / str(request.param), byte_tokenizer()
    make(request.param, vocab_size=259).save_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def test_bench_runs_a_hybrid_and_counts_the_caches_of_all_its_layers(hybrid: Path) -> None:
    sizes = ("--repeats", "1", "--prompt-tokens", "16", "--max-new-tokens", "4")
    words = ("bench", str(hybrid), "--suite", "generate", "--method", "kivi-2", *sizes)
    stock, ours = result(*words, "--method", "fp16", "--json")["rows"]
    # 19 tokens in 2 layers and 7 in 2 with a window of 8; keys and values, 2 heads, 16 channels, float32
    whole, windows = (2 * 19 * 2 * 2 * 16 * 4, 2 * 7 * 2 * 2 * 16 * 4)
    assert stock["cache_bytes"] == whole + windows
    assert stock["other_bytes"] == ours["other_bytes"] == windows
    assert ours["cache_bytes"] > whole + windows  # all is in the window, with headroom and positions
    shown = " ".join(result(*words).stdout.split())
    assert "2 of 4 layers compressed (73 % of fp16's cache)" in shown  # 19 of 19 + 7 tokens


@pytest.mark.parametrize("hybrid", ["gemma3_text", "qwen3_5_text", "nemotron_h"], indirect=True)
def test_the_planned_size_of_a_context_counts_states_of_other_layers(hybrid: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("word " * 300)
    words = ("--method", "rtn-4", "--setting", "sink_length=2", "--setting", "residual_length=64")
    path = str(tmp_path / "c.safetensors")
    made = result("compress", str(hybrid), "--prompt-file", str(tmp_path / "text.txt"), *words, "--out", path, "--json")
    (context,) = made["contexts"]
    plan = result("plan", str(hybrid), "--device", "cpu", *words, "--prompt-tokens", str(context["tokens"]), "--json")
    assert plan["methods"][-1]["context_bytes"] == pytest.approx(context["file_bytes"], rel=0.1)


@pytest.mark.parametrize("hybrid", ["gemma3_text"], indirect=True)
def test_the_line_for_a_card_counts_the_caches_of_all_layers(hybrid: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("word " * 600)
    text = ("--corpus", str(tmp_path / "text.txt"), "--seq-len", "64", "--num-sequences", "8", "--context", "512")
    words = ("--method", "kivi", "--setting", "group_size=8", "--residual-length", "8", "--max-bits", "16")
    found = result("tune", str(hybrid), *text, *words, "--json", "--out", str(tmp_path / "r.yaml"))
    assert "in 2 of 4 layers, whole cache 1/" in unquote(found["badge"])
