"""Recordings and runs: what is damaged, changed or too large is said, never used."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from contexts_made import flip
from factories import load, make_model
from folders import SEQUENCES, SIZES, bytes_of, edit, fitted, recorded, swap

from kvcli.artifact.fit import assemble
from kvcli.calibrate import collect as collecting
from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig
from kvcli.calibrate.recording import Recording
from kvcli.commands.options import parse_layers
from kvcli.errors import ArtifactError, SamplesError, UsageError
from kvcli.seam.decoder import backbone

PART = "window-000-part-00001.safetensors"


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
    """Fault (files): a sample part or a layer's file damaged, empty, missing, or of another run. Result: `fit` or
    `export` names it; the same `calibrate` or `fit` makes it again.
    """
    before = bytes_of(copy / "samples")
    damage(copy / "samples")
    with pytest.raises(SamplesError, match=r"part-0000.\.safetensors is (damaged|missing).*; record it again"):
        [Recording(copy / "samples").load(layer) for layer in (0, 1)]
    recorded(copy / "samples")
    assert bytes_of(copy / "samples") == before


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


def test_another_text_is_refused_also_by_a_recording_that_was_cut_off(tmp_path: Path, monkeypatch: Any) -> None:
    """Fault: another corpus, or other settings, in the same folder. Result: refused; the message names the
    settings with both values.
    """
    passes = iter("ab")
    monkeypatch.setattr(collecting, "backbone", lambda model: backbone(model) if next(passes, "") else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recorded(tmp_path)
    monkeypatch.undo()
    other = SEQUENCES.clone()
    other[-1, -1] += 1
    for _ in range(2):  # cut off, and whole
        with pytest.raises(SamplesError, match=r"differs in token_ids_sha256: .*--overwrite"):
            recorded(tmp_path, other)
        recorded(tmp_path)


def test_overwrite_records_and_fits_again_with_equal_settings(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: `--overwrite`. Result: what kvcli recorded or fitted in the folder is discarded; other files stay."""
    passes, seen = Mock(side_effect=backbone), []
    monkeypatch.setattr(collecting, "backbone", passes)
    notes = (copy / "samples" / "notes.txt", copy / "run" / "layer-notes.json")
    for path in notes:
        path.write_text("mine")
    recorded(copy / "samples")
    assert not passes.called
    recorded(copy / "samples", overwrite=True)
    assert passes.call_count == 6
    fitted(copy / "run", Recording(copy / "samples"), overwrite=True, done=lambda _, __, reused: seen.append(reused))
    assert seen == [False, False, False]
    assert [path.read_text() for path in notes] == ["mine", "mine"]


@pytest.mark.parametrize(
    ("value", "said"),
    [(float("nan"), "layer 1 are not finite"), (1e5, r"layer 1 reach .*more than torch.float16 holds.*bfloat16")],
)
def test_values_that_cannot_be_recorded_are_refused(tmp_path: Path, value: float, said: str) -> None:
    """Fault: queries, keys or values that are not finite, or too large for float16. Result: `calibrate` names
    the layer.
    """
    model = make_model("llama")
    model.model.layers[1].self_attn.v_proj.weight.data.fill_(value)
    with pytest.raises(SamplesError, match=f"the values of {said}"):
        collect(load(model), SEQUENCES, SIZES, tmp_path, {})


def test_free_space_is_compared_before_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault (kills): not enough disk for a recording or a built-in model. Result: refused before it starts, with the
    bytes needed and free.
    """
    monkeypatch.setattr(collecting.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30, 2**10))
    with pytest.raises(SamplesError, match=r"needs 1 MiB, but .* has 0 MiB free"):
        recorded(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def of_another_run(run: Path) -> None:
    fitted(run.parent / "other", Recording(run.parent / "samples"), seed=1)
    for suffix in ("json", "safetensors"):
        shutil.copy(run.parent / "other" / f"layer-001.{suffix}", run)


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
        of_another_run,
    ],
)
def test_a_damaged_layer_is_named_and_fitted_again(copy: Path, damage: Callable[[Path], Any]) -> None:
    run, whole, seen = copy / "run", assemble([copy / "run"]), []
    damage(run)
    if damage is not of_another_run:  # which is whole
        with pytest.raises(ArtifactError, match=r"lacks layers 1 \(missing or damaged\)"):
            assemble([run])
    fitted(run, Recording(copy / "samples"), done=lambda layer, _, reused: seen.append((layer, reused)))
    assert seen == [(0, True), (1, False), (2, True)]
    assert assemble([run]).same_content(whole)


def test_only_recorded_layers_with_queries_and_some_tokens_beside_sinks_are_fitted(copy: Path) -> None:
    assert parse_layers("1-2", [0, 1, 2], "were recorded") == [1, 2]
    for text in ("0-99999999999", "7"):
        with pytest.raises(UsageError, match="only layers 0-2 were recorded"):
            parse_layers(text, [0, 1, 2], "were recorded")
    with pytest.raises(UsageError, match="sink_length 24 leaves nothing"):
        fitted(copy / "sinks", Recording(copy / "samples"), sink_length=24)
    collect(load(make_model("llama")), SEQUENCES, CollectConfig(6, 24, 0, 2), copy / "none", {})
    with pytest.raises(SamplesError, match="no queries"):
        Recording(copy / "none").load(0)
