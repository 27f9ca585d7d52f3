"""CommVQ's re-ordered attention: codes first, codebook after (arXiv 2506.18879, Eq. 20-22); an oracle for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.commvq.values import CommVQValueCodec
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, PartialAttention
from kvcli.rope import Rotation, to_pairs


def reordered_attend(
    codec: LayerCodec[CommVQKeyCodec, CommVQValueCodec], query: Tensor, encoded: EncodedTokens, scaling: float
) -> PartialAttention:
    """Attention over codes that never decodes a key or a value.

    Keys: rotation commutes with the codebook, so the products conj(q_j) u_aj are formed once per query and codebook
    row; a token's score is Re sum_j e^{i n theta_j} * sum over stages of (P_ja + i P_jb), times its norm. Values: the
    softmax weights are summed over the bits first, and the codebook follows, (P S) C.

    Args:
        codec: a CommVQ layer.
        query: rotated, [batch, num_heads, query_len, head_dim].
        encoded: the encoded tokens.
        scaling: factor of the scores.

    Returns:
        (out, lse) as `kvcli.methods.layer_codec.PartialAttention`.
    """
    assert encoded.rotations is not None
    rotation = encoded.rotations.tokens(0, encoded.length)
    scores = _key_scores(codec.key, query.float(), encoded, rotation) * scaling
    if codec.offset is not None:
        batch, _, length, _ = rotation.cos.shape
        constant = rotation.apply(codec.offset.expand(batch, -1, length, -1))
        rows = query.float().unflatten(1, (constant.shape[1], -1))
        scores += (rows @ constant.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scaling
    visible = encoded.visible(0, encoded.length)
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse).unsqueeze(-1))
    return _value_sum(codec.value, weights, encoded), lse


def _key_scores(codec: CommVQKeyCodec, query: Tensor, encoded: EncodedTokens, rotation: Rotation) -> Tensor:
    """Scores [batch, num_heads, query_len, length], unscaled."""
    spec, groups = codec.spec, codec.num_groups
    batch, _, queries, _ = query.shape
    q = torch.view_as_complex(to_pairs(query, spec.rope.rotary_dim).contiguous())
    q = q.view(batch, spec.num_kv_heads, -1, groups, codec.config.pairs_per_group).conj()
    books = torch.view_as_complex(codec.books().view(spec.num_kv_heads, groups, *codec.codebook.shape[2:4], -1, 2))
    angles = _angles(rotation, spec.head_dim // 2).view(rotation.cos.shape[0], 1, -1, groups, q.shape[-1])
    first, second = (x.unflatten(0, (spec.num_kv_heads, groups)) for x in codec.unpack(encoded.key_codes))
    scores = torch.zeros(*q.shape[:3], first.shape[3], device=query.device)
    for b in range(batch):
        rotate = angles[b if angles.shape[0] > 1 else 0]
        for h in range(spec.num_kv_heads):
            for g in range(groups):
                products = q[b, h, :, None, None, g] * books[h, g]  # [heads * queries, R, N, g]
                total = torch.zeros(q.shape[2], first.shape[3], q.shape[-1], dtype=q.dtype, device=q.device)
                for stage in range(codec.config.num_residuals):
                    total += products[:, stage, first[h, g, b, :, stage]]
                    total += 1j * products[:, stage, second[h, g, b, :, stage]]
                scores[b, h] += (total * rotate[:, :, g]).real.sum(-1)
    scores = scores * codec.gain(encoded.key_codes).transpose(2, 3)
    return scores.unflatten(2, (-1, queries)).flatten(1, 2)


def _angles(rotation: Rotation, pairs: int) -> Tensor:
    """e^{i n theta_j} for every pair, 1 where RoPE does not reach: complex [batch or 1, 1, length, pairs]."""
    angles = torch.complex(rotation.cos.float(), rotation.sin.float())
    return torch.nn.functional.pad(angles, (0, pairs - angles.shape[-1]), value=1.0)


def _value_sum(codec: CommVQValueCodec, weights: Tensor, encoded: EncodedTokens) -> Tensor:
    """(P S) C for weights [batch, num_heads, query_len, length]."""
    codes, spec = encoded.value_codes, codec.spec
    scaled = weights * codes.scale.float().transpose(2, 3)
    sums = scaled @ codec.unpack(codes).unsqueeze(1)  # [batch, num_heads, query_len, N_c]
    by_head = sums.unflatten(1, (spec.num_kv_heads, -1)).transpose(0, 1).flatten(1, 3)
    books = codec.codebook.float().unflatten(1, (spec.num_kv_heads, -1)).transpose(0, 1)
    offset = codec.offset.float().view(spec.num_kv_heads, 1, -1)
    mass = scaled.sum(-1).unflatten(1, (spec.num_kv_heads, -1)).transpose(0, 1).flatten(1).unsqueeze(-1)
    out = by_head @ books + mass * offset
    out = out.view(spec.num_kv_heads, weights.shape[0], -1, weights.shape[2], spec.head_dim)
    return out.transpose(0, 1).flatten(1, 2)
