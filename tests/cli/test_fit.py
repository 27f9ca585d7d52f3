"""`kvcli fit`: any fitted method from the registry, and its names for some methods."""

import json
from pathlib import Path
from typing import Any

import pytest
from console import invoke, refused, result, says

from kvcli.cli.fit import summary
from kvcli.commands.paths import newest_artifact
from kvcli.errors import ArtifactError
from kvcli.registry import DEFAULT_METHOD, DEMO_SETTINGS, FIT_NAMES, METHODS, get_config, get_method

SMALL = {
    "commvq": {"codebook_size": 8, "num_residuals": 2, "value_iterations": 2, "key_iterations": 2},
    "squat": (grouped := {"group_size": 8, "residual_length": 8}),
    "squat-pre": grouped,
}


def flags(settings: dict[str, Any]) -> list[str]:
    return [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def settings(values: dict[str, Any]) -> list[str]:
    return [text for name, value in values.items() for text in ("--setting", f"{name}={value}")]


@pytest.mark.parametrize(("command", "method"), [*FIT_NAMES.items(), ("fit-subspace", "squat-pre")])
def test_a_named_command_is_fit_with_typed_options(recorded: Any, command: str, method: str) -> None:
    chosen = ["--method", method] if FIT_NAMES[command] != method else []
    named = result(command, "recorded", *chosen, *flags(SMALL[method]))
    says(named.stderr, *get_method(method).fit_metrics.values())
    fitted = result("fit", "recorded", "--method", method, *settings(SMALL[method]))
    assert fitted.stdout == named.stdout  # the same run folder
    assert "3 of 3 layers were fitted already" in fitted.stderr  # the same settings, defaults included


@pytest.mark.parametrize("method", ["squat", "squat-pre"])
def test_a_fitted_subspace_is_exported_and_used(recorded: Any, method: str) -> None:
    result("fit-subspace", "recorded", "--method", method, *flags(SMALL[method]))
    folder = invoke("export").stdout.strip()
    assert folder == f"runs/tiny/{method}-subspace"
    words = ("generate", "--method", method, "--prompt", "x" * 50, "--json")
    assert result(*words, "--artifact", folder)["memory"]["num_encoded"] > 40
    result(*words, "--setting", "group_size=8")


def test_bits_in_the_name_are_settings_and_name_the_run(recorded: Any) -> None:
    small = settings(SMALL["commvq"])
    fitted = result("fit", "recorded", "--method", "commvq-1", "--layers", "1", *small, "--json")
    assert fitted["run"] == "runs/tiny/training/commvq-1bit"
    assert [report["layer"] for report in fitted["layers"]] == [1]
    said = refused("generate", "tiny", "--method", "commvq-1", code=1)
    assert "run 'kvcli fit --method commvq-1' again: 1 of 3 layers are fitted in runs/tiny/training/commvq-1bit" in said
    assert json.loads(Path(fitted["run"], "run.json").read_text())["config"]["bits"] == 1
    fitted = result("fit", "recorded", "--method", "oscar-2", "--json")
    assert (fitted["run"], fitted["artifact"]) == ("runs/tiny/training/oscar-2", "runs/tiny/oscar-2")


def test_an_artifact_is_exported_when_the_last_layer_is_done(recorded: Any) -> None:
    shared = ("recorded", *settings(SMALL["commvq"]))
    parts = [result("fit", *shared, "--layers", layers) for layers in ("1-2", "0")]
    assert "no artifact: the run in runs/tiny/training/commvq-2bit lacks layers 0" in parts[0].stderr
    assert "next: " not in parts[0].stderr
    words = "--artifact runs/tiny/commvq-2bit --prompt 'Photosynthesis is' --residual-length 16 --stats"
    next_line = f"next: kvcli generate tiny {words}\n"
    assert parts[1].stderr.endswith(next_line)
    made = Path("runs/tiny/commvq-2bit/codec.safetensors").read_bytes()
    assert invoke("export", "--out", "other").stdout == "other\n"
    assert Path("other/codec.safetensors").read_bytes() == made
    elsewhere = invoke("fit", *shared, "--out", "elsewhere")
    assert elsewhere.stderr.endswith("next: kvcli export elsewhere\n")
    assert not Path("runs/tiny/elsewhere").exists()
    result("fit", *shared, "--setting", "key_iterations=3", "--seed", "1", "--overwrite")
    assert Path("runs/tiny/commvq-2bit/codec.safetensors").read_bytes() != made


def test_a_run_with_other_settings_is_refused_by_name(recorded: Any) -> None:
    words = ("fit-subspace", "recorded", *flags(SMALL["squat"]))
    result(*words)
    assert "differs in config.subspace_dim: 5 there, 3 here" in refused(*words, "--subspace-dim", "3", code=1)
    result(*words, "--subspace-dim", "3", "--overwrite")


def test_settings_that_commands_know_are_those_of_the_methods() -> None:
    for name in METHODS:
        assert get_config(name) is get_method(name).config_cls
        get_config(name)(**get_config(name).fit_settings)
    assert all(get_method(name).fit is not None for name in FIT_NAMES.values())
    get_config(DEFAULT_METHOD)(**DEMO_SETTINGS)


def test_summary_names_mean_and_extremes() -> None:
    metrics = {"error": "held-out error", "rows": "rows"}
    first = {"layer": 4, "error": [0.25, 0.5], "rows": [3], "other": 1}
    assert summary(metrics, [first, {"layer": 7, "error": [0.125, 0.125], "rows": 5}]) == [
        "held-out error: mean 0.25, from 0.125 (layer 7 head 0) to 0.5 (layer 4 head 1)",
        "rows: mean 4, from 3 (layer 4) to 5 (layer 7)",
    ]


def test_metrics_that_are_named_are_reported(recorded: Any) -> None:
    for name in METHODS:
        named, words = get_method(name).fit_metrics, ("recorded", "--method", name, "--layers", "0", "--json")
        if get_method(name).fit is None:
            assert not named
        else:
            fitted = result("fit", *words, *settings(SMALL.get(name, {})))
            assert named.keys() <= fitted["layers"][0].keys()


def test_the_newest_artifact_is_of_the_method_and_its_bits(tmp_path: Path) -> None:
    for method, bits in (("squat", 2), ("squat-pre", 2), ("commvq", 2), ("commvq", 1)):
        folder = Path("runs", "tiny", f"{method}-{bits}")
        folder.mkdir(parents=True)
        config = {"bits": bits} if method == "commvq" else {"k_bits": bits, "v_bits": bits}
        (folder / "kvcli.json").write_text(json.dumps({"method": method, "config": config}))
    Path("runs/tiny/squat-pre-2/kvcli.json").touch()
    for name, found in {"squat": "squat-2", "squat-2": "squat-2", "commvq": "commvq-1", "commvq-2": "commvq-2"}.items():
        assert newest_artifact("tiny", name) == Path("runs/tiny", found)
    with pytest.raises(ArtifactError, match="kvcli fit --method squat-4"):
        newest_artifact("tiny", "squat-4")
