"""`kvcli eval`: which methods and artifacts are measured."""

from pathlib import Path
from typing import Any

import pytest
from console import invoke, result

from kvcli.artifact.artifact import Artifact
from kvcli.calibrate.corpus import CorpusConfig
from kvcli.errors import ArtifactError
from kvcli.eval.suite import EvalOptions, choose_cases


@pytest.fixture
def elsewhere(tiny: Any, artifact: Path) -> Path:
    """An artifact that is not where commands look for it."""
    return artifact.rename(artifact.parents[2] / "elsewhere")


def chosen(options: EvalOptions) -> list[tuple[str, Path | None]]:
    return [(case.choice.method, case.choice.folder) for case in choose_cases(options)]


def test_a_fitted_method_takes_the_artifact_given_for_it_if_it_has_its_bits(elsewhere: Path) -> None:
    for name in ("commvq", "commvq-2"):
        options = EvalOptions(method=["kivi-2", name], artifact=[elsewhere])
        assert chosen(options) == [("kivi-2", None), ("commvq", elsewhere)]
    with pytest.raises(ArtifactError, match="no commvq-1 artifact"):
        choose_cases(EvalOptions(method=["commvq-1"], artifact=[elsewhere]))


def test_by_default_fitted_methods_are_measured_if_they_have_an_artifact(tiny: Any, artifact: Path) -> None:
    assert chosen(EvalOptions()) == [("fp16", None), ("commvq", artifact.relative_to(Path.cwd()))]
    artifact.rename(artifact.parents[2] / "elsewhere")
    assert chosen(EvalOptions()) == [("fp16", None)]


def test_a_method_with_bits_and_its_artifact_give_one_row(elsewhere: Path) -> None:
    sizes = ("--seq-len", "64", "--num-sequences", "1", "--residual-length", "8")
    (row,) = result("eval", "--method", "commvq-2", "--artifact", str(elsewhere), *sizes, "--json")["rows"]
    assert (row["method"], row["artifact"], row["label"]) == ("commvq-2", str(elsewhere), "elsewhere")
    assert row["memory"]["num_encoded"] > 0


@pytest.mark.parametrize(("split", "warned"), [("calibration", True), ("heldout", False)])
def test_a_loss_on_the_fitted_text_is_told(elsewhere: Path, split: str, warned: bool) -> None:
    made = Artifact.load(elsewhere)
    made.metadata["provenance"]["corpus"] = CorpusConfig().provenance()
    made.save(elsewhere, overwrite=True)
    sizes = ("--seq-len", "64", "--num-sequences", "1", "--residual-length", "8", "--corpus-split", split)
    for command in (("eval", "--method", "fp16"), ("tune", "--method", "rtn", "--max-bits", "16", "--context", "99")):
        said = result(*command, "--artifact", str(elsewhere), *sizes).stderr
        assert ("warning: elsewhere was fitted to text of this corpus" in said) == warned
        assert said.count("was fitted") == warned


def test_a_damaged_artifact_is_refused_before_anything_is_measured(elsewhere: Path) -> None:
    content = bytearray((elsewhere / "codec.safetensors").read_bytes())
    content[-1] ^= 1
    (elsewhere / "codec.safetensors").write_bytes(content)
    done = invoke("eval", "--method", "kivi-2", "--artifact", str(elsewhere), "--seq-len", "64", "--num-sequences", "1")
    assert done.exit_code == 1
    assert "is corrupt or truncated" in done.stderr
    assert "uncompressed" not in done.stderr
