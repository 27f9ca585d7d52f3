"""`kvcli calibrate --shard` and `kvcli merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from console import invoke, refused, result

OPTIONS = ("--tokens", "640", "--seq-len", "32", "--batch-size", "2", "--query-tokens", "128", "--fisher-tokens", "96")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_are_recorded_and_merged_where_the_next_command_looks(tiny: Any, tmp_path: Path) -> None:
    for index in (3, 1, 2):
        done = result("calibrate", *OPTIONS, "--shard", f"{index}/3", "--json")
        assert done["samples"] == f"runs/smollm2-135m/shards/{index}-of-3"
    record = result("merge", "--json")
    assert record == {"samples": "runs/smollm2-135m/samples", "num_tokens": 640, "layers": 3, "shards": 3}
    result("calibrate", *OPTIONS, "--out", "whole")
    assert contents(tmp_path / "whole") == contents(tmp_path / record["samples"])
    again = invoke("calibrate", *OPTIONS)
    assert "were recorded already and are reused" in again.stderr
    assert invoke("merge").stderr.splitlines()[-1] == "next: kvcli fit runs/smollm2-135m/samples"


def test_a_missing_shard_is_named(tiny: Any, tmp_path: Path) -> None:
    assert invoke("merge").stderr == "error: no shards below runs/; run 'kvcli calibrate --shard' first\n"
    done = invoke("calibrate", *OPTIONS, "--shard", "2/3", "--out", "second")
    assert "when all are, put them together with 'kvcli merge'" in done.stderr
    assert "next:" not in done.stderr
    merged = invoke("merge", "second")
    assert (merged.exit_code, merged.stderr) == (1, "error: shard 1/3, 3/3 is missing\n")
    assert "kvcli merge" in refused("fit", "second", code=1)
    assert not (tmp_path / "runs" / "smollm2-135m" / "samples").exists()


@pytest.mark.parametrize("shard", ["0/2", "3/2", "two", "1/99"])
def test_what_is_no_shard_is_refused(tiny: Any, shard: str) -> None:
    refused("calibrate", *OPTIONS, "--shard", shard)


def test_ranks_without_a_number_are_refused_by_commands_that_share_work(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert "RANK must be from 0 to WORLD_SIZE - 1" in refused("calibrate", *OPTIONS)
    result("methods")
