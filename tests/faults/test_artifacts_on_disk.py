"""Artifacts: what is damaged, edited or of another format is said, never used."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contexts_made import flip
from folders import bytes_of, edit
from safetensors.torch import load_file, save_file

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.fit import assemble
from kvcli.calibrate.recording import Recording
from kvcli.cli import fit
from kvcli.cli.output import Output
from kvcli.errors import ArtifactError, KvcliError


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["spec"].update(num_kv_heads=-1),
        lambda values: values["spec"].update(head_dim=2**63),
        lambda values: values["spec"].update(num_layers=4000),
        lambda values: values.update(layers=[1, 2, 3]),
        lambda values: values["files"].update({"codec.safetensors": None}),
        lambda values: values.update(method=["squat"]),
    ],
)
def test_metadata_of_wrong_types_or_ranges_is_refused(copy: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit(copy / "artifact" / "kvcli.json", change, seal=True)
    with pytest.raises(ArtifactError, match=r"damaged|corrupt"):
        Artifact.load(copy / "artifact")


def test_metadata_is_compared_with_the_tensors_before_anything_is_allocated(copy: Path) -> None:
    """Fault (files): metadata that asks for huge tensors. Result: compared on the `meta` device before anything of
    their size is allocated.
    """
    sizes = {**dict.fromkeys(("num_heads", "num_kv_heads", "head_dim"), 4096), "hidden_size": 10**6}  # 256 GiB a layer
    edit(copy / "artifact" / "kvcli.json", lambda values: values["spec"].update(sizes), seal=True)
    artifact = Artifact.load(copy / "artifact")
    with pytest.raises(ArtifactError, match=r"tensor key.gram is torch.float32 \[2, 16, 16\] instead of"):
        artifact.build_codecs(artifact.config)


def test_a_fingerprint_that_cannot_be_read_and_float8_tensors_are_refused(copy: Path) -> None:
    weights, artifact = copy / "artifact" / "codec.safetensors", Artifact.load(copy / "artifact")
    for fingerprint in ("x" * len(artifact.metadata["fingerprint"]), ""):
        odd = Artifact({**artifact.metadata, "fingerprint": fingerprint}, artifact.tensors)
        with pytest.raises(ArtifactError):
            odd.check_model(odd.spec, artifact.metadata["fingerprint"])
    tensors = load_file(weights)
    tensors["layers.0.key.gram"] = tensors["layers.0.key.gram"].to(torch.float8_e4m3fn)
    with pytest.raises(ArtifactError, match="float8"):
        Artifact(artifact.metadata, tensors).save(copy / "float8")
    assert not (copy / "float8").exists()
    save_file(tensors, weights)
    with pytest.raises(ArtifactError, match="corrupt"):
        Artifact.load(copy / "artifact")


def test_an_empty_folder_and_a_link_are_exported_into_and_files_of_others_stay(copy: Path) -> None:
    """Fault: export into a folder with other files and no artifact. Result: refused, names one of the files;
    an empty folder, a link and an artifact's folder work.
    """
    artifact, target, link = assemble([copy / "run"]), copy / "empty", copy / "link"
    target.mkdir()
    link.symlink_to(target)
    artifact.save(link)
    (target / "notes.txt").write_text("mine")
    flip(target / "codec.safetensors")
    artifact.save(link, overwrite=True)
    assert link.is_symlink()
    assert Artifact.load(link).same_content(artifact)
    assert set(bytes_of(target)) == {"kvcli.json", "codec.safetensors", "README.md", "notes.txt"}


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("samples/samples.json", lambda folder: Recording(folder / "samples")),
        ("run/run.json", lambda folder: assemble([folder / "run"])),
        ("artifact/kvcli.json", lambda folder: Artifact.load(folder / "artifact")),
    ],
)
def test_an_edited_file_and_one_of_an_older_format_are_refused_in_one_line(copy: Path, name: str, read: Any) -> None:
    """Fault (files): `samples.json`, `run.json` or `kvcli.json` edited. Result: refused; with a checksum that agrees,
    refused where types, ranges or shapes contradict each other.

    Fault (files): files of an older format. Result: refused with both versions and the remedy.
    """
    path = copy / name
    before = path.read_text()
    for field in json.loads(before).keys() - {"format_version", "sha256"}:
        edit(path, lambda values, field=field: values.update({field: "edited"}))
        with pytest.raises(KvcliError, match=r"^[^\n]*changed after it was written[^\n]*$"):
            read(copy)
        path.write_text(before)
    edit(path, lambda values: (values.pop("sha256"), values.update(format_version=1)))
    with pytest.raises(KvcliError, match=r"^[^\n]*has format version 1; this kvcli reads version [^\n]*--overwrite"):
        read(copy)


def test_tensors_do_not_need_their_file_any_more(copy: Path) -> None:
    """Mapped memory of a file that is truncated would end the process (SIGBUS).

    Fault (files): a file truncated while kvcli uses its tensors. Result: nothing: tensors are copied out of the
    mapped file.
    """
    loaded, assembled = Artifact.load(copy / "artifact"), assemble([copy / "run"])
    for path in (copy / "artifact" / "codec.safetensors", *(copy / "run").glob("*.safetensors")):
        os.truncate(path, 10)
    assert loaded.same_content(assembled)


def test_the_export_command_says_what_it_verified_and_how_to_replace_what_is_damaged(copy: Path, capsys: Any) -> None:
    def export(**options: Any) -> str:
        fit.export_artifact(fit.ExportArtifactOptions(runs=[copy / "run"], out=copy / "artifact", **options), Output())
        return capsys.readouterr().err

    assert "holds this artifact already" in export()
    flip(copy / "artifact" / "codec.safetensors")
    with pytest.raises(ArtifactError, match="--overwrite"):
        Artifact.load(copy / "artifact")
    with pytest.raises(ArtifactError, match="kvcli export --overwrite"):
        export()
    assert "verified: 6 tensors" in export(overwrite=True)
    flip(copy / "run" / "layer-001.safetensors")
    with pytest.raises(ArtifactError, match="lacks layers 1"):
        export(overwrite=True)
    assert "verified" not in capsys.readouterr().err
