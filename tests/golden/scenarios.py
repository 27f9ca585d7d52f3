"""What the golden records are of: commands with `--json`, tokens, artifacts and contexts of tiny models, all seeded.

`WRITE` writes the records again; `test_golden.py` compares what the same command writes elsewhere.
"""

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from byte_tokenizer import CHAT, byte_tokenizer
from factories import make_model
from passes import mask_of
from safetensors.torch import load_file
from typer.testing import CliRunner

import kvcli
from kvcli.cli.app import app
from kvcli.registry import METHODS, get_method
from kvcli.seam.versions import with_cache

RECORDS = Path(__file__).parent / "records"
PORTABLE = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Environment in which processors of all generations compute alike, to the last bit."""

WRITE = " ".join(["PYTHONPATH=tests:tests/support", *map("=".join, PORTABLE.items()), "python -m golden.scenarios"])
"""The command that writes the records again, or into the folder that is its argument."""

RECORDED = ("fp16", "fp8", "rtn", "kivi", "squat", "squat-pre", "qjl", "turboquant", "oscar", "kvquant", "commvq")
"""The methods that there are while records are written and compared; a new one may be added, and recorded, or not."""

VARIES = {
    # the machine, the clock and the versions that a record was made with
    *("machine", "threads", "created", "created_at", "written", "last_used", "used", "version", "versions", "commit"),
    *("program_bytes", "peak_bytes", "host_bytes", "seconds", "duration_s", "date", "device_copy_gb_s", "gb_s"),
    *("speedup", "prefill_ratio", "rate_ratio", "total_ratio", "faster_from", "share_of_ceiling"),
    # digests of what holds any of these
    *("fingerprint", "digest", "sha256", "seal", "identity", "protocol", "artifact_sha256", "samples_sha256"),
}
"""Keys whose values are replaced by their type."""

VARIES_ENDINGS = ("_s", "_ms", "_us", "_per_s", "_seconds", "_gbps")
"""The same, of keys that end so: measured times and rates."""

SMALL = ("--setting", "codebook_size=8", "--setting", "key_iterations=2", "--setting", "value_iterations=2")
FIT = {
    "commvq": ("commvq-2", SMALL),
    "kvquant": ("kvquant-2", ()),
    "oscar": ("oscar-2", ("--setting", "group_size=8")),
    "squat": ("squat-2", ("--setting", "group_size=8")),
}
"""Fitted methods, with settings that fit a tiny model in a second."""

TEXT = "".join(f"line {i} of a text that is long enough to be compressed. " for i in range(12))
QUESTION = "What does line 3 say? "
SHORT = ("--max-new-tokens", "6")
GROUPS = ("--setting", "group_size=8", "--residual-length", "16", "--sink-length", "4")


def commands() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Command lines in their order, each with the name of its record; they run in one folder."""
    calibrate = ("--corpus", "corpus.txt", "--tokens", "1024", "--seq-len", "64", "--batch-size", "4")
    calibrate += ("--query-tokens", "256", "--fisher-tokens", "256")
    yield "calibrate", ("calibrate", "model", *calibrate, "--out", "samples")
    for i in (1, 2):
        yield f"calibrate_shard_{i}", ("calibrate", "model", *calibrate, "--shard", f"{i}/2", "--out", f"shard{i}")
    yield "merge", ("merge", "shard1", "shard2", "--out", "merged")
    for name, (short, settings) in FIT.items():
        yield f"fit_{name}", ("fit", "samples", "--method", short, *settings, "--out", f"run-{name}")
        yield f"export_{name}", ("export", f"run-{name}", "--out", f"artifact-{name}")
    trained = ("--codebook-size", "8", "--num-residuals", "2", "--value-iterations", "2", "--key-iterations", "2")
    yield "train_codebook", ("train-codebook", "samples", *trained, "--out", "run-trained")
    yield "fit_subspace", ("fit-subspace", "samples", "--group-size", "8", "--out", "run-subspace")
    for name in RECORDED:
        method = get_method(name)
        artifact = ("--artifact", f"artifact-{name}") if method.needs_artifact else ("--method", name)
        grouped = "group_size" in method.config_cls.model_fields and not method.needs_artifact
        groups = ("--setting", "group_size=8") if grouped else ()
        window = ("--residual-length", "16", "--sink-length", "4") if name != "fp16" else ()
        yield f"generate_{name}", ("generate", "model", "--prompt", TEXT, *artifact, *groups, *window, *SHORT)
    kivi = ("--method", "kivi-2", *GROUPS)
    sampled = ("--temperature", "0.8", "--seed", "3", "--stats")
    yield "generate_sampled", ("generate", "model", "--prompt", TEXT, *kivi, *SHORT, *sampled)
    yield "generate_chat", ("generate", "model", "--prompt", TEXT, "--chat", *kivi, *SHORT)
    yield "compress_file", ("compress", "model", "--prompt-file", "text.txt", *kivi, "--out", "text.safetensors")
    yield "generate_file", ("generate", "model", "--context", "text.safetensors", "--prompt", QUESTION, *SHORT)
    yield "compress_store", ("compress", "model", "--prompt-file", "text.txt", *kivi, "--store", "s", "--name", "t")
    longer = ("--prompt-file", "longer.txt", "--prefill-chunk", "64", "--store", "s")
    yield "compress_reuse", ("compress", "model", *longer, *kivi)
    yield "generate_context", ("generate", "model", "--context", "t", "--store", "s", "--prompt", QUESTION, *SHORT)
    yield "generate_reuse", ("generate", "model", *longer[:2], *kivi, "--store", "s", "--reuse", *SHORT)
    yield "compress_messages", ("compress", "model", "--messages", "talk.json", *kivi, "--store", "s", "--name", "talk")
    yield "chat", ("chat", "model", "--resume", "talk", "--store", "s", *SHORT)
    yield "contexts_list", ("contexts", "list", "--store", "s")
    yield "contexts_show", ("contexts", "show", "t", "--store", "s")
    yield "contexts_verify", ("contexts", "verify", "--store", "s")
    yield "contexts_export", ("contexts", "export", "t", "--store", "s", "--out", "exported.safetensors")
    yield "contexts_import", ("contexts", "import", "exported.safetensors", "--store", "s", "--name", "back")
    yield "contexts_rm", ("contexts", "rm", "back", "--store", "s")
    yield "contexts_prune", ("contexts", "prune", "--store", "s")
    rows = ("--method", "fp16", *kivi[:-4], "--artifact", "artifact-commvq", "--residual-length", "16")
    corpus = ("--corpus", "corpus.txt", "--corpus-split", "train")
    size = ("--seq-len", "96", "--num-sequences", "4", "--batch-size", "2")
    yield "eval_kl", ("eval", "model", "--suite", "kl", *rows, *corpus, *size)
    yield "eval_layers", ("eval", "model", "--suite", "layers", *kivi[:4], *corpus, *size, "--layers", "0-1")
    needle = ("--contexts", "128", "--depths", "50", "--num-prompts", "2")
    yield "eval_needle", ("eval", "model", "--suite", "needle", *kivi[:4], *corpus, *needle)
    recall = ("--distances", "20", "--passage-words", "12", "--num-prompts", "2")
    yield "eval_recall", ("eval", "model", "--suite", "recall", *kivi[:4], *recall)
    drift = ("--prompt-tokens", "64", "--max-new-tokens", "8", "--num-prompts", "2")
    yield "eval_drift", ("eval", "model", "--suite", "drift", *kivi[:4], *corpus, *drift)
    bench = ("--method", "kivi-2", "--setting", "group_size=8", "--setting", "residual_length=16", "--repeats", "2")
    attention = ("--shape", "tiny", "--contexts", "64", "--batches", "2", "--method", "commvq-2")
    yield "bench_attention", ("bench", "--suite", "attention", *bench, *attention)
    generate = ("--prompt-tokens", "40", "--max-new-tokens", "3")
    yield "bench_generate", ("bench", "model", "--suite", "generate", *bench, *generate)
    yield "bench_contexts", ("bench", "model", "--suite", "contexts", *bench, "--prompt-tokens", "64")
    planned = ("--prompt-tokens", "400", "--max-new-tokens", "9", "--method", "kivi-2", "--setting", "group_size=8")
    yield "plan", ("plan", "model", "--device", "cpu", *planned, "--method", "commvq-2")
    yield "methods", ("methods",)
    yield "methods_kivi", ("methods", "kivi-2")
    yield "methods_bits", ("methods", "--bits", "llama-3.1-8b", "--contexts", "8192")


def plain(value: Any, key: str = "") -> Any:
    """A value of a record without what varies."""
    if key in VARIES or key.endswith(VARIES_ENDINGS):
        return f"<{type(value).__name__}>"
    if isinstance(value, dict):
        return {name: plain(inner, name) for name, inner in sorted(value.items())}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value


def prepare(folder: Path) -> None:
    """A model with a tokenizer that has a chat template, and texts."""
    model = make_model("llama", vocab_size=300, eos_token_id=2, max_position_embeddings=4096)
    model.save_pretrained(folder / "model")
    tokenizer = byte_tokenizer(CHAT)
    tokenizer.save_pretrained(folder / "model")
    (folder / "corpus.txt").write_text("\n".join(f"{TEXT} Paragraph {i * i}. " * 4 for i in range(8)))
    (folder / "text.txt").write_text(TEXT)
    (folder / "longer.txt").write_text(TEXT + "And some more that was not there before. " * 3)
    turns = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "I see."}]
    (folder / "talk.json").write_text(json.dumps(turns))


def run_commands(folder: Path) -> dict[str, Any]:
    """The records of all command lines, run in `folder`."""
    prepare(folder)
    records: dict[str, Any] = {}
    recorded = {name: METHODS[name] for name in RECORDED}
    with contextlib.chdir(folder), patch.dict(METHODS, recorded, clear=True):
        for name, words in commands():
            typed = "And line 5?\n" if words[0] == "chat" else None
            result = CliRunner().invoke(app, [*words, "--json"], input=typed)
            assert result.exit_code == 0, (name, words, result.stderr[-800:])
            assert result.stdout.startswith("{"), (name, result.stdout[:300])
            records[name] = {"command": list(words), "result": plain(json.loads(result.stdout))}
    return records


def tensor_facts(path: Path) -> dict[str, Any]:
    """Names, dtypes and shapes of a safetensors file, and a sum and a digest of each tensor."""
    facts = {}
    for name, x in load_file(path).items():
        facts[name] = {"dtype": str(x.dtype), "shape": list(x.shape), "sum": float(x.double().sum())}
        facts[name]["blake"] = hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16]
    return facts


def artifacts(folder: Path) -> dict[str, Any]:
    """What was fitted by `run_commands`: the metadata and tensors of each artifact, and digests of its files."""
    records = {}
    for name in FIT:
        path = folder / f"artifact-{name}"
        metadata, codec = plain(json.loads((path / "kvcli.json").read_text())), path / "codec.safetensors"
        content = {codec.name: codec.read_bytes(), "kvcli.json, plain": json.dumps(metadata, sort_keys=True).encode()}
        records[name] = {
            "metadata": metadata,
            "files": sorted(file.name for file in path.iterdir()),
            "tensors": tensor_facts(codec),
            "sha256_of_files": {file: hashlib.sha256(x).hexdigest() for file, x in content.items()},
        }
    return records


def tokens(folder: Path) -> dict[str, Any]:
    """Tokens of all methods on a ragged batch, by both ways of generating, and through a context file."""
    records: dict[str, Any] = {}
    generator, mask = torch.Generator().manual_seed(7), mask_of(60, 37, 51)
    ids = torch.zeros_like(mask)
    for row in range(3):
        ids[row, mask[row] == 1] = torch.randint(3, 97, (int(mask[row].sum()),), generator=generator)
    more = torch.cat((mask, torch.ones(3, 12, dtype=torch.long)), dim=1)
    for family, name in product(("llama", "qwen2"), RECORDED):
        method, model = get_method(name), make_model(family)
        if method.needs_artifact:
            continue
        with kvcli.attach(model, name, **method.example_settings) as session:
            ours = session.generate(ids, mask, sampling=kvcli.SamplingConfig(max_new_tokens=12))
            inputs = {"input_ids": ids, "attention_mask": mask, **with_cache(cache := session.new_cache())}
            theirs = model.generate(**inputs, max_new_tokens=12, do_sample=False)
            assert name == "fp16" or cache.memory().num_encoded > 0
            cache.save(folder / "tokens.safetensors")
            loaded = session.load_cache(folder / "tokens.safetensors")
            logits = model(theirs[:, -1:], attention_mask=more, **with_cache(loaded)).logits
            records[f"{family} {name}"] = {
                "session": ours.sequences.tolist(),
                "transformers": theirs[:, 60:].tolist(),
                "memory": cache.memory().to_dict(),
                "after_loading": logits[:, -1].argmax(-1).tolist(),
                "logits": logits[:, -1, :4].tolist(),
            }
    return records


GROUPS_OF_RECORDS = {"commands": run_commands, "artifacts": artifacts, "tokens": tokens}


def platform() -> str:
    """The version of PyTorch, and a digest of the processor and of what it computes: equal where floats of records are.

    Processors that compute all of this alike were seen to fit CommVQ to other last digits.
    """
    a, b = torch.randn(2, 96, 96, generator=torch.Generator().manual_seed(0)).double()
    symmetric = a @ a.T + torch.eye(96, dtype=a.dtype)
    results = [a @ b, a.exp(), b.cos(), a.softmax(-1), *torch.linalg.qr(a), *torch.linalg.eigh(symmetric)]
    results += [torch.linalg.cholesky(symmetric), torch.linalg.svdvals(a), (a.bfloat16() @ b.bfloat16()).double()]
    for x in (a.float() @ b.float(), a.float()[:3] @ b.float(), a.float().exp(), a.float().log_softmax(-1)):
        results.append(x.double())
    cpu, names = Path("/proc/cpuinfo"), ("vendor_id", "cpu family", "model", "stepping", "cache size", "flags")
    known = [x for x in (cpu.read_text().splitlines() if cpu.is_file() else ()) if x.split("\t")[0].strip() in names]
    parts = (*dict.fromkeys(x.encode() for x in known), *(x.contiguous().numpy().tobytes() for x in results))
    digest = hashlib.sha256(b"".join(parts)).hexdigest()[:12]
    return f"torch {torch.__version__.split('+')[0]}, arithmetic {digest}"


def main(folder: Path) -> None:
    """Writes all records into a folder."""
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "KVCLI_SABOTAGE" in os.environ:
        from sabotage import plugin

        plugin.pytest_sessionstart()
    with tempfile.TemporaryDirectory() as scratch:
        for group, run in GROUPS_OF_RECORDS.items():
            for name, record in run(Path(scratch)).items():
                path = folder / group / f"{name.replace(' ', '_')}.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"platform": platform(), **record}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    import interpret  # noqa: F401

    main(Path(*sys.argv[1:]) if sys.argv[1:] else RECORDS)
