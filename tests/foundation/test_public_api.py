"""The package's face: its public names, its types, and errors of settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

import kvcli
from kvcli.errors import explain
from kvcli.registry import get_method


def test_dir_shows_the_public_names_and_all_exist() -> None:
    assert dir(kvcli) == sorted(kvcli.__all__)
    assert all(hasattr(kvcli, name) for name in dir(kvcli))
    with pytest.raises(AttributeError, match="nothing"):
        kvcli.nothing  # noqa: B018


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(kvcli.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"k_bit": 2}, "there is no setting 'k_bit'; did you mean 'k_bits'?"),
        ({"colour": 2}, "there is no setting 'colour'; settings are sink_length, residual_length, flush_block, k_bits"),
        ({"k_bits": 3}, "k_bits: Input should be 1, 2, 4 or 8"),
        ({"group_size": 48}, "settings: residual_length 128 must be a positive multiple of group_size 48"),
    ],
)
def test_a_wrong_setting_is_explained(values: dict[str, int], said: str) -> None:
    config_cls = get_method("kivi").config_cls
    with pytest.raises(ValidationError) as caught:
        config_cls(**values)
    assert explain(caught.value, config_cls.model_fields).startswith(said)
