"""Which attention masks a cache takes: causal with padding."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.errors import CacheError

MASK_FORGOTTEN = "the cache holds padding: pass attention_mask, for earlier and new tokens, with every forward pass"

_BLOCK = 512


def check_mask(mask: Tensor, valid: Tensor, query_len: int) -> None:
    """Raises unless every real query sees exactly the real keys up to itself.

    Args:
        mask: boolean [batch or 1, 1, query_len, slots].
        valid: boolean [batch, slots], False at padding; the last `query_len` slots are the queries'.
        query_len: new slots.
    """
    if mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[-1] != valid.shape[1]:
        raise CacheError("the attention mask must be causal with padding; masks of another kind are not supported")
    first, key = valid.shape[1] - query_len, valid.unsqueeze(1)
    wrong = torch.zeros((), dtype=torch.bool, device=mask.device)
    # block by block of queries: only the keys among the block itself need a triangle
    for start in range(0, query_len, _BLOCK):
        stop = min(start + _BLOCK, query_len)
        rows, begin, end = mask[:, 0, start:stop], first + start, first + stop
        triangle = torch.ones(stop - start, stop - start, dtype=torch.bool, device=mask.device).tril()
        differs = (rows[..., begin:end] != (key[..., begin:end] & triangle)).any(-1)
        differs = differs | (rows[..., :begin] != key[..., :begin]).any(-1) | rows[..., end:].any(-1)
        wrong = wrong | (differs & valid[:, begin:end]).any()
    if bool(wrong):
        raise CacheError(
            "the attention mask must be causal with padding; this one hides or shows other tokens; after a padded "
            "prompt, pass attention_mask with every forward pass"
        )


def check_mask_of_layer(
    layer_idx: int, mask: Tensor | None, first: Tensor | None, valid: Tensor | None, query_len: int
) -> None:
    """Raises unless a layer hides what the first layer of the pass did.

    Args:
        layer_idx: of the layer.
        mask: its mask, another object than the first layer's, as `check_mask` takes it; None: it is causal.
        first: the first layer's.
        valid: as `check_mask` takes it; None: nothing may be read from the device.
        query_len: new slots.
    """
    if valid is None:
        moved = mask is not None and first is not None and mask.device != first.device
        if not moved:
            raise CacheError(f"layer {layer_idx} attends with a mask of its own, which is not supported")
        return
    if mask is None:
        if not bool(valid.all()):
            raise CacheError(MASK_FORGOTTEN)
        return
    try:
        check_mask(mask, valid.to(mask.device), query_len)
    except CacheError as error:
        raise CacheError(f"layer {layer_idx}: {error}") from error
