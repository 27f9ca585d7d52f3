"""Commands on models with layers of a sliding window beside those of full attention, loaded from folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_tokenizer import CHAT, byte_tokenizer
from console import invoke
from families import make, tiny_config

HYBRIDS = ("gemma3_text", "gpt_oss")


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / str(request.param)
    make(request.param, vocab_size=259).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def test_a_hybrid_generates(hybrid: Path) -> None:
    result = invoke(
        *("generate", str(hybrid), "--method", "kivi-2", "--prompt", "words " * 20, "--max-new-tokens", "4"),
        *("--residual-length", "32", "--stats", "--json"),
    )
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["memory"]["num_tokens"] == 123
    assert record["memory"]["num_encoded"] > 0


def test_bench_runs_a_hybrid_and_counts_the_caches_of_all_its_layers(hybrid: Path) -> None:
    result = invoke(
        *("bench", str(hybrid), "--suite", "generate", "--method", "fp16", "--method", "kivi-2", "--repeats", "1"),
        *("--prompt-tokens", "16", "--max-new-tokens", "4", "--json"),
    )
    assert result.exit_code == 0, result.output
    stock, ours = json.loads(result.stdout)["rows"]
    # 19 tokens in 2 layers and 7 in 2 with a window of 8; keys and values, 2 heads, 16 channels, float32
    whole, windows = (2 * 19 * 2 * 2 * 16 * 4, 2 * 7 * 2 * 2 * 16 * 4)
    assert stock["cache_bytes"] == whole + windows
    assert stock["other_bytes"] == ours["other_bytes"] == windows
    assert ours["cache_bytes"] > whole + windows  # all is in the window, with headroom and positions


def test_compress_refuses_a_hybrid_before_it_reads(hybrid: Path) -> None:
    Path("text.txt").write_text("words " * 20)
    result = invoke(
        *("compress", str(hybrid), "--method", "kivi-2", "--prompt-file", "text.txt", "--out", "made.safetensors")
    )
    assert result.exit_code == 2
    assert "2 of its 4 layers keep transformers' own cache" in result.stderr
    assert "read and compressed" not in result.stderr
    assert not Path("made.safetensors").exists()


def test_chat_and_bench_refuse_to_store_a_hybrid_before_they_start(hybrid: Path) -> None:
    chat = invoke("chat", str(hybrid), "--method", "kivi-2", "--save", "talk.safetensors")
    bench = invoke("bench", str(hybrid), "--suite", "contexts", "--method", "kivi-2", "--prompt-tokens", "16")
    for result in (chat, bench):
        assert result.exit_code == 2, result.output
        assert "2 of its 4 layers keep transformers' own cache" in result.stderr


def test_bench_says_what_share_of_the_cache_is_compressed(hybrid: Path) -> None:
    result = invoke(
        *("bench", str(hybrid), "--suite", "generate", "--method", "kivi-2", "--repeats", "1"),
        *("--prompt-tokens", "16", "--max-new-tokens", "4"),
    )
    assert result.exit_code == 0, result.output
    assert "2 of 4 layers compressed (73 % of fp16's cache)" in " ".join(result.stdout.split())  # 19 of 19 + 7 tokens


def test_plans_count_what_other_layers_keep(hybrid: Path) -> None:
    words = ("--method", "kivi-2", "--device", "cpu", "--json", "--max-new-tokens", "4", "--prompt-tokens", "120")
    result = invoke("plan", str(hybrid), *words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["methods"][1]["memory"]["other_bytes"] == 2 * 7 * 2 * 2 * 16 * 4


def test_plan_says_how_many_layers_its_caches_are_of(tmp_path: Path) -> None:
    tiny_config("cohere2").save_pretrained(tmp_path / "model")
    result = invoke("plan", str(tmp_path / "model"), "--method", "kivi-2", "--device", "cpu", "--fisher-tokens", "0")
    assert result.exit_code == 0, result.output
    assert (
        "1 of 4 layers compressed, those that attend to the whole context, with 100 % of an uncompressed"
        in result.stderr
    )
