"""Which shapes CommVQ's attention kernels refuse, and which reason they give."""

from __future__ import annotations

from typing import Any

import pytest
from factories import make_spec

from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.method import METHOD

pytest.importorskip("triton")

from kvcli.methods.commvq.attend_kernels import unsupported


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "changes", "reason"),
    [
        (64, 64, {}, None),
        (128, 128, {"pairs_per_group": 8}, None),
        (256, 256, {"codebook_size": 256}, None),
        (80, 80, {}, "CommVQ keys of head_dim 80 in groups of 40 pairs"),
        (96, 96, {}, "CommVQ keys of head_dim 96 in groups of 48 pairs"),
        (32, 32, {}, "CommVQ keys of head_dim 32 in groups of 16 pairs"),
        (64, 64, {"pairs_per_group": 4}, "CommVQ keys of head_dim 64 in groups of 4 pairs"),
        (128, 64, {}, "keys that are rotated in part of their channels"),
        (64, 64, {"value_code_bits": 24}, "24 value bits; choose a multiple of 16"),
    ],
)
def test_unsupported_shapes_are_known_before_the_first_token(
    head_dim: int, rotary_dim: int, changes: dict[str, Any], reason: str | None
) -> None:
    spec = make_spec(head_dim, rotary_dim=rotary_dim)
    assert unsupported(METHOD.build(spec, CommVQConfig(**changes), 0)) == reason
