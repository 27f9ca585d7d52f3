"""`kvcli recommend`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from console import refused, result, says

from kvcli.cli import plan
from kvcli.commands.sizes import size
from kvcli.models.shapes import shape_config
from kvcli.plan import memory
from kvcli.registry import make_config, method_name, parse_name

MODEL_CONFIG = memory.model_config
SHIPPED = plan.LOSSES
TABLES = {table["model"]: table for table in json.loads(SHIPPED.read_text())}


@pytest.fixture(autouse=True)
def _measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of the tiny model and of another one, as they are of real ones; every model has tiny shapes."""
    monkeypatch.setattr(memory, "model_config", lambda name, *_: shape_config("tiny"))
    about = {"text": "essays", "tokens": 99, "window": "the first 4", "scale": "kivi-2"}
    kl = {"kivi-2": 0.2, "kivi-4": 0.01, "klt-2": 0.05}
    tables = [{"model": "large", **about, "kl": {**kl, "kivi-2": 0.04}}, {"model": "tiny", **about, "kl": kl}]
    monkeypatch.setattr(plan, "LOSSES", tmp_path / "losses.json")
    (tmp_path / "losses.json").write_text(json.dumps(tables))


SHARED = ("--device", "cpu", "--prompt-tokens", "600", "--setting", "group_size=8")


def recommended(*words: str, model: str = "tiny") -> dict[str, Any]:
    return dict(result("recommend", model, *SHARED, "--json", *words))


def names(record: dict[str, Any]) -> list[str]:
    return [row["method"] for row in record["methods"]]


def test_a_model_that_was_measured_has_its_own_losses() -> None:
    made = recommended("--memory", "100GiB")
    assert names(made) == ["fp16", "kivi-4", "klt-2", "kivi-2"]
    assert [row["kl"] for row in made["methods"]] == [{"tiny": x} for x in (0.0, 0.01, 0.05, 0.2)]
    assert made["recommended"] == "fp16"
    assert made["measured"] == ["tiny (99 tokens of essays, the first 4 in full precision)"]


def test_what_does_not_fit_is_last_and_the_least_loss_of_what_fits_is_recommended() -> None:
    words = ("--device", "cuda", "--prefill-chunk", "1")  # where the peak is that of the cache
    peaks = {row["method"]: row["peak_bytes"] for row in recommended("--memory", "100GiB", *words)["methods"]}
    assert peaks["kivi-2"] < peaks["kivi-4"] < peaks["fp16"]
    for limit, best in ((peaks["fp16"], "fp16"), (peaks["fp16"] - 1, "kivi-4"), (peaks["kivi-2"] - 1, None)):
        made = recommended("--memory", f"{limit}B", "--method", "kivi-2", "--method", "kivi-4", *words)
        assert made["recommended"] == best
        assert [row["fits"] for row in made["methods"]] == sorted((x["fits"] for x in made["methods"]), reverse=True)
        assert all(row["fits"] == (row["peak_bytes"] <= limit) for row in made["methods"])


def test_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "model_config", lambda name, *_: shape_config("smollm2-135m"))
    words = ("recommend", "tiny", "--device", "cuda", "--prompt-tokens", "64K", "--memory", "1TiB", "--json")
    chunks = ((), ("--prefill-chunk", "4K"), ("--prefill-chunk", "64K"))
    default, parts, whole = (result(*words, *chunk)["methods"] for chunk in chunks)
    assert default == parts
    assert min(x["peak_bytes"] for x in parts) < min(x["peak_bytes"] for x in whole)


@pytest.mark.parametrize("model", ["llama-3.1-8b", *TABLES])
def test_the_losses_that_are_shipped_are_in_80_columns(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no terminal, too, in one table; the models of the losses are in its title."""
    monkeypatch.setattr(memory, "model_config", MODEL_CONFIG)
    monkeypatch.setattr(plan, "LOSSES", SHIPPED)
    shown = result("recommend", model, "--memory", "24GiB", "--prompt-tokens", "64K", "--batch", "8").stdout
    assert max(map(len, shown.splitlines())) <= 80
    of = dict(re.findall(r"(\(\d\)) ([\w.-]+\w)", " ".join(shown.split())))
    cells = [[x.strip() for x in line.split("│")][1:4] for line in shown.splitlines() if line.startswith("│")]
    own = [x for x in TABLES if model in (x, "llama-3.1-8b")]
    assert {name for name, *_ in cells} == {"fp16", *(name for x in own for name in TABLES[x]["kl"])}
    for name, loss, place in cells:
        kl = TABLES[of[place]]["kl"]
        assert loss == f"{kl.get(name, 0) / kl['kivi-2']:.3f}"


def test_losses_of_other_models_are_said_to_be_theirs() -> None:
    done = result("recommend", "org/unknown", *SHARED, "--memory", "100GiB")
    says(" ".join(done.stdout.split()), "losses measured on (1) large, (2) tiny", "0.250")
    says(done.stderr, "nothing was measured on org/unknown", "kivi-2's, measured on large (99 tokens of essays")
    assert names(recommended("--memory", "100GiB", model="org/unknown")) == ["fp16", "kivi-4", "kivi-2", "klt-2"]


def test_losses_of_several_models_are_on_one_scale() -> None:
    """A method of one of them stands where its share of kivi-2's loss there puts it."""
    tables = json.loads(plan.LOSSES.read_text())
    tables[1]["kl"]["rtn-4"] = 0.1  # half of kivi-2's 0.2, and more than its 0.04 on the other model
    plan.LOSSES.write_text(json.dumps(tables))
    made = recommended("--memory", "100GiB", model="org/unknown")["methods"]
    assert [row["method"] for row in made] == ["fp16", "kivi-4", "rtn-4", "kivi-2", "klt-2"]
    assert [row["loss"] for row in made] == pytest.approx([0, 0.25, 0.5, 1, 1.25])
    assert [row["measured_on"] for row in made] == ["large", "large", "tiny", "large", "large"]


def test_the_commands_that_measure_it() -> None:
    """The last line, which a long table leaves on the screen."""

    def said(model: str) -> str:
        peaks = {row["method"]: row["peak_bytes"] for row in recommended(*words, "--memory", "1GiB")["methods"]}
        made = result("recommend", model, *SHARED, *words, "--memory", f"{peaks['fp16'] - 1}B")
        return str(made.output.splitlines()[-1])

    words = ("--device", "cuda", "--prefill-chunk", "1", "--method", "klt-2", "--method", "rtn-4")
    fitted, measured = ("'kvcli generate org/tiny --method klt-2 --fit'", "'kvcli eval org/tiny --method klt-2'")
    assert f"klt-2 is known to lose least; {fitted} and {measured} would measure it" in said("org/tiny")
    assert "least; 'kvcli generate MODEL --method klt-2 --fit' and" in said("tiny")  # shapes that nothing can load
    folder = Path("runs/tiny/klt-2")
    folder.mkdir(parents=True)
    (folder / "kvcli.json").write_text('{"method": "klt", "config": {"bits": 2}}')
    assert f"known to lose least; {measured} would measure it" in said("org/tiny")


def test_methods_that_were_not_measured_are_last_and_never_recommended() -> None:
    made = recommended("--memory", "100GiB", "--method", "rtn-4", "--method", "kivi-2")
    assert names(made) == ["fp16", "kivi-2", "rtn-4"]
    assert made["methods"][-1]["kl"] == {"tiny": None}


def test_the_memory_is_that_of_a_gpu_unless_another_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, too: a model is loaded in 16 bits there."""
    words = ("recommend", "tiny", "--memory", "100GiB", "--prompt-tokens", "600", "--json", "--setting", "group_size=8")
    plain, gpu, cpu = (result(*words, *x) for x in ((), ("--device", "cuda"), ("--device", "cpu")))
    assert plain == gpu
    assert cpu["weights_bytes"] == 2 * plain["weights_bytes"]
    assert cpu["methods"][0]["cache_bytes"] > plain["methods"][0]["cache_bytes"]
    weights = f"tiny, bfloat16 on cuda: weights {size(plain['weights_bytes'])}"
    says(result(*words[:4]).stderr, f"{weights}\n")
    monkeypatch.setattr(memory.PlannedModel, "quantized", "gptq")
    says(result(*words[:4]).stderr, f"{weights}; those of the checkpoint (gptq) and peaks are smaller")


def test_a_name_that_the_hub_does_not_have_here_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "model_config", MODEL_CONFIG)
    monkeypatch.setattr("kvcli.models.hub._reach", lambda name, revision: (revision, True))
    assert "cannot load model 'org/none'" in refused("recommend", "org/none", "--memory", "1GiB", code=1)


def test_no_memory_and_no_number() -> None:
    assert "--memory 24GiB" in refused("recommend", "tiny")
    assert "no whole number, such as 8192 or 8K (got '9x')" in refused("recommend", "--prompt-tokens", "9x")


@pytest.mark.parametrize("model", TABLES)
def test_known_losses_are_those_of_records(model: str, repo_root: Path) -> None:
    path = next((repo_root / "docs" / "results").glob(f"quality-{model}*.jsonl"))
    corpus = TABLES[model]["text"].removeprefix("builtin:")
    path = path if model == "smollm2-135m" else path.with_name(f"quality-{model}-{corpus}.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for method, kl in TABLES[model]["kl"].items():
        name, settings = parse_name(method)
        make_config(name, settings)
        assert method_name(name, settings) == method
        assert kl in [round(row["kl_mean"], 6) for row in rows if row["method"] == method]
    shipped = repo_root / "kvcli" / "fitted" / model
    assert {path.name for path in shipped.iterdir()} <= TABLES[model]["kl"].keys()
