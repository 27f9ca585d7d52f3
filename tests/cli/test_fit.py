"""`kvcli fit`: any fitted method from the registry, and its names for some methods."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from console import invoke
from factories import record

from kvcli import registry
from kvcli.cli.fit import named_command, summary
from kvcli.cli.paths import newest_artifact
from kvcli.errors import ArtifactError
from kvcli.registry import FIT_COMMANDS, METHODS, get_method

SMALL = {
    "commvq": {"codebook_size": 8, "num_residuals": 2, "value_iterations": 2, "key_iterations": 2},
    "squat": {"group_size": 8, "residual_length": 8},
    "squat-pre": {"group_size": 8, "residual_length": 8},
}


def flags(settings: dict[str, Any]) -> list[str]:
    return [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def settings(values: dict[str, Any]) -> list[str]:
    return [text for name, value in values.items() for text in ("--setting", f"{name}={value}")]


@pytest.mark.parametrize(
    ("command", "method"), [(name, method) for name, own in FIT_COMMANDS.items() for method in own.methods]
)
def test_a_named_command_is_fit_with_typed_options(tiny: Any, tmp_path: Path, command: str, method: str) -> None:
    record(tiny.model, tmp_path / "recorded")
    chosen = ["--method", method] if len(FIT_COMMANDS[command].methods) > 1 else []
    named = invoke(command, "recorded", *chosen, *flags(SMALL[method]))
    assert named.exit_code == 0, named.stderr
    fitted = invoke("fit", "recorded", "--method", method, *settings(SMALL[method]))
    assert fitted.exit_code == 0, fitted.stderr
    assert fitted.stdout == named.stdout  # the same run folder
    assert "3 of 3 layers were fitted already" in fitted.stderr  # the same settings, defaults included


def test_bits_in_the_name_are_settings(tiny: Any, tmp_path: Path) -> None:
    record(tiny.model, tmp_path / "recorded")
    fitted = invoke("fit", "recorded", "--method", "commvq-1", "--layers", "1", *settings(SMALL["commvq"]), "--json")
    assert fitted.exit_code == 0, fitted.stderr
    result = json.loads(fitted.stdout)
    assert result["run"] == "runs/tiny/training/commvq-1bit"
    assert [report["layer"] for report in result["layers"]] == [1]
    assert json.loads(Path(result["run"], "run.json").read_text())["config"]["bits"] == 1


def test_a_method_needs_no_command_of_its_own(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FIT_COMMANDS", {})
    record(tiny.model, tmp_path / "recorded")
    small = {"codebook_size": 8, "num_residuals": 2, "value_iterations": 2, "key_iterations": 2}
    fitted = invoke("fit", "recorded", "--method", "commvq-2", *settings(small))
    assert fitted.stdout == "runs/tiny/training/commvq-2\n", fitted.stderr
    assert invoke("export").stdout == "runs/tiny/commvq-2\n"


def test_a_run_with_other_settings_is_refused_by_name(tiny: Any, tmp_path: Path) -> None:
    record(tiny.model, tmp_path / "recorded")
    assert invoke("fit-subspace", "recorded", *flags(SMALL["squat"])).exit_code == 0
    other = invoke("fit-subspace", "recorded", *flags(SMALL["squat"]), "--subspace-dim", "3")
    assert other.exit_code == 1
    assert "differs in config.subspace_dim: 5 there, 3 here" in other.stderr
    again = invoke("fit-subspace", "recorded", *flags(SMALL["squat"]), "--subspace-dim", "3", "--overwrite")
    assert again.exit_code == 0, again.stderr


@pytest.mark.parametrize("name", FIT_COMMANDS)
def test_typed_options_are_all_settings_of_the_methods(name: str) -> None:
    own = FIT_COMMANDS[name]
    options, _ = named_command(name)
    for method in own.methods:
        assert get_method(method).config_cls is own.config_cls()
        assert get_method(method).fit is not None
    config = own.config_cls()(**own.defaults)
    assert {setting: options.model_fields[setting].get_default() for setting in dict(config)} == dict(config)
    own.config_cls()(**own.quick)


def test_summary_names_mean_and_extremes() -> None:
    method = dataclasses.replace(get_method("commvq"), fit_metrics={"error": "held-out error", "rows": "rows"})
    reports = [
        {"layer": 4, "error": [0.25, 0.5], "rows": [3], "other": 1},
        {"layer": 7, "error": [0.125, 0.125], "rows": 5},
    ]
    assert summary(method, reports) == [
        "held-out error: mean 0.25, from 0.125 (layer 7 head 0) to 0.5 (layer 4 head 1)",
        "rows: mean 4, from 3 (layer 4) to 5 (layer 7)",
    ]


def test_metrics_that_are_named_are_reported(tiny: Any, tmp_path: Path) -> None:
    record(tiny.model, tmp_path / "recorded")
    for name in METHODS:
        if (method := get_method(name)).fit is None:
            assert not method.fit_metrics
            continue
        fitted = invoke("fit", "recorded", "--method", name, "--layers", "0", *settings(SMALL.get(name, {})), "--json")
        assert fitted.exit_code == 0, fitted.stderr
        assert method.fit_metrics.keys() <= json.loads(fitted.stdout)["layers"][0].keys()


def test_the_newest_artifact_is_of_the_method_and_its_bits(tmp_path: Path) -> None:
    for method, bits in (("squat", 2), ("squat-pre", 2), ("commvq", 2), ("commvq", 1)):
        folder = Path("runs", "tiny", f"{method}-{bits}")
        folder.mkdir(parents=True)
        config = {"bits": bits} if method == "commvq" else {"k_bits": bits, "v_bits": bits}
        (folder / "kvcli.json").write_text(json.dumps({"method": method, "config": config}))
    Path("runs/tiny/squat-pre-2/kvcli.json").touch()
    assert newest_artifact("tiny", "squat") == Path("runs/tiny/squat-2")
    assert newest_artifact("tiny", "squat-2") == Path("runs/tiny/squat-2")
    assert newest_artifact("tiny", "commvq") == Path("runs/tiny/commvq-1")
    assert newest_artifact("tiny", "commvq-2") == Path("runs/tiny/commvq-2")
    with pytest.raises(ArtifactError, match="kvcli fit --method squat-4"):
        newest_artifact("tiny", "squat-4")
