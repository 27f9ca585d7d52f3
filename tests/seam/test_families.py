"""Every family of models through the cache: the tokens of stock, the keys of its attention, and all methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import WINDOW, record
from families import make
from passes import generated
from torch import Tensor
from transformers import DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvcli
from kvcli.errors import CacheError, UsageError
from kvcli.fit import assemble, fit_recording
from kvcli.registry import get_method
from kvcli.seam.layer import AttentionCall
from kvcli.seam.patch import Seam
from kvcli.seam.probe import FULL, HYBRID, probe

ALL = [x for x in FULL + HYBRID if x in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
METHODS = ("commvq-2", "kivi-2", "squat-2", "squat-pre-2", "qjl")


@cache
def model_of(family: str) -> Any:
    return make(family)


def inputs() -> dict[str, Tensor]:
    """Two prompts of 30 and 19 tokens, padded on the left."""
    ids = torch.randint(3, 97, (2, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[1, :11] = mask[1, :11] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"prefill_chunk_size": 7}], ids=["greedy", "beams", "chunks"]
)
@pytest.mark.parametrize("family", ALL)
def test_tokens_are_those_of_stock(family: str, settings: dict[str, Any]) -> None:
    model = model_of(family)
    expected, logits = generated(model, inputs(), DynamicCache(config=model.config), **settings)
    with kvcli.attach(model, "fp16", **WINDOW) as session:
        cache = session.new_cache()
        tokens, ours = generated(model, inputs(), cache, **settings)
    assert torch.equal(tokens, expected)
    assert (ours - logits).abs().max() < 1e-4 * logits.abs().max()
    assert cache.memory().num_encoded > 0


@pytest.mark.parametrize("family", ALL)
def test_rotated_keys_are_those_of_stock(family: str) -> None:
    model, ids, calls = model_of(family), inputs()["input_ids"][:1], {}

    def attend(call: AttentionCall) -> Tensor:
        calls[call.layer.layer_idx] = call
        return call.exact()

    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=stock, use_cache=True)
        with Seam(model, attend) as seam:
            model(input_ids=ids, use_cache=False)
    spec = seam.attention.spec
    assert len(calls) == spec.num_layers
    for layer_idx, call in calls.items():
        theirs = call.layer.in_order(stock.layers[spec.in_model(layer_idx)].keys)
        ours = call.rotation.apply(call.key) if call.layer.rotated else call.key
        assert torch.allclose(ours, theirs, atol=1e-4 * float(theirs.abs().max()))
        # layers that rotate and are understood give us keys that do not depend on positions
        assert call.layer.own_rotation or torch.equal(call.key, ours) != call.layer.rotated


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    @cache
    def of(family: str) -> Any:
        return record(model_of(family), tmp_path_factory.mktemp(family))

    return of


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", ALL)
def test_methods_fit_and_generate(family: str, name: str, recording: Callable[[str], Any], tmp_path: Path) -> None:
    model, method = model_of(family), get_method(name.removesuffix("-2"))
    settings = dict(method.example_settings)
    if "subspace_source" in method.config_cls.model_fields:
        settings["subspace_source"] = "calibration"
    artifact = None
    if method.fit is not None:
        samples = recording(family)
        fit_recording(samples, method, method.config_cls(**settings).resolve(samples.spec), tmp_path)
        artifact, settings = assemble([tmp_path]), {}
    with kvcli.attach(model, method.name, artifact=artifact, **settings) as session:
        compressed = session.new_cache()
        tokens = torch.randint(3, 97, (2, 44), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for part in tokens.split((40, 1, 1, 1, 1), dim=1):
                logits = model(input_ids=part, past_key_values=compressed, use_cache=True).logits
                assert logits.isfinite().all()
    assert compressed.memory().num_encoded > 0


def tensors(values: list[Any]) -> list[torch.Tensor]:
    parts = [x for value in values if isinstance(value, list) for x in value]
    parts += [x for value in values if isinstance(value, dict) for x in value.values()]
    return [x for x in (*values, *parts) if isinstance(x, torch.Tensor) and x.is_floating_point()]


@pytest.mark.parametrize("family", [x for x in ALL if x in HYBRID])
def test_hybrids_compress_their_layers_of_full_attention(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    with kvcli.attach(model, "fp16", **WINDOW) as session:
        compressed = session.new_cache()
        generated(model, inputs(), compressed)
        assert 0 < session.spec.num_layers < session.spec.model_layers == len(compressed.layers)
        memory = compressed.memory()
        assert memory.num_tokens == 30 + 19 + 2 * 11
        assert memory.fp16_bytes == memory.num_tokens * session.spec.fp16_bytes_per_token()
        others = [x for layer in compressed.other_layers for x in tensors(list(vars(layer).values()))]
        assert memory.other_bytes == sum(x.nbytes for x in others) > 0
        assert (memory.layers, memory.other_layers) == (session.spec.num_layers, len(compressed.other_layers))
        assert memory.share == memory.uncompressed_bytes / (memory.uncompressed_bytes + memory.other_bytes)
        for refused in (lambda: compressed.crop(-1), lambda: compressed.save(tmp_path / "context")):
            with pytest.raises(CacheError, match="layers of the model keep transformers' own cache"):
                refused()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ALL)
def test_what_is_found_out_does_not_depend_on_the_dtype(family: str, dtype: torch.dtype) -> None:
    found, wide = probe(make(family).to(dtype)), probe(model_of(family))
    assert found.spec == wide.spec
    kinds = [[(x.rotated, x.channels, x.own_rotation) for x in attention.layers] for attention in (found, wide)]
    assert kinds[0] == kinds[1]


def test_a_family_that_no_test_runs_is_named() -> None:
    (note,) = probe(make("apertus")).notes
    assert note.startswith("model type 'apertus' is not among the families that kvcli is tested with")
    assert not probe(model_of("llama")).notes


@pytest.mark.parametrize("method", ["fp16", "kivi-2", "rtn-4"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "glm4", "smollm3"])
def test_kernels_cap_scores_and_share_them_with_sinks(family: str, method: str) -> None:
    """A padded prompt in two chunks, the second too long for one tile, then single tokens; a layer of either kind."""
    pytest.importorskip("triton")
    without_rope = {"no_rope_layer_interval": 2} if family == "smollm3" else {}
    model = make(family, num_hidden_layers=2, **without_rope)
    tokens = torch.randint(3, 97, (2, 60), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    settings = {"group_size": 16, "residual_length": 16, "sink_length": 2} if method == "kivi-2" else WINDOW

    def logits(cache: Any) -> list[Tensor]:
        made, start = [], 0
        for part in tokens.split((25, 30, 1, 4), dim=1):
            stop = start + part.shape[1]
            positions = (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:]
            with torch.no_grad():
                output = model(
                    part, attention_mask=mask[:, :stop], position_ids=positions, past_key_values=cache, use_cache=True
                )
            made.append(output.logits[:, -1])
            start = stop
        return made

    made = []
    for impl in ("fused", "reference"):
        with kvcli.attach(model, method, impl=impl, **settings) as session:
            made.append(logits(session.new_cache()))
    if method == "fp16":
        made.append(logits(DynamicCache(config=model.config)))
    for fused, *others in zip(*made, strict=True):
        for other in others:
            assert (fused - other).abs().max() <= 2e-3 * other.abs().max()


def test_hybrids_are_decoded_in_passes_and_steps_are_refused() -> None:
    model = model_of("gemma3_text")
    with kvcli.attach(model, "fp16", **WINDOW) as session:
        made = session.generate(**inputs())
        assert made.cache.step_obstacle is not None
        for asked in ({"mode": "steps"}, {"compile_layers": "eager"}):
            with pytest.raises(UsageError, match="layers of other kinds than full attention cannot take part in steps"):
                session.generate(**inputs(), **asked)
