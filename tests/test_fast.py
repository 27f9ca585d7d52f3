"""`pytest -m fast` stays a loop to work in."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

MAX_CASES = 800
MAX_SECONDS = 120.0
"""Of processor time, which other processes of the machine do not change: a minute on 2 cores."""


@pytest.mark.slow
def test_fast_tests_are_few_and_fast(repo_root: Path) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "fast", "-n", "0", "-p", "no:cacheprovider"],
        env=environment | {"OMP_NUM_THREADS": "1"},
        cwd=repo_root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    cases = sum(map(int, re.findall(r"(\d+) (?:passed|skipped)", done.stdout)))
    assert 300 < cases <= MAX_CASES, "take files out of tests/support/fast.py"
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    assert seconds <= MAX_SECONDS, "take files out of tests/support/fast.py"
