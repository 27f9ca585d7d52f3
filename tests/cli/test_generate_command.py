"""`kvcli generate`: prompts, sampling, settings of the cache."""

from pathlib import Path
from typing import Any

import torch
from console import invoke, refused, result


def test_every_method_generates(tiny: Any) -> None:
    for method in ("fp8", "rtn-4", "kivi-4", "kivi-2", "squat-2", "squat-pre-2", "qjl"):
        group = () if method == "fp8" else ("--setting", "group_size=8")
        options = ("--residual-length", "16", "--sink-length", "0", "--max-new-tokens", "4", "--stats")
        assert "KV cache" in result("generate", "--method", method, "--prompt", "x" * 60, *options, *group).stderr
    for wrong in (("qjl-3",), ("kivi", "--setting", "colour=3"), ("kivi", "--setting", "nonsense")):
        assert refused("generate", "--method", *wrong)


def test_generate_reads_prompts_from_everywhere(tiny: Any) -> None:
    Path("prompt.txt").write_text("from a file\n")
    Path("binary").write_bytes(b"\xff\xfe\x00")
    short = ("--max-new-tokens", "3")
    for words in (("--prompt", "from a flag"), ("--prompt-file", "prompt.txt"), ("--prompt", "-")):
        made = invoke("generate", *words, *short, stdin="from a pipe\n")
        assert made.stdout.startswith({"prompt.txt": "from a file", "-": "from a pipe"}.get(words[1], words[1]))
    empty = result("generate", "--prompt", "", "--json", *short)
    assert (empty["prompt_tokens"], empty["new_tokens"]) == (1, 3)
    assert "the prompt is empty: the model starts" in invoke("generate", "--prompt", "", *short).stderr
    assert refused("generate", "--prompt", "x", "--chat")  # this model has no chat template
    assert refused("generate", "--prompt-file", "binary")


def test_a_prompt_follows_the_text_of_a_file(tiny: Any) -> None:
    Path("text.txt").write_text("A text.\n")
    short = ("--max-new-tokens", "3")
    for prompt, file in (("Why?", "text.txt"), ("-", "text.txt"), ("Why?", "-")):
        typed = "A text.\n" if file == "-" else "Why?\n"
        made = invoke("generate", "--prompt-file", file, "--prompt", prompt, *short, stdin=typed)
        assert made.stdout.startswith("A text.\n\nWhy?")
    assert "both be standard input" in refused("generate", "--prompt-file", "-", "--prompt", "-", stdin="x")


def test_an_answer_that_ends_at_once_is_told_and_what_helps(chatty: Any) -> None:
    options = ("generate", "--prompt", "What is it?", "--max-new-tokens")
    assert "the one that ends" not in result(*options, "1").stderr
    chatty.model.lm_head.register_forward_hook(lambda *call: call[-1].index_fill(-1, torch.tensor([2]), 1e4))
    for more, advice in (((), "; smollm2-135m is made for conversations: add --chat\n"), (("--chat",), "\n")):
        said = result(*options, "4", *more).stderr
        assert f"warning: the model's first token is the one that ends its answer{advice}" in said


def test_sampling_is_seeded(tiny: Any) -> None:
    def sample(seed: str) -> str:
        return invoke("generate", "--prompt", "x", "--temperature", "1.5", "--seed", seed).stdout

    assert sample("1") == sample("1")
    assert sample("1") != sample("2")


def test_cache_options_reach_the_cache_and_an_artifact_names_its_method(artifact: Path) -> None:
    options = ("generate", "--prompt", "x" * 60, "--max-new-tokens", "2", "--json")
    short = ("--method", "commvq", "--residual-length", "8", "--sink-length", "1")
    memory = result(*options, *short)["memory"]
    assert memory["num_tokens"] - memory["num_encoded"] <= 8 + 1 + 2
    assert result(*options, "--method", "commvq")["memory"]["num_encoded"] == 0
    assert result(*options, "--artifact", str(artifact))["method"] == "commvq-2"


def test_the_default_method_is_the_newest_artifacts_else_kivi(artifact: Path) -> None:
    """Of every command that generates."""
    Path("text.txt").write_text("A text. " * 9)
    compress = ("compress", "--prompt-file", "text.txt", "--overwrite", "--json")
    for method in ("commvq-2", "kivi-4"):
        assert result(*compress)["method"] == method
        assert result("generate", "--prompt", "x", "--max-new-tokens", "1", "--json")["method"] == method
        if artifact.exists():
            artifact.rename("elsewhere")


def test_settings_may_be_a_mapping_in_a_file(tiny: Any) -> None:
    Path("c.yaml").write_text("method: kivi\nresidual_length: 16\nsetting:\n  k_bits: 4\n  group_size: 8\n")
    options = ("--config", "c.yaml", "--prompt", "x" * 60, "--max-new-tokens", "2", "--json")
    assert result("generate", *options)["memory"]["nominal_bits"] == [4, 2]


def test_more_tokens_than_the_model_knows_are_announced(tiny: Any) -> None:
    options = ("generate", "--method", "fp8", "--prompt")
    assert "warning: " not in result(*options, "x", "--max-new-tokens", "2").stderr
    assert "warning: " in result(*options, "x " * 600, "--max-new-tokens", "1").stderr


def test_a_prompt_inside_the_window_is_said_to_be_there_and_where_compression_starts(tiny: Any) -> None:
    options = ("generate", "--method", "rtn", "--setting", "group_size=8", "--max-new-tokens", "1", "--prompt")
    said = invoke(*options, "x" * 50, "--stats").stderr
    assert "all 50 tokens are inside the full-precision window; compression starts at 164 tokens" in said
    for length, encoded in ((163, False), (164, True)):
        assert (result(*options, "x" * length, "--json")["memory"]["num_encoded"] > 0) == encoded


def test_a_cache_that_is_larger_than_in_fp16_says_from_where_on_it_is_smaller(tiny: Any) -> None:
    options = ("generate", "--method", "fp8", "--max-new-tokens", "1", "--prompt")
    first = result(*options, "x" * 200, "--json")["smaller_than_fp16_from"]
    said = f"larger than in fp16, as every context below {first} tokens"
    assert said in result(*options, "x" * 200, "--stats").stderr
    for tokens, expected in ((first - 1, first), (first, None)):
        assert result(*options, "x" * tokens, "--json")["smaller_than_fp16_from"] == expected


def test_a_measured_row_is_shown_although_the_disk_is_full(tiny: Any, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "rows.jsonl")

    monkeypatch.setattr("kvcli.cli.suites.append_record", full)
    sizes = ("--seq-len", "64", "--num-sequences", "1", "--out", "rows.jsonl")
    done = result("eval", "--method", "fp16", *sizes, exit_code=1)
    assert "fp16" in done.stdout
    assert "the disk is full" in done.stderr
