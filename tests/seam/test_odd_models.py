"""Models that attend in ways of their own: refused in one line that says why, or right to rounding."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import WINDOW, load, make_model
from families import make, tiny_config
from odd_models import POSITIONS, REFUSED, RIGHT, with_attention, with_positions
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvcli
from kvcli.errors import KvcliError, ModelError, UnsupportedModelError
from kvcli.seam.probe import probe
from kvcli.seam.recorder import NotUnderstood
from kvcli.seam.trial import LayerProbe
from kvcli.seam.versions import with_cache
from kvcli.serve.prefixes import Prefixes
from kvcli.serve.store import ServedContexts
from kvcli.text.chat import Conversation


@torch.no_grad()
def logits(model: Any, cache: Any, *parts: int) -> Tensor:
    tokens = torch.randint(3, 97, (1, sum(parts)), generator=torch.Generator().manual_seed(0)).split(parts, dim=1)
    return torch.cat([model(input_ids=x, **with_cache(cache)).logits for x in tokens], dim=1)


@pytest.mark.parametrize("parts", [(33, 1, 1, 1), (7, 9, 17, 1, 1, 1)], ids=["prompt", "chunks"])
@pytest.mark.parametrize("name", [*RIGHT, "shifted", "switched late"])
def test_right(name: str, parts: tuple[int, ...]) -> None:
    model = with_positions(name) if name in POSITIONS else with_attention(RIGHT[name])
    expected = logits(model, DynamicCache(config=model.config), *parts)
    with kvcli.attach(model, "fp16", **WINDOW) as session:
        actual = logits(model, session.new_cache(), *parts)
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    said, steps = REFUSED[name]
    model, parts = with_attention(steps), (33, 1, 1)
    model.set_attn_implementation("eager" if name == "scaling per head" else "sdpa")
    logits(model, DynamicCache(config=model.config), *parts)  # stock runs it
    with pytest.raises(KvcliError, match=said) as refusal, kvcli.attach(model, "fp16", **WINDOW) as session:
        logits(model, session.new_cache(), *parts)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_with_biases_of_hundreds_are_rotated_as_others(dtype: torch.dtype) -> None:
    """As in the first and last layers of Qwen2.5-7B: rounding in the rotation moves scores, and hides in no channel."""
    model = make_model("qwen2")
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[5], layer.self_attn.k_proj.bias.data[23] = 300, -250
    attention = probe(model.to(dtype))
    assert [layer.rotated and not layer.own_rotation for layer in attention.layers] == [True] * 3
    assert not attention.drops_state
    key = torch.tensor([300.0, 1.0, 300.0, 1.0], dtype=dtype).expand(1, 1, 2, 4)
    other = key * torch.tensor([1.0, 1.1, 1.0, 1.1], dtype=dtype)
    LayerProbe.check(SimpleNamespace(is_finite=True), other, key, "")  # type: ignore[arg-type]
    with pytest.raises(NotUnderstood):
        LayerProbe.check(SimpleNamespace(is_finite=True), other, key, "", 4)  # type: ignore[arg-type]


def test_attention_functions_of_the_user_are_refused() -> None:
    def doubled(module: nn.Module, query: Tensor, *tensors: Any, **options: Any) -> Any:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, 2 * query, *tensors, **options)

    AttentionInterface.register("doubled", doubled)
    AttentionMaskInterface.register("doubled", sdpa_mask)
    model = make_model("llama", attn_implementation="doubled")
    with pytest.raises(UnsupportedModelError, match="its logits change by"):
        kvcli.attach(model, "fp16")


@pytest.mark.parametrize("name", POSITIONS)
def test_only_rotations_in_proportion_to_positions_are_ours(name: str) -> None:
    assert not any(layer.own_rotation for layer in probe(make_model("llama")).layers)
    found = probe(with_positions(name))
    of_two_lengths = name == "dependent on length"  # whose angles are in proportion to positions in either
    assert {layer.own_rotation for layer in found.layers} == {not of_two_lengths}
    assert found.rope.switch == (16 if of_two_lengths else None)


def test_a_model_that_drops_its_state_is_read_in_one_pass() -> None:
    """Jamba's own code begins anew in a pass of several tokens, without a word."""
    model = make("jamba")
    with kvcli.attach(model, "fp16") as session:
        cache = session.new_cache()
        logits(model, cache, 20, 1)
        in_passes: list[Callable[[], object]] = [
            lambda: logits(model, cache, 2),
            lambda: kvcli.Document(load(model), session, "A text."),
            lambda: Conversation(load(model), session, kvcli.SamplingConfig()),
            lambda: Prefixes(session, ServedContexts(None, None, None, print), 0),
        ]
        for refused in in_passes:
            with pytest.raises(ModelError, match="drops the state of earlier passes"):
                refused()
        logits(model, cache, 1)


@pytest.mark.parametrize("family", ["camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta"])
def test_positions_that_begin_after_that_of_padding_are_refused(family: str) -> None:
    """Of decoders like RoBERTa: positions from 0, which all passes are given, are not those that it makes itself."""
    with pytest.raises(UnsupportedModelError, match="its own positions do not count from 0"):
        kvcli.attach(make(family, is_decoder=True), "fp16")
    with torch.device("meta"), pytest.raises(UnsupportedModelError, match="do not count from 0"):
        probe(AutoModelForCausalLM.from_config(tiny_config(family, is_decoder=True)))


@pytest.mark.parametrize("family", ["bart", "t5", "pegasus", "m2m_100"])
def test_a_model_with_an_encoder_is_refused_as_one(family: str) -> None:
    """Some cannot run on tokens alone, some attend to all of them in the encoder; that says nothing to who reads it."""
    model = AutoModelForSeq2SeqLM.from_config(tiny_config(family))
    with pytest.raises(UnsupportedModelError, match=f"'{family}' cannot be compressed: it has an encoder"):
        kvcli.attach(model, "fp16")


def test_a_model_without_a_head_or_whose_config_counts_no_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="AutoModelForCausalLM"):
        kvcli.attach(make_model("llama").model, "fp16")
    with pytest.raises(ModelError, match="has no list of its decoder layers"):
        kvcli.attach(make("blt"), "fp16")
