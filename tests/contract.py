"""What every method must do, alone and in the cache: test classes to be subclassed with a fixture `method`.

The methods of the registry are tested in methods/test_contract.py and test_methods_cache.py, the example of
docs/adding_a_method.md in cli/test_adding_a_method.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from factories import clustered, make_spec, prompt_and_steps

import kvcli
from kvcli.artifact.artifact import Artifact
from kvcli.methods.base import Codes
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.methods.samples import LayerSamples
from kvcli.rope import Rotation
from kvcli.seam.versions import with_cache


class CodecContract:
    """Laws of a layer's codecs."""

    @pytest.fixture
    def codec(self, method: Method) -> LayerCodec:
        """The codecs of a layer, fitted where the method needs it."""
        spec = make_spec()
        config = method.config_cls(**method.example_settings).resolve(spec)
        codec = method.build(spec, config, 0)
        if method.needs_artifact:
            assert method.fit is not None
            keys, values = clustered(2, 2000, 16), clustered(2, 2000, 16, seed=1)
            angles = torch.arange(100.0)[:, None] * 1e4 ** -(torch.arange(8) / 8)
            rotation = Rotation(angles.cos()[None, None], angles.sin()[None, None])
            samples = LayerSamples(torch.randn(4, 100, 16), keys, values, torch.arange(2000), rotation)
            with torch.no_grad():
                report = method.fit(codec, samples, samples, config, torch.Generator().manual_seed(0))
            assert set(method.fit_metrics) <= set(report.metrics)
        return codec

    def test_codes_follow_the_axis_convention(self, codec: LayerCodec) -> None:
        for coder in coders(codec):
            codes = coder.encode(sample(64))
            assert codes.num_tokens == 64
            for tensor in codes.tensors().values():
                assert tensor.shape[0] == 2
                assert tensor.shape[1] in (1, 2)
                assert 64 % tensor.shape[2] == 0
            decoded = coder.decode(codes)
            assert decoded.dtype == torch.float32
            assert decoded.shape == (2, 2, 64, 16)

    def test_same_input_same_codes(self, codec: LayerCodec) -> None:
        for coder in coders(codec):
            assert equal(coder.encode(sample(32)), coder.encode(sample(32)))

    def test_encoding_pieces_is_encoding_the_whole(self, codec: LayerCodec) -> None:
        for coder in coders(codec):
            group, x = coder.tokens_per_group, sample(64)
            border = 24 - 24 % group
            whole = coder.decode(coder.encode(x))
            pieces = torch.cat([coder.decode(coder.encode(y)) for y in (x[:, :, :border], x[:, :, border:])], dim=2)
            assert torch.allclose(whole, pieces, atol=1e-5)

    def test_a_row_of_a_batch_is_encoded_as_if_alone(self, codec: LayerCodec) -> None:
        for coder in coders(codec, 3):
            x = sample(40, batch=3)
            together = coder.decode(coder.encode(x))
            alone = torch.cat([coder.row(row).decode(coder.row(row).encode(x[row : row + 1])) for row in range(3)])
            assert torch.allclose(together, alone, atol=1e-5)

    def test_bytes_equal_the_formula(self, codec: LayerCodec) -> None:
        for coder in coders(codec, 1):
            codes = coder.encode(sample(64, batch=1).half())
            assert 8 * codes.nbytes == 64 * coder.bits_per_token()

    @pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-30, 6e4])
    def test_constant_input_stays_finite(self, codec: LayerCodec, value: float) -> None:
        for coder in coders(codec, 1):
            decoded = coder.decode(coder.encode(torch.full((1, 2, 32, 16), value)))
            assert decoded.isfinite().all()

    def test_slicing_codes_is_slicing_tokens(self, codec: LayerCodec) -> None:
        for coder in coders(codec):
            codes = coder.encode(sample(64))
            assert torch.allclose(coder.decode(codes.slice(32, 64)), coder.decode(codes)[:, :, 32:], atol=1e-6)

    @pytest.mark.parametrize("rows", [1, 6])
    def test_products_with_codes_are_products_with_decoded_tokens(self, codec: LayerCodec, rows: int) -> None:
        key, value = coders(codec)
        angles = torch.randn(2, 1, 32, 8)
        rotation = Rotation(angles.cos(), angles.sin()) if codec.key.space == "pre_rope" else None
        query, weights = torch.randn(2, 2, rows, 16), torch.rand(2, 2, rows, 32)
        codes = [coder.encode(sample(64)).slice(32, 64) for coder in (key, value)]
        decoded = key.decode(codes[0])
        expected = query @ (decoded if rotation is None else rotation.apply(decoded)).transpose(-1, -2)
        assert torch.allclose(key.scores(query, codes[0], key.state, rotation), expected, atol=1e-4, rtol=1e-4)
        sums = value.weighted_sum(weights, codes[1])
        assert torch.allclose(sums, weights @ value.decode(codes[1]), atol=1e-4, rtol=1e-4)

    def test_state_dict_restores_the_codec_bit_for_bit(self, codec: LayerCodec) -> None:
        state = {name: x.clone() for name, x in codec.state_dict().items()}
        codes = [coder.encode(sample(24)) for coder in coders(codec)]
        for buffer in codec.buffers():
            buffer.zero_()
        codec.load_state_dict(state)
        assert all(equal(coder.encode(sample(24)), before) for coder, before in zip(coders(codec), codes, strict=True))


class Coder:
    """A codec with the finalized state of some sequences."""

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


def coders(codec: LayerCodec, batch: int = 2) -> list[Coder]:
    return [Coder(codec.key, batch), Coder(codec.value, batch)]


def sample(time: int, seed: int = 5, batch: int = 2) -> torch.Tensor:
    return clustered(batch * 2, time, 16, seed).view(batch, 2, time, 16)


def equal(a: Codes, b: Codes) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True))


class CacheContract:
    """Laws of a method through the whole cache of a tiny model: batches, padding, chunks, beams, bytes."""

    @pytest.fixture
    def attach(self, tiny_model: Any, method: Method, tiny_artifact: Callable[[Method], Artifact]) -> Any:
        """Attaches the method to the tiny model, with 2 bits where it can be asked for bits."""
        artifact = tiny_artifact(method) if method.needs_artifact else None
        known = CacheConfig.model_fields if method.needs_artifact else method.config_cls.model_fields
        settings = {name: value for name, value in method.example_settings.items() if name in known}
        name = method.name if method.needs_artifact else asked_for(method)

        def make(**changes: Any) -> Any:
            return kvcli.attach(tiny_model, name, artifact=artifact, **{"sink_length": 2, **settings, **changes})

        return make

    @pytest.mark.parametrize("sink_length", [0, 2])
    def test_a_left_padded_row_equals_the_same_prompt_alone(
        self, tiny_model: Any, prompt: Any, attach: Any, sink_length: int
    ) -> None:
        lengths = (40, 17, 9, 1)
        pieces = prompt_and_steps(prompt, *lengths)
        with attach(sink_length=sink_length) as session:
            together = logits(tiny_model, session, pieces)
            for row, length in enumerate(lengths):
                expected = logits(tiny_model, session, alone(pieces, row, length))
                assert torch.allclose(expected, together[row : row + 1], atol=2e-4), f"row {row} of {length} tokens"

    def test_decode_time_tokens_become_codes(self, tiny_model: Any, prompt: Any, method: Method, attach: Any) -> None:
        with attach() as session, torch.no_grad():
            cache = session.new_cache()
            tiny_model(**prompt(1), **with_cache(cache))
            assert cache.memory().num_encoded == 0
            for _ in range(30):
                tiny_model(torch.tensor([[5]]), **with_cache(cache))
            assert cache.memory().num_encoded >= 16
            assert cache.memory().window_bytes < cache.memory().fp16_bytes

    def test_true_bits_equal_the_formula(self, tiny_model: Any, prompt: Any, attach: Any) -> None:
        tiny_model.bfloat16()  # fp16 keeps the model's dtype
        with attach() as session, torch.no_grad():
            cache = session.new_cache()
            tiny_model(**prompt(50), **with_cache(cache))
            memory = cache.memory()
            keys = [codec.key.bits_per_token() for codec in session.codecs]
            values = [codec.value.bits_per_token() for codec in session.codecs]
        assert memory.key_bits == pytest.approx(sum(keys) / len(keys) / 32)
        assert memory.value_bits == pytest.approx(sum(values) / len(values) / 32)

    @pytest.mark.parametrize("settings", [{"num_beams": 3}, {"do_sample": True}, {"prefill_chunk_size": 7}])
    def test_generate_and_continue(self, tiny_model: Any, prompt: Any, attach: Any, settings: dict[str, Any]) -> None:
        inputs = prompt(30, 4)
        with attach() as session, torch.no_grad():
            cache = session.new_cache()
            out = tiny_model.generate(**inputs, **with_cache(cache), max_new_tokens=20, **settings)
            assert out.shape[1] == 50
            if "num_beams" in settings:
                return
            mask = torch.cat((inputs["attention_mask"], torch.ones(2, 26, dtype=torch.long)), dim=1)
            more = torch.cat((out, torch.full((2, 6), 7)), dim=1)
            again = tiny_model.generate(input_ids=more, attention_mask=mask, **with_cache(cache), max_new_tokens=5)
            assert again.shape[1] == 61

    def test_chunked_prefill_is_close_to_one_prefill(self, tiny_model: Any, prompt: Any, attach: Any) -> None:
        """Later chunks see codes of earlier ones, so the two differ, but not by much."""
        inputs = prompt_and_steps(prompt, 60)
        first, rest = inputs[0]["input_ids"], inputs[1:]
        chunks = [{"input_ids": ids} for ids in first.split(13, dim=1)]
        with attach() as session:
            whole = logits(tiny_model, session, inputs)
            chunked = logits(tiny_model, session, [*chunks, *({"input_ids": p["input_ids"]} for p in rest)])
        assert (chunked - whole).norm() / whole.norm() < 0.6

    def test_a_window_longer_than_the_text_is_exact(self, tiny_model: Any, prompt: Any, attach: Any) -> None:
        pieces = prompt_and_steps(prompt, 20)
        ids = torch.cat([piece["input_ids"] for piece in pieces], dim=1)
        with torch.no_grad():
            expected = tiny_model(ids).logits[:, -1]
        with attach(residual_length=64) as session:
            assert torch.allclose(logits(tiny_model, session, pieces), expected, atol=1e-4)

    def test_works_under_autocast(self, tiny_model: Any, prompt: Any, attach: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16), attach() as session:
            assert logits(tiny_model, session, prompt_and_steps(prompt, 40, 12)).isfinite().all()


def asked_for(method: Method) -> str:
    """The method as on the command line, with 2 bits, or else its least, where it can be asked for bits."""
    if not method.config_cls.bit_settings():
        return method.name
    choices = [int(bits) for bits in re.findall(r"\d+", method.bits)]
    return f"{method.name}-{2 if 2 in choices else min(choices)}"


def logits(model: Any, session: Any, pieces: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Logits of the last token, after the pieces of a text went through a new cache one by one."""
    cache = session.new_cache()
    with torch.no_grad():
        for piece in pieces:
            extra = {}
            if "attention_mask" in piece:  # as `generate` does it: padding takes no positions
                positions = (piece["attention_mask"].cumsum(-1) - 1).clamp_min(0)
                extra["position_ids"] = positions[:, -piece["input_ids"].shape[1] :]
            out = model(**piece, **extra, **with_cache(cache)).logits[:, -1]
    return out


def alone(pieces: list[dict[str, torch.Tensor]], row: int, length: int) -> list[dict[str, torch.Tensor]]:
    """The pieces of one row without its padding."""
    rows = []
    for extra, piece in enumerate(pieces):
        ids = piece["input_ids"][row : row + 1]
        mask = piece["attention_mask"][row : row + 1, -(length + extra) :]
        rows.append({"input_ids": ids if extra else ids[:, -length:], "attention_mask": mask})
    return rows
