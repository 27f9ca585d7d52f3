"""Keys and values that are encoded at different times: attention over a cache, against all tokens kept beside it."""

import pytest
import torch
from factories import make_model, make_spec
from torch import Tensor
from torch.nn.functional import pad

from kvcli.attention import reference
from kvcli.attention.backend import REFERENCE, AttentionBackend
from kvcli.attention.layer import attend_layer
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.layer import NewTokens
from kvcli.cache.window import WindowLayout, WindowTokens
from kvcli.methods.config import KIVIConfig
from kvcli.methods.kivi import METHOD
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec
from kvcli.rope import TokenRotations
from kvcli.seam.layer import AttentionCall, RotaryOutput
from kvcli.seam.patch import Seam
from kvcli.seam.sdpa import sdpa

R, GROUP, SINKS = 8, 4, 3
CONFIG = KIVIConfig(residual_length=R, group_size=GROUP, sink_length=SINKS)
STEPS = [[1, 1, 1]] * 13 + [[2, 7, 0], [1, 1, 1], [40, 1, 3]] + [[1, 0, 1]] * 5
"""New tokens of each row in the passes after the prompt; rows flush at times of their own, each at least once before
the pass of 40 tokens.
"""
EVEN_STEPS = [[1, 1]] * 13 + [[9, 9]] + [[1, 1]] * 5


class Layer:
    """One layer with its cache, and beside it every token of every row: keys after RoPE, and values."""

    def __init__(self, backend: AttentionBackend, dtype: torch.dtype, offset: bool, batch: int) -> None:
        self.backend, self.dtype, self.generator = backend, dtype, torch.Generator().manual_seed(0)
        spec, built = make_spec(head_dim=32), METHOD.build(make_spec(head_dim=32), CONFIG, 0)
        self.codec = LayerCodec(built.key, built.value, self.random(2, 32).float() if offset else None)
        seam = Seam(make_model("llama", head_dim=32, num_hidden_layers=1), sdpa)  # type: ignore[arg-type]
        self.cache, self.rope = CompressedCache(spec, METHOD, CONFIG, [self.codec], seam), seam.rope
        self.valid = torch.zeros(batch, 0, dtype=torch.bool)
        self.tokens = [torch.zeros(2, 2, 0, 32, dtype=dtype) for _ in range(batch)]
        self.coded = [(0, 0)] * batch

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def step(self, counts: list[int]) -> tuple[Tensor, list[Tensor]]:
        """The attention of new tokens, left-padded, and what it should be, the plainest way last."""
        batch, width = len(counts), max(counts)
        real = torch.arange(width) >= width - torch.tensor(counts).unsqueeze(1)
        self.valid = torch.cat((self.valid, real), dim=1)
        slots = torch.arange(self.valid.shape[1])
        mask = self.valid[:, None, None] & (slots <= slots[-width:, None])
        positions = (self.valid.cumsum(1) - 1).clamp(min=0)[:, -width:]
        rotary = RotaryOutput(positions, self.rope.rotation(positions, self.dtype))
        query, key, value = (self.random(batch, heads, width, 32) for heads in (4, 2, 2))
        new = torch.zeros(2, *key.shape, dtype=self.dtype)
        straight = WindowTokens(WindowLayout(0, width), width, 0, 0)
        rotated = self.backend.rotate_and_append(rotary.rotation, query, key, value, *new, straight)
        self.tokens = [torch.cat((old, new[:, row][:, :, real[row]]), 2) for row, old in enumerate(self.tokens)]
        expected = self.expected(rotated, real)
        layer = self.cache.compressed[0]
        new = NewTokens(layer, key, value)
        actual = attend_layer(AttentionCall(layer.attention, query, new, value, mask, 0.3, rotary), self.backend)
        after_sinks = [max(0, tokens.shape[2] - SINKS) for tokens in self.tokens]
        self.coded = [(count // R * R, max(0, count - R)) for count in after_sinks]  # KIVI section 3.3
        return actual, [x.masked_fill(~real[:, :, None, None], 0) for x in expected]

    def expected(self, query: Tensor, real: Tensor) -> list[Tensor]:
        """Over the codes of whole groups of keys and values, and over all other tokens, decoded if they are codes."""
        attended = [min(coded) // GROUP * GROUP for coded in self.coded]
        windows = [self.decoded(row, codes) for row, codes in enumerate(attended)]
        lengths = torch.tensor([window.shape[2] for window in windows])
        longest = int(lengths.max())
        key, value = torch.stack([pad(x, (0, 0, 0, longest - x.shape[2])) for x in windows], dim=1)
        index = (lengths - real.sum(1)).unsqueeze(1) + real.cumsum(1) - 1
        codes = self.backend.attend_codes(self.codec, query, self.encoded(attended), 0.3) if max(attended) else None
        visible = (torch.arange(longest) <= index[..., None]) & real[..., None]
        plain = reference.partial_attention(query, key, value, visible, 0.3)
        plain = plain if codes is None else reference.merge_state(plain, codes)
        index, none = index.masked_fill(~real, -1).int(), torch.zeros(len(windows), dtype=torch.int32)
        window = WindowTokens(WindowLayout(0, longest), longest, none, index)
        in_order = self.backend.attend_window(query, key, value, window, 0.3, codes)
        return [in_order, plain[0].transpose(1, 2).to(query.dtype)]

    def decoded(self, row: int, attended: int) -> Tensor:
        """The sinks of a row and its tokens from `attended` on, keys and values: [2, num_kv_heads, time, head_dim]."""
        tokens, (coded_keys, coded_values) = self.tokens[row].clone(), self.coded[row]
        keys, values = tokens[:1, :, SINKS : SINKS + coded_keys], tokens[1:, :, SINKS : SINKS + coded_values]
        rotation = self.rope.rotation(torch.arange(SINKS, SINKS + coded_keys)[None], torch.float32)
        if coded_keys:
            codes = self.codec.key.encode(self.codec.encoder_input(keys, rotation, self.backend.unrotate), None)
            keys.copy_(self.codec.decode_keys(codes, None, rotation, self.dtype))
        if coded_values:
            values.copy_(self.codec.value.decode_to(self.codec.value.encode(values), None, self.dtype))
        return torch.cat((tokens[:, :, :SINKS], tokens[:, :, SINKS + attended :]), dim=2)

    def encoded(self, attended: list[int]) -> EncodedTokens:
        """Codes of the first tokens of each row after its sinks, encoded at once."""
        longest = max(attended)
        keys, values = torch.zeros(2, len(attended), 2, longest, 32, dtype=self.dtype)
        for row, count in enumerate(attended):
            keys[row, :, :count], values[row, :, :count] = self.tokens[row][:, :, SINKS : SINKS + count]
        positions = torch.arange(SINKS, SINKS + longest).expand(len(attended), -1)
        rotation = self.rope.rotation(positions, torch.float32)
        key_codes = self.codec.key.encode(self.codec.encoder_input(keys, rotation, self.backend.unrotate), None)
        counts = None if min(attended) == longest else torch.tensor(attended, dtype=torch.int32)
        rotations = TokenRotations(self.rope, positions, counts) if self.codec.needs_rotations else None
        return EncodedTokens(key_codes, None, self.codec.value.encode(values), rotations, counts)


def check(backend: AttentionBackend, dtype: torch.dtype, offset: bool, even: bool) -> None:
    made = Layer(backend, dtype, offset, 2 if even else 3)
    tolerance = 0 if backend is REFERENCE else 1e-2 if dtype == torch.float16 else 1e-5
    with torch.no_grad():
        made.step([19, 19] if even else [33, 5, 1])
        for counts in EVEN_STEPS if even else STEPS:
            actual, (in_order, plain) = made.step(counts)
            assert torch.equal(actual, in_order)
            assert torch.allclose(actual, plain, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_reference(dtype: torch.dtype, offset: bool, even: bool) -> None:
    check(REFERENCE, dtype, offset, even)


@pytest.mark.parametrize(("dtype", "even"), [(torch.float32, False), (torch.float16, False), (torch.float16, True)])
def test_kernels(dtype: torch.dtype, even: bool) -> None:
    """The kernels of every method, as for one whose own kernels refuse groups of 4."""
    from kvcli.attention.decoded import attend_dequantized as attend
    from kvcli.attention.window_kernels import attend_window, rotate_and_append, unrotate

    backend = AttentionBackend("fused", attend, attend, attend_window, rotate_and_append, unrotate)
    check(backend, dtype, True, even)
