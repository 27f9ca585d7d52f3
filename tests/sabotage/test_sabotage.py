"""Some test must turn red when a function is broken; what stays green is not tested.

All sabotages: `pytest -m sabotage tests/sabotage`. Otherwise a few, others every day.
"""

import os
import subprocess
import sys
from datetime import UTC, datetime
from importlib import import_module
from itertools import product
from operator import attrgetter
from pathlib import Path
from random import Random

import pytest

from sabotage.targets import SEEN, TARGETS

HOWS = ("raises", "differs")
SAMPLE = 4
TODAY = Random(datetime.now(UTC).date().toordinal()).sample([*product(SEEN, HOWS)], SAMPLE)


def check(target: str, how: str) -> None:
    tests = Path(__file__).resolve().parents[1]
    plugins = [word for name in ("sabotage.plugin", "no:cacheprovider", "no:benchmark") for word in ("-p", name)]
    files = [str(tests / name) for name in TARGETS[target].split()]
    path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"KVCLI_SABOTAGE": f"{target}={how}", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *plugins, "-x", "-q", "-m", "not slow and not kernels", *files]
    options = {"cwd": tests.parent, "capture_output": True, "text": True, "timeout": 540}
    done = subprocess.run(command, check=False, env=env, **options)
    said = done.stdout[-2000:] + done.stderr[-2000:]
    assert done.returncode == 1, f"nothing notices that {target} {how}\n{said}"
    assert " failed" in done.stdout or " error" in done.stdout, said


def test_targets_and_their_tests_exist() -> None:
    """What was renamed is not broken, and nobody would notice."""
    for target, names in TARGETS.items():
        module, function = target.split(":")
        assert callable(attrgetter(function)(import_module(module))), target
        for name in names.split():
            file, _, test = name.partition("::")
            path = Path(__file__).resolve().parents[1] / file
            assert f"def {test}" in path.read_text() if test else path.exists(), name


@pytest.mark.parametrize(("target", "how"), TODAY)
def test_broken_today(target: str, how: str) -> None:
    check(target, how)


@pytest.mark.sabotage
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("target", TARGETS)
def test_broken(target: str, how: str) -> None:
    check(target, how)
