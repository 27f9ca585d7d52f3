"""Fits on degenerate calibration data: few distinct keys, low rank, values that a code cannot hold."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import clustered, make_model, make_spec, record

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.methods.commvq.codebook import update
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.em import initial_codebook, soft_step
from kvcli.methods.commvq.fit import fit_layer, scalar_nmse
from kvcli.methods.commvq.method import METHOD
from kvcli.methods.method import FitReport
from kvcli.methods.samples import LayerSamples, TokenBlocks
from kvcli.registry import get_method

CONFIG = CommVQConfig(codebook_size=16, num_residuals=2, key_iterations=8, value_iterations=2)


def few_distinct(count: int, tokens: int = 2000, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, count, 16, generator=generator)[:, torch.randint(0, count, (tokens,), generator=generator)]


def report_of(
    keys: torch.Tensor, values: torch.Tensor, config: CommVQConfig = CONFIG, seed: int = 0, held_out: Any = None
) -> FitReport:
    """Of a fit that is checked with the same samples, or with other keys."""
    config = config.resolve(make_spec())
    train = LayerSamples(torch.randn(4, 50, 16), keys, values, torch.arange(keys.shape[1]))
    other = train if held_out is None else LayerSamples(train.q, held_out, values, train.positions)
    with torch.no_grad():
        codec = METHOD.build(make_spec(), config, 0)
        return fit_layer(codec, train, other, config, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [5, 40])
def test_few_distinct_keys_give_a_small_codebook(count: int) -> None:
    """Sums in float32 had a part in directions that the keys do not determine, and rows grew to hundreds."""
    torch.manual_seed(0)
    config = CONFIG.model_copy(update={"codebook_size": 64, "num_residuals": 3})
    for seed in (0, 1):
        report = report_of(few_distinct(count), clustered(2, 2000, 16), config, seed)
        assert max(report.metrics["key_nmse"]) < 1e-3
        assert not report.warnings


def test_updates_are_bounded_where_the_data_determine_nothing() -> None:
    x = few_distinct(5)
    book = initial_codebook(TokenBlocks.of(x), 16, torch.Generator().manual_seed(0))
    assert book.abs().max() < 10 * x.abs().max()
    for _ in range(8):
        book = soft_step(TokenBlocks.of(x), book, 1e-3)
    assert book.abs().max() < 10 * x.abs().max()
    indices = torch.zeros(2, x.shape[1], dtype=torch.long)
    assert update(x, indices, indices, book)[0].abs().max() < 10 * x.abs().max()


def test_a_fit_worse_than_a_scalar_code_is_told() -> None:
    torch.manual_seed(0)
    keys, values = clustered(2, 2000, 16), clustered(2, 2000, 16, seed=1)
    # head 1 of what is held out lies elsewhere than what is fitted, in a way that keeps each channel's distribution
    other = keys.clone()
    other[1] = torch.stack([column[torch.randperm(2000)] for column in keys[1].T], dim=-1)
    (warning,) = report_of(keys, values, held_out=other).warnings
    assert warning.startswith("keys of head 1: held-out error")


def test_values_by_the_encoder_alone_are_told() -> None:
    """Without sweeps, the linear encoder at 2 bits is worse than at 1 bit."""
    torch.manual_seed(0)
    values = torch.randn(2, 2000, 16)
    report = report_of(clustered(2, 2000, 16), values, CONFIG.model_copy(update={"value_sweeps": 0}))
    assert any(warning.startswith("values: held-out error") for warning in report.warnings)


def test_the_scalar_code_is_that_of_its_bits() -> None:
    """Gaussian values: levels at the means of equally many values leave 36.3 % at 1 bit and 13.9 % at 2 bits."""
    x = torch.randn(1, 8000, 4, generator=torch.Generator().manual_seed(0))
    assert scalar_nmse(x, x, 0) == [pytest.approx(1, abs=1e-2)]
    assert scalar_nmse(x, x, 1) == [pytest.approx(0.363, abs=1e-2)]
    assert scalar_nmse(x, x, 2) == [pytest.approx(0.139, abs=1e-2)]


def test_warnings_of_a_fit_are_kept_and_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the fit to the run, the artifact's metadata and its card."""
    recording = record(make_model("llama"), tmp_path / "samples")
    method = get_method("commvq")
    told = replace(method, fit=lambda *arguments: replace(method.fit(*arguments), warnings=("keys of head 1: bad",)))
    monkeypatch.setattr("kvcli.artifact.fit.check_fitted", lambda _: told.fit)
    reports: list[Any] = []
    config = CONFIG.resolve(recording.spec)
    fit_recording(recording, method, config, tmp_path / "run", done=lambda i, metrics, r: reports.append(metrics))
    assert all(report["warnings"] == ["keys of head 1: bad"] for report in reports)
    assemble([tmp_path / "run"]).save(tmp_path / "artifact")
    assert "warnings of the fit" in (tmp_path / "artifact" / "README.md").read_text()
    assert Artifact.load(tmp_path / "artifact").metadata["layers"][0]["warnings"] == ["keys of head 1: bad"]
