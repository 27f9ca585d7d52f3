"""Commands on models with layers of a sliding window beside those of full attention, loaded from folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_tokenizer import CHAT, byte_tokenizer
from console import result
from families import make, tiny_config


@pytest.fixture(scope="module", params=["gemma3_text", "gpt_oss"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("models") / str(request.param), byte_tokenizer()
    make(request.param, vocab_size=259).save_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def test_a_hybrid_generates(hybrid: Path) -> None:
    words = ("--prompt", "words " * 20, "--max-new-tokens", "4", "--residual-length", "32", "--stats", "--json")
    memory = result("generate", str(hybrid), "--method", "kivi-2", *words)["memory"]
    assert memory["num_tokens"] == 123
    assert memory["num_encoded"] > 0


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


def test_a_context_of_a_hybrid_is_kept_and_used_again(hybrid: Path) -> None:
    words = (str(hybrid), "--method", "kivi-2", "--residual-length", "32", "--max-new-tokens", "4", "--json")
    Path("text").write_text("words " * 20)
    first, second = (result("ask", "text", "Who?", "--model", *words, "--store", "kept") for _ in range(2))
    assert first["read_tokens"] > 0 == second["read_tokens"]
    assert first["text"] == second["text"]
    result("compress", *words[:5], "--prompt-file", "text", "--out", "made.safetensors")
    told = ("generate", *words, "--prompt", "Who?")
    assert result(*told, "--context", "made.safetensors")["reused_tokens"] == 120


def test_plans_count_what_other_layers_keep(hybrid: Path) -> None:
    words = ("--method", "kivi-2", "--device", "cpu", "--json", "--max-new-tokens", "4", "--prompt-tokens", "120")
    planned = result("plan", str(hybrid), *words)
    assert planned["methods"][1]["memory"]["other_bytes"] == 2 * 7 * 2 * 2 * 16 * 4


def test_plan_says_how_many_layers_its_caches_are_of(tmp_path: Path) -> None:
    tiny_config("cohere2").save_pretrained(tmp_path)
    said = result("plan", str(tmp_path), "--method", "kivi-2", "--device", "cpu").stderr
    assert "1 of 4 layers compressed, those that attend to the whole context, with 100 % of an uncompressed" in said
