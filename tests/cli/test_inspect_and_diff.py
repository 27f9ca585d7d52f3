"""`kvcli inspect` and `kvcli diff`: artifacts, recordings, contexts, recipes and records of a tiny model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from console import METHOD, compressed, refused, result, says

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.artifact.recipe import Recipe
from kvcli.calibrate.parts import PARTS
from kvcli.cli.inspect import shown as lines_of
from kvcli.commands.tables import DataTable
from kvcli.contexts import ContextStore
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.registry import get_method
from kvcli.report.compare import differences
from kvcli.report.facts import of_context, sparkline
from kvcli.storage.manifest import write_sealed

EVAL = ("--setting", "group_size=8", "--residual-length", "8", "--seq-len", "64", "--num-sequences", "8")


def inspected(path: Path | str) -> dict[str, Any]:
    return dict(result("inspect", str(path), "--json"))


def differing(first: Path | str, second: Path | str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result("diff", str(first), str(second), "--json")["rows"]}


def reseal(path: Path, **changes: Any) -> None:
    """Changes fields of a sealed file, as an older version might have written them."""
    values = {**json.loads(path.read_text()), **changes}
    values.pop("sha256")
    write_sealed(path, values)


def test_an_artifact_tells_its_bits_bytes_errors_and_origin(artifact: Path) -> None:
    facts, made = inspected(artifact), Artifact.load(artifact)
    assert (facts["kind"], facts["method"]) == ("artifact", "commvq-2")
    # a cache of this artifact says the same
    sizes = ("--artifact", str(artifact), "--seq-len", "64", "--num-sequences", "1", "--residual-length", "8")
    memory = result("eval", *sizes, "--json")["rows"][-1]["memory"]
    assert [facts["bits"][x] for x in ("keys", "values")] == pytest.approx([memory["key_bits"], memory["value_bits"]])
    assert facts["bits"]["mean"] == pytest.approx(memory["true_bits"])
    parts = {name: x for name, x in facts["bytes"].items() if name not in ("all", "state of a sequence")}
    assert sum(parts.values()) == facts["bytes"]["all"] == made.nbytes
    assert facts["provenance"]["fingerprint"] == made.metadata["fingerprint"]
    assert facts["provenance"]["corpus"] == {"source": "random"}
    assert facts["settings"] == made.metadata["config"]
    books = [x for name, x in made.tensors.items() if name.endswith("key.codebook")]
    assert facts["codebooks"]["rows of key.codebook"] == sum(x[..., 0].numel() for x in books)
    dead = get_method("commvq").fit_metrics["dead_key_rows"]
    assert facts["codebooks"][dead] == sum(layer["dead_key_rows"] for layer in made.metadata["layers"])
    label = get_method("commvq").fit_metrics["key_nmse"]
    assert facts["layers"][label] == [layer["key_nmse"] for layer in made.metadata["layers"]]
    shown = result("inspect", str(artifact)).stdout
    narrow = [x.least(x.columns, 24) for x in lines_of(facts) if isinstance(x, DataTable)]
    assert max(narrow) <= 80  # of a terminal
    says(shown, "stored bits per key", "  head 1", "not recorded")
    says(shown, *f"{label} key codebook rows that no training vector uses".split())  # broken to 80 columns


def test_what_a_fit_did_not_record_is_called_so(artifact: Path) -> None:
    layers = json.loads((artifact / "kvcli.json").read_text())["layers"]
    reseal(artifact / "kvcli.json", layers=[{}, *layers[1:-1], {**layers[-1], "warnings": ["head 0 is dead"]}])
    shown = result("inspect", str(artifact)).stdout
    lines = [line for line in shown.splitlines() if "held-out error of weighted keys" in line]
    assert len(lines) == 1
    assert "not recorded" in lines[0]
    assert f"warning: layer {len(layers) - 1}: head 0 is dead" in shown


def test_a_damaged_artifact_is_not_described(artifact: Path) -> None:
    (artifact / "codec.safetensors").write_bytes(b"x")
    assert "corrupt or truncated" in refused("inspect", str(artifact), code=1)


def test_a_recording_tells_its_tokens_and_bytes_also_before_it_is_finished(recorded: Any) -> None:
    facts = inspected("recorded")
    assert (facts["kind"], facts["state"]) == ("recording", "finished")
    assert facts["tokens"]["keys and values"] == recorded.manifest.num_tokens == 1024
    of_files = sum(path.stat().st_size for path in Path("recorded").glob("*.safetensors"))
    data = sum(facts["bytes"][x] for x in ("keys and values, 16 bits", "queries, 16 bits"))
    assert data < of_files == facts["bytes"]["files so far"] < 1.1 * data
    values = json.loads(Path("recorded/samples.json").read_text())
    name, record = values["parts"].popitem()
    Path("recorded", PARTS).write_text(json.dumps({"part": name, **record}) + "\n")
    reseal(Path("recorded/samples.json"), complete=False, parts={})
    assert "goes on" in inspected("recorded")["state"]
    assert inspected("recorded")["bytes"]["files so far"] == record["bytes"]


def test_a_context_tells_the_same_in_a_file_and_in_a_store(tiny: Any) -> None:
    (row,) = compressed(*METHOD)["contexts"]
    facts = inspected("c.safetensors")
    assert (facts["kind"], facts["method"], facts["tokens"]) == ("context", "kivi-2", row["tokens"])
    assert facts["bytes"]["all"] == sum(y for x, y in facts["bytes"].items() if x not in ("all", "in fp16"))
    result("contexts", "import", "c.safetensors", "--store", "store")
    shown = result("contexts", "show", "c", "--store", "store", "--json")
    assert [shown[x] for x in ("key_bits", "value_bits")] == [facts["bits"][x] for x in ("keys", "values")]
    stored = inspected("store/c")
    assert {**stored, "path": "", "bytes": {}, "bits": {}} == {**facts, "path": "", "bytes": {}, "bits": {}}
    record = ContextStore("store").get("c").record
    unknown = record.model_copy(update={"identity": {**record.identity, "method": "of-tomorrow"}})
    assert of_context(unknown)["method"] == "of-tomorrow"
    assert "no context 'd'" in refused("inspect", "store/d", code=1)
    assert "name one of its contexts" in refused("inspect", "store")


def test_records_show_their_tables_and_commands(tiny: Any) -> None:
    result("eval", "--method", "kivi-2", *EVAL, "--out", "a.jsonl")
    (section,) = inspected("a.jsonl")["sections"]
    assert section["rows"][0]["method"] == "kivi-2"
    says(result("inspect", "a.jsonl").stdout, "kl: smollm2-135m", "$ kvcli eval kl --method kivi-2", "perplexity")
    assert "smollm2-135m, float32, corpus builtin:docs, seq-len 64" in section["notes"][0]
    with Path("a.jsonl").open("a") as file:
        file.write('\n{"suite": "kl", "met\n')
    lost = "a.jsonl: lines that are cut off or damaged were left out: 1"
    says(result("inspect", "a.jsonl").stdout, f"warning: {lost}", "kivi-2")
    assert f"warning: {lost}" in result("report", "a.jsonl", "--format", "md").stderr


def test_rows_on_the_same_text_are_compared_unit_by_unit(tiny: Any) -> None:
    rows = [
        result("eval", "--method", x, *EVAL, "--out", f"{x}.jsonl", "--json")["rows"][0] for x in ("kivi-2", "kivi-4")
    ]
    text = Path("kivi-4.jsonl").read_text()
    Path("same.jsonl").write_text(text.replace('"method": "kivi-4"', '"method": "kivi-2"'))
    found = differing("kivi-2.jsonl", "same.jsonl")
    kl = found["kl_mean"]
    assert (kl["A"], kl["B"]) == tuple(row["metrics"]["kl_mean"]["mean"] for row in rows)
    assert kl["B - A"] == pytest.approx(kl["B"] - kl["A"])
    assert kl["low"] < kl["B - A"] < kl["high"] < 0
    assert kl["real"]
    assert found["key_bits"]["B"] > found["key_bits"]["A"]
    says(result("diff", "kivi-2.jsonl", "same.jsonl").stdout, "95 % interval", "*", "key_bits")
    row = json.loads(text.replace('"method": "kivi-4"', '"method": "kivi-2"'))
    Path("other.jsonl").write_text(json.dumps({**row, "protocol": "other"}))
    assert differing("kivi-2.jsonl", "other.jsonl")["kl_mean"]["low"] is None
    del row["units"]
    Path("other.jsonl").write_text(json.dumps(row))
    assert differing("kivi-2.jsonl", "other.jsonl")["kl_mean"]["low"] is None
    alone = result("diff", "kivi-2.jsonl", "kivi-4.jsonl", "--json")
    assert [alone["rows"], *(alone[f"only in {x}"] for x in "AB")] == [
        [],
        ["kivi-2 kl smollm2-135m"],
        ["kivi-4 kl smollm2-135m"],
    ]


def test_times_of_other_contexts_are_not_compared(tiny: Any, repo_root: Path) -> None:
    lines = (repo_root / "docs" / "results" / "attention-h100.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert {json.loads(line)["context"] for line in lines} == {8192, 32768, 131072}
    Path("a.jsonl").write_text("\n".join(lines))
    Path("b.jsonl").write_text(json.dumps({**first, "p50_us": 2 * first["p50_us"]}))
    found = result("diff", "a.jsonl", "b.jsonl", "--json")
    (row,) = found["rows"]
    assert (row["row"], row["B / A"]) == ("fp16 attention llama-3.1-8b float16 8192 tokens batch 1", 2)
    assert len(found["only in A"]) == len(lines) - 1


def test_artifacts_differ_in_settings_bits_and_errors(artifact: Path, recorded: Any) -> None:
    config = CommVQConfig(bits=1, codebook_size=8, num_residuals=2, key_iterations=2, value_iterations=2)
    fit_recording(recorded, get_method("commvq"), config.resolve(recorded.spec), Path("other-fit"))
    assemble([Path("other-fit")]).save("other")
    found = differing(artifact, "other")
    assert {"method", "settings.num_residuals", "bits.keys", "bits.mean", "bytes.all"} <= found.keys()
    assert found["bits.keys"]["B / A"] == pytest.approx(found["bits.keys"]["B"] / found["bits.keys"]["A"])
    error = "layers." + get_method("commvq").fit_metrics["key_nmse"]
    assert found[error]["B"] > found[error]["A"]
    assert not [name for name in found if name.startswith("provenance")]
    shutil.copytree(artifact, "copy")
    assert differing(artifact, "copy") == {}
    assert "do not differ" in result("diff", str(artifact), "copy").stdout


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A recipe that needs no artifact."""
    measured = {"kl_mean": 0.04, "kl_low": 0.03, "kl_high": 0.05, "corpus": "builtin:docs", "commit": "0123456789ab"}
    settings = {"k_bits": [4, 2, 1], "v_bits": 2, "residual_length": 32}
    return Recipe(model="tiny", fingerprint="f:00", method="kivi", settings=settings, measured=measured)


def test_a_recipe_tells_its_model_method_bits_by_layer_and_loss(recipe: Recipe, tmp_path: Path) -> None:
    recipe.save(tmp_path / "r.yaml")
    facts = inspected(tmp_path / "r.yaml")
    assert (facts["kind"], facts["method"], facts["settings"]) == ("recipe", "kivi", recipe.settings)
    assert facts["measured"] == recipe.measured
    assert {x: facts["provenance"][x] for x in ("model", "fingerprint")} == {"model": "tiny", "fingerprint": "f:00"}
    assert "artifact" not in facts
    shown = result("inspect", str(tmp_path / "r.yaml")).stdout
    says(shown, "fingerprint", "kl_low", "0.03", "kl_high", "builtin:docs", "0123456789ab", "█▃▁", "residual_length")
    assert "[4, 2" not in shown
    recipe.model_copy(update={"settings": {"k_bits": 4, "v_bits": 4}, "measured": {}}).save(tmp_path / "plain.yaml")
    plain = inspected(tmp_path / "plain.yaml")
    assert (plain["method"], plain["measured"]) == ("kivi-4", {"commit": "not recorded"})


def test_a_recipe_tells_whether_its_artifact_is_there(recipe: Recipe, artifact: Path) -> None:
    digest = json.loads((artifact / "kvcli.json").read_text())["sha256"]
    of_artifact = {"method": "commvq", "settings": {"sink_length": 2}, "artifact_sha256": digest}
    for folder, there in ((artifact, True), (artifact / "moved", False)):
        recipe.model_copy(update={**of_artifact, "artifact": str(folder)}).save(Path("r.yaml"))
        facts = inspected("r.yaml")
        assert facts["artifact"] == {"folder": str(folder), "sha256": digest, "is there": there}
        assert facts["method"] == "commvq"  # its bits are in the artifact


def test_recipes_differ_in_bits_and_loss(recipe: Recipe, tmp_path: Path) -> None:
    recipe.save(tmp_path / "a.yaml")
    changed = {"settings": {**recipe.settings, "k_bits": 4}, "measured": {**recipe.measured, "kl_mean": 0.02}}
    recipe.model_copy(update=changed).save(tmp_path / "b.yaml")
    found = differing(tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert [*found] == ["method", "measured.kl_mean", "settings.k_bits"]
    assert found["settings.k_bits"]["A"] == pytest.approx(7 / 3)
    assert found["measured.kl_mean"]["B / A"] == pytest.approx(0.5)


def test_lists_of_one_mean_differ_all_the_same() -> None:
    (row,) = differences({"path": "a", "x": {"y": [1, 3], "z": True}}, {"path": "b", "x": {"y": [3, 1], "z": True}})
    assert row == {"name": "x.y", "A": 2, "B": 2, "B / A": 1}


def test_what_is_neither_is_refused(recorded: Any, artifact: Path) -> None:
    assert "name an artifact" in refused("inspect")
    assert "missing does not exist" in refused("inspect", "missing")
    assert "is a run of kvcli fit" in refused("inspect", "fitted")
    Path("notes.yaml").write_text("Once upon a time")
    assert "is no recipe" in refused("inspect", "notes.yaml")
    Path("empty").mkdir()
    assert "neither an artifact nor a recording" in refused("inspect", "empty")
    Path("text.txt").write_text("Once upon a time")
    assert "holds no records" in refused("inspect", "text.txt")
    assert "name two paths" in refused("diff", "recorded")
    assert "is of the kind recording" in refused("diff", "recorded", str(artifact))


def test_a_sparkline_goes_from_the_least_to_the_greatest() -> None:
    assert sparkline([0, 1, 2, 7]) == "▁▂▃█"
    assert sparkline([3, 3]) == "▁▁"
