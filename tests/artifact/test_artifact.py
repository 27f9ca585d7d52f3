"""Artifacts come back bit for bit, and anything that is wrong with one is said in a line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from contexts_made import flip
from factories import CONFIG, make_model, record
from safetensors.torch import load_file, save_file

import kvcli
from kvcli.artifact.artifact import Artifact
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.calibrate.recording import Recording
from kvcli.errors import ArtifactError, UsageError
from kvcli.registry import get_method
from kvcli.storage.atomic import file_record
from kvcli.storage.manifest import write_sealed

WEIGHTS = "codec.safetensors"
COMMVQ = get_method("commvq")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(make_model("llama"), tmp_path_factory.mktemp("recording"))


@pytest.fixture(scope="module")
def run_folder(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    fit_recording(recording, COMMVQ, CONFIG.resolve(recording.spec), folder)
    return folder


@pytest.fixture
def folder(run_folder: Path, tmp_path: Path) -> Path:
    assemble([run_folder]).save(tmp_path / "artifact")
    return tmp_path / "artifact"


def test_round_trip_is_bit_exact(run_folder: Path, folder: Path) -> None:
    made, actual = assemble([run_folder]), Artifact.load(folder)
    assert actual.same_content(made)
    assert actual.method == "commvq"
    assert actual.metadata["provenance"]["num_tokens"] == 1024
    assert all(len(layer["key_nmse"]) == 2 for layer in actual.metadata["layers"])
    assert {path.name for path in folder.iterdir()} == {"kvcli.json", "codec.safetensors", "README.md"}
    assert "kvcli generate" in (folder / "README.md").read_text()


def set_version(folder: Path) -> None:
    metadata = json.loads((folder / "kvcli.json").read_text())
    (folder / "kvcli.json").write_text(json.dumps({**metadata, "format_version": 99}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Changes tensors and makes the digests agree, as a careless tool would."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    metadata = json.loads((folder / "kvcli.json").read_text())
    metadata["files"][WEIGHTS] = file_record(folder / WEIGHTS)
    del metadata["sha256"]
    write_sealed(folder / "kvcli.json", metadata)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda x: (x / WEIGHTS).write_bytes((x / WEIGHTS).read_bytes()[:-100]), "corrupt or truncated"),
        (lambda x: flip(x / WEIGHTS, -1), "corrupt or truncated"),
        (lambda x: (x / WEIGHTS).unlink(), "missing"),
        (lambda x: (x / "kvcli.json").write_text("{"), "damaged"),
        (set_version, "format version 99"),
        (lambda x: rewrite(x, lambda y: y["layers.1.key.codebook_scale"].view(-1)[:1].fill_(torch.nan)), "not finite"),
        (lambda x: rewrite(x, lambda y: y.pop("layers.2.value.offset")), "layer 2 .* does not fit"),
        (lambda x: rewrite(x, lambda y: y.update({"layers.3.key.codebook": torch.ones(1)})), "belongs to no layer"),
        (
            lambda x: rewrite(x, lambda y: y.update({"layers.1.value.offset": torch.zeros(3)})),
            "layer 1 .* does not fit",
        ),
    ],
)
def test_damage_is_refused_in_one_line(folder: Path, damage: Any, said: str) -> None:
    damage(folder)
    with pytest.raises(ArtifactError, match=said) as caught:
        kvcli.attach(make_model("llama"), "commvq", artifact=folder)
    assert "\n" not in str(caught.value)


def test_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(ArtifactError, match="num_layers 3 instead of 2"):
        kvcli.attach(make_model("llama", num_hidden_layers=2), "commvq", artifact=folder)
    other = make_model("llama")
    other.model.layers[2].self_attn.v_proj.weight.data[0, 0] += 1
    with pytest.raises(ArtifactError, match="weights differ"):
        kvcli.attach(other, "commvq", artifact=folder)


def test_saving_destroys_nothing(run_folder: Path, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    made = assemble([run_folder])
    with pytest.raises(ArtifactError, match="--overwrite"):
        made.save(folder)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    with pytest.raises(ArtifactError, match="not an artifact"):
        made.save(precious, overwrite=True)
    assert (precious / "thesis.txt").read_text() == "x"
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("kvcli.artifact.artifact.save_file", full)
    with pytest.raises(OSError, match="No space"):
        made.save(folder, overwrite=True)
    assert Artifact.load(folder).same_content(made)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "precious"]


def test_a_fit_resumes_and_its_layers_may_be_in_two_folders(recording: Any, run_folder: Path, tmp_path: Path) -> None:
    config, seen = CONFIG.resolve(recording.spec), []
    fit_recording(recording, COMMVQ, config, tmp_path, layers=[0, 2])
    with pytest.raises(ArtifactError, match="lacks layers 1"):
        assemble([tmp_path])
    stamp = (tmp_path / "layer-002.safetensors").stat().st_mtime_ns
    (tmp_path / "layer-000.json").unlink()  # cut off between the two files of a layer
    fit_recording(recording, COMMVQ, config, tmp_path, done=lambda layer, _, reused: seen.append((layer, reused)))
    assert seen == [(0, False), (1, False), (2, True)]
    assert (tmp_path / "layer-002.safetensors").stat().st_mtime_ns == stamp
    fit_recording(recording, COMMVQ, config, tmp_path / "other", layers=[1])
    (tmp_path / "layer-001.json").unlink()
    # resuming and sharing change no bit
    assert assemble([tmp_path, tmp_path / "other"]).same_content(assemble([run_folder]))


def test_another_configuration_is_refused(recording: Recording, run_folder: Path) -> None:
    other = CONFIG.model_copy(update={"key_iterations": 3}).resolve(recording.spec)
    before = sorted(path.name for path in run_folder.iterdir())
    with pytest.raises(ArtifactError, match=r"differs in config.key_iterations: 6 there, 3 here\); .*--overwrite"):
        fit_recording(recording, COMMVQ, other, run_folder)
    assert sorted(path.name for path in run_folder.iterdir()) == before
    with pytest.raises(UsageError, match="layers 9"):
        fit_recording(recording, COMMVQ, CONFIG.resolve(recording.spec), run_folder, layers=[9])
