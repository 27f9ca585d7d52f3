"""Modules around attention run by kernels of few launches, in decode steps."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from threading import Barrier, get_ident
from typing import Any

import pytest
import torch
from families import make
from parts import DEVICE
from passes import padded
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import rms_norm as torch_rms_norm

import kvcli
from kvcli.attention import fused_modules
from kvcli.attention.fused_modules import FusedModules
from kvcli.kernels.linear import MOST_ROWS, add_rms_norm, gated, linear, rms_norm

DTYPES = [torch.float32, torch.float16, *[torch.bfloat16] * (DEVICE == "cuda")]  # the interpreter rounds otherwise
ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def near(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert (ours.float() - theirs.float()).abs().max() <= ERRORS[ours.dtype] * theirs.float().abs().max()


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 1), (5, 3), (MOST_ROWS,)])
def test_products_are_those_of_float32(rows: tuple[int, ...], dtype: torch.dtype) -> None:
    """Sizes that no tile divides, one to three weights, with biases and without."""
    for width, sizes in ((48, (7,)), (1040, (70, 1, 33)), (4096, (16, 130))):
        x = random(*rows, width, dtype=dtype)
        weights = [random(n, width, dtype=dtype, seed=n) for n in sizes]
        for biases in ([None] * len(sizes), [random(n, dtype=dtype, seed=n + 1) for n in sizes]):
            for ours, weight, bias in zip(linear(x, weights, biases), weights, biases, strict=True):
                near(ours, torch_linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_gated_products_round_as_modules_of_their_own(rows: int, dtype: torch.dtype) -> None:
    for width, n in ((48, 7), (1040, 150)):
        x, gate, up = (
            random(*shape, dtype=dtype, seed=len(shape) * n) for shape in ((rows, width), (n, width), (n, width))
        )
        for name, act in (("silu", silu), ("gelu_tanh", lambda y: gelu(y, approximate="tanh"))):
            near(gated(x, gate / 8, up / 8, name), act(torch_linear(x, gate / 8)) * torch_linear(x, up / 8))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_round_before_their_weight_or_after(dtype: torch.dtype) -> None:
    for shape in ((3, 1, 64), (1, 1000), (2, 5, 4096)):
        x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
        unit = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        near(rms_norm(x, weight, 1e-5, late=True), unit.to(dtype) * weight)
        near(rms_norm(x, weight, 1e-5, offset=1.0), (unit * (1 + weight.float())).to(dtype))
        added = random(*shape, dtype=dtype, seed=2)
        total, normed = add_rms_norm(x, added, weight, 1e-5, late=True)
        assert torch.equal(total, x + added)
        assert torch.equal(normed, rms_norm(total, weight, 1e-5, late=True))


def shaken(family: str) -> Any:
    """A tiny model whose norms and biases are not those that every model has."""
    model = make(family, vocab_size=300).to(DEVICE)
    for name, x in model.named_parameters():
        if x.dim() == 1:
            x.data.add_(random(*x.shape, dtype=x.dtype, seed=len(name)) / 4)
    return model


KINDS = {  # family: what kernels stand in for
    "llama": {"LlamaRMSNorm", "LlamaMLP", "Linear"}, "qwen2": {"Qwen2RMSNorm", "Qwen2MLP", "Linear"},
    "gemma2": {"Gemma2RMSNorm", "Gemma2MLP", "Linear"}, "qwen3": {"Qwen3RMSNorm", "Qwen3MLP", "Linear"},
    "phi3": {"Phi3RMSNorm", "Linear"}, "gpt2": set(), "nemotron": {"Linear"},
    "olmo_hybrid": {"OlmoHybridRMSNorm", "OlmoHybridMLP", "Linear"},
}  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize("family", KINDS)
@torch.no_grad()
def test_a_model_computes_the_same_and_is_as_before(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shaken(family)
    fused, tokens = FusedModules(model), padded(5, 5, device=DEVICE)["input_ids"]
    assert {type(module).__name__ for module in fused._kernels} == KINDS[family]
    assert len(fused._sums) == (4 if family in ("llama", "qwen2", "qwen3", "phi3") else 0)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    sums: list[Any] = []
    monkeypatch.setattr(fused_modules, "add_rms_norm", lambda *x, **kw: sums.append(x) or add_rms_norm(*x, **kw))
    for ids in (tokens[:1, :1], tokens[:, :3], tokens.repeat(8, 1)):  # the last are too many rows
        expected = model(ids).logits
        with fused.active():
            near(model(ids).logits, expected)
    assert len(sums) == 3 * max(0, 2 * len(fused._sums) - 1)  # no norm of these layers follows the last sum
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


@torch.no_grad()
def test_kernels_are_launched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    for name in ("linear", "gated", "rms_norm"):
        own = getattr(fused_modules, name)
        monkeypatch.setattr(
            fused_modules, name, lambda *x, own=own, **kw: launched.append(own.__name__) or own(*x, **kw)
        )
    fused = FusedModules(shaken("llama"))
    for rows, expected in ((1, {"linear", "gated", "rms_norm"}), (MOST_ROWS + 1, {"rms_norm"})):
        launched.clear()
        fused.launch(rows)
        assert set(launched) == expected


@torch.no_grad()
def test_what_computes_something_else_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that scales twice, an MLP with another activation, a projection of a class of its own or with a hook."""
    model: Any = shaken("llama")
    first, second, third, _ = model.model.layers
    norm, mlp = type(first.input_layernorm), type(first.mlp)
    monkeypatch.setattr(norm, "forward", lambda self, x: 2 * self.weight * torch_rms_norm(x, x.shape[-1:], None, 1e-5))
    monkeypatch.setattr(mlp, "forward", lambda self, x: self.down_proj(relu(self.gate_proj(x)) * self.up_proj(x)))
    second.self_attn.q_proj = type("Quantized", (nn.Linear,), {})(64, 64, bias=False).to(DEVICE)
    third.self_attn.k_proj.register_forward_hook(lambda module, args, output: 2 * output)
    taken = set(FusedModules(model)._kernels)
    assert not any(type(module) in (norm, mlp) for module in taken)
    assert {first.self_attn.q_proj, first.mlp.gate_proj, second.self_attn.k_proj, third.self_attn.q_proj} <= taken
    assert not {second.self_attn.q_proj, third.self_attn.k_proj} & taken
    ids = padded(3, device=DEVICE)["input_ids"]
    expected = model(ids).logits
    with FusedModules(model).active():
        near(model(ids).logits, expected)


class Act(nn.Module):
    """An activation as transformers makes them."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


@torch.no_grad()
def test_threads_share_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs its own kernels, and none in a thread that asked for none."""
    model, asking = shaken("llama"), set[int]()

    def noted(call: Any) -> Any:
        return lambda *arguments, **options: asking.add(get_ident()) or call(*arguments, **options)

    monkeypatch.setattr(fused_modules, "linear", noted(lambda x, *parts: [*map(partial(torch_linear, x), *parts)]))
    monkeypatch.setattr(fused_modules, "gated", lambda x, gate, up, name: silu(x @ gate.T) * (x @ up.T))
    prompts = [padded(5, 5, device=DEVICE)["input_ids"][:, i : i + 2] for i in range(4)]
    expected = [model(ids).logits for ids in prompts]

    def run(place: int) -> bool:
        together.wait()  # each in a thread of its own
        asked = place % 2 == 0
        modules = FusedModules(model).active if asked else nullcontext
        for _ in range(30):
            with torch.no_grad(), modules():
                near(model(prompts[place]).logits, expected[place])
        return asked == (get_ident() in asking)

    together = Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        norm = lambda x, w, eps, **kw: torch_rms_norm(x, w.shape, w, eps)  # noqa: E731
        monkeypatch.setattr(fused_modules, "rms_norm", norm)
        monkeypatch.setattr(fused_modules, "add_rms_norm", lambda x, y, *rest, **kw: (x + y, norm(x + y, *rest)))
        asking.clear()
        assert all(pool.map(run, range(4)))
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("act", [gelu, lambda x: x * (1.702 * x).sigmoid(), relu])
def test_activations_that_are_nearly_known_are_another_one(act: Any) -> None:
    """Rounded to 16 bits, GELU and its approximations agree."""
    model: Any = shaken("llama").half()
    for layer in model.model.layers:
        layer.mlp.act_fn = Act(act)
    assert not {layer.mlp for layer in model.model.layers} & set(FusedModules(model)._kernels)


@torch.no_grad()
def test_modules_that_are_given_more_than_one_input_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = shaken("llama")
    own, norm = type(model.model.norm).forward, model.model.layers[0].input_layernorm
    monkeypatch.setattr(type(norm), "forward", lambda self, hidden_states, gate=1.0: gate * own(self, hidden_states))
    x = random(1, 64, dtype=torch.float32)
    with FusedModules(model).active():
        assert "forward" in vars(norm)
        near(norm(x, 3.0), 3 * own(norm, x))
        near(norm(hidden_states=x), own(norm, x))


class Clamped(nn.Module):
    """An MLP of one layer alone that cuts its gate off, as some of the last layers of some checkpoints do."""

    def __init__(self, mlp: Any, limit: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            mlp.act_fn,
        )
        self.limits = (limit,)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=self.limits[0]) * self.up_proj(x))


@torch.no_grad()
def test_every_module_is_tried_also_with_large_numbers() -> None:
    model: Any = shaken("llama")
    for layer, limit in zip(model.model.layers, (torch.inf, torch.inf, 2.0, torch.inf), strict=True):
        layer.mlp = Clamped(layer.mlp, limit)
    taken = FusedModules(model)._kernels
    assert [layer.mlp in taken for layer in model.model.layers] == [True, True, False, True]


@torch.no_grad()
def test_modules_that_need_other_inputs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms with a gate or with one weight for all channels, MLPs with a factor or two outputs, activations of two."""
    model: Any = shaken("llama")
    first, _, third, _ = model.model.layers
    norm, mlp = type(first.input_layernorm), type(first.mlp)
    first.input_layernorm.weight = nn.Parameter(torch.ones(1, device=DEVICE))
    monkeypatch.setattr(norm, "forward", lambda self, x, gate: gate * x)
    monkeypatch.setattr(mlp, "forward", lambda self, x, factor: factor * x)
    third.mlp.act_fn = Act(lambda gate, up: gate * up)
    assert {type(module) for module in FusedModules(model)._kernels} == {nn.Linear}
    monkeypatch.setattr(mlp, "forward", lambda self, x: (x, x))
    assert {type(module) for module in FusedModules(model)._kernels} == {nn.Linear}


@torch.no_grad()
def test_modules_are_as_before_whatever_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = shaken("llama")
    fused, calls = FusedModules(model), []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return partial(*arguments)

    monkeypatch.setattr(fused_modules, "partial", interrupted)
    with pytest.raises(KeyboardInterrupt), fused.active():
        pass
    assert len(calls) == 6
    assert all("forward" not in vars(module) for module in model.modules())


@torch.no_grad()
def test_what_was_changed_since_then_counts() -> None:
    """A projection of an MLP that is replaced, as adapters do, one and norms with a hook, a `forward` of the user's."""
    model: Any = shaken("llama")
    fused, ids = FusedModules(model), padded(3, device=DEVICE)["input_ids"]
    first, second, third, last = model.model.layers
    first.mlp.up_proj = nn.Sequential(first.mlp.up_proj, nn.Linear(96, 96, device=DEVICE))
    second.mlp.down_proj.register_forward_hook(lambda module, args, output: 2 * output)
    second.post_attention_layernorm.register_forward_hook(lambda module, args, output: 3 * output)
    third.input_layernorm.register_forward_hook(lambda module, args, output: 5 * output)
    own = third.self_attn.o_proj.forward
    third.self_attn.o_proj.forward = lambda x: 3 * own(x)
    last.input_layernorm = nn.Identity()
    expected = model(ids).logits
    with fused.active():
        near(model(ids).logits, expected)
    assert "forward" in vars(third.self_attn.o_proj)


def plain(layer: Any, x: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """A layer's input with attention added, and what its MLP makes of it."""
    x = x + layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)[0]
    return x, layer.mlp(layer.post_attention_layernorm(x))


def beside(layer: Any, x: Tensor, **kwargs: Any) -> Tensor:
    attended = layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)[0]
    return x + attended + layer.mlp(layer.post_attention_layernorm(x))


OTHERWISE = {
    "a factor of the MLP": lambda layer, x, **kw: torch.add(*plain(layer, x, **kw), alpha=0.99),
    "two outputs": lambda layer, x, **kw: (sum(plain(layer, x, **kw)), None),
    "another mask": lambda layer, x, attention_mask=None, **kw: sum(plain(layer, x, attention_mask=0, **kw)),
    "something of the input": lambda layer, x, **kw: sum(plain(layer, x, gain=x.mean(), **kw)),
    "64 bits": lambda layer, x, **kw: sum(plain(layer, x, **kw)).double(),
    "attention beside the MLP": beside,
}


@torch.no_grad()
@pytest.mark.parametrize("how", OTHERWISE)
def test_layers_that_add_otherwise_run_as_they_are(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = shaken("llama")
    kind = type(model.model.layers[0])
    monkeypatch.setattr(kind, "forward", lambda self, x, **kwargs: sum(plain(self, x, **kwargs)))
    assert len(FusedModules(model)._sums) == 4
    with monkeypatch.context() as patch:
        mlp = type(model.model.layers[0].mlp)
        patch.setattr(mlp, "forward", lambda self, x, own=mlp.forward: own(self, x).double())
        assert not FusedModules(model)._sums
    monkeypatch.setattr(kind, "forward", OTHERWISE[how])
    assert not FusedModules(model)._sums


@torch.no_grad()
def test_layers_that_are_called_otherwise_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With something that was not tried, in training, with a hook on a part that sums leave out; not with less."""
    model, sums = shaken("phi3"), list[Any]()
    fused, layer = FusedModules(model), model.model.layers[1]
    x = random(1, 2, 64, dtype=torch.float32)
    given = {"position_embeddings": model.model.rotary_emb(x, torch.arange(2, device=DEVICE)[None])}
    monkeypatch.setattr(fused_modules, "add_rms_norm", lambda *x, **kw: sums.append(x) or add_rms_norm(*x, **kw))
    for change, more, count in (
        (lambda: None, {}, 2),
        (lambda: None, {"other": 1}, 0),
        (layer.train, {}, 0),
        (lambda: layer.eval().resid_attn_dropout.register_forward_hook(lambda module, x, out: 2 * out), {}, 0),
    ):
        change()
        expected = layer(x, **given, **more)
        sums.clear()
        with fused.active():
            near(layer(x, **given, **more), expected)
        assert len(sums) == count


@torch.inference_mode()
def test_what_is_changed_between_layers_is_normed_again() -> None:
    model: Any = shaken("llama")
    x, more = (random(1, 2, 64, dtype=torch.float32, seed=seed) for seed in (0, 1))
    angles, found = model.model.rotary_emb(x, torch.arange(2, device=DEVICE)[None]), list[Tensor]()
    for modules in (nullcontext, FusedModules(model).active):
        with modules():
            y = x
            for layer in model.model.layers:
                y = layer(y, position_embeddings=angles).add_(more)
        found.append(y)
    near(*found)


@torch.no_grad()
def test_norms_that_were_changed_since_then_count() -> None:
    """A `forward` of the user's own, and that of another layer in the place of a layer's."""
    model: Any = shaken("llama")
    fused, ids = FusedModules(model), padded(3, device=DEVICE)["input_ids"]
    first, second, third, last = model.model.layers
    for norm in (first.input_layernorm, first.post_attention_layernorm):
        norm.weight.data = norm.weight.data.flip(0)
    own = last.post_attention_layernorm.forward
    last.post_attention_layernorm.forward = lambda x: 3 * own(x)
    third.post_attention_layernorm = first.post_attention_layernorm
    second.input_layernorm = first.input_layernorm
    expected = model(ids).logits
    with fused.active():
        near(model(ids).logits, expected)


@torch.no_grad()
def test_biases_of_later_layers_count() -> None:
    """Where those of the first layer, in which a kernel is tried, are 0."""
    model: Any = make("llama", mlp_bias=True, attention_bias=True).to(DEVICE)
    for name, x in model.named_parameters():
        if name.endswith("bias"):
            x.data = random(*x.shape, dtype=x.dtype) * ("layers.0." not in name)
    ids = padded(3, device=DEVICE)["input_ids"]
    expected, fused = model(ids).logits, FusedModules(model)
    with fused.active():
        near(model(ids).logits, expected)


def test_weights_that_are_not_stored_as_their_dtype_says_stay() -> None:
    """torchao quantizes the weight of a Linear, which says that it is of 16 bits."""
    import torchao.quantization as torchao

    model: Any = make("llama", num_hidden_layers=1).bfloat16()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert {type(module).__name__ for module in FusedModules(model)._kernels} <= {"LlamaRMSNorm"}


@pytest.mark.kernels
def test_steps_run_them_and_passes_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = make("llama", num_hidden_layers=1).to(DEVICE), []
    monkeypatch.setattr(fused_modules, "rms_norm", lambda x, *rest, **kw: calls.append(1) or rms_norm(x, *rest, **kw))
    with kvcli.attach(model, "kivi-2", impl="fused", group_size=16, residual_length=16, sink_length=2) as session:
        made = {}
        for mode in ("passes", "steps"):
            calls.clear()
            made[mode] = session.generate(
                **padded(30, 19, device=DEVICE), max_new_tokens=18, eos_token_id=[], mode=mode
            )
            assert bool(calls) == (mode == "steps")
    assert torch.equal(*(x.sequences for x in made.values()))
