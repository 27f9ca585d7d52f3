"""`--fit`: one command records, fits and generates; the next one finds what it made, for these weights only."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from console import SHORT, invoke, refused, result
from factories import load, make_model

from kvcli.artifact.artifact import Artifact
from kvcli.cli import calibrate, fit, session_options
from kvcli.commands import paths
from kvcli.commands.paths import newest_artifact
from kvcli.errors import ArtifactError
from kvcli.models import builtin_models
from kvcli.models import load as models
from kvcli.models.builtin_models import BUILTIN_MODELS

WORDS = ("--method", "klt-2", "--prompt", "It was the best of times", "--residual-length", "4", *SHORT)
LITTLE = {"tokens": 512, "seq_len": 128, "query_tokens": 128, "batch_size": 2}


@pytest.fixture
def recordings(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gradient tokens of each recording that --fit made; recordings are short."""
    made: list[int] = []
    run = calibrate.run

    def short(options: Any, output: Any, loaded: Any) -> None:
        made.append(options.fisher_tokens)
        run(options.model_copy(update={**LITTLE, "fisher_tokens": 128}), output, loaded)

    monkeypatch.setattr(calibrate, "run", short)
    return made


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the package's artifacts, which other tests do not see."""
    folder = Path(session_options.__file__).parents[1] / "fitted"
    monkeypatch.setattr(paths, "SHIPPED", folder)
    return folder


def test_the_artifact_is_made_once_for_all_commands(recordings: list[int], tmp_path: Path) -> None:
    first = result("generate", *WORDS, "--fit")
    assert first["method"] == "klt-2"
    assert first["memory"]["num_encoded"] > 0
    folder = newest_artifact("smollm2-135m", "klt-2")
    assert folder.is_relative_to(tmp_path / "fits" / "smollm2-135m")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # no recording is left
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times")
    for words in (("generate", *WORDS, "--fit"), ("generate", *WORDS)):
        assert result(*words)["text"] == first["text"]
    made = result("compress", "--prompt-file", str(text), "--method", "klt-2", "--fit", "--out", "c", "--json")
    assert made["method"] == "klt-2"
    assert recordings == [32768]


def test_other_weights_of_the_same_name_are_fitted_anew(recordings: list[int], tiny: Any, monkeypatch: Any) -> None:
    result("generate", *WORDS, "--fit")
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data.neg_()
    other = replace(load(model), tokenizer=tiny.tokenizer)
    monkeypatch.setattr(models, "load_model", lambda name="tiny", **_: replace(other, name=name))
    assert "other weights" in result("generate", *WORDS, exit_code=1)["error"]
    result("generate", *WORDS, "--fit")
    result("generate", *WORDS, "--fit")
    assert len(recordings) == 2
    folders = [path.parent for path in paths.FITS.glob("smollm2-135m/*/kvcli.json")]
    assert len({Artifact.load(folder).metadata["fingerprint"] for folder in folders}) == 2


def test_an_artifact_of_another_version_is_made_anew(recordings: list[int]) -> None:
    first = result("generate", *WORDS, "--fit")
    path = newest_artifact("smollm2-135m", "klt-2") / "kvcli.json"
    path.write_text(path.read_text().replace('"format_version": 6', '"format_version": 5'))
    assert result("generate", *WORDS, "--fit")["text"] == first["text"]
    assert len(recordings) == 2


def test_a_fit_that_was_stopped_goes_on(recordings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    write, run = fit.write_artifact, calibrate.run

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "write_artifact", stopped)
    assert invoke("generate", *WORDS, "--fit").exit_code == 130
    monkeypatch.setattr(fit, "write_artifact", write)
    monkeypatch.setattr(calibrate, "run", run)
    done = invoke("generate", *WORDS, "--fit")
    assert "layers were fitted already and are reused" in done.stderr, done.output


def test_without_an_artifact_the_error_says_what_makes_one_and_how_long_it_takes(
    recordings: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCLI_CACHE", str(tmp_path / "cache"))
    for words in (("generate", "--prompt", "x"), ("chat",), ("serve",), ("compress", "--prompt-file", __file__)):
        line = refused(*words, "--method", "commvq-2", code=1)
        assert "'kvcli calibrate' and 'kvcli fit --method commvq-2'" in line
        assert line.endswith("or add --fit")  # the model is not on this machine
    copy = builtin_models.copy_folder(BUILTIN_MODELS["smollm2-135m"])
    copy.mkdir(parents=True)
    shapes = '"num_hidden_layers": 30, "num_key_value_heads": 3, "hidden_size": 576, "num_attention_heads": 9'
    (copy / "config.json").write_text(f"{{{shapes}}}")
    with (copy / "model.safetensors").open("wb") as file:
        file.truncate(269 * 10**6)
    line = refused("generate", "--prompt", "x", "--method", "commvq-2", code=1)
    assert line.endswith("or add --fit, roughly 29 min on 2 CPU cores, less on a GPU")


SLIPS = {
    "--fit": "name a method",
    "--fit --method klt --artifact here": "no --artifact",
    "--fit --method kivi-2": "'kivi-2' needs no artifact",
    "--fit --method zip": "unknown method 'zip'",
}


@pytest.mark.parametrize("words", SLIPS)
def test_slips(words: str) -> None:
    assert SLIPS[words] in refused("generate", "--prompt", "x", *words.split())


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert "--devices" in refused("generate", "--prompt", "x", "--fit", "--method", "klt")


@pytest.mark.parametrize("model", BUILTIN_MODELS)
def test_the_package_has_a_whole_artifact_of_each_built_in_model(model: str, shipped: Path) -> None:
    folder = newest_artifact(model, "klt")
    assert folder.parent == shipped / model
    found = Artifact.load(folder)
    assert (found.metadata["model"], found.method) == (model, "klt")
    assert len(found.build_codecs(found.config)) == found.spec.num_layers
    assert f"klt-{found.config.model_dump()['bits']:g}" == folder.name
    with pytest.raises(ArtifactError):
        newest_artifact(f"./{model}", "klt")  # a folder of that name is another model


def test_an_artifact_of_the_package_is_checked_against_the_model(tiny: Any, shipped: Path) -> None:
    assert "whose shapes differ" in refused("generate", "--method", "klt", "--prompt", "x", code=1)


def test_artifacts_of_the_package_are_small(shipped: Path) -> None:
    assert 2**20 < sum(file.stat().st_size for file in shipped.rglob("*") if file.is_file()) < 16 * 2**20
