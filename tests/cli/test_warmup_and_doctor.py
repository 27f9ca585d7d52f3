"""`kvcli warmup`, `kvcli doctor`, and what Triton has compiled."""

import json
from importlib.metadata import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import load, make_model
from typer.testing import CliRunner

from kvcli.artifact.choice import MethodChoice
from kvcli.attention.session import Session
from kvcli.cli import doctor
from kvcli.cli.app import app
from kvcli.cli.output import Output
from kvcli.cli.session_options import ChosenMethod
from kvcli.eval.suite import Case
from kvcli.kernels.compiling import compiled_kernels


def findings(*words: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code of `kvcli doctor --json`, and its findings by what they are of."""
    done = CliRunner().invoke(app, ["doctor", "--json", *words])
    return done.exit_code, {row["what"]: row for row in json.loads(done.stdout.splitlines()[0])["findings"]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are kernels to compile")
def test_a_warm_up_needs_a_gpu() -> None:
    done = CliRunner().invoke(app, ["warmup", "--shape", "tiny"])
    assert (done.exit_code, "for the GPU of this machine, not for device 'cpu'" in done.stderr) == (2, True)


@pytest.mark.parametrize(("words", "why"), [(["--method", "kivy"], "did you mean"), (["--batch", "0"], "greater than")])
def test_a_warm_up_refuses_before_torch(words: list[str], why: str) -> None:
    done = CliRunner().invoke(app, ["warmup", "--shape", "tiny", *words])
    assert (done.exit_code, why in done.stderr) == (2, True)


def test_commands_warm_up_what_they_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rows that they will have, with their progress; without a GPU there is nothing to compile."""
    warmed: list[tuple[Any, ...]] = []
    loaded, output = load(make_model("llama")), Output(quiet=True)

    def warm_up(self: Any, batch: int = 1, progress: Any = None, chunk: int | None = None) -> None:
        warmed.append((batch, progress, chunk))

    case = Case("kivi-2", MethodChoice("kivi", {"group_size": 4, "residual_length": 8}))
    with case.attach(loaded, output) as session:
        assert session.warmup() == []
    monkeypatch.setattr(Session, "warmup", warm_up)
    with Case("rtn", MethodChoice("rtn", {"group_size": 4})).attach(loaded, output, batch=3, chunk=32):
        pass
    with ChosenMethod(MethodChoice("rtn", {"group_size": 4})).attach(loaded, "auto", output):
        pass
    assert warmed == [(3, output.progress, 32), (1, output.progress, None)]


def test_the_doctor_finds_methods_and_packages() -> None:
    code, found = findings("-q")
    assert code == 0
    assert f"torch {torch.__version__}" in found["packages"]["detail"]
    assert {found[name]["state"] for name in ("fp16", "kivi-2", "commvq-1", "qjl", "klt-2.25")} == {"ok"}
    extras = {extra for extra in metadata("kvcli").get_all("Provides-Extra", []) if extra != "test"}
    missing = {name for name, row in found.items() if name.startswith("kvcli[") and row["state"] == "missing"}
    assert missing <= {f"kvcli[{extra}]" for extra in extras}
    assert ("GPU" in found) is not torch.cuda.is_available()


def test_a_broken_method_and_an_old_package_end_in_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, case: Any, context: int, batch: int) -> Any:
        if case.name == "qjl":
            raise RuntimeError("no such instruction")

    monkeypatch.setattr("kvcli.bench.layer.KernelCheck.agreement", broken)
    monkeypatch.setattr(doctor, "version", lambda name: "0.1" if name == "torch" else "99")
    code, found = findings()
    assert code == 1
    broken_ones = [what for what, row in found.items() if row["state"] == "broken"]
    assert broken_ones == ["torch", "transformers", "lmcache", "sglang", "vllm", "qjl"]
    assert found["qjl"]["detail"] == "RuntimeError: no such instruction"
    assert found["torch"]["detail"] == "0.1; kvcli needs torch>=2.11"
    assert found["transformers"]["detail"].startswith("99; kvcli needs transformers")


def test_a_gpu_with_kernels_and_without_a_place_for_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    size = {"total_memory": 2**30, "shared_memory_per_block_optin": 101376, "shared_memory_per_block": 49152}
    gpu = SimpleNamespace(name="GPU", major=8, minor=6, **size)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "a" / "b"))
    first, kernels = doctor._gpus()
    assert "compute capability 8.6, 99.00 KiB of shared memory per block" in first.detail
    assert kernels.state == "missing"
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    assert [finding.state for finding in doctor._gpus()] == ["ok", "broken"]


def test_only_kernels_of_kvcli_are_counted(tmp_path: Path) -> None:
    kernels = (("a", "_merge_splits_kernel", 90), ("b", "_extend_kernel", 90), ("c", "_other_kernel", 90))
    for folder, name, capability in (*kernels, ("d", "_extend_kernel", 86)):
        (tmp_path / folder).mkdir()
        text = json.dumps({"name": name, "target": {"backend": "cuda", "arch": capability}})
        (tmp_path / folder / f"{name}.json").write_text(text)
        (tmp_path / folder / f"__grp__{name}.json").write_text("{}")
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "_extend_kernel.json").write_text("[")
    found = compiled_kernels(tmp_path)
    assert found.counts == {"90": 2, "86": 1}
    assert found.nbytes == sum(file.stat().st_size for x in "abd" for file in (tmp_path / x).iterdir())
