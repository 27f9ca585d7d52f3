"""Words of the command that a command says to type next."""

from __future__ import annotations

from kvcli.cli.command import model_argument, try_method
from kvcli.cli.suites import last_method


def test_a_method_is_tried_or_the_artifact_that_it_needs_is_made() -> None:
    assert try_method("kivi-2", "eval", ["m"]) == ["kvcli", "eval", "m", "--method", "kivi-2"]
    assert try_method("commvq-1", "eval", ["m"]) == ["kvcli", "calibrate", "m"]


def test_the_last_method_that_compresses_and_the_default_model() -> None:
    assert last_method([{"method": "fp16"}, {"method": "kivi-2"}, {"method": "fp16"}]) == "kivi-2"
    assert last_method([{"method": "fp16"}]) == "fp8"
    assert (model_argument("m"), model_argument("smollm2-135m")) == (["m"], [])
