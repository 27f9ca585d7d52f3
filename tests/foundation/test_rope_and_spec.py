"""Rotations, and what a config says of a model."""

from typing import Any

import pytest
import torch
from factories import make_model
from families import make, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcli.errors import UnsupportedModelError
from kvcli.methods.packing import pack_bits, pack_planes, packed_size, planes_size, unpack_bits, unpack_planes
from kvcli.rope import ROPE_TILE, NoRope, Rope, Rotation, from_pairs, to_pairs
from kvcli.seam.probe import probe
from kvcli.spec import NO_ROPE, ModelSpec


def test_rotation_equals_transformers_bit_for_bit() -> None:
    model = make_model("llama")
    x, positions = torch.randn(2, 4, 9, 16), torch.randint(0, 500, (2, 9))
    cos, sin = model.model.rotary_emb(x, positions)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    rotation = Rope(model.model.rotary_emb).rotation(positions, torch.float32)
    assert torch.equal(rotation.apply(x), expected)
    assert torch.allclose(rotation.unapply(rotation.apply(x)), x, atol=1e-5)


def test_unapply_undoes_yarn_scaling() -> None:
    model = make_model(
        "llama",
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64},
    )
    rotation = Rope(model.model.rotary_emb).rotation(torch.arange(300)[None], torch.float32)
    assert not torch.allclose(rotation.cos**2 + rotation.sin**2, torch.ones(()))
    x = torch.randn(1, 2, 300, 16)
    assert torch.allclose(rotation.unapply(rotation.apply(x)), x, atol=1e-4)


def test_a_tile_is_the_rotation_of_its_first_position() -> None:
    rope = Rope(make_model("llama", max_position_embeddings=4096).model.rotary_emb)
    positions = torch.tensor([[0, 3, ROPE_TILE - 1, ROPE_TILE, 1000], [ROPE_TILE + 1, 511, 512, 900, 2000]])
    rotation = rope.rotation(positions, torch.float32)
    first = rope.rotation(torch.tensor([[0, 0, 0, 256, 768], [256, 256, 512, 768, 1792]]), torch.float32)
    assert torch.equal(rotation.tile.cos, first.cos)
    assert torch.equal(rotation.tile.sin, first.sin)
    # rotated by the tile and then within it is rotated by the position
    x = torch.randn(2, 4, 5, 16)
    within = rope.rotation(positions % ROPE_TILE, torch.float32)
    assert torch.allclose(rotation.tile.apply(within.apply(x)), rotation.apply(x), atol=1e-4)


def test_parts_and_copies_of_a_rotation_know_their_tiles() -> None:
    rope = Rope(make_model("llama", max_position_embeddings=4096).model.rotary_emb)
    rotation = rope.rotation(torch.tensor([[200, 300, 600], [0, 255, 256]]), torch.float32)
    for known in (False, True):  # before and after the whole one was asked for its tiles
        assert ("tile" in vars(rotation)) == known
        for part, at in (
            (rotation.last(2), lambda x: x[:, :, -2:]),
            (rotation.last(3), lambda x: x),
            (rotation.select([1]), lambda x: x[[1]]),
            (rotation.contiguous(), lambda x: x),
        ):
            whole = rope.rotation(torch.tensor([[0, 256, 512], [0, 0, 256]]), torch.float32)
            assert torch.equal(part.tile.cos, at(whole.cos))
            assert torch.equal(part.tile.sin, at(whole.sin))
    still = Rotation.none(rotation)
    assert torch.equal(still.tile.cos, torch.ones_like(rotation.cos))
    assert not still.tile.sin.any()


def test_a_rotation_on_another_device_has_its_tiles_there() -> None:
    rotation = NoRope(16, torch.device("cpu")).rotation(torch.arange(5)[None], torch.float32)
    assert rotation.to(torch.device("cpu")) is rotation
    elsewhere = rotation.to(torch.device("meta"))
    assert elsewhere.tile.cos.is_meta
    assert elsewhere.tile.sin.is_meta


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_pairs_are_what_rope_rotates(rotary_dim: int) -> None:
    x = torch.randn(3, 16)
    pairs = to_pairs(x, rotary_dim)
    assert torch.equal(from_pairs(pairs, rotary_dim), x)
    assert torch.equal(pairs[:, 1, 0], x[:, 1])
    assert torch.equal(pairs[:, 1, 1], x[:, 1 + rotary_dim // 2])


def test_spec_reads_every_family(any_model: Any) -> None:
    spec = ModelSpec.from_config(any_model.config)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (3, 4, 2, 16)
    assert spec.kv_dim == 32
    assert spec.num_kv_groups == 2
    assert spec.fp16_bytes_per_token() == 3 * 2 * 32 * 2
    assert ModelSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("mamba", {}, "linear_attention in layers 0, 1"),
        ("mistral", {"sliding_window": 64}, "sliding_attention in layers 0, 1"),
        ("falcon_h1", {}, "with keys and values alone: hybrid in layers 0, 1"),  # with a state beside them
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "sliding_attention"),
    ],
)
def test_unsupported_models_are_refused_by_name(family: str, changes: dict[str, Any], named: str) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=2, **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        ModelSpec.from_config(config)


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


@settings(max_examples=200, deadline=None)
@given(n_bits=st.integers(1, 16), count=st.integers(1, 40), seed=st.integers(0, 1000))
def test_packing_round_trip_without_waste(n_bits: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**n_bits, (2, 3, count), generator=generator)
    packed = pack_bits(codes, n_bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, packed_size(count, n_bits)) == (2, 3, -(-count * n_bits // 8))
    assert torch.equal(unpack_bits(packed, n_bits, count), codes.int())


def test_packing_is_little_endian() -> None:
    assert pack_bits(torch.tensor([0xABC, 0x123]), 12).tolist() == [0xBC, 0x3A, 0x12]
    assert pack_bits(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1]), 1).tolist() == [1, 1]


@pytest.mark.parametrize(("n_bits", "count"), [(1, 80), (2, 128), (4, 96), (8, 64), (2, 33), (1, 5)])
def test_planes_round_trip(n_bits: int, count: int) -> None:
    codes = torch.randint(0, 2**n_bits, (2, 3, count))
    packed = pack_planes(codes, n_bits)
    assert packed.shape[-1] == planes_size(count, n_bits) <= packed_size(count, n_bits) + 1
    assert torch.equal(unpack_planes(packed, n_bits, count), codes.int())


def test_planes_are_far_apart_in_a_word() -> None:
    words = pack_planes(torch.tensor([3, 0, 1, 2] + [0] * 12), 2).view(torch.int16)
    assert words.tolist() == [3 | 1 << 2, 0 | 2 << 2]


@pytest.mark.parametrize("n_bits", [0, 17])
def test_packing_refuses_other_widths(n_bits: int) -> None:
    with pytest.raises(ValueError, match="n_bits"):
        pack_bits(torch.zeros(3, dtype=torch.long), n_bits)
