"""Encoded tokens with random codes, and the comparison of attention over them."""

from typing import Any

import torch
from torch import Tensor, nn

from kvcli.kernels.launch import norm_unit
from kvcli.methods.commvq.keys import CommVQKeyCodes
from kvcli.methods.commvq.values import CommVQValueCodes
from kvcli.methods.head_groups import KeyGroups
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, PartialAttention
from kvcli.methods.packing import pack_bits
from kvcli.registry import make_config, parse_method
from kvcli.rope import Rope, TokenRotations
from kvcli.spec import ModelSpec, RopeSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIRST_POSITION = 7
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}


class Rotary(nn.Module):
    """A rotary module as transformers makes them."""

    attention_scaling = 1.0

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.inv_freq = (1e4 ** -(torch.arange(0, head_dim, 2) / head_dim)).to(DEVICE)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = (positions[..., None].float() * self.inv_freq).repeat(1, 1, 2)
        return angle.cos().to(x.dtype) * self.attention_scaling, angle.sin().to(x.dtype) * self.attention_scaling


def make_codec(name: str, heads: int, kv_heads: int, head_dim: int, **settings: Any) -> tuple[Any, LayerCodec]:
    method, from_bits = parse_method(name)
    rope = RopeSpec("default", 1e4, head_dim)
    spec = ModelSpec("llama", 1, heads * head_dim, heads, kv_heads, head_dim, 4096, 1, rope)
    config = make_config(method.name, {**from_bits, **settings})
    if method.name == "commvq":
        config = config.resolve(spec)
    codec = method.build(spec, config, 0).to(DEVICE)
    if method.name.startswith("klt"):  # what is not fitted decodes to 0
        for part in (codec.key, codec.value):
            part.randomize_(torch.Generator(DEVICE).manual_seed(0))
    if method.name == "oscar":
        for part in (codec.key, codec.value):
            part.rotation.copy_(torch.linalg.qr(torch.randn(part.rotation.shape))[0])
    return method, codec


def random_codes(codec: LayerCodec, batch: int, length: int) -> tuple[Any, Any]:
    """Codes of CommVQ with random books: no fit is needed to compare two ways of reading them."""
    key, value = codec.key, codec.value
    if isinstance(key, KeyGroups):
        groups = [random_codes(codec.of_rank(i, len(key.parts)), batch, length) for i in range(len(key.parts))]
        keys, values = zip(*groups, strict=True)
        return key.join_codes(keys), value.join_codes(values)
    config, spec = key.config, key.spec
    key.codebook.copy_(torch.randint(-127, 128, key.codebook.shape))
    key.codebook_scale.uniform_(0.001, 0.01)
    value.codebook.normal_()
    value.offset.normal_()
    codes = torch.randint(0, 2**config.bits_per_code, (batch, length, key.num_codes), device=DEVICE)
    norms = 1 if config.key_norm == "joint" else spec.num_kv_heads
    norm = (torch.rand(batch, norms, length, 1, device=DEVICE) * 20 / norm_unit(key.norm_width)).half()
    bits = torch.randint(0, 256, (batch, 1, length, config.value_code_bits // 8), dtype=torch.uint8, device=DEVICE)
    scale = torch.rand(batch, 1, length, 1, device=DEVICE).half()
    keys = CommVQKeyCodes(pack_bits(codes, config.bits_per_code).unsqueeze(1), norm)
    return keys, CommVQValueCodes(bits, scale)


def make_part(codec: LayerCodec, heads: int, batch: int, length: int, lengths: list[int] | None) -> EncodedTokens:
    spec = codec.key.spec
    state = codec.key.new_state(batch, torch.device(DEVICE))
    keys = torch.randn(batch, spec.num_kv_heads, length, spec.head_dim, device=DEVICE)
    if state is not None:
        queries = torch.randn(batch, heads, length, spec.head_dim, device=DEVICE)
        codec.key.observe(state, queries, keys, torch.full((batch,), float(length), device=DEVICE))
        codec.key.finalize_state(state, list(range(batch)))
    if isinstance(codec.key, KeyGroups) or hasattr(codec.key, "codebook"):
        key_codes, value_codes = random_codes(codec, batch, length)
    else:
        key_codes, value_codes = codec.key.encode(keys, state), codec.value.encode(torch.randn_like(keys))
    rotations = None
    if codec.needs_rotations:
        positions = torch.arange(FIRST_POSITION, FIRST_POSITION + length, device=DEVICE).expand(batch, -1)
        rotations = TokenRotations(Rope(Rotary(spec.head_dim)), positions)
    counts = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return EncodedTokens(key_codes, state, value_codes, rotations, counts)


def exact_attend(codec: LayerCodec, query: Tensor, part: EncodedTokens, scaling: float) -> PartialAttention:
    """Attention of one query token over decoded codes in float64."""
    spec, length = codec.key.spec, part.length
    rotation = None if part.rotations is None else part.rotations.tokens(0, length)
    keys = codec.decode_keys(part.key_codes, part.key_state, rotation, torch.float32).double()
    values = codec.value.decode(part.value_codes, None).double()
    scores = query.double().unflatten(1, (spec.num_kv_heads, -1)).squeeze(3) @ keys.transpose(-1, -2) * scaling
    if part.lengths is not None:
        held = torch.arange(length, device=scores.device) < part.lengths.view(-1, 1, 1, 1)
        scores = scores.masked_fill(~held, float("-inf"))
    out = scores.softmax(-1).nan_to_num() @ values
    return out.view(query.shape).float(), scores.logsumexp(-1).view(query.shape[:3]).float()


def assert_same(ours: PartialAttention, expected: PartialAttention, dtype: torch.dtype) -> None:
    assert ours[0].isfinite().all()
    error = (ours[0] - expected[0]).norm() / expected[0].norm()
    assert error < TOLERANCE[dtype], f"error {error:.1e}"
    seen = expected[1].isfinite()
    assert torch.equal(seen, ours[1].isfinite())
    assert torch.allclose(ours[1][seen], expected[1][seen], atol=1e-4 if dtype == torch.float32 else 2e-2)
