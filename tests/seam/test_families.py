"""Every family of models through the cache: the keys of its attention, dtypes, and kernels with caps and sinks."""

from functools import cache
from typing import Any

import pytest
import torch
from factories import WINDOW, load
from families import make
from passes import go_on, ids, mask_of, padded, read
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvcli
from kvcli.cache.others import can_be_static, windows_are_full
from kvcli.errors import ModelError, UsageError
from kvcli.seam.layer import AttentionCall
from kvcli.seam.patch import Seam
from kvcli.seam.probe import FULL, HYBRID, probe
from kvcli.seam.versions import with_cache

ALL = [x for x in FULL + HYBRID if x in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


@cache
def model_of(family: str) -> Any:
    return make(family)


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


@pytest.mark.parametrize("family", ALL)
def test_what_is_found_out_does_not_depend_on_the_dtype(family: str) -> None:
    wide, *narrow = (probe(make(family).to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16))
    for found in narrow:
        assert found.spec == wide.spec
        kinds = [[(x.rotated, x.channels, x.own_rotation) for x in attention.layers] for attention in (found, wide)]
        assert kinds[0] == kinds[1]


def test_a_family_that_no_test_runs_is_named() -> None:
    (note,) = probe(make("apertus")).notes
    assert note.startswith("model type 'apertus' is not among those that tests run with every method")
    assert not probe(model_of("llama")).notes


@pytest.mark.parametrize("method", ["fp16", "kivi-2", "rtn-4"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "glm4", "smollm3"])
def test_kernels_cap_scores_and_share_them_with_sinks(family: str, method: str) -> None:
    """A padded prompt in two chunks, the second too long for one tile, then single tokens; a layer of either kind."""
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


@pytest.mark.parametrize("lengths", [(30, 19), (30, 5)])
@pytest.mark.parametrize("family", [x for x in HYBRID if x != "llama4_text"])
@torch.no_grad()
def test_steps_of_hybrids_make_the_tokens_of_passes(family: str, lengths: tuple[int, int]) -> None:
    """Also where the window of a row is not full at first, and where rows end at a token of their own."""
    model = model_of(family)
    sampling = kvcli.SamplingConfig(40)
    with kvcli.attach(model, "rtn-4", **WINDOW) as session:
        free = session.generate(**padded(*lengths), sampling=sampling, eos_token_id=[], mode="passes")
        stops = free.sequences[:, -8].tolist()
        for ends in ([], stops):
            made = {}
            for mode in ("passes", "steps"):
                one = session.generate(**padded(*lengths), sampling=sampling, eos_token_id=ends, mode=mode)
                later = one.sequences[:, -1:]
                mask = mask_of(*(x + one.sequences.shape[1] - max(lengths) for x in lengths))
                assert one.mode == mode or ends  # rows may end at once
                made[mode] = one.sequences, session.model(later, attention_mask=mask, **with_cache(one.cache)).logits
            assert torch.equal(*(made[mode][0] for mode in made))
            one, two = (made[mode][1] for mode in made)
            assert (one - two).abs().max() <= 1e-4 * one.abs().max()


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj", "codegen", "ctrl", "gpt_bigcode", "biogpt"])
@torch.no_grad()
def test_tokens_beyond_a_table_of_positions_are_refused_by_name(family: str) -> None:
    """On a GPU, an index beyond it would end the process; padding takes no position."""
    model = make(family, max_position_embeddings=48)
    loaded, refused = load(model), "has positions for 48 tokens, not for "
    loaded.check_length(48, pytest.fail)
    with pytest.raises(UsageError, match=f"{refused}49"):
        loaded.check_length(49, pytest.fail)
    with kvcli.attach(model, "rtn-4", **WINDOW) as session:
        cache = session.new_cache()
        model(ids(1, 40), **with_cache(cache))
        model(ids(1, 8), **with_cache(cache))
        with pytest.raises(ModelError, match=f"{refused}49"):
            model(ids(1, 1), **with_cache(cache))
        with pytest.raises(ModelError, match=f"{refused}49"):
            session.generate(ids(1, 46), max_new_tokens=9)
        if family not in ("ctrl", "gptj", "codegen"):  # whose positions count padding
            short = session.generate(**padded(46, 20), max_new_tokens=2)
            assert short.sequences.shape[1] == 48


def test_a_model_that_rotates_has_no_table_of_positions() -> None:
    load(model_of("llama")).check_length(513, (said := list[str]()).append)
    assert len(said) == 1


def test_states_are_static_where_their_size_does_not_grow() -> None:
    full, window = DynamicLayer(), DynamicSlidingWindowLayer(8)
    recurrent, *_ = DynamicCache(config=model_of("qwen3_5_text").config).layers
    assert can_be_static([]) and can_be_static([window, recurrent])  # noqa: PT018
    assert not can_be_static([recurrent, full])
    for count, filled in ((6, False), (7, True), (9, True)):
        window = DynamicSlidingWindowLayer(8)
        window.update(*[torch.zeros(2, 1, count, 4)] * 2)
        assert windows_are_full([window], (9, 8)) == filled
    assert not windows_are_full([window], (9, 7))  # one is padding


def test_what_cannot_take_part_in_steps_is_refused_by_name() -> None:
    refused = "layers whose states grow, or start anew, cannot take part in steps"
    with kvcli.attach(model_of("llama4_text"), "fp16", **WINDOW) as session:
        with pytest.raises(UsageError, match=refused):
            session.generate(**padded(30, 19), max_new_tokens=40, mode="steps")
        assert session.generate(**padded(30, 19), max_new_tokens=20).mode == "passes"
