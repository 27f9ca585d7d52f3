"""Identifies all that a model computes with: a sample of every weight, active adapters, and values of the config.

Contexts depend on it; artifacts depend on less (`fingerprint.py`). An adapter counts by its tensors and factors, not by
its name, and where it is active: a model whose adapters are disabled is the model without them.
"""

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvcli.models.fingerprint import tensors_of

_NUMBERS = 512
"""Of a weight that are looked at, up to twice as many; 8B weights take 6 ms on an H200, 13 ms on a CPU core."""

_NOT_COMPUTED_WITH = {
    *PreTrainedConfig().to_dict(),
    "use_cache",
    "pretraining_tp",
    "quantization_config",
    "torch_dtype",
}
_NOT_COMPUTED_WITH_ENDS = ("token_id", "token_ids", "dropout", "_drop", "_pdrop", "initializer_range", "aux_loss_coef")

_LIBRARIES = ("torch", "transformers", "peft")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights_identity(model: nn.Module) -> str:
    """32 hexadecimal digits, the same for the same weights in the same dtype; those on `meta` count by shape alone."""
    facts, samples = list[Any](), dict[tuple[torch.device, torch.dtype], list[Tensor]]()
    for x in _active(model, set()):
        facts.append([str(x.dtype), list(x.shape)] if isinstance(x, Tensor) else x)
        if isinstance(x, Tensor) and x.numel() and not x.is_meta:
            bits = x.view(_BITS[x.itemsize]).reshape(-1)
            # an odd step meets all columns of a matrix
            samples.setdefault((x.device, bits.dtype), []).append(bits[:: bits.numel() // _NUMBERS | 1])
    digest = blake3(json.dumps(facts).encode())
    for parts in samples.values():
        digest.update(torch.cat(parts).cpu().numpy().tobytes())
    return digest.hexdigest(16)


def adapters_now(model: nn.Module) -> tuple[Any, ...]:
    """What layers of PEFT say of the next pass: adapters that are active in each, and whether rows have their own.

    The model itself is not asked: what PEFT wraps has methods of transformers where PEFT's model has values.
    """
    if not hasattr(model, "peft_config"):
        return ()
    modules = [*model.modules()]
    layers: list[Any] = [x for x in modules if isinstance(getattr(x, "disable_adapters", None), bool)]
    hooks = chain.from_iterable(module._forward_pre_hooks.values() for module in modules)
    by_row = any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks)
    return *(() if x.disable_adapters else tuple(x.active_adapters) for x in layers), by_row


def config_values(model: nn.Module) -> dict[str, Any]:
    """What a model's config says of how it computes, as plain JSON values by dotted names; empty without a config.

    Windows, factors and epsilons are in no weight. Names of tokens, files and labels are left out, and what training
    alone uses.
    """
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    return dict(_flat(json.loads(json.dumps(values, default=str), parse_constant=str), ""))


def _flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, x in values.items():
        if name in _NOT_COMPUTED_WITH or name.startswith("output_") or name.endswith(_NOT_COMPUTED_WITH_ENDS):
            continue
        if isinstance(x, dict):
            yield from _flat(x, f"{prefix}{name}.")
        else:
            yield prefix + name, x


def _active(module: nn.Module, seen: set[int]) -> Iterator[Any]:
    """Weights and persistent buffers in order, each once, and what else adapters depend on, as plain JSON values."""
    children = dict(module.named_children())
    base, names = children.get("base_layer", children.get("original_module")), getattr(module, "active_adapters", None)
    if base is None or names is None:
        values = [x for x in tensors_of(module).values() if id(x) not in seen]
        seen.update(map(id, values))
        yield from chain.from_iterable(plain_tensors(x.data) for x in values)
        if type(module).__module__.partition(".")[0] not in _LIBRARIES:  # factors and switches of somebody's own
            numbers = ((name, x) for name, x in vars(module).items() if isinstance(x, (bool, float)))
            yield from ([name, x] for name, x in numbers if name != "training" and not name.startswith("_"))
        for child in children.values():
            yield from _active(child, seen)
        return
    yield from _active(base, seen)  # of a layer of PEFT's, whose adapters are in mappings by their names
    merged, disabled = (bool(getattr(module, name, False)) for name in ("merged", "disable_adapters"))
    if merged and disabled:
        yield "the next pass takes adapters out of the weights"
    parts = [x for x in chain(vars(module).values(), children.values()) if hasattr(x, "keys")]
    for x in [part[name] for name in names for part in parts if name in part and not merged and not disabled]:
        if isinstance(x, nn.Module):
            yield from _active(x, seen)
        elif isinstance(x, Tensor):
            yield from plain_tensors(x.data)
        elif isinstance(x, (bool, int, float, str, list)):
            yield x


def plain_tensors(x: Tensor) -> Iterator[Tensor]:
    """The tensors that one of another class is made of, such as codes and scales."""
    names = x.__tensor_flatten__()[0] if type(x) is not Tensor and hasattr(x, "__tensor_flatten__") else ()
    yield from chain.from_iterable(plain_tensors(getattr(x, name)) for name in names) if names else (x,)
