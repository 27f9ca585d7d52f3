"""What errors of keys and values cost, from gradients."""

from typing import Any

import pytest
import torch
from contexts_made import flip
from factories import FAMILIES, load, make_model
from torch import Tensor

from kvcli.calibrate import fisher
from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig
from kvcli.calibrate.parts import FISHER
from kvcli.calibrate.recording import Recording
from kvcli.errors import SamplesError
from kvcli.seam.layer import AttentionCall
from kvcli.seam.patch import Seam

TIME = 80
SEQUENCES = torch.randint(3, 97, (3, TIME), generator=torch.Generator().manual_seed(0))


def uniform(seed: int) -> Tensor:
    return torch.rand(TIME, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(model: Any, sequence: Tensor, seed: int = 0) -> dict[int, tuple[Tensor, Tensor]]:
    with fisher._frozen(model):
        return fisher.backward(model, sequence, uniform(seed))


def log_probs(model: Any, sequence: Tensor, layer: int, errors: tuple[Tensor, Tensor]) -> Tensor:
    """Those of a model that reads other keys or values of one layer, where a cache would read codes."""

    def attend(call: AttentionCall) -> Tensor:
        here = call.layer.layer_idx == layer
        coded = (call.key + errors[0], call.value + errors[1]) if here else (call.key, call.value)
        return fisher._attend(call.query, call.key, call.value, *coded, call)

    with torch.no_grad(), Seam(model, attend):
        states = model.base_model(input_ids=sequence[None], use_cache=False).last_hidden_state
        return model.get_output_embeddings()(states)[0].double().log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_that_of_the_model(family: str) -> None:
    model = make_model(family)
    zero = torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        expected = model(SEQUENCES[:1]).logits[0].double().log_softmax(-1)
    assert torch.allclose(log_probs(model, SEQUENCES[0], 0, zero), expected, atol=1e-4)


def test_sinks_and_tokens_that_only_the_window_shows_have_no_gradient() -> None:
    for key, value in gradients(make_model("llama"), SEQUENCES[0]).values():
        for x in (key, value):
            assert (x.grad.abs().amax((0, 1, 3)) > 0).tolist() == [4 <= t < TIME - 32 for t in range(TIME)]


@pytest.mark.parametrize("side", ["key", "value"])
def test_gradients_predict_the_divergence_of_small_errors(side: str) -> None:
    model, layer = make_model("llama"), 1
    # sharper distributions than those of small random weights
    model.lm_head.weight.data.mul_(20)
    index = ("key", "value").index(side)
    x = gradients(model, SEQUENCES[0])[layer][index].detach()
    error = 0.02 * x.std() * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    zero = torch.zeros_like(error)
    errors = (error, zero) if side == "key" else (zero, error)
    exact, ours = (log_probs(model, SEQUENCES[0], layer, e) for e in ((zero, zero), errors))
    divergence = float((exact.exp() * (exact - ours)).sum())
    found = (gradients(model, SEQUENCES[0], seed)[layer][index].grad for seed in range(150))
    predicted = [float((grad * error).sum()) ** 2 / 2 for grad in found]
    assert sum(predicted) / len(predicted) == pytest.approx(divergence, rel=0.35)


def test_a_large_vocabulary_is_taken_in_smaller_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that are drawn, and so the gradients, do not depend on the blocks."""
    model, blocks, logits_of = make_model("llama"), [], fisher.logits_of
    monkeypatch.setattr(fisher, "logits_of", lambda model, states: (blocks.append(states), logits_of(model, states))[1])
    whole = gradients(model, SEQUENCES[0])
    monkeypatch.setattr(fisher, "LOGITS", 97 * 7)
    split = gradients(model, SEQUENCES[0])
    assert [states.shape[1] for states in blocks] == [TIME, *[7] * 11, 3]
    for layer_idx, pair in whole.items():
        for x, y in zip(pair, split[layer_idx], strict=True):
            assert x.grad is not None
            assert y.grad is not None
            assert torch.allclose(x.grad, y.grad, atol=1e-6)


def test_tokens_are_drawn_from_the_models_distribution() -> None:
    """At one position, over many draws: the mean gradient of log p(y) is zero, as it is for no other distribution."""
    model = make_model("llama")
    model.lm_head.weight.data.mul_(20)
    states = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0)).expand(1, 4000, -1).clone()
    level = torch.rand(4000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with Seam(model, lambda call: call.exact()):
        gradient = fisher._gradient_of_sampled(model, states, level)[0]
    error = gradient.std(0) / 4000**0.5
    assert float((gradient.mean(0) / error).abs().max()) < 4.5


def test_recordings_keep_it(tmp_path: Any) -> None:
    model = make_model("qwen2")
    before = [p.requires_grad for p in model.parameters()]
    collect(load(model), SEQUENCES, CollectConfig(3, TIME, 1, 2, fisher_sequences=2), tmp_path, {})
    recording = Recording(tmp_path)
    assert [p.requires_grad for p in model.parameters()] == before
    assert all(p.grad is None for p in model.parameters())
    samples = recording.load(0)
    keys = torch.cat([samples.k[:, i * TIME + 4 : (i + 1) * TIME] for i in (0, 2)], dim=1)
    covariance = torch.stack([torch.cov(x.T, correction=0) for x in keys])
    assert torch.allclose(samples.fisher.key_covariance, covariance, atol=1e-3)
    for layer in recording.fisher:
        for x in (layer.key, layer.value):
            assert torch.linalg.eigvalsh(x.double()).amin() > -1e-6 * float(x.abs().max())
            assert float(x.diagonal(dim1=1, dim2=2).min()) > 0


def test_it_is_written_once_and_a_damaged_file_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = make_model("llama"), CollectConfig(3, TIME, 1, 2, fisher_sequences=1)
    collect(load(model), SEQUENCES, config, tmp_path, {})
    said: list[str] = []
    monkeypatch.setattr("kvcli.calibrate.collect.sequence_sums", None)
    collect(load(model), SEQUENCES, config, tmp_path, {}, say=said.append)
    assert said == ["3 of 3 parts were recorded already and are reused"]
    flip(tmp_path / FISHER)
    with pytest.raises(SamplesError, match="damaged"):
        Recording(tmp_path).load(0)
    (tmp_path / FISHER).unlink()
    with pytest.raises(SamplesError, match="missing"):
        Recording(tmp_path).load(0)


torch.library.define("kvcli_tests::half", "(Tensor x) -> Tensor")


@torch.library.impl("kvcli_tests::half", "cpu")
@torch.no_grad()
def half(x: Tensor) -> Tensor:
    """An operation without a derivative: autograd passes nothing on, without an error."""
    return x / 2


class Fails(torch.autograd.Function):
    """An operation whose derivative fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("no kernel for this type")


BLOCKING = {
    "detached": Tensor.detach,
    "no derivative": lambda x: torch.ops.kvcli_tests.half(x) + 0.0,
    "fails": Fails.apply,
    "layers": lambda x: type(x)(x.last_hidden_state.detach()),
}
"""What is done to the output of a part of a model; gradients around it, through the residual, are finite and wrong."""
NONE = "lets no gradients through; leave them out with --fisher-tokens 0"


@pytest.mark.parametrize(
    ("part", "way", "said"),
    [
        *(
            (f"model.layers.1.{part}", way, rf"layers\.1\.{part} \(Linear\) {NONE}")
            for part in ("self_attn.o_proj", "self_attn.k_proj", "mlp.up_proj")
            for way in ("detached", "no derivative")
        ),
        ("lm_head", "detached", f"output layer {NONE}"),
        ("model.norm", "detached", rf"norm \(LlamaRMSNorm\) {NONE}"),
        ("model", "layers", "layers let no gradients through"),
        ("model.layers.1.mlp.up_proj", "fails", r"cannot be computed \(no kernel for this type\); leave them out"),
    ],
)
def test_gradients_that_miss_a_part_or_fail_are_refused(part: str, way: str, said: str) -> None:
    model = make_model("llama")
    model.get_submodule(part).register_forward_hook(lambda module, inputs, output: BLOCKING[way](output))
    with pytest.raises(SamplesError, match=said):
        list(fisher.sequence_sums(load(model), SEQUENCES, 0, range(3)))


def test_gradients_that_are_not_finite_are_refused() -> None:
    model = make_model("llama")
    model.lm_head.weight.data[5] = torch.nan
    with pytest.raises(SamplesError, match="not finite"):
        list(fisher.sequence_sums(load(model), SEQUENCES, 0, range(3)))


def test_larger_keys_count_more() -> None:
    """The mean of g g^T has the squared distance from the mean key as weight, and beside it none."""
    model, sequence = make_model("llama"), SEQUENCES[0]
    sums = fisher.sequence_sums(load(model), sequence[None], 3, [0])
    layers = fisher.layer_fisher((added for _, added in sums), 3)
    for layer_idx, pair in gradients(model, sequence, seed=3).items():
        layer = layers[layer_idx]
        both = (layer.key, layer.key_unweighted), (layer.value, layer.value_unweighted)
        for x, (found, unweighted) in zip(pair, both, strict=True):
            kept, grad = x.detach()[0, :, 4:].double(), x.grad[0, :, 4:].double()
            weight = (kept - kept.mean(1, keepdim=True)).square().sum((0, 2))
            expected = sum(
                w * torch.einsum("hd,he->hde", g, g) for w, g in zip(weight, grad.transpose(0, 1), strict=True)
            )
            assert torch.allclose(found.double(), expected / weight.sum(), rtol=1e-4)
            assert torch.allclose(
                unweighted.double(), torch.einsum("htd,hte->hde", grad, grad) / grad.shape[1], rtol=1e-4
            )


def test_what_a_gradient_reaches() -> None:
    leaf, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    between = leaf * 2
    for output, wanted in ((leaf, leaf), (between, leaf), (between, between), (between.exp() + other, leaf)):
        assert fisher._leads_to(output, wanted)
    for output, wanted in ((between, other), (between.detach(), leaf), (other * between.detach(), between)):
        assert not fisher._leads_to(output, wanted)
