"""Processes that share a run: the same result as one, and one message when a rank dies."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_worker
from ranked import WAIT_S, ranks_of

from kvcli.errors import RankError, UsageError
from kvcli.storage import ranks
from kvcli.storage.ranks import packed

CALIBRATE = ("calibrate", "--corpus", "builtin", "--tokens", "1280", "--seq-len", "64", "--batch-size", "2")
CALIBRATE = (*CALIBRATE, "--query-tokens", "256", "--fisher-tokens", "320", "--layer-window", "2", "--out", "samples")
FIT = ("fit", "samples", "--method", "commvq", "--setting", "codebook_size=8", "--setting", "value_iterations=2")
FIT = (*FIT, "--setting", "key_iterations=2", "--out", "run")


def under_torchrun(folder: Path, command: tuple[str, ...], **variables: str) -> Any:
    started = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOME": str(folder),
        **variables,
    }
    options: Any = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": WAIT_S}
    return subprocess.run([*started, rank_worker.__file__, *command], check=False, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix == ".safetensors"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process records and fits."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        for command in (CALIBRATE, FIT):
            ((code, _, err),) = ranks_of(folder, command, 1)
            assert code == 0, err
    return folder


@pytest.mark.slow
def test_two_ranks_give_what_one_process_gives(alone: Path, tmp_path: Path) -> None:
    """To the last bit: a forward pass and a layer are computed by one rank, on as many threads as alone."""
    for command, folder in ((CALIBRATE, "samples"), (FIT, "run")):
        first, second = ranks_of(tmp_path, (*command, "--json"), 2)
        assert first[0] == second[0] == 0, first[2] + second[2]
        assert second[1] == second[2] == ""
        assert contents(tmp_path / folder) == contents(alone / folder)
        assert not [path for path in (tmp_path / folder).iterdir() if path.is_dir()]
    assert (tmp_path / "samples" / "samples.json").read_bytes() == (alone / "samples" / "samples.json").read_bytes()
    assert [report["layer"] for report in json.loads(first[1])["layers"]] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("dying", [0, 1])
def test_a_dead_rank_ends_the_others_and_the_run_resumes(alone: Path, tmp_path: Path, dying: int) -> None:
    """Fault (kills): a rank dies. Result: the others end with one line that names it; the same command resumes."""
    place = "kvcli.calibrate.collect:write_part"
    codes = ranks_of(tmp_path, CALIBRATE, 2, DYING_RANK=str(dying), DIE_IN=place)
    assert codes[dying][0] == -signal.SIGKILL
    code, out, err = codes[1 - dying]
    assert (code, out) == (1, "")
    which = "\nerror: rank 1" if dying else "rank 1: error: rank 0"
    assert f"{which} has ended before this one; its own message says why; run the same command again" in f"\n{err}"
    assert "Traceback" not in err
    resumed = ranks_of(tmp_path, CALIBRATE, 2)
    assert [code for code, _, _ in resumed] == [0, 0]
    assert "parts were recorded already" in resumed[0][2]
    assert contents(tmp_path / "samples") == contents(alone / "samples")


@pytest.mark.slow
def test_torchrun_starts_ranks_and_a_dead_one_ends_the_fit(alone: Path, tmp_path: Path) -> None:
    (tmp_path / "samples").symlink_to(alone / "samples")
    killed = under_torchrun(tmp_path, FIT, DYING_RANK="1", DIE_IN="kvcli.artifact.fit:_write_layer")
    assert killed.returncode != 0
    assert "Signal 9 (SIGKILL)" in killed.stderr  # of torchrun, which may end rank 0 before that has said anything
    done = under_torchrun(tmp_path, FIT)
    assert (done.returncode, done.stdout) == (0, "run\n"), done.stderr
    assert contents(tmp_path / "run") == contents(alone / "run")


def test_work_is_shared_out_evenly() -> None:
    assert packed([1.0] * 6, 3) == [[0, 3], [1, 4], [2, 5]]
    assert packed([5, 1, 1, 1, 1, 1], 2) == [[0], [1, 2, 3, 4, 5]]
    assert packed([3, 3, 2, 2, 2], 2) == [[0, 2, 4], [1, 3]]  # 7 and 5, where 6 and 6 would be best
    assert packed([1.0], 3) == [[0], [], []]
    costs = [(7 * index) % 13 + 1.0 for index in range(80)]
    shares = packed(costs, 8)
    assert sorted(index for share in shares for index in share) == list(range(80))
    loads = [sum(costs[index] for index in share) for share in shares]
    assert max(loads) < 1.05 * min(loads)


def test_a_process_alone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with ranks.join_ranks() as alone:
        assert alone == ranks.ALONE
        alone.wait()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "7")  # some platforms set it for jobs of one process
    assert ranks.environment() == ranks.ALONE


@pytest.mark.parametrize("rank", ["2/", "2/2", "2/-1", "x/0", "0/0", "2/x", "-3/0"])
def test_variables_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    count, own = rank.split("/")
    monkeypatch.setenv("WORLD_SIZE", count)
    monkeypatch.setenv("RANK", own)
    if not own:
        monkeypatch.delenv("RANK")
    with pytest.raises(UsageError, match=f"WORLD_SIZE={count}: RANK must be from 0"):
        ranks.environment()


def test_ranks_that_cannot_meet_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RankError, match=r"rank 1 cannot reach the others .*torchrun"), ranks.join_ranks():
        pass
