"""Commands on models with layers of a sliding window beside those of full attention, loaded from folders."""

from pathlib import Path
from urllib.parse import unquote

import pytest
from byte_tokenizer import CHAT, byte_tokenizer
from console import result, says
from families import make

from kvcli.artifact.artifact import Artifact

STATES = 3 * (4 * 128 * 2 + 4 * 16 * 16 * 4)
"""Bytes of 3 linear layers of qwen3_5_text: 4 tokens of a convolution in 16 bits, states of 4 heads in float32."""


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


@pytest.mark.parametrize("hybrid", ["qwen3_5_text"], indirect=True)
def test_the_line_for_a_card_counts_the_caches_of_all_layers(hybrid: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("word " * 600)
    text = ("--corpus", str(tmp_path / "text.txt"), "--seq-len", "64", "--num-sequences", "8", "--context", "512")
    words = ("--method", "kivi", "--setting", "group_size=8", "--residual-length", "8", "--max-bits", "16")
    found = result("tune", str(hybrid), *text, *words, "--json", "--out", str(tmp_path / "r.yaml"))
    best = next(row for row in found["rows"] if row["label"] == found["best"])
    fp16 = 512 * 2 * 2 * 16 * 2  # keys and values of 2 heads of 16 channels, in 16 bits
    whole = (fp16 + STATES) / (best["cache_bytes"] + STATES)
    said = f"1 of 4 layers, whole cache 1/{whole:.2f} of 16 bits at 512 tokens"
    assert f" bits in {said}, KL " in unquote(found["badge"])
    assert result("inspect", str(tmp_path / "r.yaml"), "--json")["measured"]["compressed"] == said


SHAPES = [("llama", 4, 0), ("gemma3_text", 2, 2 * 7 * 2 * 2 * 16 * 2), ("qwen3_5_text", 1, STATES)]


@pytest.mark.parametrize(("hybrid", "layers", "others"), SHAPES, indirect=["hybrid"])
def test_recordings_artifacts_and_cards_say_what_the_whole_cache_shrinks_by(
    hybrid: Path, layers: int, others: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is not known, which is then not said."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("word " * 600)
    budgets = ("--tokens", "1024", "--seq-len", "64", "--query-tokens", "64", "--fisher-tokens", "64")
    recorded = result("calibrate", str(hybrid), "--corpus", "text.txt", *budgets, "--out", "samples").stderr
    fp16, coverage = 32768 * layers * 2 * 2 * 16 * 2, f"{layers} of 4 layers" if others else "all 4 layers"
    whole = f", with {100 * fp16 / (fp16 + others):.0f} % of an uncompressed cache of 32768 tokens" * bool(others)
    of_recording = f"{coverage}, those that attend to the whole context{whole}"
    says(recorded, f"recorded {of_recording}\n")
    assert result("inspect", "samples", "--json")["recorded"] == of_recording
    artifact = Path(result("fit", "samples", "--method", "klt-2").stdout.strip())
    facts = result("inspect", str(artifact), "--json")
    ours = fp16 * facts["bits"]["all of 32768 tokens"] / 16
    said = f"{coverage}, whole cache 1/{(fp16 + others) / (ours + others):.2f} of 16 bits at 32768 tokens"
    assert facts["compressed"] == said
    says(result("inspect", str(artifact)).stdout, *said.split())  # broken to 80 columns, not cut
    says((artifact / "README.md").read_text(), f"| compressed | {said} |\n")
    made = Artifact.load(artifact)
    for record in ({}, {"other_layers": {"tokens": 32768, "bytes": "many"}}):
        Artifact({**made.metadata, "provenance": record}, made.tensors).save(artifact, overwrite=True)
        assert result("inspect", str(artifact), "--json")["compressed"] == (coverage if others else said)
