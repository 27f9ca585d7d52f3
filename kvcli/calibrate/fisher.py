"""Fisher information of keys and values, which predicts what their errors cost in KL divergence.

To second order, small errors d_t of the keys of a layer (or of its values) make the next-token distributions differ by
sum_t E[(g_t . d_t)^2] / 2 nats, with g_t the gradient of log p(y) by key t, where each y is drawn from the model's own
distribution. Only what a compressed cache would read from codes counts: gradients through attention to sinks and to
the last tokens before a query are left out.

Codes make larger errors where keys are larger, so the outer products g g^T are averaged with the squared distance of
key t from the mean key as weight; and without weights, which few large gradients disturb less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kvcli.errors import SamplesError, error_text
from kvcli.methods.samples import LayerFisher
from kvcli.models.load import LoadedModel
from kvcli.seam.decoder import backbone, find_decoder, logits_of
from kvcli.seam.layer import AttentionCall
from kvcli.seam.patch import Seam
from kvcli.seam.rotary import RotaryCall

_SINKS, _WINDOW = 4, 32
LOGIT_TOKENS = 256
"""Most tokens whose logits are in memory at once."""

LOGITS = 2**24
"""Most logits in memory at once, of one token or more; backward passes keep four numbers for each."""

_REMEDY = "leave them out with --fisher-tokens 0"
_KINDS = ("key", "value")
_SUMS = ("fisher", "weight", "unweighted", "squares", "sum", "count")
_NOT_DIFFERENTIABLE = ("NotImplemented", "WarnNotImplemented")
"""Nodes that autograd puts where an operation has no derivative."""

Sums = dict[str, Tensor]
"""Sums over tokens by name, `layers.L.key.NAME` and `layers.L.value.NAME`, float64."""


def sequence_sums(
    loaded: LoadedModel,
    sequences: Tensor,
    seed: int,
    indices: Collection[int],
    advance: Callable[[int], None] = lambda tokens: None,
) -> Iterator[tuple[int, Sums]]:
    """The terms of single sequences in the Fisher information and covariance of all layers' keys and values.

    Of `sequences`, token ids int64 [num_sequences, seq_len], those of `indices` are yielded in ascending order, with
    sums on the CPU; which tokens are drawn from the model for one does not depend on the others. `advance` is called
    with the number of tokens after each. SamplesError: logits or gradients that are not finite, or a model that is not
    differentiable.
    """
    generator, model = torch.Generator().manual_seed(seed), loaded.model
    for index, sequence in enumerate(sequences[: max(indices, default=-1) + 1]):
        uniform = torch.rand(len(sequence), generator=generator, dtype=torch.float64)
        if index not in indices:
            continue
        with _frozen(model):
            layers = backward(model, sequence, uniform)
        sums: Sums = {}
        for layer_idx, pair in layers.items():
            for x, kind in zip(pair, _KINDS, strict=True):
                if x.grad is None:
                    raise SamplesError(f"the {kind}s of layer {layer_idx} have no gradients; {_REMEDY}")
                if not bool(x.grad.isfinite().all()):
                    raise SamplesError(f"gradients of the {kind}s of layer {layer_idx} are not finite; {_REMEDY}")
                y, grad = (z.detach()[0, :, _SINKS:].double() for z in (x, x.grad))
                weight = (y - y.mean(1, keepdim=True)).square().sum((0, 2))
                fisher = torch.einsum("htd,hte,t->hde", grad, grad, weight)
                unweighted, squares = grad.mT @ grad, y.mT @ y
                count = torch.tensor(y.shape[1])
                added = zip(_SUMS, (fisher, weight.sum(), unweighted, squares, y.sum(1), count), strict=True)
                sums.update({f"layers.{layer_idx}.{kind}.{name}": z.cpu() for name, z in added})
        advance(sequence.numel())
        yield index, sums


def layer_fisher(sums: Iterable[Sums], num_layers: int) -> list[LayerFisher]:
    """Fisher information and covariance of all layers from the sums of sequences, which are added in their order."""
    total: Sums = {}
    for added in sums:
        for name, x in added.items():
            total[name] = total[name].add_(x) if name in total else x.clone()
    layers = []
    for layer_idx in range(num_layers):
        tensors: list[Tensor] = []
        for kind in _KINDS:
            fisher, weight, unweighted, squares, x, count = (
                total[f"layers.{layer_idx}.{kind}.{name}"] for name in _SUMS
            )
            mean = x / count
            tensors += (fisher / weight.clamp_min(1e-300)).float(), (unweighted / count).float()
            tensors.append((squares / count - mean.unsqueeze(-1) * mean.unsqueeze(-2)).float())
        layers.append(LayerFisher(*tensors))
    return layers


def backward(model: Any, sequence: Tensor, uniform: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values of each layer with their gradients, for one sequence [time].

    `uniform`, float64 [time] in [0, 1), decides which token is drawn from the model at each position. SamplesError: a
    model that is not differentiable, such as one with quantized weights of some kinds.
    """
    tensors: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(call: AttentionCall) -> Tensor:
        """Attention that keeps pre-RoPE keys and values through which later tokens would read codes."""
        coded = call.key.clone(), call.value.clone()
        for x in coded:
            x.retain_grad() if x.requires_grad else x.requires_grad_()
        tensors[call.layer.layer_idx] = coded
        output: Tensor = checkpoint(_attend, call.query, call.key, call.value, *coded, call, use_reentrant=False)
        return output

    ids = sequence.unsqueeze(0).to(model.device)
    with Seam(model, attend), torch.inference_mode(False), torch.enable_grad():
        try:
            with _passing_gradients(find_decoder(model)):
                states = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
            if not states.requires_grad:
                raise SamplesError(f"the model's layers let no gradients through; {_REMEDY}")
            states.backward(_gradient_of_sampled(model, states.detach(), uniform))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = error_text(error)[:200]
            raise SamplesError(f"the model's gradients cannot be computed ({reason}); {_REMEDY}") from error
    return tensors


def _attend(
    query: Tensor, key: Tensor, value: Tensor, coded_key: Tensor, coded_value: Tensor, call: AttentionCall
) -> Tensor:
    """Attention of one sequence whose tokens beyond sinks and window are other tensors of the same values.

    `query` is [1, num_heads, time, head_dim], the others [1, num_kv_heads, time, head_dim], before RoPE; the result is
    [1, time, num_heads, head_dim].
    """
    time = query.shape[2]
    at = torch.arange(time, device=query.device)
    distance = at.unsqueeze(1) - at
    visible = distance >= 0 if call.mask is None else call.mask[0, 0]
    coded = (distance >= _WINDOW) & (at >= _SINKS)
    rotated, keys = call.rotation.apply(query), [call.rotation.apply(x) for x in (coded_key, key)]
    if call.layer.latent:
        rotated = call.layer.absorbed(rotated, key, value)
        keys = [torch.cat(pair, dim=-1) for pair in zip(keys, (coded_value, value), strict=True)]
    rows = (rotated * call.scaling).unflatten(1, (key.shape[1], -1))
    scores = [torch.einsum("bhgqd,bhkd->bhgqk", rows, x) for x in keys]
    score = torch.where(coded, scores[0], scores[1]).float()
    if (cap := call.layer.soft_cap) is not None:
        score = cap * torch.tanh(score / cap)
    score = score.masked_fill(~visible, -math.inf)
    if call.sinks is not None:
        logits = call.sinks.float().view(1, key.shape[1], -1, 1, 1).expand(*score.shape[:-1], 1)
        score = torch.cat((score, logits), dim=-1)
    weights = score.softmax(-1)[..., :time].to(value.dtype)
    output = torch.einsum("bhgqk,bhkd->bqhgd", weights * coded, coded_value)
    output = output + torch.einsum("bhgqk,bhkd->bqhgd", weights * ~coded, value)
    output = output.flatten(2, 3)
    return call.layer.projected(output, query, key) if call.layer.latent else output


def _gradient_of_sampled(model: Any, states: Tensor, uniform: Tensor) -> Tensor:
    """Gradient of the log-probability of one token drawn at each position, by the last hidden states [1, time, D].

    The token is the first whose cumulative probability exceeds `uniform` [time]: one number per position travels to
    the device, whatever the vocabulary.
    """
    gradients: list[Tensor] = []
    tokens = max(1, min(LOGIT_TOKENS, LOGITS // model.config.get_text_config().vocab_size))
    for part, level in zip(states.split(tokens, dim=1), uniform.to(states.device).split(tokens), strict=True):
        leaf = part.requires_grad_()
        log_probs = logits_of(model, leaf).float().log_softmax(-1)[0]
        if not bool(log_probs.isfinite().all()):
            raise SamplesError(f"the model's logits are not finite; {_REMEDY}")
        if not log_probs.requires_grad:
            raise SamplesError(f"the model's output layer lets no gradients through; {_REMEDY}")
        cumulative = log_probs.detach().exp().cumsum(-1)
        reached = level.to(cumulative.dtype).unsqueeze(1) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, reached, right=True).clamp(max=cumulative.shape[-1] - 1)
        gradients += torch.autograd.grad(log_probs.gather(1, drawn).sum(), leaf)
    return torch.cat(gradients, dim=1)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Parameters without gradients for the block."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _passing_gradients(decoder: nn.Module) -> Iterator[None]:
    """Raises SamplesError in the block at the first innermost module whose output does not lead back to its input.

    Some quantized linear layers block gradients so, without an error.
    """
    innermost = {module: name for name, module in decoder.named_modules() if next(module.children(), None) is None}

    def check(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
        several = output if isinstance(output, tuple | list) else (output,)
        outputs = [x for x in several if isinstance(x, Tensor) and x.is_floating_point()]
        rotary = RotaryCall.of(module, args, kwargs, output) is not None
        if inputs and outputs and not rotary and not _leads_to(outputs[0], inputs[0]):
            raise SamplesError(f"{innermost[module]} ({type(module).__name__}) lets no gradients through; {_REMEDY}")

    hooks = [module.register_forward_hook(check, with_kwargs=True) for module in innermost]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _leads_to(output: Tensor, source: Tensor) -> bool:
    """Whether a gradient of the output reaches a tensor that it was computed from."""
    if output is source:
        return True
    visited: set[Any] = set()
    nodes = [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in visited or node.name().rpartition("::")[2] in _NOT_DIFFERENTIABLE:
            continue
        if node is source.grad_fn or getattr(node, "variable", None) is source:
            return True
        visited.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False
