"""Chunks as bytes and back, in the forms that LMCache has, without LMCache."""

import re
from typing import Any

import pytest
import torch
from chunks_made import CHUNK, SPEC, decoded, random_chunk, served, stored_bytes
from factories import make_model, make_spec

from kvcli.errors import ChunkError, UsageError
from kvcli.integrations.chunks.codec import ChunkCodec
from kvcli.integrations.chunks.format import SIZE, ChunkLayout
from kvcli.integrations.chunks.served import Served
from kvcli.integrations.chunks.stored import encode_each
from kvcli.integrations.lmcache.layout import chunk_layout, decode_chunk, encode_chunk
from kvcli.registry import METHODS, get_method, make_config, parse_method
from kvcli.rope import Rope
from kvcli.spec import ModelSpec, RopeSpec


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "group_size"), [(16, 32), (64, 32), (80, 16), (96, 32), (128, 64)], ids=str)
def test_codes_are_those_of_the_method(head_dim: int, group_size: int, dtype: torch.dtype) -> None:
    spec = make_spec(head_dim, num_kv_heads=4)
    model = served(spec, "kivi-2", exact_tokens=0, group_size=group_size, residual_length=128)
    chunk = random_chunk([2, 1, 128, 4 * head_dim], dtype)
    codec = ChunkCodec(model)
    out = decoded(codec, encode_chunk(codec, chunk), chunk)
    keys, values = (x.view(1, 128, 4, head_dim).transpose(1, 2) for x in chunk)
    (layer,) = model.codecs(chunk_layout([chunk.shape], [dtype], spec))
    for x, part, ours in ((keys, layer.key, out[0]), (values, layer.value, out[1])):
        expected = part.decode_to(part.encode(x, None), None, dtype)
        assert torch.equal(ours.view(1, 128, 4, head_dim).transpose(1, 2), expected)


@pytest.mark.parametrize("shape", [[1, 1, 64, 64], [1, 64, 64]])
def test_fused_chunks_hold_the_same_codes(shape: list[int]) -> None:
    codec = ChunkCodec(served())
    split = random_chunk(CHUNK)
    fused = torch.cat(tuple(split.view(2, 1, 64, 2, 16)), dim=-1).reshape(shape)
    stored = encode_chunk(codec, fused)
    assert torch.equal(stored, encode_chunk(codec, split))
    out = decoded(codec, stored, fused).view(1, 64, 2, 2, 16)
    expected = decoded(codec, encode_chunk(codec, split), split).view(2, 1, 64, 2, 16)
    assert torch.equal(out, torch.stack(tuple(expected), dim=3))


WRONG = [[2, 1, 64, 33], [2, 1, 64, 48], [2, 2, 64, 32], [2, 1, 0, 32], [3, 1, 64, 32], [1, 1, 64, 32 + 16]]
WRONG += [[64, 64], [2, 1, 64, 2, 16]]


def test_unknown_layouts_are_refused_by_name() -> None:
    codec, half = ChunkCodec(served()), torch.float16
    wrong = [([shape], half) for shape in WRONG] + [([CHUNK], torch.uint8), ([CHUNK], torch.float64)]
    for shapes, dtype in (*wrong, ([CHUNK, CHUNK], half)):
        with pytest.raises(ChunkError, match=re.escape(f"{shapes[0]} {dtype}")):
            codec.stored_bytes(chunk_layout(shapes, [dtype] * len(shapes), SPEC))
    for tokens in (1, 31, 33, 63, 65):  # no whole groups
        with pytest.raises(ChunkError, match=f"{tokens} tokens.*multiple of 32"):
            stored_bytes(codec, [2, 1, tokens, 32], half)


@pytest.mark.parametrize("method", [name for name in METHODS if not get_method(name).needs_artifact])
def test_every_method_is_stored_or_refused(method: str) -> None:
    record = get_method(method)
    settings = {"key_offset": "none"} if "key_offset" in record.config_cls.model_fields else {}
    if record.build(SPEC, make_config(record.name, settings), 0).key.new_state(1, torch.device("cpu")) is not None:
        with pytest.raises(UsageError, match="state"):
            served(method=method, **settings)
        return
    codec, chunk = ChunkCodec(served(method=method, **settings)), random_chunk(CHUNK)
    if record.build(SPEC, make_config(record.name, settings), 0).tokens_per_group > CHUNK[2]:
        with pytest.raises(ChunkError, match=r"64 tokens.*multiple of"):
            encode_chunk(codec, chunk)
        codec = ChunkCodec(served(method=method, **settings, **record.example_settings))
    stored = encode_chunk(codec, chunk)
    assert stored.numel() == stored_bytes(codec, CHUNK, chunk.dtype)
    out = decoded(codec, stored, chunk)
    assert (out.float() - chunk.float()).square().sum() < 0.35 * chunk.float().square().sum()
    assert torch.equal(decoded(codec, encode_chunk(codec, chunk), chunk), out)


@pytest.mark.parametrize(("method", "most"), [("kivi-2", 3.1), ("kivi-4", 5.1), ("commvq-2", 2.2), ("commvq-1", 1.2)])
@pytest.mark.parametrize(("head_dim", "num_kv_heads"), [(128, 8), (64, 3)], ids=["Llama-3.1-8B", "SmolLM2-135M"])
def test_bits_with_everything_included(method: str, most: float, head_dim: int, num_kv_heads: int) -> None:
    rope = RopeSpec("default", 1e4, head_dim)
    spec = ModelSpec("llama", 1, num_kv_heads * head_dim, num_kv_heads, num_kv_heads, head_dim, 8192, 97, rope)
    record, from_bits = parse_method(method)
    config = make_config(record.name, from_bits).resolve(spec)
    rotary = make_model("llama", head_dim=head_dim).model.rotary_emb
    codecs = [record.build(spec, config, 0)] if record.needs_artifact else None
    codec = ChunkCodec(Served(spec, Rope(rotary), record, config, codecs))
    shape = [2, 1, 256, num_kv_heads * head_dim]
    stored = stored_bytes(codec, shape, torch.bfloat16)
    # a header is for all layers of a model, here for one
    assert 8 * (stored - SIZE) / torch.Size(shape).numel() < most - 0.005
    assert SIZE < 100


def test_first_tokens_stay_as_they_are_and_cost_the_others_nothing() -> None:
    chunk = random_chunk(CHUNK, torch.float32)
    chunk[:, :, :2] *= 1000
    codecs = [ChunkCodec(served(exact_tokens=count)) for count in (2, 0)]
    ours, plain = (decoded(codec, encode_chunk(codec, chunk), chunk) - chunk for codec in codecs)
    assert not ours[:, :, :2].any()
    assert ours[0, 0, 2:32].square().mean() < 0.2
    assert plain[0, 0, 2:32].square().mean() > 0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("plane", [0, 1])
def test_what_codes_cannot_hold_is_refused(value: float, plane: int) -> None:
    chunk = random_chunk(CHUNK, torch.bfloat16)
    chunk[plane, 0, 40, 3] = value
    with pytest.raises(ChunkError, match=("keys" if plane == 0 else "values") + " of layer 0"):
        encode_chunk(ChunkCodec(served()), chunk)


def test_damaged_bytes_are_refused_and_leave_the_chunk_alone() -> None:
    codec = ChunkCodec(served())
    chunk = random_chunk(CHUNK)
    stored, target = encode_chunk(codec, chunk), torch.zeros_like(chunk)
    variants = [stored[:length] for length in (0, 7, SIZE - 1, SIZE, stored.numel() - 1)]
    for at in (*range(SIZE), *range(SIZE, stored.numel(), 97), -1):
        variants.append(stored.clone())
        variants[-1][at] ^= 0x10
    for damaged in variants:
        with pytest.raises(ChunkError):
            decode_chunk(codec, damaged, target)
    assert not target.any()
    decode_chunk(codec, torch.cat((stored, torch.zeros(99, dtype=torch.uint8))), target)
    assert torch.equal(target, decoded(codec, stored, chunk))


def test_codes_of_other_settings_or_of_another_layout_are_refused() -> None:
    codec, chunk = ChunkCodec(served()), random_chunk(CHUNK)
    stored = encode_chunk(codec, chunk)
    for changes in ({"method": "kivi-4"}, {"exact_tokens": 0}, {"group_size": 16}, {"spec": make_spec(num_kv_heads=4)}):
        with pytest.raises(ChunkError, match="another model, artifact or settings"):
            decode_chunk(ChunkCodec(served(**changes)), stored, chunk)
    for other in (random_chunk([2, 1, 32, 32]), random_chunk(CHUNK, torch.bfloat16)):
        with pytest.raises(ChunkError, match="is asked for"):
            decode_chunk(codec, stored, other)


def test_a_rank_has_some_of_the_heads_and_layers() -> None:
    codec = ChunkCodec(served(ModelSpec.from_dict({**SPEC.to_dict(), "num_layers": 4})))
    whole = random_chunk([2, 4, 64, 32])
    out = decoded(codec, encode_chunk(codec, whole), whole)
    part = whole[:, 1:3, :, 16:].contiguous()
    assert torch.equal(decoded(codec, encode_chunk(codec, part), part), out[:, 1:3, :, 16:])


def test_what_is_lost_is_measured_without_the_tokens_that_stay() -> None:
    codec = ChunkCodec(served(exact_tokens=2))
    x = random_chunk([2, 2, 64, 16], torch.float32).unsqueeze(2)  # sides, chunks, layer, tokens, channels
    x = torch.cat((x, x), dim=2)
    x[:, :, :, :2] *= 1000
    layout = ChunkLayout(1, 64, 2, 16, torch.float32)
    encoded = codec.encode(layout, lambda i: (x[0], x[1]), with_errors=True)
    ((keys, values),) = codec.decode(list(encoded.stored), layout)
    for side, ours in enumerate((keys, values)):
        lost = (ours - x[side])[:, :, 2:].square().sum((1, 2, 3)) / x[side][:, :, 2:].square().sum((1, 2, 3))
        assert encoded.errors is not None
        assert torch.allclose(encoded.errors[:, side], lost, rtol=1e-4)
    assert codec.encode(layout, lambda i: (x[0], x[1])).errors is None


def test_chunks_beside_one_that_cannot_be_stored_keep_their_starts() -> None:
    codec, layout = ChunkCodec(served()), ChunkLayout(1, 64, 2, 16, torch.float32)
    x = torch.stack([random_chunk([2, 64, 16], torch.float32, seed) for seed in range(3)])
    x[1, 0, 5, 5] = float("inf")
    said = list[str]()
    made = encode_each(codec, layout, lambda i: (x, x), [0, 64, 128], ["aa", "bb", "cc"], "k", said.append)
    assert [chunk.key for chunk in made] == ["aa", "cc"]
    assert len(said) == 1
    for chunk, row in zip(made, (0, 2), strict=True):
        alone = codec.encode(layout, lambda i, row=row: (x[row : row + 1], x[row : row + 1]), [64 * row])
        assert chunk.data == alone.stored[0].numpy().tobytes()
        assert chunk.plain_bytes == 2 * 2 * 64 * 16 * 4


def test_few_codings_find_the_one_that_cannot_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, layout = ChunkCodec(served()), ChunkLayout(1, 64, 2, 16, torch.float32)
    x, counts, encode = torch.randn(16, 2, 64, 16), list[int](), codec.encode
    x[9, 0, 5, 5] = float("nan")

    def counted(layout: ChunkLayout, layer: Any, *rest: Any, **options: Any) -> Any:
        counts.append(len(layer(0)[0]))
        return encode(layout, layer, *rest, **options)

    monkeypatch.setattr(codec, "encode", counted)
    names = [f"{i:02x}" for i in range(16)]
    made = encode_each(codec, layout, lambda i: (x, x), None, names, "k", lambda line: None)
    assert [chunk.key for chunk in made] == [name for name in names if name != "09"]
    assert counts == [16, 8, 8, 4, 2, 1, 1, 2, 4]
