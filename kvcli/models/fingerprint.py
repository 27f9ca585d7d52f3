"""Identifies the model of an artifact: the shapes, and a sample of the weights of the key and value projections.

Adapters (LoRA) are no part of it: a model with adapters is the model they were put on, whichever of them are active.
Adapters that were merged into the weights make another model. A quantized projection is sampled by what it computes,
whatever its class, and compared up to the error of its codes.
"""

import hashlib
import json
from itertools import chain
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kvcli.errors import ModelError, error_text
from kvcli.spec import ModelSpec

_PROJECTIONS = ("k_proj", "v_proj")
_MAX_MATRICES = 64
_QUANTIZED = "quantized"
_MAX_RELATIVE_ERROR = 0.25
"""Largest RMS difference of quantized weights, relative to their RMS: beyond that of 4 bits, far below another's."""

_VOCABULARIES: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Checksums of vocabularies by tokenizer."""


def fingerprint(model: nn.Module, spec: ModelSpec) -> str:
    """Identifies a model by its shapes and a sample of its key and value projections, without their adapters.

    Returns:
        16 hexadecimal digits of the shapes' sha256, a colon, and two weights per projection as float16 in hexadecimal;
        `:quantized` follows where a projection has no plain weight, or one that was decompressed. To be compared with
        `differs`, because a model loaded in another dtype has its weights rounded. ModelError: the model has no
        projections, or one cannot be read.
    """
    shapes = hashlib.sha256(json.dumps(spec.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
    projections = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in _PROJECTIONS}
    if not projections:  # keys and values come from one projection: the first modules with a matrix of weights
        for name, module in model.named_modules():
            adapted = hasattr(module, "base_layer")
            if isinstance(module, nn.Embedding) or any(name.startswith(f"{taken}.") for taken in projections):
                continue  # what is in one that was taken is an adapter
            if not adapted and any(True for _ in module.children()):
                continue  # its matrices are masks or positions
            weight: Any = getattr(module, "weight", None)  # a quantized one may have any name
            tensors = tensors_of(module).values() if weight is None else (weight,)
            has_matrix = any(getattr(x, "ndim", 0) == 2 for x in tensors)
            if has_matrix and len(projections) < _MAX_MATRICES:
                projections[name] = module
    if not projections:
        raise ModelError(f"{type(model).__name__} has no projections whose weights tell it from others")
    sample, quantized = [], False
    for name, projection in sorted(projections.items()):
        module = projection
        while isinstance(base := getattr(module, "base_layer", None), nn.Module):  # where peft put an adapter on it
            module = base
        weight = getattr(module, "weight", None)
        plain = type(getattr(weight, "data", None)) is Tensor and weight.ndim == 2
        if plain and weight.is_floating_point() and weight.itemsize > 1:
            # scales and the like beside a plain weight are what it was decompressed with
            quantized = quantized or bool(tensors_of(module).keys() - {"weight", "bias"})
            sample.append(weight.detach().flatten()[[0, weight.numel() // 2]].to("cpu", torch.float16))
        else:
            quantized = True
            sample.append(_computed_weights(name, module, model, spec))
    digits = b"".join(x.numpy().tobytes() for x in sample).hex()
    return f"{shapes}:{digits}" + (f":{_QUANTIZED}" if quantized else "")


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module without those of its parts and tables that are no part of a checkpoint."""
    own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    return {name: x for name, x in own if name not in module._non_persistent_buffers_set}


def differs(first: str, second: str) -> str | None:
    """Why two fingerprints are not of the same model, up to the rounding of 16-bit dtypes and of quantized weights.

    None if it is the same model; ValueError: one of them is no fingerprint.
    """
    (shapes_a, a, quantized_a), (shapes_b, b, quantized_b) = _parts(first), _parts(second)
    if shapes_a != shapes_b or a.numel() != b.numel():
        return "the shapes differ"
    error = float((a - b).square().mean().sqrt() / a.square().mean().sqrt().clamp_min(1e-12))
    what = f"weights of the key and value projections differ by {100 * error:.3g} % (RMS of a sample)"
    if quantized_a or quantized_b:
        limit = f"up to {100 * _MAX_RELATIVE_ERROR:.0f} % is taken for the error of a quantized copy"
        return None if error <= _MAX_RELATIVE_ERROR else f"{what}; {limit}"
    if bool(((a - b).abs() <= 0.01 * a.abs() + 1e-6).all()):
        return None
    return f"{what}: other weights, or an adapter that was merged into them"


def text_identity(tokenizer: Any) -> dict[str, str]:
    """Checksums of a tokenizer's vocabulary, `tokenizer`, and of its `chat_template`, empty without a template.

    The vocabulary is read once per tokenizer: one that is changed in place keeps its checksum.
    """
    if not hasattr(tokenizer, "get_vocab"):
        vocabulary = _sha256("")
    elif not (vocabulary := _VOCABULARIES.get(tokenizer, "")):
        words = [f"{i} {word}" for word, i in sorted(tokenizer.get_vocab().items(), key=itemgetter(1))]
        vocabulary = _VOCABULARIES[tokenizer] = _sha256("\n".join(words))
    template = getattr(tokenizer, "chat_template", None)
    return {"tokenizer": vocabulary, "chat_template": _sha256(str(template)) if template else ""}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _parts(text: str) -> tuple[str, Tensor, bool]:
    """Shapes, sampled weights as float32 and whether they are quantized; ValueError: it is no fingerprint."""
    shapes, *rest = text.split(":")
    if not shapes or len(rest) not in (1, 2) or rest[1:] not in ([], [_QUANTIZED]):
        raise ValueError("it is no fingerprint")
    weights = torch.frombuffer(bytearray.fromhex(rest[0]), dtype=torch.float16).float()
    if not weights.isfinite().all():
        raise ValueError("weights that are not finite")
    return shapes, weights, len(rest) == 2


def _computed_weights(name: str, module: nn.Module, model: nn.Module, spec: ModelSpec) -> Tensor:
    """The two sampled weights of a projection of any class, as float16 [2] on the CPU.

    The first input channel is 1, then -1, and the others are 0; half the difference is free of the bias. An input of
    zeros alone would be divided by its largest value where activations are quantized by rows.
    """
    tensors = [*module.parameters(), *module.buffers(), *model.parameters()]
    if tensors[0].is_meta:
        raise ModelError(f"{name} is offloaded or not loaded (device meta); its weights are needed in memory")
    unreadable = f"weights of {name} ({type(module).__name__}) cannot be sampled"
    dtype = getattr(model, "dtype", torch.float32)
    width = getattr(module, "in_features", spec.hidden_size)
    inputs = torch.zeros(1, 2, width, dtype=dtype, device=tensors[0].device)
    inputs[0, :, 0] = torch.tensor([1, -1])
    try:
        with torch.no_grad():
            output = module(inputs)[0].float()
        weights = ((output[0] - output[1]) / 2)[[0, output.shape[-1] // 2]].to("cpu", torch.float16)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{unreadable}: {error_text(error)}") from error
    if not weights.isfinite().all():
        raise ModelError(f"{unreadable}: they are not finite")
    return weights
