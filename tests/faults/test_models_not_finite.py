"""NaN and infinities that appear while a model runs, and prompts that a model cannot take."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from factories import load, make_model

import kvcli
from kvcli.attention.generation import SamplingConfig
from kvcli.errors import ModelError, UsageError
from kvcli.eval.quality import QualityReport, TokenScores, measure, reference_states
from kvcli.models.load import LoadedModel
from kvcli.text.generate import generate_text
from kvcli.text.prompts import prompt_ids


class Words:
    """A tokenizer of the tiny models: every character is a token."""

    eos_token_id = pad_token_id = 0
    bos_token_id: int | None = 1
    chat_template = "x"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids: Any, **_: Any) -> str:
        return "x" * len(ids)

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        raise TypeError("unsupported operand\nin the template")


def loaded_with(model: Any) -> LoadedModel:
    return replace(load(model), tokenizer=Words())  # type: ignore[arg-type]


def overflow(model: Any, layer_idx: int) -> Any:
    """Makes activations that float32 does not hold, of weights that are finite."""
    for name in ("up_proj", "down_proj"):
        getattr(model.model.layers[layer_idx].mlp, name).weight.data.mul_(1e30)
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_refuses_logits_that_are_not_finite_and_names_the_layer(temperature: float) -> None:
    loaded = loaded_with(overflow(make_model("llama"), 1))
    with kvcli.attach(loaded, "fp8") as session, pytest.raises(ModelError, match=r"'fp8'.* not finite from layer 1 on"):
        generate_text(loaded, session, torch.tensor([[5, 6, 7]]), SamplingConfig(4, temperature))
    assert not loaded.model.get_output_embeddings()._forward_hooks
    assert not loaded.model.model.layers[1]._forward_hooks


def test_keys_beyond_float16_are_not_taken_for_a_dropped_state() -> None:
    model = make_model("llama", num_hidden_layers=2, head_dim=64)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data *= 1e5
        layer.self_attn.q_proj.weight.data *= 1e-5
    with kvcli.attach(model.half(), "fp8") as session, pytest.raises(ModelError, match="not finite from layer 0 on"):
        session.generate(torch.arange(3, 60)[None], prefill_chunk=30)


def test_generate_refuses_logits_that_the_head_makes_infinite() -> None:
    model = make_model("llama")
    model.lm_head.weight.data = 3e38 * model.lm_head.weight.data.sign()
    loaded = loaded_with(model)
    with kvcli.attach(loaded, "fp16") as session, pytest.raises(ModelError, match="not finite in the logits"):
        generate_text(loaded, session, torch.tensor([[5, 6, 7]]), SamplingConfig(4))


def test_eval_refuses_a_model_or_a_method_that_is_not_finite() -> None:
    model, tokens = make_model("llama"), torch.randint(3, 97, (1, 40))
    states = [reference_states(model, tokens)]
    overflow(model, 1)
    with pytest.raises(ModelError, match=r"uncompressed attention, .* not finite from layer 1 on"):
        reference_states(model, tokens)
    with pytest.raises(ModelError, match=r"method 'fp16'.* not finite from layer 1 on"):
        measure(model, lambda: kvcli.attach(model, "fp16"), tokens, states, chunk=16, batch_size=1)


def test_a_perplexity_beyond_a_float_is_infinite() -> None:
    nll = torch.full((1, 2), 1e4, dtype=torch.float64)
    memory: Any = None
    figures = QualityReport(TokenScores(nll, nll, nll, nll / 1e4), memory).figures
    assert figures["perplexity"] == float("inf")
    assert figures["reference_perplexity"] == pytest.approx(2.718281828)


def test_an_empty_prompt_is_said_or_refused() -> None:
    loaded, said = loaded_with(make_model("llama")), list[str]()
    assert prompt_ids(loaded, "", chat=False, say=said.append).tolist() == [[1]]
    assert "the prompt is empty" in said[0]
    without: Any = Words()
    without.bos_token_id = without.eos_token_id = None
    with pytest.raises(UsageError, match="the prompt is empty"):
        prompt_ids(replace(loaded, tokenizer=without), "", chat=False)


def test_a_token_without_an_embedding_and_a_chat_template_that_fails_are_one_line() -> None:
    loaded = loaded_with(make_model("llama"))
    with pytest.raises(ModelError, match="the tokenizer makes token 122, but tiny has 97 embeddings"):
        prompt_ids(loaded, "az", chat=False)
    with pytest.raises(ModelError, match="the chat template of tiny fails: unsupported operand in the template"):
        prompt_ids(loaded, "hello", chat=True)


def test_beyond_the_context_transformers_does_not_repeat_the_warning() -> None:
    said: list[logging.LogRecord] = []
    logger, handler = logging.getLogger("transformers"), logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    loaded = loaded_with(make_model("llama", max_position_embeddings=17))
    logger.addHandler(handler)
    try:
        with kvcli.attach(loaded, "fp16") as session:
            made, _ = generate_text(loaded, session, torch.randint(3, 97, (1, 20)), SamplingConfig(3))
    finally:
        logger.removeHandler(handler)
    assert (made.new_tokens, said) == (3, [])
