"""Laws that every method of the registry obeys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factories import clustered, make_spec

from kvcli.attention.session import make_config
from kvcli.methods.base import Codes, LayerCodec
from kvcli.registry import METHODS, get_method
from kvcli.samples import LayerSamples

SETTINGS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "fp8": {},
    "rtn": {"group_size": 8},
    "kivi": {"group_size": 8, "residual_length": 8},
    "squat": {"group_size": 8, "residual_length": 8},
    "squat-pre": {"group_size": 8, "residual_length": 8},
    "qjl": {"group_size": 8, "num_outliers": 2},
    "commvq": {"codebook_size": 8, "num_residuals": 3, "key_iterations": 4, "value_iterations": 3},
}
"""Small settings of each method; a new method must add its own."""


@pytest.fixture(params=METHODS)
def codec(request: pytest.FixtureRequest) -> LayerCodec:
    """A layer's codecs, fitted where the method is."""
    method, spec = get_method(request.param), make_spec()
    config = make_config(method, SETTINGS[request.param])
    if hasattr(config, "resolve"):
        config = config.resolve(spec)
    made = method.build(spec, config, 0)
    if method.needs_artifact:
        keys, values = clustered(2, 2000, 16), clustered(2, 2000, 16, seed=1)
        samples = LayerSamples(torch.randn(4, 100, 16), keys, values, torch.arange(2000))
        with torch.no_grad():
            method.fit(made, samples, samples, config, torch.Generator().manual_seed(0))
    return made


def parts(codec: LayerCodec, batch: int = 2) -> list[Any]:
    return [Coder(codec.key, batch), Coder(codec.value, batch)]


class Coder:
    """A codec with the settled state of some sequences."""

    def __init__(self, codec: Any, batch: int = 2) -> None:
        self.codec, self.state = codec, codec.new_state(batch, torch.device("cpu"))
        if self.state is not None:
            generator = torch.Generator().manual_seed(3)
            queries = torch.randn(batch, 4, 50, 16, generator=generator)
            codec.observe(self.state, queries, sample(50, batch=batch), torch.full((batch,), 50.0))
            codec.finalize_state(self.state, list(range(batch)))

    def encode(self, x: torch.Tensor) -> Codes:
        return self.codec.encode(x, self.state)

    def decode(self, codes: Codes) -> torch.Tensor:
        return self.codec.decode(codes, self.state)

    def row(self, row: int) -> Coder:
        alone = Coder(self.codec, 1)
        alone.state = None if self.state is None else self.state.select([row])
        return alone

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)


def sample(time: int, seed: int = 5, batch: int = 2) -> torch.Tensor:
    return clustered(batch * 2, time, 16, seed).view(batch, 2, time, 16)


def equal(a: Codes, b: Codes) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True))


def test_codes_follow_the_axis_convention(codec: LayerCodec) -> None:
    for part in parts(codec):
        codes = part.encode(sample(64))
        assert codes.num_tokens == 64
        for tensor in codes.tensors().values():
            assert tensor.shape[0] == 2
            assert tensor.shape[1] in (1, 2)
            assert 64 % tensor.shape[2] == 0
        decoded = part.decode(codes)
        assert decoded.dtype == torch.float32
        assert decoded.shape == (2, 2, 64, 16)


def test_same_input_same_codes(codec: LayerCodec) -> None:
    for part in parts(codec):
        assert equal(part.encode(sample(32)), part.encode(sample(32)))


def test_encoding_pieces_is_encoding_the_whole(codec: LayerCodec) -> None:
    for part in parts(codec):
        group, x = part.tokens_per_group, sample(64)
        border = 24 - 24 % group
        whole = part.decode(part.encode(x))
        pieces = torch.cat([part.decode(part.encode(y)) for y in (x[:, :, :border], x[:, :, border:])], dim=2)
        assert torch.allclose(whole, pieces, atol=1e-5)


def test_a_row_of_a_batch_is_coded_as_if_alone(codec: LayerCodec) -> None:
    for part in parts(codec, 3):
        x = sample(40, batch=3)
        together = part.decode(part.encode(x))
        alone = torch.cat([part.row(row).decode(part.row(row).encode(x[row : row + 1])) for row in range(3)])
        assert torch.allclose(together, alone, atol=1e-5)


def test_bytes_equal_the_formula(codec: LayerCodec) -> None:
    for part in parts(codec, 1):
        codes = part.encode(sample(64, batch=1).half())
        assert 8 * codes.nbytes == 64 * part.bits_per_token()


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-30, 6e4])
def test_constant_input_stays_finite(codec: LayerCodec, value: float) -> None:
    for part in parts(codec, 1):
        decoded = part.decode(part.encode(torch.full((1, 2, 32, 16), value)))
        assert decoded.isfinite().all()


def test_slicing_codes_is_slicing_tokens(codec: LayerCodec) -> None:
    for part in parts(codec):
        codes = part.encode(sample(64))
        assert torch.allclose(part.decode(codes.slice(32, 64)), part.decode(codes)[:, :, 32:], atol=1e-6)


def test_state_dict_restores_the_codec_bit_for_bit(codec: LayerCodec) -> None:
    state = {name: x.clone() for name, x in codec.state_dict().items()}
    codes = [part.encode(sample(24)) for part in parts(codec)]
    for buffer in codec.buffers():
        buffer.zero_()
    codec.load_state_dict(state)
    assert all(equal(part.encode(sample(24)), before) for part, before in zip(parts(codec), codes, strict=True))
