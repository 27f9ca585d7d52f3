"""Attention of long queries: over blocks of codes, which are decoded once for all queries, and over new tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from kvcli.attention import chunk_kernels
from kvcli.attention.reference import PREFILL_THRESHOLD
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, PartialAttention

_MOST = 65280.0
"""The largest bfloat16 that float16 holds."""

_BLOCK_BYTES = 2**27
"""Decoded keys and values of all sequences that are attended to at once, in bytes."""

_MIN_BLOCK_TOKENS = 1024
"""Tokens of a sequence that are decoded at once even in a large batch: launches have a fixed cost per block."""

_FEW_BLOCK_BYTES = 2**25
"""`_BLOCK_BYTES` of few queries, which take little time per block."""


def attend_dequantized(
    codec: LayerCodec, query: Tensor, encoded: EncodedTokens, scaling: float, soft_cap: float | None = None
) -> PartialAttention:
    """As `kvcli.attention.reference.attend_codes`, with blocks of tokens decoded to 16 bits, or 32 for float32 queries.

    bfloat16 would round decoded tokens to 8 bits; float16, which holds every decoded token, rounds them to 11. Tokens
    that are stored as they are need neither dtype nor memory of their own.
    """
    if (dtype := _dtype(codec, query)) != query.dtype:
        query = query.clamp(-_MOST, _MOST).to(dtype)
    state: PartialAttention | None = None
    most = encoded.length if _stored(codec) and encoded.pages is None else _block_tokens(codec, query)
    for start, stop in codec.blocks(encoded.length, most, encoded.page_size):
        rotation = None if encoded.rotations is None else encoded.rotations.tokens(start, stop)
        key_codes, value_codes = encoded.codes(start, stop)
        key = codec.decode_keys(key_codes, encoded.key_state, rotation, query.dtype)
        value = codec.value.decode_to(value_codes, None, query.dtype)
        if (hidden := encoded.skip - start) > 0:
            key, value = key[:, :, hidden:], value[:, :, hidden:]
        if encoded.lengths is None:
            state = _extend(state, query, key, value, scaling, soft_cap, causal=False)
        else:
            state = chunk_kernels.extend(
                state,
                query,
                key,
                value,
                scaling,
                lengths=encoded.lengths,
                first=max(start, encoded.skip),
                soft_cap=soft_cap,
            )
    assert state is not None
    return state


def dequantize_all(codec: LayerCodec, query: Tensor, encoded: EncodedTokens) -> tuple[Tensor, Tensor] | None:
    """All keys and values, decoded as for `attend_dequantized`; None if they are more than one of its blocks."""
    dtype = _dtype(codec, query)
    if encoded.length > _block_tokens(codec, query):
        return None
    rotation = None if encoded.rotations is None else encoded.rotations.tokens(0, encoded.length)
    key_codes, value_codes = encoded.codes(0, encoded.length)
    key = codec.decode_keys(key_codes, encoded.key_state, rotation, dtype)
    return key, codec.value.decode_to(value_codes, None, dtype)


def attend_prefill(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, codes: PartialAttention | None,
    soft_cap: float | None = None,
) -> PartialAttention:  # fmt: skip
    """Causal attention of new tokens over each other, merged with that over the codes.

    Args:
        query: rotated, [batch, num_heads, query_len, head_dim].
        key, value: of the same tokens, [batch, num_kv_heads, query_len, head_dim or value_dim], rotated keys.
        codes: (out, lse) over the codes, if there are any; overwritten.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap).
    """
    return _extend(codes, query, key, value, scaling, soft_cap, causal=True)


def _extend(
    state: PartialAttention | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    soft_cap: float | None,
    *,
    causal: bool,
) -> PartialAttention:
    """Adds keys that all sequences have to a state, in place if there is one, and returns it."""
    part = None
    if query.shape[2] >= PREFILL_THRESHOLD and soft_cap is None and query.shape[3] == key.shape[3]:
        part = fused_sdpa(query, key, value, scaling, causal=causal)
    if part is None:
        return chunk_kernels.extend(state, query, key, value, scaling, causal=causal, soft_cap=soft_cap)
    if state is None:
        return part[0].to(torch.float32, memory_format=torch.contiguous_format), part[1].contiguous()
    chunk_kernels.merge(state, part)
    return state


def _stored(codec: LayerCodec) -> bool:
    """Whether tokens are stored as they are, keys without an offset."""
    return codec.key.exact and codec.value.exact and not codec.needs_rotations


def _dtype(codec: LayerCodec, query: Tensor) -> torch.dtype:
    """What queries and decoded tokens are multiplied in."""
    return torch.float16 if query.dtype == torch.bfloat16 and not _stored(codec) else query.dtype


def _block_tokens(codec: LayerCodec, query: Tensor) -> int:
    """Tokens of a sequence that are decoded at once."""
    budget = _BLOCK_BYTES if query.shape[2] >= PREFILL_THRESHOLD else _FEW_BLOCK_BYTES
    per_token = codec.key.spec.kv_width * query.element_size()
    return max(_MIN_BLOCK_TOKENS, budget // (query.shape[0] * per_token))


def fused_sdpa(query: Tensor, key: Tensor, value: Tensor, scaling: float, *, causal: bool) -> PartialAttention | None:
    """softmax(q k^T * scaling) v by FlashAttention or cuDNN, whichever SDPA would choose, with the lse that it omits.

    Returns:
        out in the query's dtype with any strides, and lse float32 [batch, num_heads, query_len]; None where SDPA would
        choose neither, as for float32 and without an NVIDIA GPU.
    """
    choose = getattr(torch, "_fused_sdp_choice", None)  # which a later torch may not have
    if choose is None or query.device.type != "cuda" or torch.version.hip or query.dtype == torch.float32:
        return None
    choice = choose(query, key, value, None, 0.0, causal, scale=scaling, enable_gqa=query.shape[1] > key.shape[1])
    ops = torch.ops.aten
    if choice == SDPBackend.CUDNN_ATTENTION.value:
        out, lse = ops._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scaling
        )[:2]
    elif choice == SDPBackend.FLASH_ATTENTION.value and query.shape[-1] % 8 == 0:
        out, lse = ops._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scaling)[:2]
    else:
        return None
    return out, lse.reshape(query.shape[:3])
