"""At which position of its context a chunk begins, where an engine does not say it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import Rope, unrotate

_FEW_TOKENS, _FEW_LAYERS = 1, 2
_MORE_TOKENS, _MORE_LAYERS = 8, 4
_BEST_STARTS = 16
_BATCH = 64


def find_starts(keys: Callable[[int], Tensor], codecs: list[LayerCodec], rope: Rope, max_positions: int) -> list[int]:
    """The positions of chunks' first tokens: multiples of their length at which keys are coded with the least error.

    Engines name chunks by a hash of all tokens before them, which says nothing of their number, and have keys after
    RoPE. So every multiple is tried on one token of two layers, the 16 best of them on eight tokens of four layers. A
    wrong start would not make wrong keys, for decoding rotates back by the same angles; it would only cost precision,
    because the codebooks were fitted to keys that were rotated back right. `keys` are of a layer, [chunks,
    num_kv_heads, tokens, head_dim].
    """
    few, more = (
        {i: keys(i) for i in spread(len(codecs), num_layers).tolist()} for num_layers in (_FEW_LAYERS, _MORE_LAYERS)
    )
    count, _, length, _ = next(iter(few.values())).shape
    found = []
    for chunk in range(count):
        starts = torch.arange(0, max(length, max_positions - length + 1), length)
        if len(starts) > _BEST_STARTS:
            errors = _errors(few, chunk, codecs, rope, starts, _FEW_TOKENS)
            starts = starts[errors.topk(_BEST_STARTS, largest=False).indices.sort().values]
        found.append(int(starts[_errors(more, chunk, codecs, rope, starts, _MORE_TOKENS).argmin()]))
    return found


def _errors(
    keys: dict[int, Tensor], chunk: int, codecs: list[LayerCodec], rope: Rope, starts: Tensor, num_tokens: int
) -> Tensor:
    """Squared error of coding a few tokens at each start, as a share of their energy, summed over layers."""
    group = max(codec.tokens_per_group for codec in codecs)
    length = next(iter(keys.values())).shape[2]
    tokens = spread(length // group, max(1, num_tokens // group)) * group
    tokens = (tokens.unsqueeze(1) + torch.arange(group)).flatten()

    def of_layer(layer_idx: int, some: Tensor) -> Tensor:
        chosen, codec = keys[layer_idx][chunk][:, tokens].float(), codecs[layer_idx]
        rotation = rope.rotation((some.unsqueeze(1) + tokens).to(chosen.device), torch.float32)
        codes = codec.key.encode(codec.encoder_input(chosen.expand(len(some), -1, -1, -1), rotation, unrotate), None)
        decoded = codec.decode_keys(codes, None, rotation, torch.float32)
        return ((decoded - chosen).square().sum((1, 2, 3)) / chosen.square().sum().clamp_min(1e-30)).cpu()

    return torch.cat([torch.stack([of_layer(i, some) for i in keys]).sum(0) for some in starts.split(_BATCH)])


def spread(length: int, count: int) -> Tensor:
    """Up to `count` indices below `length`, evenly spread, neither first nor last where there are others."""
    count = min(length, count)
    return (torch.arange(count) * 2 + 1) * length // (2 * count)
