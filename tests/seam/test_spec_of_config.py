"""What a config says of a model's attention, against what the model does."""

from __future__ import annotations

import pytest
from families import make, tiny_config
from test_families import ALL

from kvcli.seam.probe import probe
from kvcli.spec import NO_ROPE, ModelSpec

UNTOLD = {
    "cohere2": "only its layers of a sliding window are rotated, which its code says and its config does not",
    "exaone4": "only its layers of a sliding window are rotated, which its code says and its config does not",
    "hunyuan_v1_dense": "normalizes keys after rotating them, so they are compressed after RoPE",
    "nanochat": "normalizes keys after rotating them, so they are compressed after RoPE",
    "qwen3_5_text": "positions have three parts, so its keys are compressed after RoPE",
}
"""Families whose config does not tell how keys of full attention are rotated, with the reason."""


@pytest.mark.parametrize("family", ALL)
def test_a_config_tells_what_the_probe_finds(family: str) -> None:
    model = make(family)
    told, found = ModelSpec.from_config(model.config), probe(model).spec
    if family in UNTOLD:
        assert told.rope.rope_type != NO_ROPE == found.rope.rope_type
        told = ModelSpec.from_dict({**told.to_dict(), "rope": found.to_dict()["rope"]})
    assert told == found


def test_a_config_tells_the_width_of_values() -> None:
    model = make("mimo_v2_flash", v_head_dim=8)
    told = ModelSpec.from_config(model.config)
    assert told == probe(model).spec
    assert (told.head_dim, told.value_dim, told.rope.rotary_dim) == (16, 8, 6)


def test_layers_that_a_config_says_not_to_rotate_are_counted_among_those_of_full_attention() -> None:
    spec = ModelSpec.from_config(tiny_config("smollm3", no_rope_layers=[0, 1, 1, 0]))
    assert spec.unrotated == (0, 3)
    assert spec.rope.rope_type != NO_ROPE
    none = ModelSpec.from_config(tiny_config("smollm3", no_rope_layers=[0, 0, 0, 0]))
    assert (none.unrotated, none.rope.rope_type) == ((), NO_ROPE)


def test_a_field_that_a_type_does_not_have_says_nothing_about_its_rotation() -> None:
    spec = ModelSpec.from_config(tiny_config("llama", position_embedding_type="absolute"))
    assert spec.rope.rope_type == "default"


def test_positions_in_three_parts_are_not_rotated_by_us() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
    assert ModelSpec.from_config(tiny_config("qwen3_5_text", rope_parameters=rope)).rope.rope_type == NO_ROPE
