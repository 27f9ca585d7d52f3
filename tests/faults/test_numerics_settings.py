"""Settings of all methods have bounds, and what a codec keeps of a sequence can be emptied, as if it were new."""

import pytest
import torch
from contract import equal, sample
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


@pytest.mark.parametrize("name", METHODS)
def test_a_reset_row_is_coded_like_a_new_one(name: str) -> None:
    method = get_method(name)
    config = method.config_cls(**method.example_settings).resolve(make_spec())
    codec = method.build(make_spec(), config, 0).key
    used, fresh = (codec.new_state(2, torch.device("cpu")) for _ in range(2))
    if used is None:
        codec.reset_state(used, [0, 1])
        return
    queries, counts = torch.randn(2, 4, 40, 16, generator=torch.Generator().manual_seed(0)), torch.full((2,), 40.0)
    codec.observe(used, 9 * queries.flip(1), sample(40, seed=1), counts)
    codec.finalize_state(used, [0, 1])
    before = used.select([0])
    codec.reset_state(used, [1])
    assert equal(before, used.select([0]))
    open_row = torch.tensor([0.0, 1.0])
    shown = open_row.view(2, 1, 1, 1)
    codec.observe(used, queries * shown, sample(40) * shown, counts * open_row)
    codec.finalize_state(used, [1])
    codec.observe(fresh, queries, sample(40), counts)
    codec.finalize_state(fresh, [0, 1])
    new = sample(32, seed=2)[1:]
    assert equal(codec.encode(new, used.select([1])), codec.encode(new, fresh.select([1])))
