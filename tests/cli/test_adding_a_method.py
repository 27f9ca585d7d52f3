"""docs/adding_a_method.md, executed: its file and its registry line are all that a method needs."""

from __future__ import annotations

from typing import Any

import pytest
from console import refused, result
from contract import CacheContract, CodecContract

import kvcli.methods
from kvcli.methods.method import Method
from kvcli.registry import METHODS, get_method


@pytest.fixture
def method(adding: Any) -> Method:
    return get_method(adding("adding_a_method.md", kvcli.methods, METHODS, "METHOD")[0])


class TestCodecs(CodecContract):
    """Its codecs."""


class TestCache(CacheContract):
    """Its cache."""


def test_it_generates_and_is_listed(method: Method, tiny: Any) -> None:
    options = ("--residual-length", "16", "--sink-length", "0", "--max-new-tokens", "4", "--json")
    memory = result("generate", "--method", "absmax-3", "--prompt", "x" * 60, *options)["memory"]
    assert memory["num_encoded"] >= 40
    assert memory["nominal_bits"] == [3, 3]
    assert (memory["key_bits"], memory["value_bits"]) == (4, 4)  # a head of 16 channels: 6 bytes and a scale
    assert "k_bits" in refused("generate", "--method", "absmax-5")
    assert "absmax" in [row["name"] for row in result("methods", "--json")["methods"]]


def test_it_is_evaluated(method: Method, tiny: Any) -> None:
    options = ("--seq-len", "128", "--num-sequences", "2", "--batch-size", "2", "--json")
    chosen = ("--method", "absmax-2", "--method", "absmax-3", "--method", "absmax-8")
    errors = [row["kl_mean"] for row in result("eval", *chosen, *options)["rows"]]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("impl", ["reference", pytest.param("fused", marks=pytest.mark.kernels)])
def test_it_is_benched(method: Method, impl: str) -> None:
    options = ("--shape", "tiny", "--contexts", "64", "--repeats", "3", "--impl", impl, "--json")
    _, row = result("bench", "--method", "absmax-3", *options)["rows"]
    assert row["method"] == "absmax-3"
    assert row["p50_us"] > 0
    assert row["true_bits"] == (16 * 3 + 16) / 16  # a head of 16 channels
