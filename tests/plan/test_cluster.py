"""What an engine holds: as many tokens as vLLM's own blocks had, and how that divides between GPUs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from console import invoke, refused

from kvcli.artifact.choice import MethodChoice
from kvcli.errors import UsageError
from kvcli.models.shapes import shape_config
from kvcli.plan.cluster import Cluster
from kvcli.plan.memory import MethodPlan, PlannedModel

GIB = 2**30
MEASURED = {"fp16": 393216, "kivi-2": 2013184, "klt-2": 2875904, "commvq-1": 5670912, "turboquant-3": 1935360}
"""Tokens in 48 GiB of pages of 512 tokens, as vLLM 0.26 said on an H100 and an H200 (docs/engines.md)."""
ON_TWO = {"fp16": 786432, "kivi-2": 4026368, "klt-2": 5751808}
"""The same on two H200s, klt-2 with `head_groups=2`."""


def plan_of(name: str, shape: str = "llama-3.1-8b") -> MethodPlan:
    planned = PlannedModel(shape, shape_config(shape), torch.bfloat16, torch.device("cuda"))
    choice = MethodChoice(name)
    return MethodPlan(planned, name, choice.record, choice.config.resolve(planned.spec), fused=True)


@pytest.mark.parametrize("name", MEASURED)
def test_pages_hold_what_vllm_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(name)
    monkeypatch.setattr("kvcli.plan.cluster.pass_bound", lambda *args, **named: 0)
    beside = plan.planned.weights_bytes + plan.memory(1, 1).artifact_bytes
    held: Any = Cluster(1, 1, beside + 48 * GIB).holds(plan, 32768)
    assert held["tokens"] == MEASURED[name]
    assert held["requests"] <= MEASURED[name] // 32768
    for gpus in (2, 8):  # codes of fewer heads together have a norm each
        divided: Any = Cluster(3, gpus, -(-beside // gpus) + 48 * GIB).holds(plan, 32768, requests=1000)
        if gpus == 2 and name in ON_TWO:
            assert divided["tokens"] == 3 * ON_TWO[name]
        assert 0.9 * 3 * gpus <= divided["tokens"] / held["tokens"] <= 3 * gpus * 1.001
        assert (divided["nodes"] - 1) * divided["requests"] < 3 * 1000 <= divided["nodes"] * divided["requests"]


def test_what_does_not_divide_or_fit() -> None:
    plan = plan_of("kivi-2")
    assert Cluster(1, 16, 64 * GIB).holds(plan, 100)["tokens"] > Cluster(1, 8, 64 * GIB).holds(plan, 100)["tokens"]  # type: ignore[index,operator]
    with pytest.raises(UsageError, match="32 heads and 8 kv heads do not divide between 3 GPUs"):
        Cluster(1, 3, 64 * GIB).holds(plan, 100)
    assert Cluster(4, 1, 8 * GIB).holds(plan, 100, requests=5) == {"tokens": 0, "requests": 0, "nodes": None}
    assert Cluster(1, 2, 64 * GIB).holds(plan_of("squat-2"), 100) is None
    assert Cluster(1, 2, 64 * GIB).holds(plan_of("oscar"), 100) is None  # codes of a layer's heads together


def test_the_command_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("plan", "llama-3.1-70b", "--method", "kivi-2", "--method", "squat-2", "--prompt-tokens", "32K")
    sizes = ("--memory", "141GiB", "--gpus", "4", "--nodes", "2", "--requests", "100")
    record = json.loads(invoke(*words, *sizes, "--json").stdout)
    exact, kivi, squat = (row["engine"] for row in record["methods"])
    assert squat is None
    assert kivi["requests"] > 5 * exact["requests"]
    assert (exact["nodes"], kivi["nodes"]) == (3, 1)
    monkeypatch.setenv("COLUMNS", "160")
    shown = invoke(*words, "--memory", "141GiB", "--gpus", "4").stdout
    assert "tokens, requests: what an engine holds on 1 x 4 such GPUs" in " ".join(shown.split())
    assert "say what an engine may use of each GPU, such as --memory 80GiB" in refused(*words, "--gpus", "4")


def test_where_a_tier_pays_follows_from_what_was_measured(repo_root: Path) -> None:
    """And a tier of .63 GB that was restored in 3.04 s, 1.0 of it decoding, was read too slowly to beat 1.21 s."""
    methods = (x for name in ("klt-2.25", "kivi-2", "kivi-4", "qjl") for x in ("--method", name))
    words = ("plan", "llama-3.1-8b", "--memory", "80GiB", "--requests", "1", "--json", *methods)
    exact, klt, kivi, kivi4, qjl = (row["tier"] for row in json.loads(invoke(*words).stdout)["methods"])
    assert exact == {"tier_bytes": 131072, "from_MB_per_s": round(131072 * 32768 / 1.21 / 1e6)}
    assert klt["tier_bytes"] * 32768 == pytest.approx(0.63e9, rel=0.01)
    assert kivi["from_MB_per_s"] < klt["from_MB_per_s"] < exact["from_MB_per_s"]
    assert klt["from_MB_per_s"] > 630 / (3.04 - 1.0)
    assert (kivi4["tier_bytes"] > kivi["tier_bytes"], kivi4["from_MB_per_s"], qjl["tier_bytes"]) == (True, None, None)
    assert json.loads(invoke(*words, "--gpus", "2").stdout)["methods"][0]["tier"]["from_MB_per_s"] is None
    record = json.loads((repo_root / "kvcli/plan/tier.json").read_text())
    log = (repo_root / "notes/benchmarks_log.md").read_text().split(record["source"].split("'")[1])[1].split("\n## ")[0]
    times = (record["computed"]["seconds"], *(1000 * x["seconds"] for x in record["decoded"].values()))
    assert not [taken for taken in times if not re.search(rf"\b{taken:g}\b", log)]
