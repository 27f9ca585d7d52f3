"""Tables of the papers, on tiny models."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from factories import clustered, load, make_model, make_spec

from kvcli.errors import UsageError
from kvcli.eval.quality import reference_states
from kvcli.methods.samples import LayerSamples
from research.commvq_tables import key_rows, value_rows
from research.measured_tables import TextInputs, measured_rows
from research.paper_tables import LayerInputs
from research.reproduce import PAPER_TABLES, get_paper_table

SPEC = dataclasses.replace(make_spec(32), num_layers=1)


def samples(seed: int) -> LayerSamples:
    order = torch.randperm(1500, generator=torch.Generator().manual_seed(seed))
    keys, values = (clustered(2, 1500, 32, seed=part) for part in (0, 1))
    return LayerSamples(keys[:2, :4].repeat(2, 1, 1), keys[:, order], values[:, order], torch.arange(1500))


@pytest.fixture(scope="module", autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def errors() -> LayerInputs:
    return LayerInputs(SPEC, samples(0), samples(1), 0)


def test_larger_groups_with_larger_codebooks_are_better_as_in_the_paper(errors: LayerInputs) -> None:
    rows = list(get_paper_table("commvq-9").errors(errors))
    assert [(row["g"], row["N"], row["R"]) for row in rows] == [(2, 2, 1), (4, 4, 1), (8, 16, 1), (16, 64, 1)]
    assert len({row["bits"] for row in rows[:2]}) == 1
    found = [row["nmse"] for row in rows]
    assert found == sorted(found, reverse=True)
    assert [row["paper"] for row in rows] == sorted((row["paper"] for row in rows), reverse=True)


def test_every_stage_lowers_the_error(errors: LayerInputs) -> None:
    shapes = tuple((64, 8, stages, None) for stages in (1, 2, 4))
    rows, again = list(key_rows(errors, shapes)), list(key_rows(errors, shapes[:1]))
    assert rows[0]["mse"] > rows[1]["mse"] > rows[2]["mse"]
    assert again[0] == rows[0]  # a fit of one stage is the first stage of a longer one


def test_additive_codes_beat_asymmetric_ones(errors: LayerInputs) -> None:
    rows = {(row["method"], row["bits"]): row for row in value_rows(errors)}
    for bits in (1, 2):
        assert rows["commvq", bits]["mse"] < rows["asymmetric", bits]["mse"]
        assert rows["commvq", bits]["stored"] < rows["asymmetric", bits]["stored"]


@pytest.fixture(scope="module")
def quality() -> TextInputs:
    loaded = load(make_model("llama"))
    sequences = torch.randint(3, 97, (2, 80), generator=torch.Generator().manual_seed(0))
    return TextInputs(loaded, sequences, [reference_states(loaded.model, sequences)], 2, 32)


@pytest.mark.parametrize("name", ["kivi-1", "squat-3"])
def test_tables_of_quality(name: str, quality: TextInputs) -> None:
    rows = list(measured_rows(quality, get_paper_table(name).measurements(quality.loaded.spec)))
    assert all(row["kl"] > 0 and row["paper"] for row in rows)
    if name == "kivi-1":
        assert rows[0]["kl"] < min(row["kl"] for row in rows[1:])  # 4 bits
    else:
        assert {row["r"] for row in rows} == {5, 10}  # as many dimensions as a head of 16 channels has


@pytest.mark.parametrize("name", PAPER_TABLES)
def test_a_table_has_either_errors_or_measurements(name: str) -> None:
    table = get_paper_table(name)
    assert (table.errors is None) != (table.measurements is None)
    with pytest.raises(UsageError, match="did you mean"):
        get_paper_table(name + "0")
