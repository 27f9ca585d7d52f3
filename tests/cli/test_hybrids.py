"""Commands on models with layers of a sliding window beside those of full attention, loaded from folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_tokenizer import CHAT, byte_tokenizer
from console import result
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
    words = ("--prompt", "words " * 20, "--max-new-tokens", "4", "--residual-length", "32", "--stats", "--json")
    memory = result("generate", str(hybrid), "--method", "kivi-2", *words)["memory"]
    assert memory["num_tokens"] == 123
    assert memory["num_encoded"] > 0


def test_bench_runs_a_hybrid_and_counts_the_caches_of_all_its_layers(hybrid: Path) -> None:
    words = ("bench", str(hybrid), "--suite", "generate", "--repeats", "1", "--prompt-tokens", "16")
    words += ("--max-new-tokens", "4", "--method", "kivi-2")
    stock, ours = result(*words, "--method", "fp16", "--json")["rows"]
    # 19 tokens in 2 layers and 7 in 2 with a window of 8; keys and values, 2 heads, 16 channels, float32
    whole, windows = (2 * 19 * 2 * 2 * 16 * 4, 2 * 7 * 2 * 2 * 16 * 4)
    assert stock["cache_bytes"] == whole + windows
    assert stock["other_bytes"] == ours["other_bytes"] == windows
    assert ours["cache_bytes"] > whole + windows  # all is in the window, with headroom and positions
    shown = " ".join(result(*words).stdout.split())
    assert "2 of 4 layers compressed (73 % of fp16's cache)" in shown  # 19 of 19 + 7 tokens


@pytest.mark.parametrize(
    "words",
    [
        ("compress", "--prompt-file", "text.txt", "--out", "made.safetensors"),
        ("chat", "--save", "made.safetensors"),
        ("bench", "--suite", "contexts", "--prompt-tokens", "16"),
    ],
)
def test_storing_a_hybrid_is_refused_before_anything_is_read(hybrid: Path, words: tuple[str, ...]) -> None:
    Path("text.txt").write_text("words " * 20)
    done = result(words[0], str(hybrid), "--method", "kivi-2", *words[1:], exit_code=2)
    assert "2 of its 4 layers keep transformers' own cache" in done.stderr
    assert "read and compressed" not in done.stderr
    assert not Path("made.safetensors").exists()


def test_plans_count_what_other_layers_keep(hybrid: Path) -> None:
    words = ("--method", "kivi-2", "--device", "cpu", "--json", "--max-new-tokens", "4", "--prompt-tokens", "120")
    planned = result("plan", str(hybrid), *words)
    assert planned["methods"][1]["memory"]["other_bytes"] == 2 * 7 * 2 * 2 * 16 * 4


def test_plan_says_how_many_layers_its_caches_are_of(tmp_path: Path) -> None:
    tiny_config("cohere2").save_pretrained(tmp_path / "model")
    said = result("plan", str(tmp_path / "model"), "--method", "kivi-2", "--device", "cpu").stderr
    assert "1 of 4 layers compressed, those that attend to the whole context, with 100 % of an uncompressed" in said
