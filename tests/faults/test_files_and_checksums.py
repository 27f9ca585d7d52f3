"""Files of recordings, runs and artifacts: what is damaged, changed, locked or too large is said, never used."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import load, make_model
from folders import SEQUENCES, SETTINGS, SIZES, bytes_of, edit, fitted, flip, make, recorded, swap
from safetensors.torch import load_file, save_file

from kvcli.artifact import Artifact
from kvcli.calibrate import collection as collecting
from kvcli.calibrate.collect import CollectConfig, collect
from kvcli.cli.export import ExportOptions, run
from kvcli.cli.fit import parse_layers
from kvcli.cli.output import Output
from kvcli.errors import ArtifactError, KvcliError, SamplesError, UsageError
from kvcli.files import append_record, locked, read_records, replacing, write_sealed
from kvcli.fit import assemble, fit_recording
from kvcli.registry import get_method
from kvcli.samples import Recording

PART = "window-000-part-00001.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    for name in ("samples", "run", "artifact"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


# --- recordings


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(folder / PART),
        lambda folder: (folder / PART).write_bytes(b""),
        lambda folder: (folder / PART).unlink(),
        lambda folder: swap(folder / PART, folder / PART.replace("part-00001", "part-00000")),
    ],
)
def test_a_damaged_part_is_named_and_recorded_again(copy: Path, damage: Callable[[Path], Any]) -> None:
    before = bytes_of(copy / "samples")
    damage(copy / "samples")
    with pytest.raises(SamplesError, match=r"part-0000.\.safetensors is (damaged|missing).*; record it again"):
        [Recording(copy / "samples").load(layer) for layer in (0, 1)]
    recorded(copy / "samples")
    assert bytes_of(copy / "samples") == before


@pytest.mark.parametrize("name", ["seq_len", "windows", "spec", "num_parts", "rope", "token_ids_sha256"])
def test_an_edited_manifest_is_refused(copy: Path, name: str) -> None:
    edit(copy / "samples" / "samples.json", lambda values: values.update({name: 1}))
    with pytest.raises(SamplesError, match="changed after it was written"):
        Recording(copy / "samples")


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["windows"][0].__setitem__(1, 10**18),
        lambda values: values.update(num_parts=10**15),
        lambda values: values["spec"].update(num_layers=10**9),
        lambda values: values["rope"].update(inv_freq=[0.0] * 3),
        lambda values: values.update(spec=None),
        lambda values: values.update(parts=[]),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(copy: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit(copy / "samples" / "samples.json", change, seal=True)
    with pytest.raises(SamplesError, match=r"samples.json is damaged \("):
        Recording(copy / "samples")


def test_another_text_is_refused_also_by_a_recording_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, run = [], collecting._run

    def cut_off(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        run(*arguments)

    monkeypatch.setattr(collecting, "_run", cut_off)
    with pytest.raises(KeyboardInterrupt):
        recorded(tmp_path)
    other = SEQUENCES.clone()
    other[-1, -1] += 1
    with pytest.raises(SamplesError, match=r"differs in token_ids_sha256: .*--overwrite"):
        recorded(tmp_path, other)
    recorded(tmp_path)
    with pytest.raises(SamplesError, match="token_ids_sha256"):
        recorded(tmp_path, other)


def test_overwrite_records_again_with_equal_settings(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, run = [], collecting._run
    monkeypatch.setattr(collecting, "_run", lambda *arguments: (calls.append(1), run(*arguments)))
    (copy / "samples" / "notes.txt").write_text("mine")
    recorded(copy / "samples")
    assert not calls
    recorded(copy / "samples", overwrite=True)
    assert len(calls) == 6
    assert (copy / "samples" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("value", "said"),
    [(float("nan"), "layer 1 are not finite"), (1e5, r"layer 1 reach .*more than torch.float16 holds.*bfloat16")],
)
def test_values_that_cannot_be_recorded_are_refused(tmp_path: Path, value: float, said: str) -> None:
    model = make_model("llama")
    model.model.layers[1].self_attn.v_proj.weight.data.fill_(value)
    with pytest.raises(SamplesError, match=f"the values of {said}"):
        collect(load(model), SEQUENCES, SIZES, tmp_path, {})


def test_free_space_is_compared_before_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30, 2**10))
    with pytest.raises(SamplesError, match=r"needs 1 MiB, but .* has 0 MiB free"):
        recorded(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_recording_without_queries_says_so(tmp_path: Path) -> None:
    recording = collect(load(make_model("llama")), SEQUENCES, CollectConfig(6, 24, 0, 2), tmp_path, {})
    with pytest.raises(SamplesError, match="no queries"):
        recording.load(0)


# --- runs


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: flip(run / "layer-001.safetensors"),
        lambda run: (run / "layer-001.safetensors").write_bytes(b""),
        lambda run: shutil.copy(run / "layer-002.safetensors", run / "layer-001.safetensors"),
        lambda run: [shutil.copy(run / f"layer-002.{x}", run / f"layer-001.{x}") for x in ("safetensors", "json")],
        lambda run: (run / "layer-001.json").write_text("{}"),
        lambda run: (run / "layer-001.json").write_text("[]"),
        lambda run: edit(run / "layer-001.json", lambda values: values["metrics"].update(subspace_energy=[1.0])),
    ],
)
def test_a_damaged_layer_is_named_and_fitted_again(copy: Path, damage: Callable[[Path], Any]) -> None:
    whole = assemble([copy / "run"])
    damage(copy / "run")
    with pytest.raises(ArtifactError, match=r"lacks layers 1 \(missing or damaged\)"):
        assemble([copy / "run"])
    seen = []
    fitted(copy / "run", Recording(copy / "samples"), done=lambda layer, _, reused: seen.append((layer, reused)))
    assert seen == [(0, True), (1, False), (2, True)]
    assert assemble([copy / "run"]).same_content(whole)


def test_a_layer_of_another_run_is_not_reused(copy: Path) -> None:
    recording, seen = Recording(copy / "samples"), []
    fitted(copy / "other", recording, seed=1)
    for suffix in ("json", "safetensors"):
        shutil.copy(copy / "other" / f"layer-001.{suffix}", copy / "run")
    fitted(copy / "run", recording, done=lambda _, __, reused: seen.append(reused))
    assert seen == [True, False, True]


def test_overwrite_fits_again_with_equal_settings(copy: Path) -> None:
    seen: list[bool] = []
    (copy / "run" / "layer-notes.json").write_text("mine")
    fitted(copy / "run", Recording(copy / "samples"), overwrite=True, done=lambda _, __, reused: seen.append(reused))
    assert seen == [False, False, False]
    assert (copy / "run" / "layer-notes.json").read_text() == "mine"


def test_an_edited_run_is_refused(copy: Path) -> None:
    edit(copy / "run" / "run.json", lambda values: values["config"].update(group_size=16))
    with pytest.raises(ArtifactError, match="changed after it was written"):
        assemble([copy / "run"])


def test_only_recorded_layers_are_fitted_and_some_tokens_must_be_no_sinks(copy: Path) -> None:
    assert parse_layers("1-2", [0, 1, 2]) == [1, 2]
    for text in ("0-99999999999", "7"):
        with pytest.raises(UsageError, match="only layers 0-2 were recorded"):
            parse_layers(text, [0, 1, 2])
    recording, method = Recording(copy / "samples"), get_method("squat")
    config = method.config_cls(**{**method.example_settings, **SETTINGS, "sink_length": 24}).resolve(recording.spec)
    with pytest.raises(UsageError, match="sink_length 24 leaves nothing"):
        fit_recording(recording, method, config, copy / "sinks")


# --- artifacts


@pytest.mark.parametrize("field", ["config", "spec", "layers", "provenance", "fingerprint", "files", "kvcli_version"])
def test_an_edited_kvcli_json_is_refused(copy: Path, field: str) -> None:
    edit(copy / "artifact" / "kvcli.json", lambda values: values.update({field: None}))
    with pytest.raises(ArtifactError, match="changed after it was written"):
        Artifact.load(copy / "artifact")


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
    def enlarge(values: dict[str, Any]) -> None:
        values["spec"].update(num_heads=4096, num_kv_heads=4096, head_dim=4096, hidden_size=10**6)  # 256 GiB a layer

    edit(copy / "artifact" / "kvcli.json", enlarge, seal=True)
    artifact = Artifact.load(copy / "artifact")
    with pytest.raises(ArtifactError, match=r"tensor key.gram is torch.float32 \[2, 16, 16\] instead of"):
        artifact.build_codecs(artifact.config)


def test_a_fingerprint_that_cannot_be_read_is_refused(copy: Path) -> None:
    artifact = Artifact.load(copy / "artifact")
    for fingerprint in ("x" * len(artifact.metadata["fingerprint"]), ""):
        odd = Artifact({**artifact.metadata, "fingerprint": fingerprint}, artifact.tensors)
        with pytest.raises(ArtifactError):
            odd.check_model(odd.spec, artifact.metadata["fingerprint"], "squat")


def test_float8_tensors_are_read(copy: Path) -> None:
    weights = copy / "artifact" / "codec.safetensors"
    tensors = load_file(weights)
    artifact = Artifact.load(copy / "artifact")
    tensors["layers.0.key.gram"] = tensors["layers.0.key.gram"].to(torch.float8_e4m3fn)
    with pytest.raises(ArtifactError, match="float8"):
        Artifact(artifact.metadata, tensors).save(copy / "float8")
    assert not (copy / "float8").exists()
    save_file(tensors, weights)
    with pytest.raises(ArtifactError, match="corrupt"):
        Artifact.load(copy / "artifact")


def test_two_exports_are_equal_byte_for_byte(copy: Path) -> None:
    fitted(copy / "again", Recording(copy / "samples"))
    assemble([copy / "again"]).save(copy / "second")
    assert bytes_of(copy / "second") == bytes_of(copy / "artifact")
    assert "seconds" not in (copy / "second" / "kvcli.json").read_text()


def test_an_empty_folder_and_a_link_are_exported_into_and_files_of_others_stay(copy: Path) -> None:
    artifact, target, link = assemble([copy / "run"]), copy / "empty", copy / "link"
    target.mkdir()
    link.symlink_to(target)
    artifact.save(link)
    (target / "notes.txt").write_text("mine")
    artifact.save(link, overwrite=True)
    assert link.is_symlink()
    assert Artifact.load(link).same_content(artifact)
    assert set(bytes_of(target)) == {"kvcli.json", "codec.safetensors", "README.md", "notes.txt"}


def test_a_damaged_artifact_at_the_target_is_replaced_with_overwrite(copy: Path) -> None:
    artifact = assemble([copy / "run"])
    flip(copy / "artifact" / "codec.safetensors")
    with pytest.raises(ArtifactError, match="--overwrite"):
        Artifact.load(copy / "artifact")
    artifact.save(copy / "artifact", overwrite=True)
    assert Artifact.load(copy / "artifact").same_content(artifact)


def test_older_formats_are_refused_in_one_line(copy: Path) -> None:
    for path, read in (
        (copy / "samples" / "samples.json", lambda: Recording(copy / "samples")),
        (copy / "run" / "run.json", lambda: assemble([copy / "run"])),
        (copy / "artifact" / "kvcli.json", lambda: Artifact.load(copy / "artifact")),
    ):
        edit(path, lambda values: (values.pop("sha256"), values.update(format_version=1)))
        with pytest.raises(KvcliError, match=r"has format version 1; this kvcli reads version .*--overwrite") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_tensors_do_not_need_their_file_any_more(copy: Path) -> None:
    """Mapped memory of a file that is truncated would end the process (SIGBUS)."""
    loaded, assembled = Artifact.load(copy / "artifact"), assemble([copy / "run"])
    for path in (copy / "artifact" / "codec.safetensors", *(copy / "run").glob("*.safetensors")):
        os.truncate(path, 10)
    assert loaded.same_content(assembled)


# --- locks and failed writes


def test_a_folder_has_one_writer(copy: Path) -> None:
    recording, artifact = Recording(copy / "samples"), assemble([copy / "run"])
    with locked(copy / "samples", SamplesError), pytest.raises(SamplesError, match="another kvcli process writes"):
        recorded(copy / "samples")
    with locked(copy / "run", ArtifactError), pytest.raises(ArtifactError, match="another kvcli process writes"):
        fitted(copy / "run", recording)
    with locked(copy / "artifact", ArtifactError), pytest.raises(ArtifactError, match="another kvcli process writes"):
        artifact.save(copy / "artifact", overwrite=True)


@pytest.fixture
def _small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("_small_files")
def test_a_write_that_fails_names_its_file(tmp_path: Path) -> None:
    big = {"x": torch.zeros(2000)}
    with (
        pytest.raises(OSError, match=r"File too large: '.*a.safetensors'"),
        replacing(tmp_path / "a.safetensors") as path,
    ):
        save_file(big, path)
    with pytest.raises(OSError, match=r"File too large: '.*b.json'"):
        write_sealed(tmp_path / "b.json", {"x": "y" * 2000})
    with pytest.raises(OSError, match=r"File too large: '.*c.jsonl'"):
        append_record(tmp_path / "c.jsonl", {"x": "y" * 2000})
    assert not list(tmp_path.glob("*.tmp"))


def test_content_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    fsync, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("fsync"), fsync(handle)))
    monkeypatch.setattr(Path, "replace", lambda self, target: (events.append("rename"), rename(self, target)))
    write_sealed(tmp_path / "a.json", {})
    assert events == ["fsync", "rename", "fsync"]


def test_records_that_a_kill_cut_off_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_record(path, {"a": 1})
    with path.open("ab") as handle:
        handle.write(b'{"a": \xff')
    append_record(path, {"a": 2})
    assert read_records(path) == [{"a": 1}, {"a": 2}]


def test_the_export_command_says_what_it_verified_and_how_to_replace_what_is_damaged(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(**options: Any) -> str:
        run(ExportOptions(runs=[copy / "run"], out=copy / "artifact", **options), Output())
        return capsys.readouterr().err

    assert "holds this artifact already" in export()
    flip(copy / "artifact" / "codec.safetensors")
    with pytest.raises(ArtifactError, match="kvcli export --overwrite"):
        export()
    assert "verified: 6 tensors" in export(overwrite=True)
    flip(copy / "run" / "layer-001.safetensors")
    with pytest.raises(ArtifactError, match="lacks layers 1"):
        export(overwrite=True)
    assert "verified" not in capsys.readouterr().err
