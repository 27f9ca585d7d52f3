"""What a context was made with: all weights and the adapters that are active, where an artifact asks for less."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from byte_tokenizer import CHAT, byte_tokenizer
from factories import WINDOW, load, make_model
from families import make
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import kvcli
from kvcli.cache.identity import CacheIdentity
from kvcli.contexts import ContextStore
from kvcli.errors import CacheError, UnsupportedModelError
from kvcli.models.fingerprint import differs, fingerprint
from kvcli.models.weights import config_values, weights_identity
from kvcli.seam.probe import probe
from kvcli.seam.versions import with_cache
from kvcli.serve.prefixes import Prefixes
from kvcli.serve.store import ServedContexts
from kvcli.text.chat import Conversation

pytestmark = pytest.mark.filterwarnings("ignore:.*adapter.*:UserWarning", "ignore:`is_gradient_check:FutureWarning")
SETTINGS: Any = {"method": "rtn-4", **WINDOW}
IDS = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(0))


def lora(model: Any, *names: str, **settings: Any) -> Any:
    """With adapters whose numbers depend on their names alone, of which the first is active."""
    settings = {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"], **settings}
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        adapted.add_adapter(name, config)
    for key, weight in adapted.named_parameters():
        if found := [name for name in names if key.endswith(f".{name}.weight")]:
            generator = torch.Generator().manual_seed(ord(found[0][-1]))
            weight.data.normal_(generator=generator).mul_(0.2)
    return adapted.eval()


@pytest.mark.parametrize("part", ["up_proj", "q_proj", "o_proj", "layernorm", "embed_tokens", "lm_head"])
def test_a_context_depends_on_every_weight_and_an_artifact_on_keys_and_values(part: str) -> None:
    model = make_model("llama")
    spec, first, before = probe(model).spec, weights_identity(model), fingerprint(model, probe(model).spec)
    other = deepcopy(model)
    assert weights_identity(other) == first
    for name, weight in other.named_parameters():
        if part in name:
            weight.data.mul_(1.01)
            break
    assert weights_identity(other) != first
    assert differs(fingerprint(other, spec), before) is None
    assert weights_identity(deepcopy(model).bfloat16()) != first


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_adapters_count_by_their_numbers_where_they_are_active(settings: dict[str, Any]) -> None:
    base = make_model("llama")
    none = weights_identity(base)
    both = lora(deepcopy(base), "a", "b", **settings)
    first = weights_identity(both)
    both.set_adapter("b")
    second = weights_identity(both)
    with both.disable_adapter():
        assert weights_identity(both) == none
    assert weights_identity(lora(deepcopy(base), "other a", **settings)) == first
    assert weights_identity(lora(deepcopy(base), "a", **settings | {"lora_alpha": 8})) != first
    both.merge_adapter()
    merged = weights_identity(both)
    both.base_model.disable_adapter_layers()  # the next pass takes it out of the weights again
    between = weights_identity(both)
    assert len({none, first, second, merged, between}) == 5


class Scaled(nn.Module):
    """An adapter of somebody's own."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.down, self.scale, self.enabled = linear, nn.Linear(64, 2), 1.0, True


@pytest.mark.parametrize("config", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_adapters_that_are_not_of_each_token_are_refused(config: Any) -> None:
    """Also where they become active later; the passes of a session are not those of PEFT's generate."""
    of_prompt = peft.get_peft_model(make_model("llama"), config(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedModelError, match="adapter 'default' puts tokens of its own before a text"):
        kvcli.attach(of_prompt, "rtn-4")
    kvcli.attach(of_prompt.get_base_model(), "rtn-4").detach()
    adapted = lora(make_model("llama"), "a")
    adapted.add_adapter("b", peft.LoraConfig(alora_invocation_tokens=[5], task_type="CAUSAL_LM"))
    with kvcli.attach(adapted, "rtn-4") as session:
        adapted.set_adapter("b")
        with pytest.raises(UnsupportedModelError, match="'b' works on the end of a text alone"):
            session.generate(IDS)


def test_factors_and_switches_of_modules_of_others_count() -> None:
    model = make_model("llama")
    model.model.layers[0].mlp.up_proj = adapter = Scaled(model.model.layers[0].mlp.up_proj)
    found = {weights_identity(model)}
    for adapter.scale, adapter.enabled in ((0.5, True), (0.5, False)):
        found.add(weights_identity(model))
    assert len(found) == 3
    assert weights_identity(model.train()) in found


def test_quantized_and_tied_weights_and_those_that_are_not_loaded() -> None:
    model = make_model("llama", tie_word_embeddings=True)
    other = deepcopy(model)
    other.model.layers[1].mlp.up_proj.weight.data.neg_()
    for x in (model, other):
        quantize_(x, Int8WeightOnlyConfig())
    assert weights_identity(model) == weights_identity(deepcopy(model)) != weights_identity(other)
    assert weights_identity(make_model("llama").to("meta")) != weights_identity(
        make_model("llama", num_hidden_layers=2).to("meta")
    )


@pytest.fixture
def adapted() -> Any:
    """A loaded chat model with adapters a and b, of which a is active."""
    loaded = load(make_model("llama", vocab_size=300, max_position_embeddings=2048))
    tokenizer = byte_tokenizer(CHAT)
    return replace(loaded, model=lora(loaded.model, "a", "b"), tokenizer=tokenizer)


@pytest.mark.parametrize("other", ["b", None])
def test_a_context_of_one_adapter_is_used_for_no_other_in_the_same_session(
    adapted: Any, tmp_path: Path, other: str | None
) -> None:
    path, model = tmp_path / "a.safetensors", adapted.model
    with kvcli.attach(model, **SETTINGS) as session, torch.inference_mode():
        cache = session.new_cache()
        model(IDS, **with_cache(cache))
        cache.save(path, IDS)
        assert session.load_cache(path).get_seq_length() == 40
        with model.disable_adapter() if other is None else nullcontext(model.set_adapter(other)):
            with pytest.raises(CacheError, match=r"other adapters \(LoRA\) are active"):
                session.load_cache(path)
            with pytest.raises(CacheError, match="active adapters have changed"):
                cache.save(path)
        model.set_adapter("a")
        assert session.load_cache(path).get_seq_length() == 40


@pytest.mark.parametrize(
    "how", ["by row", "in between", "disabled", "in between, of what is wrapped", "disabled, of it"]
)
def test_what_several_adapters_have_read_is_of_none(how: str, tmp_path: Path) -> None:
    """Adapters are those of its making again when it is saved; the passes themselves are as PEFT makes them."""
    adapted, (how, _, wrapped) = lora(make_model("llama"), "a", "b"), how.partition(",")
    with kvcli.attach(adapted.get_base_model() if wrapped else adapted, **SETTINGS) as session, torch.no_grad():
        cache, names = session.new_cache(), {"adapter_names": ["b"]} if how == "by row" else {}
        adapted.set_adapter("b" if how == "in between" else "a")
        with adapted.disable_adapter() if how == "disabled" else nullcontext():
            adapted(IDS, **with_cache(cache), **names)
        adapted.set_adapter("a")
        adapted(IDS, **with_cache(cache))
        with pytest.raises(CacheError, match="the active adapters changed"):
            cache.save(tmp_path / "cache", IDS.repeat(1, 2))


def test_an_adapter_that_attends_beside_the_model_is_refused() -> None:
    """PEFT rotates its queries itself, by what the rotary module returns, which does nothing while attached."""
    config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=2)
    adapted = peft.get_peft_model(make_model("llama"), config)
    for model, said in ((adapted, "attends to tokens of its own"), (adapted.get_base_model(), "weights of its own")):
        with pytest.raises(UnsupportedModelError, match=said):
            kvcli.attach(model, "rtn-4")
    with adapted.disable_adapter():
        session = kvcli.attach(adapted, "rtn-4")
    with session, pytest.raises(UnsupportedModelError, match="attends to tokens of its own"):
        session.generate(IDS)


def test_a_document_is_of_the_adapter_that_it_was_made_with(adapted: Any, tmp_path: Path) -> None:
    sampling, text = kvcli.SamplingConfig(6), "Some words about nothing. " * 8
    for store in (None, tmp_path / "contexts"):
        with kvcli.attach(adapted, **SETTINGS) as session:
            books, answers = dict[str, kvcli.Document](), dict[str, str]()
            for name in ("a", "b"):
                adapted.model.set_adapter(name)
                books[name] = kvcli.Document(adapted, session, text, store=store)
                answers[name] = books[name].ask("What?", sampling).text
            assert books["b"].reused_tokens == 0
            assert answers["a"] != answers["b"]
            with pytest.raises(CacheError, match=r"other adapters \(LoRA\) are active; make another one"):
                books["a"].ask("What?", sampling)
            adapted.model.set_adapter("a")
            assert books["a"].ask("What?", sampling).text == answers["a"]


def test_a_conversation_is_read_again_for_another_adapter(adapted: Any) -> None:
    said: list[str] = []
    with kvcli.attach(adapted, **SETTINGS) as session:
        talk = Conversation(adapted, session, kvcli.SamplingConfig(5), say=said.append)
        talk.reply("Hello")
        adapted.model.set_adapter("b")
        assert talk.reply("Again").reused_tokens == 0
        assert talk.reply("Again").reused_tokens > 0
    assert len(said) == 1
    assert "adapters have changed" in said[0]


def test_prefixes_of_one_adapter_are_used_for_no_other(adapted: Any, tmp_path: Path) -> None:
    ids = IDS.repeat(1, 9)
    with kvcli.attach(adapted.model, "rtn-4") as session:
        prefixes = Prefixes(
            session, ServedContexts(ContextStore(tmp_path / "contexts"), adapted.tokenizer, None, print), 2**30
        )
        sources = []
        for name in ("a", "a", "b", "b", "a"):
            adapted.model.set_adapter(name)
            prefixes.keep(prefix := prefixes.read(ids, "", True, lambda count: None))
            sources.append(prefix.source)
        prefixes.contexts.close()
    assert sources == ["none", "hot", "none", "hot", "hot"]


def test_the_identity_that_stored_contexts_have_stays() -> None:
    """They are refused where it is another one."""
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30))
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.arange(x.numel()).view_as(x))
    assert weights_identity(model) == "dcb2426c7f320f1a9551a16810d6526b"


OTHER_CONFIGS: list[tuple[str, str, Any]] = [
    ("llama", "rms_norm_eps", 1e-2),
    ("llama", "hidden_act", "gelu"),
    ("granite", "residual_multiplier", 0.5),
    ("granite", "attention_multiplier", 0.5),
    ("gemma3_text", "sliding_window", 16),
    ("gemma3_text", "rope_parameters", {"sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}),
]


@pytest.mark.parametrize(("family", "name", "value"), OTHER_CONFIGS)
def test_a_context_belongs_to_what_the_config_says_of_how_a_model_computes(family: str, name: str, value: Any) -> None:
    """The weights are the same; windows, factors and epsilons are in none of them."""
    model = make(family)
    if isinstance(value, dict):
        value = {**getattr(model.config, name), **value}
    other = make(family, **{name: value})
    other.load_state_dict(model.state_dict())
    assert weights_identity(other) == weights_identity(model)
    with kvcli.attach(model, "rtn-4", **WINDOW) as session:
        cache = session.new_cache()
        model(IDS, **with_cache(cache))
        context = cache.context(IDS)
        assert session.check_context(context)
    with kvcli.attach(other, "rtn-4", **WINDOW) as session, pytest.raises(CacheError, match=f"with a {name}"):
        session.load_cache(context)


def test_what_a_newer_library_adds_to_a_config_refuses_no_context() -> None:
    model = make_model("llama")
    values = config_values(model)
    assert values["rms_norm_eps"] == model.config.rms_norm_eps
    assert values["rope_parameters.rope_theta"] == model.config.rope_parameters["rope_theta"]
    assert not {"transformers_version", "dtype", "use_cache", "bos_token_id", "attention_dropout"} & values.keys()
    assert config_values(nn.Linear(2, 2)) == {}
    with kvcli.attach(model, "rtn-4") as session:
        ours = session.identity()
    newer = replace(ours, model_config={**values, "new_feature": 1})
    older = replace(ours, model_config={})
    assert {ours.difference(newer), newer.difference(ours), ours.difference(older), older.difference(ours)} == {None}
    assert CacheIdentity.from_dict(newer.to_dict()) == newer
    assert "model_config" not in older.to_dict()
