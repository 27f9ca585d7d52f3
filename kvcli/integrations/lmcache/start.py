"""At which position of its context a chunk starts.

LMCache names chunks by a hash of all tokens before them, which says nothing of their number, and holds keys after RoPE.
A codec of keys before RoPE therefore tries every multiple of the chunk's length, undoes the rotation, and keeps the
start at which codes come nearest to the keys. A wrong start would not make wrong keys, for decoding rotates back by the
same angles; it would only cost precision, because the codebooks were fitted to keys that were rotated back right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.attention.reference import unrotate
from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import Rope

_FEW_TOKENS, _FEW_LAYERS = 1, 2
_MORE_TOKENS, _MORE_LAYERS = 8, 4
_KEPT = 16
_BATCH = 64


def find_start(keys: Tensor, codecs: list[LayerCodec], rope: Rope, max_positions: int) -> int:
    """The start, a multiple of the chunk's length, at which the keys are coded with the least error.

    All starts are tried on one token of two layers, the 16 best of them on eight tokens of four layers.

    Args:
        keys: after RoPE, [layers, num_kv_heads, tokens, head_dim].
        codecs: of the layers.
        rope: of the model.
        max_positions: positions that the model knows.

    Returns:
        Position of the chunk's first token.
    """
    length = keys.shape[2]
    starts = torch.arange(0, max(length, max_positions - length + 1), length)
    if len(starts) > _KEPT:
        errors = _errors(keys, codecs, rope, starts, _FEW_TOKENS, _FEW_LAYERS)
        starts = starts[errors.topk(_KEPT, largest=False).indices.sort().values]
    errors = _errors(keys, codecs, rope, starts, _MORE_TOKENS, _MORE_LAYERS)
    return int(starts[errors.argmin()])


def _errors(
    keys: Tensor, codecs: list[LayerCodec], rope: Rope, starts: Tensor, num_tokens: int, num_layers: int
) -> Tensor:
    """Squared error of coding a few tokens at each start, as a share of their energy, summed over layers."""
    group = max(codec.tokens_per_group for codec in codecs)
    tokens = _spread(keys.shape[2] // group, max(1, num_tokens // group)) * group
    tokens = (tokens.unsqueeze(1) + torch.arange(group)).flatten()
    layers = _spread(len(codecs), num_layers).tolist()
    errors = [
        torch.stack([_layer_errors(keys[i], codecs[i], rope, part, tokens) for i in layers]).sum(0)
        for part in starts.split(_BATCH)
    ]
    return torch.cat(errors)


def _layer_errors(keys: Tensor, codec: LayerCodec, rope: Rope, starts: Tensor, tokens: Tensor) -> Tensor:
    """Relative errors of one layer at each start, float32 on the CPU."""
    chosen = keys[:, tokens].float()
    rotation = rope.rotation((starts.unsqueeze(1) + tokens).to(keys.device), torch.float32)
    codes = codec.key.encode(codec.encoder_input(chosen.expand(len(starts), -1, -1, -1), rotation, unrotate), None)
    decoded = codec.decode_keys(codes, None, rotation, torch.float32)
    return ((decoded - chosen).square().sum((1, 2, 3)) / chosen.square().sum().clamp_min(1e-30)).cpu()


def _spread(length: int, count: int) -> Tensor:
    """Up to `count` indices below `length`, evenly spread, neither first nor last where there are others."""
    count = min(length, count)
    return (torch.arange(count) * 2 + 1) * length // (2 * count)
