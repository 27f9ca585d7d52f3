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
from passes import generated, go_on, ids, mask_of, padded, read
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvcli
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.errors import CacheError, UsageError
from kvcli.registry import get_method
from kvcli.seam.layer import AttentionCall
from kvcli.seam.patch import Seam
from kvcli.seam.probe import FULL, HYBRID, probe
from kvcli.seam.versions import with_cache

ALL = [x for x in FULL + HYBRID if x in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
METHODS = ("commvq-2", "kivi-2", "squat-2", "squat-pre-2", "qjl")


@cache
def model_of(family: str) -> Any:
    return make(family)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"prefill_chunk_size": 7}], ids=str)
@pytest.mark.parametrize("family", ALL)
def test_tokens_are_those_of_stock(family: str, settings: dict[str, Any]) -> None:
    model = model_of(family)
    expected, logits = generated(model, padded(30, 19), DynamicCache(config=model.config), **settings)
    with kvcli.attach(model, "fp16", **WINDOW) as session:
        cache = session.new_cache()
        tokens, ours = generated(model, padded(30, 19), cache, **settings)
    assert torch.equal(tokens, expected)
    assert (ours - logits).abs().max() < 1e-4 * logits.abs().max()
    assert cache.memory().num_encoded > 0


@pytest.mark.parametrize("family", ALL)
def test_rotated_keys_are_those_of_stock(family: str) -> None:
    model, text, calls = model_of(family), ids(1, 30), {}

    def attend(call: AttentionCall) -> Tensor:
        calls[call.layer.layer_idx] = call
        return call.exact()

    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=text, **with_cache(stock))
        with Seam(model, attend) as seam:
            model(input_ids=text, use_cache=False)
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
        with torch.no_grad():
            for part in ids(2, 44).split((40, 1, 1, 1, 1), dim=1):
                assert model(input_ids=part, **with_cache(compressed)).logits.isfinite().all()
    assert compressed.memory().num_encoded > 0


@pytest.mark.parametrize("family", [x for x in ALL if x in HYBRID])
def test_hybrids_compress_their_layers_of_full_attention(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    with kvcli.attach(model, "fp16", **WINDOW) as session:
        compressed = session.new_cache()
        generated(model, padded(30, 19), compressed)
        assert 0 < session.spec.num_layers < session.spec.model_layers == len(compressed.layers)
        memory = compressed.memory()
        assert memory.num_tokens == 30 + 19 + 2 * 11
        assert memory.fp16_bytes == memory.num_tokens * session.spec.fp16_bytes_per_token()
        others = [x for x in tree_leaves([vars(x) for x in compressed.other_layers]) if isinstance(x, Tensor)]
        assert memory.other_bytes == sum(x.nbytes for x in others if x.is_floating_point()) > 0
        assert (memory.layers, memory.other_layers) == (session.spec.num_layers, len(compressed.other_layers))
        assert memory.share == memory.uncompressed_bytes / (memory.uncompressed_bytes + memory.other_bytes)
        with pytest.raises(CacheError, match="layers of the model keep a state of the whole text"):
            compressed.crop(-1)
        compressed.save(tmp_path / "context")
        assert session.load_cache(tmp_path / "context").memory().other_bytes == memory.other_bytes


@pytest.mark.parametrize("family", ALL)
def test_what_is_found_out_does_not_depend_on_the_dtype(family: str) -> None:
    wide, *narrow = (probe(make(family).to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16))
    for found in narrow:
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
    changes = {"glm4": {"num_hidden_layers": 1}, "smollm3": {"no_rope_layer_interval": 2}}
    model = make(family, **{"num_hidden_layers": 2, **changes.get(family, {})})
    settings = {"group_size": 16, "residual_length": 16, "sink_length": 2} if method == "kivi-2" else WINDOW

    def logits(cache: Any) -> list[Tensor]:
        read(model, cache, mask_of(25, 16))
        return [x[:, -1] for x in go_on(model, cache, mask_of(25, 16), (30, 1, 4))]

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
        made = session.generate(**padded(30, 19), sampling=kvcli.SamplingConfig(4))
        assert made.cache.step_obstacle is not None
        for asked in ({"mode": "steps"}, {"compile_layers": "eager"}):
            with pytest.raises(UsageError, match="layers of other kinds than full attention cannot take part in steps"):
                session.generate(**padded(30, 19), **asked)
