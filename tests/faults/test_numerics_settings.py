"""Settings of all methods have bounds above as well as below."""

from __future__ import annotations

import pytest
from factories import make_spec
from pydantic import ValidationError

from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.config import QJLConfig
from kvcli.registry import METHODS, get_method


@pytest.mark.parametrize("name", METHODS)
def test_no_setting_takes_any_number(name: str) -> None:
    config_cls = get_method(name).config_cls
    for setting, field in config_cls.model_fields.items():
        if field.annotation in (int, float):
            for value in (-2, 10**12, float("inf"), float("nan")):
                with pytest.raises(ValidationError, match=setting):
                    config_cls(**{setting: value})


def test_settings_beyond_a_head_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_outliers 65 exceeds head_dim 64"):
        get_method("qjl").build(make_spec(64), QJLConfig(num_outliers=65), 0)
    with pytest.raises(ValueError, match="value_code_bits 600 exceeds 16 bits"):
        CommVQConfig(value_code_bits=600).resolve(make_spec(16))
