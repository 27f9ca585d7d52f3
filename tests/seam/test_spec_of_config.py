"""What a config says of a model's attention, against what the model does."""

from __future__ import annotations

from typing import Any

import pytest
from families import make, tiny_config

from kvcli.errors import UnsupportedModelError
from kvcli.seam.probe import probe
from kvcli.spec import NO_ROPE, ModelSpec

ROPE = {"rope_type": "default", "rope_theta": 1e4}


def test_a_config_tells_the_width_of_values() -> None:
    model = make("mimo_v2_flash", v_head_dim=8)
    told = ModelSpec.from_config(model.config)
    assert told == probe(model).spec
    assert (told.head_dim, told.value_dim, told.rope.rotary_dim) == (16, 8, 6)


@pytest.mark.parametrize(
    ("family", "changes", "rotates", "unrotated"),
    [
        ("smollm3", {"no_rope_layers": [0, 1, 1, 0]}, True, (0, 3)),  # counted among those of full attention
        ("smollm3", {"no_rope_layers": [0, 0, 0, 0]}, False, ()),
        ("llama", {"position_embedding_type": "absolute"}, True, ()),  # a field that this type does not have
        ("qwen3_5_text", {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]}}, True, ()),  # three equal positions
    ],
)
def test_a_config_says_what_we_rotate(
    family: str, changes: dict[str, Any], rotates: bool, unrotated: tuple[int, ...]
) -> None:
    spec = ModelSpec.from_config(tiny_config(family, **changes))
    assert (spec.rope.rope_type != NO_ROPE, spec.unrotated) == (rotates, unrotated)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("deepseek_v32", {}, "indexed_attention"),
        ("gemma3n_text", {"num_kv_shared_layers": 2}, "what another one caches"),
    ],
)
def test_sizes_are_not_told_of_caches_that_are_not_keys_and_values(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        ModelSpec.from_config(tiny_config(family, **changes))
