"""`kvcli tune`: the search for bits of each layer."""

import json
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from console import invoke, refused, result
from factories import load, make_model, record

import kvcli
from kvcli.artifact.choice import MethodChoice
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.artifact.recipe import Recipe, artifact_sha256
from kvcli.cli.tune import TuneOptions
from kvcli.commands.machine import commit
from kvcli.eval.suite import Case
from kvcli.eval.tune import Goal, path_of, tune, with_bits
from kvcli.models.load import LoadedModel
from kvcli.registry import get_method

TINY = ("--seq-len", "64", "--num-sequences", "8", "--context", "512", "--residual-length", "8", "--sink-length", "2")
KIVI = ("--method", "kivi", "--setting", "group_size=8")


def test_the_path_has_the_least_loss_for_its_bytes() -> None:
    """Against all choices: none of as few bytes loses less than one on the path."""
    generator = torch.Generator().manual_seed(0)
    curves = []
    for _ in range(4):
        losses = torch.rand(4, generator=generator).sort(descending=True).values.tolist()
        curves.append({bits: (bits * 1.5, loss) for bits, loss in zip((1, 2, 4, 8), losses, strict=True)})

    def sizes(bits: Any) -> tuple[float, float]:
        return tuple(sum(curve[x][i] for curve, x in zip(curves, bits, strict=True)) for i in (0, 1))  # type: ignore[return-value]

    path = path_of(curves)
    assert path[0] == [1, 1, 1, 1]
    assert path[-1] == [8, 8, 8, 8]
    everything = [sizes(bits) for bits in product((1, 2, 4, 8), repeat=4)]
    for bits in path:
        cost, loss = sizes(bits)
        assert loss <= min(other for spent, other in everything if spent <= cost) + 1e-12


def test_a_path_leaves_out_bits_that_are_never_worth_their_bytes() -> None:
    assert path_of([{1: (1, 1.0), 2: (2, 0.9), 4: (3, 0.0), 8: (4, 0.0)}]) == [[1], [4]]


def test_a_goal_is_the_fewest_bytes_or_the_least_loss() -> None:
    found = [(1, 0.5), (2, 0.2), (3, 0.1)]
    best = Goal(8, max_kld=0.3).best(found, lambda x: x)
    assert best == (2, 0.2)
    assert Goal(8, max_bytes=2.5).best(found, lambda x: x) == (2, 0.2)
    assert Goal(8, max_bytes=3).best(found, lambda x: x) == (3, 0.1)
    assert Goal(8, max_kld=0.3, max_bytes=1).best(found, lambda x: x) is None


def test_a_label_has_method_bits_and_what_is_said_of_both() -> None:
    base = Case(", 8 exact", MethodChoice("kivi"))
    labels = [with_bits(base, bits).label for bits in ([2, 2, 4, 4], [2, 4, 4, 4], [16, 2, 16, 16], [16, 16, 16, 2])]
    assert [x.removesuffix(", 8 exact") for x in labels] == [
        "kivi-k2v4",
        "kivi by layer, K 3.00 V 4.00",
        "kivi, keys of layer 1 alone",
        "kivi, values of layer 1 alone",
    ]
    assert all(x.endswith(", 8 exact") for x in labels)


@pytest.mark.parametrize("goal", [Goal(8, max_kld=0.1), Goal(8, max_bytes=150)])
def test_bits_by_layer_are_searched_of_the_method_that_is_best_with_the_same(goal: Goal, monkeypatch: Any) -> None:
    """By its bytes at the asked loss, or its loss at the asked bytes."""
    searched: list[str] = []
    monkeypatch.setattr("kvcli.eval.tune.by_layer", lambda base, objective: searched.append(base.choice.method) or [])

    def measure(case: Case) -> Any:
        bits = case.choice.settings["k_bits"]
        loss = {"kivi": 0.4, "rtn": 0.2, "squat": 0.3}[case.choice.method] / bits
        return SimpleNamespace(case=case, loss=loss, memory=SimpleNamespace(cache_bytes=50 * bits))

    loaded = SimpleNamespace(spec=SimpleNamespace(num_layers=2))
    objective: Any = SimpleNamespace(goal=goal, loaded=loaded, measure=measure)
    for methods in (("kivi", "rtn", "squat"), ("rtn", "squat", "kivi"), ("squat", "kivi", "rtn")):
        tune([Case("", MethodChoice(method)) for method in methods], [], objective)
    assert searched == ["rtn"] * 3


def test_the_search_writes_a_recipe_that_does_what_it_says(command_model: LoadedModel) -> None:
    rivals = {row["label"]: row for row in result("tune", *TINY, *KIVI, "--max-bits", "16", "--json")["rows"]}
    limit = rivals["kivi-2"]["kl_mean"]
    found = result("tune", *TINY, *KIVI, "--max-kld", str(limit), "--json", "--out", "made/r.yaml")
    rows = {row["label"]: row for row in found["rows"]}
    best = rows[found["best"]]
    assert best["kl_mean"] <= limit
    assert best["cache_bytes"] == min(row["cache_bytes"] for row in rows.values() if row["kl_mean"] <= limit)
    assert rows["kivi-2"]["kl_mean"] == limit
    recipe = Recipe.read("made/r.yaml")
    assert recipe.measured["kl_mean"] == best["kl_mean"]
    assert recipe.measured["commit"] == commit()
    assert recipe.measured["kl_low"] < best["kl_mean"] < recipe.measured["kl_high"]
    assert f"{best['effective_bits']:.2f}%20bits" in found["badge"]
    # the same text through the recipe: the held-out sequences are the last 8 of 10
    common = ("--seq-len", "64", "--num-sequences", "10", "--method", "kivi-2", "--json")
    row = result("eval", *common, *TINY[-4:], "--setting", "group_size=8", "--recipe", "made/r.yaml")["rows"][1]
    assert row["label"] == "r"
    kl = [unit["kl"] for unit in row["units"][2:]]
    assert sum(kl) / 8 == pytest.approx(best["kl_mean"], rel=1e-4)


def test_a_text_too_short_for_intervals_is_told(command_model: LoadedModel) -> None:
    done = invoke("tune", *TINY, *KIVI, "--num-sequences", "2", "--max-bits", "16")
    assert "warning: 128 tokens are too few for an interval: other text may lose far more" in done.stderr


def test_layers_that_lose_most_get_most_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model whose second layer has no output: its bits cost nothing."""
    from dataclasses import replace

    from byte_tokenizer import byte_tokenizer

    model = make_model("llama", vocab_size=260, max_position_embeddings=2048)
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()
    loaded = replace(load(model), tokenizer=byte_tokenizer())
    monkeypatch.setattr("kvcli.models.load.load_model", lambda name="tiny", **_: replace(loaded, name=name))
    monkeypatch.chdir(tmp_path)
    found = result("tune", *TINY, *KIVI, "--max-bits", "8", "--json", "--out", "r.yaml")
    settings = Recipe.read("r.yaml").settings
    assert found["best"].startswith("kivi by layer")
    for side in ("k_bits", "v_bits"):
        assert settings[side][1] == 1
        assert min(settings[side][0], settings[side][2]) > 1
    uniform = next(row for row in found["rows"] if row["label"] == "kivi-2")
    best = next(row for row in found["rows"] if row["label"] == found["best"])
    assert best["kl_mean"] < uniform["kl_mean"]
    assert uniform["real"]


def test_a_search_that_was_stopped_goes_on(command_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcli.attention.session import Session

    command = ("tune", *TINY, *KIVI, "--max-kld", "0.05", "--out", "r.yaml")
    first = result(*command, "--json")
    lines = Path("r.jsonl").read_text().splitlines()
    assert len({json.loads(line)["key"] for line in lines}) == len(lines)  # nothing is measured twice
    Path("r.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])
    again, opened = result(*command, "--json"), []
    assert again["rows"] == first["rows"]
    assert len(Path("r.jsonl").read_text().splitlines()) == len(lines) + 1
    opening = Session.new_cache
    monkeypatch.setattr(Session, "new_cache", lambda *x: opened.append(1) or opening(*x))
    assert result(*command, "--json")["rows"] == first["rows"]
    assert not opened
    result(*command, "--json", "--seed", "1")  # another text
    assert opened


def test_methods_are_compared_before_layers_are_searched(command_model: LoadedModel) -> None:
    done = invoke("tune", *TINY, "--setting", "group_size=8", "--max-kld", "0.05")
    assert done.exit_code == 0, done.output
    most = int(re.findall(r"at most (\d+) measurements, of", done.stderr)[0])
    numbers = [int(x) for x in re.findall(rf"^(\d+) of {most}, ", done.stderr, re.MULTILINE)]
    assert numbers == [*range(1, len(numbers) + 1)]
    assert numbers[-1] <= most
    assert "left out: " not in done.stderr
    assert "too few for an interval" not in done.stderr
    assert ", keys of layer 0 alone: " in done.stderr
    assert ", values of layer 1 alone: " in done.stderr
    records = [json.loads(line) for line in Path("runs/smollm2-135m/recipe.jsonl").read_text().splitlines()]
    searched = {x["method"] for x in records if isinstance(x["settings"].get("k_bits"), list)}
    assert len(searched) == 1
    assert {"kivi", "rtn", "squat", "turboquant"} <= {x["method"] for x in records if x["held_out"]}
    assert "nothing with bits" in done.stderr or "by layer" in done.stdout
    title = re.sub(r"\s+", " ", done.stdout.partition("┏")[0])
    assert re.search(r"; difference: to [a-z].*; \*: its 95 % interval excludes 0 $", title)


def test_what_cannot_be_reached_or_searched_is_refused(command_model: LoadedModel) -> None:
    Path("short.txt").write_text("Four words and more. " * 24)
    assert "--max-kld, --max-bits or --memory" in refused("tune")
    assert "bits are searched of rtn" in refused("tune", "--max-kld", "1", "--method", "kivi-2")
    assert "bits are searched of rtn" in refused("tune", "--max-kld", "1", "--method", "commvq")
    assert "did you mean 'kivi-2'" in refused("tune", "--max-kld", "1", "--method", "kivvi")
    assert "multiple of group_size" in refused("tune", "--max-kld", "1", "--method", "kivi", "--residual-length", "9")
    assert "the model alone needs" in refused("tune", "--memory", "100MiB", *TINY, *KIVI)
    large = refused("tune", *TINY, *KIVI, "--max-bits", "1", code=3)
    assert re.search(r"nothing reaches the goal; the smallest cache, of kivi.*, takes .* KiB, more than .* KiB", large)
    assert "the goal; least is lost by kivi" in refused("tune", *TINY, *KIVI, "--max-kld", "1e-9", code=3)
    short = refused("tune", *TINY, *KIVI, "--max-bits", "4", "--search-sequences", "8", "--corpus", "short.txt")
    assert "the text is too short: take one of 576 tokens or more, or lower --seq-len" in short
    assert "take a longer --seq-len" in refused("tune", *TINY, *KIVI, "--max-bits", "4", "--seq-len", "12")


def test_an_artifact_can_be_the_best(command_model: LoadedModel, tmp_path: Path) -> None:
    """OSCAR at 2 bits and 2 of scales; no bits of KIVI are as few with scales of 8 tokens."""
    method, samples = get_method("oscar"), record(command_model.model, tmp_path / "samples")
    config = method.config_cls(**{**method.example_settings, "group_size": 16}).resolve(samples.spec)
    fit_recording(samples, method, config, tmp_path / "run")
    assemble([tmp_path / "run"]).save(Path("fitted"))
    found = result("tune", *TINY, *KIVI, "--artifact", "fitted", "--max-bits", "4.8", "--json", "--out", "r.yaml")
    assert found["best"] == "fitted"
    recipe = Recipe.read("r.yaml")
    assert (recipe.method, recipe.artifact_sha256) == ("oscar", artifact_sha256("fitted"))
    assert recipe.settings == {"sink_length": 2, "residual_length": 8, "flush_block": 1}
    with kvcli.attach(command_model, recipe="r.yaml") as session:
        assert session.method.name == "oscar"


def test_memory_is_what_the_model_leaves_for_its_cache() -> None:
    plain = TuneOptions().max_bytes(32768, 2**30)
    few, many = (TuneOptions(memory=memory).max_bytes(32768, 2**30) for memory in ("2GiB", "3GiB"))
    assert plain == float("inf")
    assert 0 < few < 2 * 2**30
    assert many - few == pytest.approx(2**30 * 8 / 9)
    assert TuneOptions(memory="3GiB", max_bits=4).max_bytes(32768, 2**30) == 2**28


def test_bits_at_which_layers_do_not_add_up_are_left_out(command_model: LoadedModel, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvcli.eval.tune.RUINOUS", 0.0)
    result("tune", *TINY, *KIVI, "--max-bits", "16", "--json", "--out", "r.yaml")
    records = [json.loads(line)["settings"] for line in Path("r.jsonl").read_text().splitlines()]
    alone = [x for record in records for x in (record["k_bits"], record["v_bits"]) if isinstance(x, list)]
    assert len(alone) >= 6
    assert {bits for x in alone for bits in x} == {8, 16}
