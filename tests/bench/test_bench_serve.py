"""`kvcli bench serve`: clients of a server, whose prompts are new, in memory and on disk."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from kvcli.bench.serve import ServeBenchOptions, _bodies
from kvcli.cli.app import app


def test_prompts_are_found_in_memory_and_on_disk(tmp_path: Path) -> None:
    shape = ("--random-weights", "tiny", "--layers", "1", "--device", "cpu", "--prompt-tokens", "300")
    small = ("--method", "kivi-2", "--setting", "group_size=8", "--setting", "residual_length=8", "--new-tokens", "3")
    done = CliRunner().invoke(
        app,
        ["bench", "serve", *shape, *small, "--clients", "1", "--clients", "3", "--json", "--out", str(tmp_path / "x")],
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.splitlines()[0])["rows"]
    assert [(row["method"], row["batch"]) for row in rows] == [
        (name, clients) for clients in (1, 3) for name in ("fp16", "kivi-2")
    ]
    for row in rows:
        assert row["status"] == "ok", row["note"]
        assert row["hot_cached"] == row["disk_cached"] > 0.8
        assert min(row[f"{state}_{x}"] for state in ("cold", "hot", "disk") for x in ("first_s", "tokens_per_s")) > 0
        assert (row["direct_first_s"] is None) == (row["batch"] > 1)
        assert (row["busy_first_s"] is None) == (row["batch"] == 1)


def test_requests_of_many_clients_are_sampled_as_the_api_allows() -> None:
    sent = [json.loads(body) for body in _bodies([[1]] * 100, ServeBenchOptions())]
    assert [x["temperature"] for x in sent[:2]] == [0, 1 / 16]
    assert max(x["temperature"] for x in sent) <= 2
    assert len({x["seed"] for x in sent}) == 100
